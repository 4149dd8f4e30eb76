"""Out of memory: what is on a GPU, which line made it, and what keeps it there.

    with explain_oom() as why: train()         when memory runs out: what was asked for, what would have helped
    explain_memory()                           the same table for now
    forget_error()                             frees what the last error keeps alive: its frames and their tensors
    remember_origins()                         from here on the line that makes a tensor is known: call it first
    with find_leaks() as leaks: step()         what a block left behind, and who refers to it

The same on real and on virtual GPUs: everything comes from torch.cuda's snapshots and from Python's gc.
`helpers.show.draw_segments` draws the blocks of PyTorch's allocator.
"""

from helpers.measure.oom.blocks import remember_origins
from helpers.measure.oom.explain import Explanation, explain_memory, explain_oom
from helpers.measure.oom.leaks import Leaks, find_leaks, forget_error

__all__ = [
    "Explanation",
    "Leaks",
    "explain_memory",
    "explain_oom",
    "find_leaks",
    "forget_error",
    "remember_origins",
]
