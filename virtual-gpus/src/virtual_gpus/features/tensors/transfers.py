"""Moving tensors: to, cuda, cpu, pin_memory, save_on_cpu and what follows from them."""

from typing import Any

import torch
from torch.overrides import has_torch_function_unary
from torch.types import Device

from virtual_gpus.clock.cost import CHARGED_ELSEWHERE, READS_AND_WRITES
from virtual_gpus.dispatch.copies import Dtype, Format, Tensor, move
from virtual_gpus.dispatch.mode import enter_thread
from virtual_gpus.dispatch.operators import Row
from virtual_gpus.entrance import entrance
from virtual_gpus.features.tensors.attributes import get_device
from virtual_gpus.features.tensors.device_numbers import named, raw_parse_to
from virtual_gpus.machine import VirtualGPU, active, find_gpu
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import gpu_of, has_values, is_fake, pin
from virtual_gpus.placement.storages import is_pinned as says_pinned
from virtual_gpus.threads import below, this_thread

_raw = {name: getattr(torch._C.TensorBase, name) for name in ("to", "cuda", "cpu", "pin_memory", "is_pinned")}
_raw_compatible, _AS_IS = torch._has_compatible_shallow_copy_type, torch.preserve_format
_BETWEEN = ("copy_", "_copy_from", "_copy_from_and_resize", "_has_compatible_shallow_copy_type")
OPERATORS = dict.fromkeys(_BETWEEN, Row(READS_AND_WRITES, crosses=True))
OPERATORS["_local_scalar_dense"] = Row(CHARGED_ELSEWHERE)  # all that `.item()` takes is that the host waits


def as_device(device: Device) -> torch.device | None:
    """A device from what people write: 1, "cuda", "cuda:1", torch.device. None stays None."""
    return None if device is None else torch.device(named(device))


def _parse_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device | None, Dtype, bool, Format, bool]:
    """The arguments of `Tensor.to` in any of its three forms: (device, dtype, copy, memory format, blocking)."""
    kwargs = dict(kwargs)
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Tensor):
        blocking = not _flag(args[1:], 0, kwargs, "non_blocking")
        return other.device, other.dtype, _flag(args[1:], 1, kwargs), kwargs.get("memory_format"), blocking
    position = 2 if args and isinstance(args[0], torch.dtype) else 3
    # PyTorch's parser for modules, used here, knows no such argument.
    copy = args[position] if len(args) > position else kwargs.pop("copy", False)
    parse = torch._C._nn._parse_to if isinstance(other, int) or "device" in kwargs else raw_parse_to
    device, dtype, non_blocking, memory_format = parse(*args[:position], **kwargs)
    return device, dtype, copy, memory_format, not non_blocking


def _flag(args: tuple[Any, ...], position: int, kwargs: dict[str, Any], name: str = "copy") -> bool:
    return bool(args[position] if len(args) > position else kwargs.get(name, False))


@entrance
def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to` with virtual devices."""
    machine = active()
    if machine is None or this_thread.in_kernel or has_torch_function_unary(self):  # see `gpu_as_seen`
        return _raw["to"](self, *args, **kwargs)
    device, dtype, copy, memory_format, blocking = _parse_to(args, kwargs)
    kind = None if device is None else device.type
    if kind == "meta" and not has_values(self):  # for C++, it is there already
        with below():
            return torch.ops.aten._to_copy.default(self, dtype=dtype, memory_format=memory_format)
    if device is None or (kind != "cpu" and kind != "cuda"):
        return _raw["to"](self, *args, **kwargs)
    target = find_gpu(machine, device) if kind == "cuda" else None
    return _moved(self, target, dtype, memory_format, copy, blocking)


def _moved(self: Tensor, target: VirtualGPU | None, dtype: Dtype, layout: Format, copy: bool, blocking: bool) -> Tensor:
    enter_thread()
    if is_fake(type(self)):  # it is on no GPU, see `dispatch.mode`
        layout = layout or torch.preserve_format
        return _raw["to"](self, "cpu", dtype or self.dtype, not blocking, copy, memory_format=layout)
    return move(self, target, dtype, layout, copy, blocking)


@entrance
def cuda(self: Tensor, device: Device = None, non_blocking: bool = False, memory_format: Format = _AS_IS) -> Tensor:
    """`Tensor.cuda`: to the current GPU, or to the one named."""
    machine = active()
    if machine is None or this_thread.in_kernel or has_torch_function_unary(self):
        return _raw["cuda"](self, device, non_blocking, memory_format=memory_format)
    device = as_device(device) or torch.device("cuda", machine.current)
    if device.type != "cuda":
        raise RuntimeError(f"Invalid device, must be cuda device (got {device})")
    return _moved(self, find_gpu(machine, device), None, memory_format, False, not non_blocking)


def cpu(self: Tensor, memory_format: Format = _AS_IS) -> Tensor:
    """`Tensor.cpu`: a copy in the computer's memory, or the tensor itself when it is there."""
    if has_torch_function_unary(self) or gpu_of(self) is None or active() is None:
        return _raw["cpu"](self, memory_format=memory_format)
    return move(self, None, None, memory_format, False)


def type_as(self: Tensor, other: Tensor) -> Tensor:
    """`self` with the dtype and on the device of `other`."""
    return self.to(other.device, other.dtype)


def pin_memory(self: Tensor, device: Device = None) -> Tensor:
    """A copy that says it is pinned (page-locked): on the modelled clock, copies from it are faster."""
    if active() is None:
        return _raw["pin_memory"](self, device) if device is not None else _raw["pin_memory"](self)
    if gpu_of(self) is not None:
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
    return self if is_pinned(self) else pin(self.clone())


def is_pinned(self: Tensor, device: Device = None) -> bool:
    """True for what `pin_memory` returned."""
    is_answered = active() is not None and not has_torch_function_unary(self)
    return says_pinned(self) if is_answered else _raw["is_pinned"](self)


def _has_compatible_shallow_copy_type(input: Tensor, from_: Tensor) -> bool:
    """Whether Module.to can give a parameter other data, as between the CPU and a real GPU (`tensors._set_data`)."""
    if (gpu_of(input) is None) == (gpu_of(from_) is None):
        return _raw_compatible(input, from_)
    return not (input.is_meta or from_.is_meta) and input.layout == from_.layout


class save_on_cpu(torch.autograd.graph.save_on_cpu):
    """Within it, what autograd saves is moved to the computer's memory until the backward pass asks for it.

    With shapes_only, the computer's memory gets a tensor without values as well: what is packed away comes back unread.
    A copy by `.cpu()` would refuse integers (the words of an embedding) and fill the rest with nan.
    """

    def __init__(self, pin_memory: bool = False, device_type: str = "cuda"):
        super().__init__(pin_memory, device_type)
        with_values = self.pack_hook

        def pack(tensor: Tensor) -> Any:
            if has_values(tensor):
                return with_values(tensor)
            return tensor.device, torch.empty_like(tensor, device="meta")

        self.pack_hook = pack


def patches() -> list[Patch]:
    lazy = vars(torch.nn.parameter)["UninitializedTensorMixin"]  # it knows what it lets pass by what it was before
    passes = [*lazy._allowed_methods, to, cuda, cpu, get_device, Tensor.untyped_storage]
    rows: list[Patch] = [(Tensor, f.__name__, f) for f in (to, cuda, cpu, type_as, pin_memory, is_pinned)]
    rows += [(torch, "_has_compatible_shallow_copy_type", _has_compatible_shallow_copy_type)]
    rows += [(torch.autograd.graph, "save_on_cpu", save_on_cpu)]
    return [*rows, (lazy, "_allowed_methods", passes)]
