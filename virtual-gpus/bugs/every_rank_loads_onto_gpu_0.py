"""A snapshot was loaded without map_location, so that each rank put a copy on the GPU that had saved it.

Thread: https://github.com/pytorch/examples/issues/1078

The test that finds it asks for what it takes for granted: a rank has no memory on other GPUs.
"""

import os
import tempfile

import torch
from torch import nn

ERROR = "memory on another GPU"
ON_GPUS = "runs, and GPU 0 has less room"


def resume(rank, map_location):
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "snapshot.pt")
        torch.save(nn.Linear(64, 64).to("cuda:0").state_dict(), file)  # as rank 0 did
        state = torch.load(file, map_location=map_location, weights_only=True)
        model = nn.Linear(64, 64).to(f"cuda:{rank}")
        model.load_state_dict(state)
        others = [torch.cuda.memory_allocated(gpu) for gpu in range(torch.cuda.device_count()) if gpu != rank]
        assert not any(others), f"rank {rank} has memory on another GPU: {others} bytes"


def before(rank):
    resume(rank, None)


def after(rank):
    resume(rank, f"cuda:{rank}")
