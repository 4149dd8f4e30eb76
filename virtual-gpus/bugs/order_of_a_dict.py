"""Gradients were summed by type, in the order of a dict, which was another one in each process.

Thread: https://github.com/NVIDIA/apex/issues/19
"""

import torch
import torch.distributed as dist

ERROR = "all_reduce"
ON_GPUS = "hangs until the time limit of NCCL"


def reduce_all(buckets):
    for bucket in buckets.values():
        dist.all_reduce(bucket)


def gradients(rank):
    kinds = [torch.float16, torch.float32]
    # Python's dicts have kept their order since 3.7. The ranks fill this one differently, to the same effect.
    kinds = kinds[::-1] if rank else kinds
    return {kind: torch.ones(4, dtype=kind, device="cuda") for kind in kinds}


def before(rank):
    reduce_all(gradients(rank))


def after(rank):
    buckets = gradients(rank)
    reduce_all({kind: buckets[kind] for kind in sorted(buckets, key=str)})
