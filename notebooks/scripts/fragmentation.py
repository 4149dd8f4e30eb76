"""Gaps in PyTorch's memory (lesson 06): 96 MiB are free in pieces of 12 MiB. Does a tensor of 40 MiB fit?

python fragmentation.py
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python fragmentation.py
"""

import torch

MiB = 2**20


def tensor_of(mib):
    return torch.empty(mib * MiB, dtype=torch.uint8, device="cuda")


def make_gaps():
    kept = []
    for _ in range(8):
        whole = tensor_of(24)
        del whole
        kept += [tensor_of(12), tensor_of(12)]
    return kept[::2]


_, total = torch.cuda.mem_get_info()
torch.cuda.set_per_process_memory_fraction(224 * MiB / total)  # as little as the GPU of the lesson has
kept = make_gaps()
reserved = torch.cuda.memory_reserved() // MiB
allocated = torch.cuda.memory_allocated() // MiB
try:
    tensor_of(40)
    outcome = "fit"
except torch.OutOfMemoryError:
    outcome = "do not fit"
print(f"{reserved} MiB reserved, {allocated} MiB allocated; 40 MiB more {outcome}.")
