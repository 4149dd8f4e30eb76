"""What the tests of the parallel loss share: none to four GPUs, numbers, criteria of one's own."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus


def counts(*numbers_of_gpus):
    """A fixture of so many virtual GPUs, one after the other; 0 is a machine without any."""

    @pytest.fixture(params=numbers_of_gpus)
    def count(request, monkeypatch):
        if request.param == 0:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with virtual_gpus(request.param) if request.param else nullcontext():
            yield request.param

    return count


def first(count):
    return "cuda:0" if count else "cpu"


def numbers(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class PerSample(nn.Module):
    def forward(self, outputs, targets):
        return (outputs - targets).square().mean(1)


class Summed(PerSample):
    def forward(self, outputs, targets):
        return super().forward(outputs, targets).sum()
