"""torch.autocast("cuda") and GradScaler: the switches that tell `features.autocast`, and what shapes_only must know.

torch.autocast, custom_fwd, custom_bwd and GradScaler themselves are PyTorch's own. With shapes_only it is not known
whether a gradient overflowed; it counts as not. The scale then stays the one that GradScaler started from.
"""

from __future__ import annotations

import torch

from virtual_gpus.features.autocast import casting
from virtual_gpus.placement.storages import gpu_of

_Scaler = torch.amp.GradScaler
_raw_set = torch.set_autocast_enabled
_raw_clear = torch.clear_autocast_cache
_raw = {name: getattr(_Scaler, name) for name in ("_maybe_opt_step", "get_scale", "_get_growth_tracker")}


def set_autocast_enabled(*args) -> None:
    """`set_autocast_enabled("cuda", True)`, or the old form without the device."""
    _raw_set(*args)
    casting.follow()


def clear_autocast_cache() -> None:
    """Forget the weights that were cast; autocast does this when its outermost region ends."""
    casting.clear_cache()
    _raw_clear()


# ---- GradScaler with shapes_only -------------------------------------------------------------------------------------


def _has_no_values(tensor) -> bool:
    gpu = None if tensor is None else gpu_of(tensor)
    return gpu is not None and gpu.machine.shapes_only


def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
    """The step, unless a gradient overflowed."""
    if any(_has_no_values(found) for found in optimizer_state["found_inf_per_device"].values()):
        return optimizer.step(*args, **kwargs)
    return _raw["_maybe_opt_step"](self, optimizer, optimizer_state, *args, **kwargs)


def get_scale(self) -> float:
    """The current scale."""
    return self._init_scale if _has_no_values(_scale_of(self)) else _raw["get_scale"](self)


def _get_growth_tracker(self) -> int:
    return self._init_growth_tracker if _has_no_values(_scale_of(self)) else _raw["_get_growth_tracker"](self)


def _scale_of(scaler):
    return scaler._scale if scaler.is_enabled() else None


def forget() -> None:
    """Take autocast's kernels out again and let the cast weights go."""
    casting.unregister()


def patches():
    """See `features`."""
    rows = [(owner, f.__name__, f) for owner in (torch, torch._C) for f in (set_autocast_enabled, clear_autocast_cache)]
    return rows + [(_Scaler, f.__name__, f) for f in (_maybe_opt_step, get_scale, _get_growth_tracker)]
