"""Random generators: torch.Generator(device="cuda") and torch.cuda.default_generators.

torch.cuda.random (manual_seed_all, get_rng_state, ...) is PyTorch's own code on top of these.
"""

from __future__ import annotations

import torch

from virtual_gpus.machine import active
from virtual_gpus.placement.random_numbers import Generator, default_generator


class DefaultGenerators:
    """torch.cuda.default_generators: one per visible GPU."""

    def __len__(self) -> int:
        return len(active().gpus)

    def __getitem__(self, index: int) -> Generator:
        return default_generator(active().gpus[index])

    def __iter__(self):
        return (default_generator(gpu) for gpu in active().gpus)


def patches():
    """See `features`."""
    return [(torch, "Generator", Generator), (torch.cuda, "default_generators", DefaultGenerators())]
