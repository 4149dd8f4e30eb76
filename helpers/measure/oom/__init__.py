"""Explains a GPU's memory: what it contains, which line of code created each tensor, and what keeps it alive.

    with explain_oom() as why: train()         if memory runs out: which request failed, and what would have helped
    explain_memory()                           the same table for the memory in use now
    forget_error()                             free what the last error keeps alive: its frames and their tensors
    remember_origins()                         record the line that creates each tensor from now on; call it first
    with find_leaks() as leaks: step()         what a block left behind, and who refers to it

All of this works in the same way on real and on virtual GPUs, with torch.cuda's snapshots and Python's gc.
`helpers.show.draw_segments` draws the blocks of PyTorch's allocator.
"""

from helpers.measure.oom.blocks import remember_origins
from helpers.measure.oom.explain import Explanation, explain_memory, explain_oom
from helpers.measure.oom.leaks import Leaks, find_leaks, forget_error
