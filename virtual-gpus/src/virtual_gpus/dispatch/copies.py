"""Copies between the computer's memory and the GPUs, and from GPU to GPU.

For C++, such a copy goes from the CPU to the CPU. It would hand a gradient on untouched, on the wrong GPU. So
the copy is an autograd function of its own, whose backward copies back to where the tensor came from.
"""

from __future__ import annotations

from typing import Any

import torch

from virtual_gpus.dispatch import valueless
from virtual_gpus.dispatch.timing import charge_copy
from virtual_gpus.machine import VirtualGPU, active
from virtual_gpus.placement.random_numbers import is_state
from virtual_gpus.placement.storages import StorageAllocation, gpu_of, has_values, is_wrapper, pin, place, put

Tensor, Dtype, Format = torch.Tensor, torch.dtype | None, torch.memory_format | None  # None: as it is
Place = VirtualGPU | None  # None: the computer


class ToCopy(torch.autograd.Function):
    """A copy to `target` (None: the CPU) whose gradient goes back as it was; with `jvp` and `vmap`, for torch.func."""

    @staticmethod
    def forward(tensor: Tensor, target: Place, dtype: torch.dtype, layout: Format, blocking: bool) -> Tensor:
        """Copy. Called by `move`."""
        return raw_copy(tensor, target, dtype, layout, blocking)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Note both ends of the copy."""
        tensor, ctx.target, ctx.dtype, *_ = inputs
        ctx.source, ctx.source_dtype = gpu_of(tensor), tensor.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Copy the gradient back; to the CPU if the source's virtual GPUs are off by now."""
        if active() is None:
            return gradient.to(ctx.source_dtype), None, None, None, None
        source = ctx.source if ctx.source is not None and ctx.source.machine.on else None
        return move(gradient, source, ctx.source_dtype, None, False), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        """Copy the tangent along."""
        return move(tangent, ctx.target, ctx.dtype, None, False)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *copied: Any) -> tuple[Tensor, int | None]:
        """All samples in one copy."""
        return ToCopy.apply(*copied), in_dims[0]


def move(
    tensor: Tensor, target: Place, dtype: Dtype = None, layout: Format = None, copy: bool = False, blocking: bool = True
) -> Tensor:
    """`tensor` on `target` as `dtype`: itself, or a copy that autograd follows. blocking: if the host waits for it."""
    layout = layout or torch.preserve_format
    dtype = dtype or tensor.dtype
    source = gpu_of(tensor)
    if source is target and not copy and dtype == tensor.dtype:
        if layout is torch.preserve_format or tensor.is_contiguous(memory_format=layout):
            return tensor
    if source is None and target is not None and target.machine.shapes_only and is_state(tensor):
        return tensor  # DTensor goes on from it, which needs its values
    transformed = is_transformed()
    if transformed and source is target:  # a cast; in a rule of vmap, no Function may be called
        layout = layout if tensor.layout == torch.strided else None
        return torch.ops.aten._to_copy.default(tensor, dtype=dtype, memory_format=layout)
    if (tensor.requires_grad and torch.is_grad_enabled()) or transformed:
        return ToCopy.apply(tensor, target, dtype, layout, blocking)
    return raw_copy(tensor, target, dtype, layout, blocking)


def is_transformed() -> bool:
    """True inside torch.func's transforms and forward-mode differentiation, which follow tensors without a flag."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def raw_copy(tensor: Tensor, target: Place, dtype: torch.dtype, layout: Format, blocking: bool = True) -> Tensor:
    """The copy itself, unseen by dispatch modes and by autograd. Raises the allocator's OutOfMemory."""
    if is_wrapper(type(tensor)):
        return _copy_of_wrapper(tensor, target, dtype, layout, blocking)
    source = gpu_of(tensor)
    made = _copied(tensor, target, dtype, layout)
    into_pinned = target is None and source is not None and not blocking  # as `_to_copy` does (TensorConversions.cpp)
    charge_copy("_to_copy", source, target, tensor, dtype, blocking, into_pinned)
    made = pin(made) if into_pinned else made
    if (here := source or target) is not None:
        here.machine.follower.copy(tensor, made, blocking)
    return made


def _copy_of_wrapper(tensor: Any, *how: Any) -> Tensor:
    """A DTensor, say, around copies of what it holds."""
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    inner = {name: raw_copy(part, *how) if isinstance(part, Tensor) else part for name, part in inner.items()}
    with torch.no_grad():
        return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride()).detach()


def _copied(tensor: Tensor, target: Place, dtype: torch.dtype, layout: Format) -> Tensor:
    if target is None and not has_values(tensor):
        return valueless.copy_to_host(torch.empty(tensor.shape, dtype=dtype, device="cpu"), tensor)
    device = allocation = None
    if target is not None and target.machine.shapes_only:
        device = target.machine.tensor_device
    if target is not None and tensor.layout == torch.strided:
        allocation = StorageAllocation(target, tensor.numel() * dtype.itemsize)  # first: what cannot fit fills nothing
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        layout = layout if tensor.layout == torch.strided else None
        made = torch.ops.aten._to_copy.default(tensor, dtype=dtype, device=device, memory_format=layout)
    if allocation is not None:
        put(made, allocation)
    elif target is not None:
        place(made, target)
    return made
