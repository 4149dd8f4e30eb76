"""`torch.autocast("cuda")` for tensors that are on the CPU for C++.

Autocast is a dispatch key: PyTorch's kernels at AutocastCUDA cast the inputs, then call the operator again without the
key (aten/src/ATen/autocast_mode.cpp). They ask C++ whether a tensor is on a GPU, and would cast none of ours. So at the
first use of autocast, kernels in Python take their places, with CUDA's lists and CUDA's casts;
and since no tensor of ours carries the key, each thread that turns autocast on has it added to all
its operators. Composite operators follow the lists at every level, as on a GPU.

torch.autocast, custom_fwd, custom_bwd and GradScaler themselves are PyTorch's own. With shapes_only it is not known
whether a gradient overflowed; it counts as not. The scale then stays the one that GradScaler started from.

Stand-ins that answer before the dispatcher is reached use `cast_first`, an LSTM `cast`.

`operators.AUTOCAST` says what is done with which operator. `names` leaves out what the installed version does not cast.
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from math import isnan
from typing import Any

import torch

from virtual_gpus.dispatch import routes
from virtual_gpus.dispatch.operators import AUTOCAST, OpCall
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import gpu_of, has_values
from virtual_gpus.threads import OfEachThread

_KEY = torch._C.DispatchKey.AutocastCUDA
_KEYS = torch._C.DispatchKeySet(_KEY) | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_FP32 = torch.float32
_CASTABLE = {t for t in vars(torch).values() if isinstance(t, torch.dtype) and t.is_floating_point} - {torch.float64}

_enabled = torch.is_autocast_enabled
_lower_dtype = torch.get_autocast_dtype
_to = torch._C.TensorBase.to
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_include = torch._C._dispatch_tls_set_dispatch_key_included

_cast_weights: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}  # of all threads, as in C++
_Scaler = torch.amp.GradScaler
_raw_set = torch.set_autocast_enabled
_raw_clear = torch.clear_autocast_cache
_raw = {name: getattr(_Scaler, name) for name in ("get_scale", "_get_growth_tracker")}
_registering = threading.Lock()
_library: list[torch.library.Library] = []
# While `torch.autocast("cuda")` is on and the operator that is called has not been cast yet.
_casts = OfEachThread(False)


def below_autocast() -> AbstractContextManager[None]:
    """The CPU's operators compute in the types that they are given, also under `torch.autocast("cpu")`."""
    return torch._C._ExcludeDispatchKeyGuard(_KEYS)


# ---- casts: as `cached_cast` and `prioritize` in aten/src/ATen/autocast_mode.cpp and autocast_mode.h -----------------


def is_eligible(value: object) -> bool:
    """True for what CUDA's autocast may cast: a floating-point tensor on a GPU that is not float64."""
    return isinstance(value, torch.Tensor) and value.dtype in _CASTABLE and is_on_gpu(value)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """True for a tensor on a virtual GPU that is on."""
    try:
        storage: Any = tensor.untyped_storage()  # `gpu_of`, without its calls: this runs for every input
        gpu = storage._record.gpu
    except (NotImplementedError, RuntimeError):
        return gpu_of(tensor) is not None
    return gpu is not None and gpu.machine.on


def cast(value: Any, dtype: torch.dtype) -> Any:
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
    lowers_weight = weight.is_leaf and not weight._is_view() and dtype is _lower_dtype("cuda")
    return lowers_weight and torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()


def _cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The cast of a weight, made once per autocast region; with its graph, since a region may turn gradients on."""
    known = _cast_weights.get(id(weight))
    if known is not None and known[0]() is weight:
        return known[1]
    with torch.enable_grad():
        lowered = _to(weight, dtype)
    _cast_weights[id(weight)] = (weakref.ref(weight), lowered)
    return lowered


def widest(values: Iterable[Any], dtype: torch.dtype) -> torch.dtype:
    """The promote policy: float32 if any input has it, else the lower precision (`prioritize` in autocast_mode.h)."""
    for value in values:
        if type(value) in (list, tuple):
            dtype = widest(value, dtype)
        elif is_eligible(value) and dtype is not _FP32:
            dtype = value.dtype
    return dtype


# ---- kernels: what each policy does around an operator ---------------------------------------------------------------


def _without_autocast(op: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    """Call `op` with autocast off for this thread."""
    outer, _casts.value = _casts.value, False
    _exclude(_KEY, True)
    try:
        return op(*args, **kwargs)
    finally:
        _exclude(_KEY, False)
        _casts.value = outer


def _casting_to(dtype_for: Callable[[Any, dict[str, Any]], torch.dtype]) -> Callable[..., Callable[..., Any]]:
    """Cast inputs to `dtype_for(args, kwargs)`, last one first, as C++ evaluates arguments: the blocks' order."""

    def kernel(op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        dtype = dtype_for(args, kwargs)
        if kwargs:
            kwargs = {name: cast(value, dtype) for name, value in reversed(kwargs.items())}
        return _without_autocast(op, [cast(value, dtype) for value in reversed(args)][::-1], kwargs)

    return partial(partial, kernel)


def _to_fp32_results(op: Any) -> Callable[..., Any]:
    position, name = [argument.name for argument in op._schema.arguments].index("dtype"), op._schema.name[6:]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if is_eligible(args[0]):
            if position >= len(args):
                kwargs = {**kwargs, "dtype": kwargs.get("dtype") or _FP32}
            elif args[position] is None:
                args = (*args[:position], _FP32, *args[position + 1 :])
        runs = getattr(torch, name) if "softmax" in name else op  # a patch, which asks for one kernel
        return _without_autocast(runs, args, kwargs)

    return kernel


def _banned(op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(a, torch.Tensor) and is_on_gpu(a) for a in args):
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. "
            "Use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss."
        )
    return _without_autocast(op, args, kwargs)


_POLICIES = {
    "lower_precision": _casting_to(lambda args, kwargs: _lower_dtype("cuda")),
    "fp32": _casting_to(lambda args, kwargs: _FP32),
    "fp32_set_opt_dtype": _to_fp32_results,
    "promote": _casting_to(lambda args, kwargs: widest((*args, *kwargs.values()), _lower_dtype("cuda"))),
    "banned": partial(partial, _banned),
}


def composite(call: OpCall) -> Any:
    """The parts of an operator that is taken apart under autocast, whose key is off by now, follow the lists."""
    if call.op.kernels is not None or not _casts.value:
        return routes.composite(call)
    _exclude(_KEY, False)
    try:
        return routes.composite(call)
    finally:
        _exclude(_KEY, True)


ROUTES = {"composite": composite}


def cast_first(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which answers for operator `name`. Under autocast, it is given cast inputs and runs without it, as
    the operator's own kernel would. What `AUTOCAST` says of `name` casts inputs."""
    return _POLICIES[AUTOCAST[name]](function) if _enabled("cuda") and _casts.value else function


# ---- on and off ------------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """The operators that this version of PyTorch casts and that have a kernel here, with their overloads."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    known = set(torch._C._dispatch_get_all_op_names())
    return [name for name in AUTOCAST if f"aten::{name}" in known and has(f"aten::{name}", "AutocastCUDA")]


def register() -> None:
    """Put the kernels in, once."""
    if _library:
        return
    with _registering, warnings.catch_warnings():
        if _library:
            return
        warnings.simplefilter("ignore")  # PyTorch says that it had kernels here already; `forget` gives them back
        library = torch.library.Library("aten", "IMPL", "AutocastCUDA")
        for name in names():
            base, _, overload = name.partition(".")
            library.impl(name, _POLICIES[AUTOCAST[name]](getattr(getattr(torch.ops.aten, base), overload or "default")))
        _library.append(library)


def forget() -> None:
    """Give PyTorch its own kernels back. Called when the last virtual GPUs go off."""
    _cast_weights.clear()
    _casts.value = False
    _include(_KEY, False)
    with _registering:
        while _library:
            _library.pop()._destroy()


def set_autocast_enabled(*args: Any) -> None:
    """`set_autocast_enabled("cuda", True)`, or the old form without the device: operators reach the kernels or not."""
    _raw_set(*args)
    on = _enabled("cuda")
    if on:
        register()
    _casts.value = on
    _include(_KEY, on)


def clear_autocast_cache() -> None:
    """Forget the weights that were cast; autocast does this when its outermost region ends."""
    _cast_weights.clear()
    _raw_clear()


# ---- GradScaler with shapes_only -------------------------------------------------------------------------------------


def _maybe_opt_step(self: _Scaler, optimizer: torch.optim.Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any):
    """The step, unless a gradient overflowed. The host waits for each GPU's answer, which may be nan, as in PyTorch."""
    found = sum(answer.item() for answer in state["found_inf_per_device"].values())
    return None if found > 0 else optimizer.step(*args, **kwargs)


def get_scale(self: _Scaler) -> float:
    """The current scale, for which the host waits."""
    scale = _raw["get_scale"](self)
    return self._init_scale if isnan(scale) else scale


def _get_growth_tracker(self: _Scaler) -> int:
    is_known = not self.is_enabled() or self._scale is None or has_values(self._scale)
    return _raw["_get_growth_tracker"](self) if is_known else self._init_growth_tracker


def patches() -> list[Patch]:
    rows = [(owner, f.__name__, f) for owner in (torch, torch._C) for f in (set_autocast_enabled, clear_autocast_cache)]
    return rows + [(_Scaler, f.__name__, f) for f in (_maybe_opt_step, get_scale, _get_growth_tracker)]
