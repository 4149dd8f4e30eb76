"""What CUDA refuses, or warns of, under `torch.use_deterministic_algorithms(True)`. `CHECKS` of each family name it.

Source: the calls of `alertNotDeterministic` in PyTorch's aten/src/ATen/native/cuda, as they are in the CUDA libraries
of 2.11 to 2.15. What the CPU's kernel refuses itself, such as max_unpool2d, is not repeated here.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._prims_common import alert_not_deterministic

from virtual_gpus.dispatch.op_call import OpCall


def not_deterministic(kernel: str, only_if: Callable[[OpCall], bool] = lambda call: True) -> Callable[[OpCall], None]:
    """A check that raises or warns, as the setting says, if `only_if` is true. kernel: its name in CUDA's message."""
    return lambda call: alert_not_deterministic(kernel) if only_if(call) else None
