"""The casts of `torch.autocast("cuda")`: what may be cast, to what, and the cache of cast weights.

As `cached_cast` and `prioritize` in aten/src/ATen/autocast_mode.cpp and autocast_mode.h. Each cast is an ordinary
`.to(dtype)`: a tensor on the GPU, which autograd follows.
"""

from __future__ import annotations

import weakref

import torch

from virtual_gpus.placement.storages import gpu_of

_CASTABLE = {t for t in vars(torch).values() if isinstance(t, torch.dtype) and t.is_floating_point} - {torch.float64}
_FP32 = torch.float32
_to = torch._C.TensorBase.to
_lower_dtype = torch.get_autocast_dtype
_cast_weights: dict[int, tuple[weakref.ref, torch.Tensor]] = {}  # of all threads, as in C++


def is_eligible(value) -> bool:
    """True for what CUDA's autocast may cast: a floating-point tensor on a GPU that is not float64."""
    return isinstance(value, torch.Tensor) and value.dtype in _CASTABLE and is_on_gpu(value)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """True for a tensor on a virtual GPU that is on."""
    try:
        gpu = tensor.untyped_storage()._record.gpu  # `gpu_of`, without its calls: this runs for every input
    except (NotImplementedError, RuntimeError):
        return gpu_of(tensor) is not None
    return gpu is not None and gpu.machine.on


def cast(value, dtype: torch.dtype):
    """`value` as `dtype` if it is eligible, lists of tensors element by element; anything else as it is."""
    if isinstance(value, torch.Tensor):
        kind = value.dtype
        if kind is dtype or kind not in _CASTABLE or not is_on_gpu(value):
            return value
        if kind is _FP32 and value.requires_grad and _may_be_cached(value, dtype):
            return _cast_weight(value, dtype)
        return _to(value, dtype)
    if type(value) in (list, tuple) and value and isinstance(value[0], torch.Tensor):
        return [cast(part, dtype) for part in value]
    return value


def _may_be_cached(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Weights of a network: leaves, no views, cast to the lower precision. Not inference tensors (pytorch 158232)."""
    return (
        weight.is_leaf
        and not weight._is_view()
        and dtype is _lower_dtype("cuda")
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
    )


def _cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The cast of a weight, made once per autocast region; with its graph, since a region may turn gradients on."""
    known = _cast_weights.get(id(weight))
    if known is not None and known[0]() is weight:
        return known[1]
    with torch.enable_grad():
        made = _to(weight, dtype)
    _cast_weights[id(weight)] = (weakref.ref(weight), made)
    return made


def clear_cache() -> None:
    """Forget the cast weights, and with them their memory."""
    _cast_weights.clear()


def widest(values, dtype: torch.dtype) -> torch.dtype:
    """The promote policy: float32 if any input has it, else the lower precision (`prioritize` in autocast_mode.h)."""
    for value in values:
        if type(value) in (list, tuple):
            dtype = widest(value, dtype)
        elif is_eligible(value) and dtype is not _FP32:
            if value.dtype is not _FP32 and value.dtype is not dtype:
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
            dtype = value.dtype
    return dtype
