"""Out of memory: what is on a GPU, who made it, what keeps it, how it lies there, and how large a batch may be.

    with explain_oom() as why: train()         when memory runs out: what was asked for, what would have helped
    explain_memory()                           the same table for now
    forget_error()                             frees what the last error keeps alive: its frames and their tensors
    remember_places()                          from here on each tensor's origin is known: call it first
    with find_leaks() as leaks: step()         what a block left behind, and who refers to it
    write_viewer("memory.html")                PyTorch's own viewer of the same, as a file for a browser
    find_batch_size(step, model, optimizer)    the largest batch that fits; net and optimizer stay as they were

`helpers.show` draws: draw_segments, the blocks of PyTorch's allocator, and draw_cures, which cure to try first.
The same on real and on virtual GPUs: everything comes from torch.cuda's snapshots and from Python's gc.
"""

from helpers.measure.oom.batch_size import find_batch_size
from helpers.measure.oom.errors import forget_error
from helpers.measure.oom.explain import Explanation, explain_memory, explain_oom
from helpers.measure.oom.leaks import Leaks, find_leaks
from helpers.measure.oom.places import forget_places, remember_places
from helpers.measure.oom.viewer import write_viewer

__all__ = [
    "Explanation",
    "Leaks",
    "explain_memory",
    "explain_oom",
    "find_batch_size",
    "find_leaks",
    "forget_error",
    "forget_places",
    "remember_places",
    "write_viewer",
]
