"""PyTorch's random generators, saved and set back: the reason why a resumed training draws the same dropout.

Python's and NumPy's generators are not looked at.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["generator_states", "set_generators"]

GPUs = Sequence[torch.device]


def generator_states(generator: torch.Generator | None = None, gpus: GPUs | None = None) -> dict[str, Any]:
    """The states of PyTorch's generators on the CPU and on `gpus` (all of them by default), and of `generator`."""
    return {
        "cpu": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(gpu) for gpu in _all(gpus)],
        "loader": generator.get_state() if generator is not None else None,
    }


def set_generators(
    states: Mapping[str, Any], generator: torch.Generator | None = None, gpus: GPUs | None = None
) -> None:
    """Put PyTorch's generators, and `generator`, into the states that `generator_states` gave, GPU by GPU."""
    # Generator states are bytes that must lie on the CPU, also those of a GPU's generator.
    torch.set_rng_state(states["cpu"].cpu())
    for gpu, state in zip(_all(gpus), states["cuda"], strict=False):
        torch.cuda.set_rng_state(state.cpu(), gpu)
    if generator is not None and states["loader"] is not None:
        generator.set_state(states["loader"].cpu())


def _all(gpus: GPUs | None) -> GPUs:
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count())] if gpus is None else gpus
