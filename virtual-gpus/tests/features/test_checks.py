"""Checks of arguments that read values pass where there are none."""

import pytest
import torch
from virtual_gpus import virtual_gpus


@virtual_gpus(2, shapes_only=True)
def test_what_pytorch_only_checks_passes():
    x = torch.zeros(4, 2, device="cuda")
    drawn = torch.distributions.Normal(x, x).sample()
    with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cuda:1"):
        torch.nn.functional.gaussian_nll_loss(x, drawn, x) + torch.ones(4, 2, device="cuda:1")
