"""Making tensors on a GPU and moving them: to, cuda, cpu, pin_memory, torch.tensor and its kin."""

from __future__ import annotations

import functools

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._device import _device_constructors

from virtual_gpus.dispatch.copies import move
from virtual_gpus.dispatch.mode import enter_thread
from virtual_gpus.entrance import entrance
from virtual_gpus.machine import active
from virtual_gpus.patches.numbers import named
from virtual_gpus.placement.storages import HostStorage, find_gpu, gpu_of, is_fake, storages
from virtual_gpus.placement.storages import is_pinned as says_pinned
from virtual_gpus.threads import this_thread

_raw = {name: getattr(torch._C.TensorBase, name) for name in ("to", "cuda", "cpu", "pin_memory", "is_pinned")}
_raw_make = {name: getattr(torch, name) for name in ("tensor", "as_tensor", "asarray", "sparse_coo_tensor")}


def as_device(device) -> torch.device | None:
    """A device from what people write: 1, "cuda", "cuda:1", torch.device. None stays None."""
    return None if device is None else torch.device(named(device))


def _parse_to(args, kwargs):
    """The arguments of `Tensor.to` in any of its three forms: (device, dtype, copy, memory format, blocking)."""
    args, kwargs = list(args), dict(kwargs)
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, torch.Tensor):
        rest = args[1:] if args else []
        blocking = not _flag(rest, 0, kwargs, "non_blocking")
        return other.device, other.dtype, _flag(rest, 1, kwargs), kwargs.get("memory_format"), blocking
    position = 2 if args and isinstance(args[0], torch.dtype) else 3
    copy = _flag(args, position, kwargs)
    del args[position:]  # PyTorch's parser for modules, used here, knows no copy argument
    kwargs.pop("copy", None)
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype, copy, memory_format, not non_blocking


def _flag(args, position: int, kwargs, name: str = "copy") -> bool:
    return bool(args[position] if len(args) > position else kwargs.get(name, False))


@entrance
def to(self, *args, **kwargs):
    """`Tensor.to` with virtual devices."""
    machine = active()
    if machine is None or this_thread.inside:
        return _raw["to"](self, *args, **kwargs)
    if has_torch_function_unary(self):  # a subclass, or a mode
        return handle_torch_function(to, (self,), self, *args, **kwargs)
    device, dtype, copy, memory_format, blocking = _parse_to(args, kwargs)
    if device is None or device.type not in ("cpu", "cuda"):
        return _raw["to"](self, *args, **kwargs)
    enter_thread()
    target = find_gpu(machine, device) if device.type == "cuda" else None
    if is_fake(type(self)):  # it is on no GPU, see `dispatch.mode`
        memory_format = memory_format or torch.preserve_format
        return _raw["to"](self, "cpu", dtype or self.dtype, not blocking, copy, memory_format=memory_format)
    return move(self, target, dtype, memory_format, copy, blocking)


@entrance
def cuda(self, device=None, non_blocking: bool = False, memory_format=torch.preserve_format):
    """`Tensor.cuda`: to the current GPU, or to the one named."""
    machine = active()
    if machine is None:
        return _raw["cuda"](self, device, non_blocking, memory_format)
    if has_torch_function_unary(self):
        return handle_torch_function(cuda, (self,), self, device, non_blocking, memory_format)
    enter_thread()
    device = as_device(device)
    if device is None:
        device = torch.device("cuda", machine.current)
    if device.type != "cuda":
        raise RuntimeError(f"Invalid device, must be cuda device (got {device})")
    if is_fake(type(self)):
        return self.to(device, non_blocking=non_blocking, memory_format=memory_format)
    return move(self, find_gpu(machine, device), None, memory_format, False, not non_blocking)


def cpu(self, memory_format=torch.preserve_format):
    """`Tensor.cpu`: a copy in the computer's memory, or the tensor itself when it is there."""
    if gpu_of(self) is None or active() is None:
        return _raw["cpu"](self, memory_format=memory_format)
    if has_torch_function_unary(self):
        return handle_torch_function(cpu, (self,), self, memory_format)
    return move(self, None, None, memory_format, False)


def type_as(self, other):
    """`self` with the dtype and on the device of `other`."""
    return self.to(other.device, other.dtype)


def pin_memory(self, device=None):
    """A copy that says it is pinned (page-locked): on the modelled clock, copies from it are faster."""
    if active() is None:
        return _raw["pin_memory"](self, device) if device is not None else _raw["pin_memory"](self)
    if gpu_of(self) is not None:
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
    if is_pinned(self):
        return self
    pinned = self.clone()
    for storage in storages(pinned):
        storage._record = HostStorage(pinned=True)
    return pinned


def is_pinned(self, device=None) -> bool:
    """True for what `pin_memory` returned."""
    return says_pinned(self) if active() is not None else _raw["is_pinned"](self)


def _maker(name: str):
    """`torch.tensor` and its kin parse their data in C++ and would ask CUDA itself: make it on the CPU, then move."""
    make = _raw_make[name]

    @functools.wraps(make)
    @entrance
    def on_device(data, *args, device=None, **kwargs):
        machine = active()
        device = as_device(device)
        source = gpu_of(data) if isinstance(data, torch.Tensor) else None
        if device is None and source is None:
            device = _default_device()
        if machine is None or (source is None and (device is None or device.type != "cuda")):
            return make(data, *args, **kwargs) if device is None else make(data, *args, device=device, **kwargs)
        enter_thread()
        if source is not None and device is None:
            target = source if name != "tensor" else None  # torch.tensor(gpu_tensor) makes a CPU tensor
        else:
            target = find_gpu(machine, device) if device.type == "cuda" else None
        return _make_on(make, name, target, data, args, kwargs)

    return on_device


def _make_on(make, name: str, target, data, args, kwargs):
    """On the CPU first, then on `target`; what is there already is shared, not copied, where PyTorch shares it."""
    if isinstance(data, torch.Tensor) and name in ("as_tensor", "asarray"):
        dtype = kwargs.get("dtype", args[0] if args else None)
        return move(data, target, dtype, None, bool(kwargs.get("copy")))
    requires_grad = kwargs.pop("requires_grad", False)
    if isinstance(data, torch.Tensor) and gpu_of(data) is not None:
        data = move(data.detach(), None, None, None, False)
    args = tuple(move(a, None, None, None, False) if isinstance(a, torch.Tensor) else a for a in args)
    made = make(data, *args, device=torch.device("cpu"), **kwargs)
    return move(made.detach(), target, None, None, False).requires_grad_(requires_grad)


def _default_device() -> torch.device | None:
    """What `torch.set_default_device` or `with torch.device(...)` asks for; None where nobody asked."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def new_tensor(self, data, *, dtype=None, device=None, requires_grad: bool = False, **kwargs):
    """`x.new_tensor(data)`: on x's device unless another is named."""
    device = self.device if device is None else device
    return torch.tensor(data, dtype=dtype or self.dtype, device=device, requires_grad=requires_grad, **kwargs)


_raw_swaps = torch.__future__.get_swap_module_params_on_conversion


def get_swap_module_params_on_conversion() -> bool:
    """Module.to changes a parameter in place on a real GPU; from the CPU to meta tensors that takes a swap."""
    machine = active()
    return _raw_swaps() or (machine is not None and machine.shapes_only)


def patches():
    """See `patches`."""
    swaps = (torch.__future__, "get_swap_module_params_on_conversion", get_swap_module_params_on_conversion)
    found = [(torch.Tensor, f.__name__, f) for f in (to, cuda, cpu, type_as, pin_memory, is_pinned, new_tensor)]
    found += [swaps] + [(torch, name, _maker(name)) for name in _raw_make]
    return found + [(torch, name, _joining(function)) for name, function in _factories()]


def _factories():
    """(name, function) of everything in `torch` that makes a tensor where its `device` argument says."""
    # Asked now, since PyTorch keeps this set for ever once made: it must hold its own functions, not patches.
    known = _device_constructors()
    likes = {f for n, f in vars(torch).items() if n.endswith("_like")}
    makers = {id(f) for f in known | likes}
    return [(n, f) for n, f in vars(torch).items() if id(f) in makers and n not in _raw_make]


def _joining(make):
    """C++ asks `_lazy_init` once per process; a thread that was there before the GPUs must join all the same."""

    @functools.wraps(make)
    def factory(*args, **kwargs):
        enter_thread()
        if "device" in kwargs:
            kwargs["device"] = named(kwargs["device"])
        return make(*args, **kwargs)

    return factory
