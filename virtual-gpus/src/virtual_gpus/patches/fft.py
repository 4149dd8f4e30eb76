"""`torch.backends.cuda.cufft_plan_cache`, a setting that programs read and change. The plans take no memory here."""

from __future__ import annotations

import torch

from virtual_gpus.patches.cuda import gpu_at

_DEFAULT = 4096  # plans (CUFFT_DEFAULT_CACHE_SIZE in aten/src/ATen/native/cuda/CuFFTPlanCache.h)


class PlanCache:
    """The plans of one GPU: none, whatever their largest number is."""

    def __init__(self) -> None:
        self._most = _DEFAULT

    @property
    def size(self) -> int:
        """How many plans are kept."""
        return 0

    @property
    def max_size(self) -> int:
        """How many plans may be kept. Setting it raises RuntimeError for a negative number, as cuFFT's cache does."""
        return self._most

    @max_size.setter
    def max_size(self, count: int) -> None:
        if count < 0:
            raise RuntimeError(f"cuFFT plan cache size must be non-negative, but got {count}")
        self._most = count

    def clear(self) -> None:
        """Forget all plans."""


class PlanCaches:
    """The caches of all GPUs by their device. Its own attributes are those of the current GPU."""

    def __init__(self) -> None:
        object.__setattr__(self, "_caches", {})

    def __getitem__(self, device: torch.device | str | int | None) -> PlanCache:
        return self._caches.setdefault(gpu_at(device), PlanCache())

    def __getattr__(self, name: str):
        return getattr(self[None], name)

    def __setattr__(self, name: str, value: int) -> None:
        setattr(self[None], name, value)


def patches():
    """See `patches`."""
    return [(torch.backends.cuda, "cufft_plan_cache", PlanCaches())]
