"""What a tensor says of itself: device, is_cuda, get_device, type, numpy."""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter
from torch.overrides import has_torch_function_unary

from virtual_gpus import errors
from virtual_gpus.dispatch.valueless import NotKept
from virtual_gpus.features.tensors.device_numbers import named
from virtual_gpus.features.tensors.legacy import is_cuda_type, parse_type
from virtual_gpus.machine import VirtualGPU, active, find_gpu
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import StorageAllocation, device_of, gpu_of, is_wrapper, put
from virtual_gpus.threads import below, this_thread

_raw = torch._C.TensorBase
_raw_data: Any = vars(_raw)["data"]  # a descriptor
_is_meta = vars(_raw)["is_meta"].__get__
_raw_interface: Any = vars(torch.Tensor)["__cuda_array_interface__"]
_raw_str = torch._tensor_str._str
_raw_make_wrapper, _raw_from_real = torch.Tensor._make_wrapper_subclass, FakeTensorConverter.from_real_tensor


def gpu_as_seen(tensor: torch.Tensor) -> VirtualGPU | None:
    """The virtual GPU that holds `tensor`, as the program sees it. Kernels see none, and neither do calls that are not
    answered here: PyTorch hands them to a function mode or subclass first, and that calls again."""
    return None if this_thread.in_kernel or has_torch_function_unary(tensor) or active() is None else gpu_of(tensor)


def _flag(name: str) -> Callable[[torch.Tensor], bool]:
    """`is_cuda`, True for a tensor on a virtual GPU; `is_cpu` or `is_meta`, False there, with shapes_only as well."""
    raw, kind = getattr(_raw, name).__get__, name.removeprefix("is_")
    return lambda tensor: raw(tensor) if has_torch_function_unary(tensor) else device_of(tensor).type == kind


def get_device(self: torch.Tensor) -> int:
    """The GPU's index, -1 for the CPU."""
    gpu = gpu_as_seen(self)
    return _raw.get_device(self) if gpu is None else gpu.index


def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
    """As PyTorch: a GPU tensor refuses, unless `force=True` copies it first."""
    if gpu_as_seen(self) is None:
        _host_reads(self, "numpy")
        return _raw.numpy(self, force=force)
    if not force:
        device = device_of(self)
        del self  # a kept traceback must not keep the tensor
        raise TypeError(  # torch/csrc/utils/tensor_numpy.cpp
            f"can't convert {device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )
    return self.detach().cpu().resolve_conj().resolve_neg().numpy()


def tolist(self: torch.Tensor) -> list[Any] | int | float | bool | complex:
    """Nested lists of numbers; with shapes_only there are none to give."""
    gpu = gpu_as_seen(self)
    if gpu is not None and gpu.machine.shapes_only:
        raise errors.needs_values("tolist()")
    if gpu is None:
        _host_reads(self, "tolist")
    return _raw.tolist(self)


def _host_reads(tensor: torch.Tensor, name: str) -> None:
    """Readers of CPU tensors that no dispatch mode sees."""
    machine = active()
    if machine is not None and not this_thread.in_kernel and not has_torch_function_unary(tensor):
        machine.follower.kernel(name, [tensor], ())


def item(self: torch.Tensor) -> int | float | bool | complex:
    """The number; with shapes_only, nan that says so where it is printed."""
    gpu = gpu_as_seen(self)
    number = _raw.item(self)
    return number if gpu is None or not gpu.machine.shapes_only or number == number else NotKept("nan")


def _str(tensor: torch.Tensor, *, tensor_contents: str | None = None) -> str:
    """How a tensor prints; with shapes_only its form and the word that values are not kept, as a meta tensor's."""
    gpu = gpu_as_seen(tensor) if isinstance(tensor, torch.Tensor) else None
    if gpu is not None and gpu.machine.shapes_only:
        tensor_contents = f"values are not kept, size={tuple(tensor.shape)}"
    return _raw_str(tensor, tensor_contents=tensor_contents)


def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> str | torch.Tensor:
    """`x.type()` names the GPU's class; `x.type(dtype)` converts, as PyTorch does. dtype: also a name or class."""
    if gpu_as_seen(self) is None and not is_cuda_type(dtype):
        return _raw.type(self) if dtype is None else _raw.type(self, dtype, non_blocking=non_blocking, **kwargs)
    if dtype is None:
        # Under a function mode, such as a default device, PyTorch asks this function again.
        name = _raw.type(self).removeprefix("torch.").removeprefix("cuda.").removeprefix("meta.")
        return f"torch.cuda.{name}"
    if not isinstance(dtype, torch.dtype):
        dtype, on_gpu = parse_type(dtype)
        device = "cpu" if not on_gpu else "cuda" if gpu_as_seen(self) is None else self.device
        return self.to(device, dtype, non_blocking=non_blocking)
    return _raw.type(self, dtype, non_blocking=non_blocking, **kwargs)


type_.__name__ = "type"  # as a name of this module it would hide Python's


def set_(self: torch.Tensor, source: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Take over the storage of `source`, a tensor or a storage. As PyTorch: only one on the tensor's own device."""
    if source is None:
        return _raw.set_(self, *args, **kwargs)
    if not this_thread.in_kernel and active() is not None:
        device = getattr(source, "_untyped_storage", source).device  # a TypedStorage warns when it is asked
        if device != self.device:
            raise RuntimeError(  # aten/src/ATen/native/Resize.h
                f'Attempted to set the storage of a tensor on device "{self.device}" to a storage on different device '
                f'"{device}".  This is no longer allowed; the devices must match.'
            )
    return _raw.set_(self, source, *args, **kwargs)


def _make_wrapper_subclass(*args: Any, **kwargs: Any) -> torch.Tensor:
    """A tensor around others, since C++ must not hear of a GPU that it does not know. `device` asks the tensors inside.
    Of a class that does not name them, it is the GPU that was given."""
    device, machine = kwargs.get("device"), active()
    if device is None or machine is None or (device := torch.device(named(device))).type != "cuda":
        return _raw_make_wrapper(*args, **kwargs)
    kwargs["device"] = machine.tensor_device
    wrapper = _raw_make_wrapper(*args, **kwargs)
    return wrapper if is_wrapper(type(wrapper)) else put(wrapper, StorageAllocation(find_gpu(machine, device), 0))


def from_real_tensor(self: FakeTensorConverter, *args: Any, **kwargs: Any) -> FakeTensor:
    """A fake tensor of a real one's form. It is on the CPU: C++ would ask the driver for the GPU of a fake tensor."""
    with below():
        return _raw_from_real(self, *args, **kwargs)


def _cuda_array_interface(self: torch.Tensor) -> dict[str, Any]:
    if gpu_as_seen(self) is None:
        return _raw_interface.__get__(self)
    raise errors.not_modelled("__cuda_array_interface__")


def _set_data(self: torch.Tensor, value: torch.Tensor) -> None:
    """`x.data = y`. Between the CPU and a GPU without values, x gets another tensor in C++, which cannot change it."""
    machine = active()
    if machine is None or not machine.shapes_only or _is_meta(self) == _is_meta(value):
        _raw_data.__set__(self, value)
        return
    gradient, self.grad = self.grad, None
    hooks = {name: getattr(self, name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")}
    if self.is_leaf and self._use_count() > 1:  # a graph holds it
        torch.autograd.graph.get_gradient_edge(self).node.register_prehook(_refuse_older_graph)
    with below():  # it is no operator
        replacement = torch.Tensor._make_subclass(type(self), value.detach(), self.requires_grad)
    torch._C._swap_tensor_impl(self, replacement)  # whose Python object stays, with its attributes
    for name, hook in hooks.items():
        if hook is not None:
            setattr(self, name, hook)
    if gradient is not None:  # which has to be on the same device, from now on
        gradient.data = gradient.to(self)
        self.grad = gradient


def _refuse_older_graph(gradients: tuple[torch.Tensor, ...]) -> None:
    raise RuntimeError(
        "With shapes_only, the backward pass cannot go to a parameter that moved between the CPU and a GPU after "
        "the forward pass. Move the module first."
    )


def patches() -> list[Patch]:
    tensor = torch.Tensor
    rows: list[Patch] = [(tensor, f.__name__, f) for f in (get_device, numpy, tolist, set_, item)]
    rows += [(torch._tensor_str, "_str", _str), (FakeTensorConverter, "from_real_tensor", from_real_tensor)]
    rows += [(tensor, name, property(_flag(name))) for name in ("is_cuda", "is_cpu", "is_meta")]
    rows += [(tensor, "device", property(device_of)), (tensor, "type", type_)]
    rows += [(tensor, "_make_wrapper_subclass", staticmethod(_make_wrapper_subclass))]
    rows += [(tensor, "data", property(_raw_data.__get__, _set_data))]
    rows += [(tensor, "__cuda_array_interface__", property(_cuda_array_interface))]
    return [*rows, (torch, "get_device", get_device)]
