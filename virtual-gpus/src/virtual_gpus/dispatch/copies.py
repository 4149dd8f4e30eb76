"""Copies between the computer's memory and the GPUs, and from GPU to GPU.

For C++, such a copy goes from the CPU to the CPU. It would hand a gradient on untouched, on the wrong GPU. So
the copy is an autograd function of its own, whose backward copies back to where the tensor came from.
"""

from itertools import pairwise
from typing import Any

import torch

from virtual_gpus import errors
from virtual_gpus.clock.work import Operand
from virtual_gpus.dispatch import valueless
from virtual_gpus.dispatch.operators import cost
from virtual_gpus.dispatch.timing import Place, send, times
from virtual_gpus.machine import active
from virtual_gpus.placement import storages
from virtual_gpus.placement.random_numbers import is_state
from virtual_gpus.placement.storages import StorageAllocation, gpu_of, is_pinned, nbytes, pin, place, put

_to_copy: Any = torch.ops.aten._to_copy.default._op
_below_autograd: Any = torch._C._AutoDispatchBelowAutograd  # `torch.no_grad` is written in Python
Tensor, Dtype, Format = torch.Tensor, torch.dtype | None, torch.memory_format | None  # None: as it is


class ToCopy(torch.autograd.Function):
    """A copy to `target` (None: the CPU) whose gradient goes back as it was; with `jvp` and `vmap`, for torch.func."""

    @staticmethod
    def forward(tensor: Tensor, target: Place, dtype: torch.dtype, layout: Format, blocking: bool) -> Tensor:
        """Copy. Called by `move`."""
        return raw_copy(tensor, gpu_of(tensor), target, dtype, layout, blocking)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Note both ends of the copy."""
        tensor, ctx.target, ctx.dtype, *_ = inputs
        ctx.source, ctx.source_dtype = gpu_of(tensor), tensor.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Copy the gradient back; to the CPU if the source's virtual GPUs are off by now."""
        source = ctx.source if ctx.source is not None and ctx.source.machine.on else None
        back = gradient.to(ctx.source_dtype) if active() is None else move(gradient, source, ctx.source_dtype)
        return back, None, None, None, None

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
    layout, dtype, source = layout or torch.preserve_format, dtype or tensor.dtype, gpu_of(tensor)
    if source is target and not copy and dtype == tensor.dtype:
        if layout is torch.preserve_format or tensor.is_contiguous(memory_format=layout):
            return tensor
    if source is None and target is not None and target.machine.shapes_only and is_state(tensor):
        return tensor  # DTensor goes on from it, which needs its values
    transformed = is_transformed()
    if transformed and source is target:  # a cast; in a rule of vmap, no Function may be called
        layout = layout if tensor.layout == torch.strided else None
        return _to_copy(tensor, dtype=dtype, memory_format=layout)
    if (tensor.requires_grad and torch.is_grad_enabled()) or transformed:
        return ToCopy.apply(tensor, target, dtype, layout, blocking)
    return raw_copy(tensor, source, target, dtype, layout, blocking)


def is_transformed() -> bool:
    """True inside torch.func's transforms and forward-mode differentiation, which follow tensors without a flag."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def raw_copy(
    tensor: Tensor, source: Place, target: Place, dtype: torch.dtype, layout: Format, blocking: bool
) -> Tensor:
    """The copy itself, unseen by dispatch modes and by autograd. Raises the allocator's OutOfMemory."""
    if storages.is_hollow(tensor):
        if storages.is_wrapper(type(tensor)):
            return _copy_of_wrapper(tensor, target, dtype, layout, blocking)
        if source is not target:
            raise errors.not_modelled("copies of tensors that hold others, of a class without __tensor_flatten__")
        return _to_copy(tensor, dtype=dtype, memory_format=layout)
    result = _copied(tensor, source, target, dtype, layout)
    if target is None and source is not None and not blocking:  # as `_to_copy` does (TensorConversions.cpp)
        pin(result)
    if source is not None or target is not None:
        charge_copy("_to_copy", tensor, result, blocking, source, target)
    return result


def _copy_of_wrapper(tensor: Any, *how: Any) -> Tensor:
    """A DTensor, say, around copies of what it holds."""
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    for name, part in inner.items():
        inner[name] = raw_copy(part, gpu_of(part), *how) if isinstance(part, Tensor) else part
    with torch.no_grad():
        return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride()).detach()


def _copied(tensor: Tensor, source: Place, target: Place, dtype: torch.dtype, layout: Format) -> Tensor:
    if target is None and source is not None and source.machine.shapes_only:
        with torch._C._DisableTorchDispatch():
            return valueless.copy_to_host(storages.empty_in(None, tensor.shape, dtype), tensor)
    device, allocation = None if target is None else target.machine.tensor_device, None
    if target is not None and tensor.layout == torch.strided:
        allocation = StorageAllocation(target, tensor.numel() * dtype.itemsize)  # first: what cannot fit fills nothing
    with torch._C._DisableTorchDispatch(), _below_autograd():
        layout = layout if tensor.layout == torch.strided else None
        result = _to_copy(tensor, dtype=dtype, device=device, memory_format=layout)
    if allocation is not None:
        return put(result, allocation)
    return result if target is None else place(result, target)


def plan_copy(
    source: Tensor, target: Tensor, blocking: bool, here: Place, there: Place
) -> tuple[int, list[int], list[int]]:
    """How CUDA does `target.copy_(source)` from `here` to `there` (aten/src/ATen/native/cuda/Copy.cu): bytes over the
    link (0: within a GPU), and those of each temporary at the source and at the target, in the order of the copy.

    GPUs reach each other's memory, so there it is one kernel. Between the computer and a GPU, both ends are packed and
    of one type: temporaries, if the tensors are not. The CPU casts, and with `non_blocking=True` the GPU.
    """
    casts, at_source = source.dtype != target.dtype, list[int]()
    is_direct = (here is not None and there is not None) or (not casts and lie_alike(source, target))
    if is_direct or source.layout != torch.strided or source.is_nested:  # the latter two are counted as one block
        return nbytes(target) if here is not there else 0, [], []
    casts_first, packed = (here is not None) is not blocking, source.is_contiguous()
    if casts and casts_first:  # keeps the order of the dimensions, and leaves gaps out
        at_source = [source.numel() * target.dtype.itemsize]
        strides = [stride for size, stride in zip(source.shape, source.stride(), strict=True) if size > 1]
        packed = strides == sorted(strides, reverse=True)
    sent = target.numel() * (target if casts_first else source).dtype.itemsize
    if not packed or source.numel() != target.numel():
        at_source.append(sent)
    return sent, at_source, [] if target.is_contiguous() and (casts_first or not casts) else [sent]


def lie_alike(one: Tensor, other: Tensor) -> bool:
    """True if the elements of both lie side by side in one order (`is_contiguous` in TensorIterator.cpp)."""
    if one.is_nested or one.layout != torch.strided or (one.is_contiguous() and other.is_contiguous()):
        return one.numel() == other.numel()
    steps, others = ([(n, by) for n, by in zip(t.shape, t.stride(), strict=True) if n != 1] for t in (one, other))
    return steps == others and sum((n - 1) * by for n, by in steps) == one.numel() - 1


def charge_copy(name: str, source: Tensor, target: Tensor, blocking: bool, here: Place, there: Place) -> None:
    """Take the GPU's temporaries of `target.copy_(source)`, and put on the clock what the CPU does not do of it. here,
    there: the GPUs of both, of which one is None at most. Raises the allocator's OutOfMemory."""
    sent, at_source, at_target = plan_copy(source, target, blocking, here, there)
    gpu, temporaries = (here, at_source) if here is not None else (there, at_target)
    assert gpu is not None
    if here is not None:
        if here.machine.charger is not None:
            here.machine.charger.before(here, [source], is_fusible=here is there)
        if here.late:
            here.late.hold(here, [source])
    held, passes = None, (nbytes(source), nbytes(target)) if here is there else ()
    if temporaries:
        held = storages.scratch(gpu, *temporaries)
        passes = (*temporaries, nbytes(target)) if here is None else (nbytes(source), *temporaries)
    if here is None:
        send(sent, None, there, not at_source and is_pinned(source), blocking)
    for read, written in pairwise(passes):
        needs = times(gpu, cost(name, (Operand((read,), 1),), (Operand((written,), 1),), gpu.spec))
        gpu.machine.clock.launch(gpu.slot, gpu.stream, needs.seconds, needs.host, name, needs.further)
    if here is not None and here is not there and (there is None or here.machine is there.machine):
        send(sent, here, there, not at_target and is_pinned(target), blocking)
    if held is not None:
        held.close()
    gpu.machine.follower.copy(source, target, blocking)
