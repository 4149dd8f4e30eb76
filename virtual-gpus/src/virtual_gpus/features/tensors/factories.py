"""Making tensors on a GPU: torch.tensor and its kin, `x.new(...)`, the default device, and the factories' threads."""

import functools
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function
from torch.types import Device
from torch.utils._device import _device_constructors

from virtual_gpus import errors, figures
from virtual_gpus.clock.cost import FREE, bytes_of, moves
from virtual_gpus.dispatch.copies import move
from virtual_gpus.dispatch.mode import enter_thread
from virtual_gpus.dispatch.operators import Row
from virtual_gpus.entrance import entrance
from virtual_gpus.features.tensors.autograd import beside
from virtual_gpus.features.tensors.device_numbers import named
from virtual_gpus.features.tensors.transfers import as_device
from virtual_gpus.machine import VirtualGPU, active, find_gpu
from virtual_gpus.patches.table import Patch, around
from virtual_gpus.placement.storages import gpu_of, pin
from virtual_gpus.threads import this_thread

Make = Callable[..., Any]  # a function of PyTorch that makes tensors
# The functions that parse their data in C++, and the name of that argument.
_DATA: dict[str, str] = figures.beside(__file__)["data"]
_raw_make = {name: getattr(torch, name) for name in _DATA}
_SHARED = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)
_raw_new: Make = torch._C.TensorBase.new
_default_device = functools.partial(getattr, torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
_default_before: list[object] = []  # what torch.set_default_device had set when the GPUs went on
_NAMES, _FITTED = (figures.beside(__file__)[part] for part in ("operators", "fill"))
_FILL = moves(lambda operation: bytes_of(operation.outputs or operation.inputs[:1]), **_FITTED)
OPERATORS = {
    **dict.fromkeys(_NAMES["fill"].split(), Row(_FILL)),
    **dict.fromkeys(_NAMES["free"].split(), Row(FREE)),
    "set_": Row(FREE, crosses=True),
}
# Functions in C++ that may make a result without an operator on their input: of no elements, or of an empty matrix.
_FOR_ITSELF = ((torch._C._nn, "unflatten_dense_tensors"), (torch.linalg, "matrix_rank"), (torch.linalg, "cond"))


def _maker(name: str) -> Make:
    """`torch.tensor` and its kin parse their data in C++ and would ask CUDA itself: make it on the CPU, then move."""
    make = _raw_make[name]

    def on_device(*args: Any, device: Device = None, **kwargs: Any) -> torch.Tensor:
        machine = active()
        first = next((key for key in (_DATA[name], "size") if key in kwargs), None)
        if not args and first is not None:
            args = (kwargs.pop(first),)
        if machine is None or not args:
            return make(*args, **kwargs) if device is None else make(*args, device=device, **kwargs)
        source = gpu_of(args[0]) if isinstance(args[0], torch.Tensor) else None
        device = as_device(device)
        if source is None and (device is None or device.type != "cuda"):
            kwargs = kwargs if device is None else {**kwargs, "device": device}
            return pin(make(*args, **kwargs)) if kwargs.pop("pin_memory", False) else make(*args, **kwargs)
        target = source if device is None else find_gpu(machine, device) if device.type == "cuda" else None
        return _make_on(make, name, target, *args, **kwargs)

    return _Factory(make, on_device)


def _make_on(make: Make, name: str, target: VirtualGPU | None, data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """On the CPU first, then on `target`; what is there already is shared, not copied, where PyTorch shares it."""
    if isinstance(data, torch.Tensor) and name in ("as_tensor", "asarray"):
        dtype = kwargs.get("dtype", args[0] if args else None)
        return move(data, target, dtype, None, bool(kwargs.get("copy")))
    requires_grad, pinned = kwargs.pop("requires_grad", False), kwargs.pop("pin_memory", False)
    if isinstance(data, torch.Tensor) and gpu_of(data) is not None:
        data = move(data.detach(), None, None, None, False)
    args = tuple(move(a, None, None, None, False) if isinstance(a, torch.Tensor) else a for a in args)
    tensor = move(make(data, *args, device=torch.device("cpu"), **kwargs).detach(), target, None, None, False)
    return (pin(tensor) if pinned and target is None else tensor).requires_grad_(requires_grad)


def new_tensor(self: torch.Tensor, data: Any, *, device: Device = None, **kwargs: Any) -> torch.Tensor:
    """`x.new_tensor(data)`: on x's device unless another is named, or `data` is a tensor and has one."""
    if device is None:
        device = (data if isinstance(data, torch.Tensor) else self).device
    kwargs["dtype"] = kwargs.get("dtype") or self.dtype
    return torch.tensor(data, device=device, **kwargs)


@entrance
def new(self: torch.Tensor, *args: Any, device: Device = None, **kwargs: Any) -> torch.Tensor:
    """`x.new(2, 3)`, `x.new([1, 2])`, `x.new(tensor)`, `x.new()`: of x's dtype, on x's GPU unless another is named.

    The rules of torch/csrc/utils/tensor_new.cpp: integers and a torch.Size are sizes, a tensor or a storage is shared,
    other sequences are data. Raises TypeError for a tensor of another type.
    """
    if active() is None or gpu_of(self) is None:
        return _raw_new(self, *args, **kwargs) if device is None else _raw_new(self, *args, device=device, **kwargs)
    device = self.device if device is None else as_device(device)
    first = args[0] if len(args) == 1 else None
    if isinstance(first, torch.Tensor) and first.type() != self.type():
        raise TypeError(f"expected a tensor of type {self.type()} (got {first.type()})")
    if kwargs or any(isinstance(arg, _SHARED) for arg in args):  # of a sparse tensor: indices and values
        return _raw_new(self, *args, **kwargs)
    sizes = first if isinstance(first, torch.Size) else args or (0,)
    if all(isinstance(size, Integral) for size in sizes):
        return torch.empty(sizes, dtype=self.dtype, layout=self.layout, device=device)
    return new_tensor(self, *args, device=device)


def _beside_input(function: Make, *args: Any, **kwargs: Any) -> Any:
    """The results of such a function belong on the GPU of its first input."""
    results = function(*args, **kwargs)
    first = next(iter((*args, *kwargs.values())))
    for result in results if isinstance(results, (list, tuple)) else [results]:
        beside(result, first)
    return results


def prepare() -> None:
    _default_before[:] = [_default_device()]


def forget() -> None:
    """A default device that was set while GPUs were on is probably one that is no more."""
    if _default_before and _default_device() is not _default_before.pop():
        torch.set_default_device(None)


def patches() -> list[Patch]:
    rows: list[Patch] = [(torch.Tensor, f.__name__, f) for f in (new_tensor, new)]
    rows += [(torch, name, _maker(name)) for name in _raw_make]
    rows += [(owner, name, around(getattr(owner, name), _beside_input)) for owner, name in _FOR_ITSELF]
    return rows + [(torch, name, _Factory(function, function)) for name, function in _factories()]


def _factories() -> list[tuple[str, Make]]:
    """(name, function) of everything in `torch` that makes a tensor where its `device` argument says."""
    # Asked now, since PyTorch keeps this set for ever once made: it must hold its own functions, not patches.
    likes = {f for n, f in vars(torch).items() if n.endswith("_like")}
    makers = {id(f) for f in _device_constructors() | likes}
    return [(n, f) for n, f in vars(torch).items() if id(f) in makers and n not in _raw_make]


class _Factory:
    """What stands for a factory. Modes and classes with `__torch_function__` may have a table of what it does.

    They are asked with this object. It equals PyTorch's own function, since a table may be older than the GPUs.
    """

    def __init__(self, make: Make, factory: Make):
        functools.update_wrapper(self, make)
        self._make, self._factory, self._is_like = make, factory, make.__name__.endswith("_like")

    @entrance
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        asked = (args[:1] or (kwargs.get("input"),)) if self._is_like else ()
        if torch._C._is_torch_function_mode_enabled() or (asked and has_torch_function(asked)):
            return handle_torch_function(self, asked, *args, **kwargs)
        if this_thread.mode is None and active() is not None:  # older threads join here: C++ asks once per process
            enter_thread()
        if "device" in kwargs:
            kwargs["device"] = named(kwargs["device"])
        try:
            return self._factory(*args, **kwargs)
        except RuntimeError as error:
            if "item() cannot be called on meta tensors" in str(error):  # in C++, below every mode
                raise errors.needs_values(f"torch.{self._make.__name__} of tensors") from None
            raise

    def __eq__(self, other: object) -> bool:
        return self is other or self._make == other

    def __hash__(self) -> int:
        return hash(self._make)

    def __repr__(self) -> str:
        return repr(self._make)

    def __reduce__(self) -> str:
        return self._make.__name__  # as a name in torch
