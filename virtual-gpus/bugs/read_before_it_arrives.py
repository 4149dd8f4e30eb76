"""The norm of the gradients was copied without waiting, and read at once: the number of the step before.

Thread: https://github.com/deepspeedai/DeepSpeed/pull/501
"""

import torch

ERROR = "RaceError"
ON_GPUS = "runs, with wrong numbers now and then"
RANKS = None
SETTINGS = {"check_races": True}


def norms(wait):
    buffer = torch.zeros(1).pin_memory()
    found = []
    for step in range(2):
        gradient = torch.full((1000,), float(step), device="cuda")
        buffer.copy_(gradient.sum(), non_blocking=True)
        if wait:
            torch.cuda.current_stream().synchronize()
        found.append(float(buffer))
    return found


def before():
    return norms(wait=False)


def after():
    return norms(wait=True)
