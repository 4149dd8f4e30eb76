"""What each operator costs on the clock: its sizes are looked up once, its seconds are kept.

The routes call `charge_op` after every operator on a GPU. Code that computes below the dispatch mode calls
`charge_kernel` with the operator that CUDA would have run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, mul
from typing import Any

import torch

from virtual_gpus.clock.clock import COPY_IN, COPY_OUT, TO_THE_CPU, TO_THE_GPU
from virtual_gpus.clock.links import PINNED_START, REACHED
from virtual_gpus.clock.work import Cost, Format, Operand, Operation
from virtual_gpus.dispatch.measured_calls import key_of
from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.operators import cost
from virtual_gpus.placement.storages import allocation_of, gpu_of, tensors_in
from virtual_gpus.threads import this_thread

Tensors, TensorList = Iterable[torch.Tensor], Sequence[torch.Tensor]
MaybeCall, Place = OpCall | None, VirtualGPU | None  # no place: the computer
_PRECISION: dict[torch.dtype, Format] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
_kept: dict[Any, LaunchTimes] = {}
_allows_tf32 = torch._C._get_fp32_precision_getter
_grad_enabled = torch.is_grad_enabled
# Not comprehensions: a call into Python per operator costs, and a generator that is cut short swallows a Ctrl-C.
_form, _is_trained = attrgetter("shape", "dtype"), attrgetter("requires_grad")
_Tensor, _elements, _itemsize = torch.Tensor, torch.Tensor.numel, torch.Tensor.element_size


@dataclass(frozen=True, slots=True)  # and no tuple: a warm operator reads its attributes faster
class LaunchTimes:
    """Seconds of an operator's kernels on the GPU, and of the host to issue the first one, and the further ones."""

    seconds: float
    host: float
    further: float


def charge_op(call: OpCall, result: Any) -> None:
    """Put one operator on the GPU's clock, unless the machine's charger takes it. result: as it returned it."""
    gpu, op, tensors = call.gpu, call.op, call.tensors
    machine = gpu.machine
    if machine.charger is not None and machine.charger.takes(call, result):
        return
    if op.is_view:
        machine.clock.spend(machine.clock.host.view, gpu.slot)
        return
    try:
        made = _form(result) if type(result) is _Tensor else tuple(map(_form, tensors_in(result) or _filled(call)))
        seen = (gpu.spec.kind, op, made, *map(_form, tensors))
    except RuntimeError:
        if any(part.is_nested or torch.nn.parameter.is_lazy(part) for part in (*tensors, *tensors_in(result))):
            return  # neither has a shape: they take no modelled time
        raise
    if op.depends_on_strides:
        formula = op.unless[1] if op.unless is not None and not call[op.unless[0]] else op.formula
        seen += (formula, op.tf32_setting and _allows_tf32("cuda", op.tf32_setting), *map(_strides, tensors))
    kept = _kept.get(seen)
    if kept is None:
        kept = _kept[seen] = _look_up(gpu, seen, len(tensors))
        if len(_kept) > 65536:
            _kept.clear()
    if not kept.seconds:
        machine.clock.spend(kept.host, gpu.slot)
        return
    _issue(gpu, op.base, tensors, kept, call)


def _issue(
    gpu: VirtualGPU, name: str, tensors: Tensors, needs: LaunchTimes, call: MaybeCall = None, trains: bool | None = None
) -> None:
    """Kernels in the current stream, which wait for what they read.

    call: whose measured seconds win. trains: whether autograd notes them down, which costs the host more. None: if it
    runs in this thread, or records and one of the tensors is trained.
    """
    machine, stream, seconds, host = gpu.machine, gpu.stream_of_thread.value, needs.seconds, needs.host
    clock = machine.clock
    if trains or (trains is None and (this_thread.in_backward or (_grad_enabled() and any(map(_is_trained, tensors))))):
        host += clock.host.training
    if machine.charger is not None:
        tensors = list(tensors)
        machine.charger.before(gpu, tensors)
    if call is not None and machine.measured is not None:
        seconds = machine.measured.seconds(key_of(call.func, call.args, call.kwargs), seconds)
    if clock.tracks[gpu.slot].expected:  # asked here too, which spares the call
        await_tensors(gpu, tensors)
    clock.launch(gpu.slot, stream, seconds, host, name, needs.further)


def charge_kernel(
    gpu: VirtualGPU, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], trains: bool = False
) -> None:
    """Work that the dispatch mode does not see, as what CUDA would have run. trains: if autograd notes it down."""
    written = [tensor for tensor in outputs if not any(tensor is given for given in inputs)]  # some stand for a shape
    launch(gpu, name, cost(name, operands(inputs), operands(outputs), gpu.spec), inputs, trains, written)


def launch(
    gpu: VirtualGPU, name: str, charge: Cost, reads: TensorList, trains: bool = False, writes: TensorList = ()
) -> None:
    """Kernels that the dispatch mode does not see. trains: if autograd notes them down, which only the caller knows."""
    _issue(gpu, name, reads, times(gpu, charge), trains=trains or None)
    gpu.machine.follower.kernel(name, reads, writes)


def charge_foreach(call: OpCall, columns: list[TensorList], gpus: list[VirtualGPU | None], result: Any) -> None:
    """An operator on lists of tensors: for each GPU among them, one call with its elements. gpus: of the first list."""
    op, unscales = call.op, call.kwargs.get("grad_scale") is not None
    dtype = getattr(result[0], "dtype", None) if result else None
    for gpu in filter(None, dict.fromkeys(gpus)):
        rows = columns
        if gpus.count(gpu) < len(gpus):
            rows = [[part for part, where in zip(column, gpus, strict=False) if where is gpu] for column in columns]
        # A list that is given twice is read once: `addcmul` squares the gradient in every optimizer.
        reads = {(id(row[0]), id(row[-1])): row for row in rows}.values()
        # How long lists take depends on their elements and bytes (`cost`), which are found faster than all shapes.
        sizes, elements = tuple(map(len, rows)), sum(map(_elements, rows[0]))
        seen = gpu.spec.kind, op, sizes, elements, *map(_nbytes, reads), unscales, dtype
        kept = _kept.get(seen)
        if kept is None:
            filled = operands(part for part in tensors_in(result) or _filled(call) if gpu_of(part) is gpu)
            operation = Operation(op.base, operands(chain(*reads)), filled, gpu.spec, "fp32", 1, sizes, op.in_place)
            kept = _kept[seen] = times(gpu, op.formula(operation))
        _issue(gpu, op.base, chain(*rows), kept, call if len(rows[0]) == len(gpus) else None, trains=False)


def _nbytes(tensors: TensorList) -> int:
    return sum(map(mul, map(_elements, tensors), map(_itemsize, tensors)))


def charge_read(call: OpCall) -> None:
    """`.item()`, and operators whose result's size hangs on values: the host waits for the GPU."""
    gpu, clock = call.gpu, call.gpu.machine.clock
    await_tensors(gpu, call.tensors)
    clock.notice(clock.mark(gpu.slot, gpu.stream), gpu.slot)


def send(size: int, source: Place, target: Place, pinned: bool, blocking: bool) -> None:
    """So many bytes over a link. It waits for the current streams of its GPUs, and they for it.

    Pageable memory goes through a buffer of the driver, so the host stands still meanwhile; from pinned memory, with
    `non_blocking=True`, it goes on. Each GPU has one engine for copies in each direction.
    """
    ends = [(gpu, lane) for gpu, lane in ((source, COPY_OUT), (target, COPY_IN)) if gpu is not None]
    (first, _), (last, _) = ends[0], ends[-1]
    clock, link, name = first.machine.clock, first.machine.topology.pcie, TO_THE_GPU if source is None else TO_THE_CPU
    latency = link.latency * PINNED_START
    if first is not last:
        link, name = first.machine.topology.between(first.slot, last.slot), f"cuda:{first.index} to cuda:{last.index}"
        pinned, blocking, latency = True, False, link.latency
    speed = link.bandwidth * REACHED
    if not pinned:
        speed, latency, blocking = min(speed, clock.host.pageable), clock.host.pageable_copy, True
    clock.hand_over(first.slot, last.slot)
    now = clock.spend(clock.host.copy, first.slot)
    clock.hand_over(first.slot, last.slot)
    start = max(now, *(clock.ready(gpu.slot, lane) for gpu, engine in ends for lane in (gpu.stream, engine)))
    end = start + latency + size / speed
    for gpu, engine in ends:
        clock.occupy(gpu.slot, engine, start, end, "copy", name, kernel=False)
        clock.hold(gpu.slot, gpu.stream, end)
    if blocking:
        clock.wait(end, first.slot)


def await_tensors(gpu: VirtualGPU, tensors: Iterable[torch.Tensor]) -> None:
    """Work of the current stream on what a collective fills waits for the collective. What is past is forgotten."""
    clock, stream = gpu.machine.clock, gpu.stream
    track = clock.tracks[gpu.slot]
    if not track.expected:
        return
    ready = clock.ready(gpu.slot, stream)
    for tensor in tensors:
        arrival = track.arrival_of(allocation_of(tensor))
        if arrival is not None:
            clock.hold(gpu.slot, stream, arrival.time())
    track.forget_past(ready)


# ---- what the formulas say -------------------------------------------------------------------------------------------


def _filled(call: OpCall) -> list[torch.Tensor]:
    """What an operator writes on: gradients only if it unscales them (ATen/native/cuda/fused_adam_utils.cuh)."""
    kept = "grads" if call.kwargs.get("grad_scale") is None else None
    return [tensor for name, tensor in call.named_tensors() if name in call.op.filled and name != kept]


def _look_up(gpu: VirtualGPU, seen: tuple[Any, ...], number: int) -> LaunchTimes:
    """seen: what `charge_op` keeps them by, with so many tensors. A formula is given nothing else, so that no call gets
    the seconds of another."""
    _, op, made, *forms = seen
    given, (formula, _, *strides) = forms[:number], forms[number:] or (op.formula, "")
    made = (made,) if torch.dtype in map(type, made) else made  # one tensor, not several
    outputs = tuple(Operand(tuple(shape), dtype.itemsize) for shape, dtype in made)
    inputs = tuple(Operand(tuple(s), d.itemsize, at) for (s, d), at in zip(given, strides or repeat(()), strict=False))
    if op.outputs:  # they come last
        inputs, outputs = inputs[: -len(made)], inputs[-len(made) :]
    elif op.in_place and len(made) == 1:
        outputs = inputs[:1]
    dtypes = [dtype for _, dtype in given]
    numbers = precision_of(op.tf32_setting, dtypes), 1 + any(dtype.is_complex for dtype in dtypes)
    charge = formula(Operation(op.base, inputs, outputs, gpu.spec, *numbers))
    return times(gpu, charge, in_place=bool(op.written))


def times(gpu: VirtualGPU, charge: Cost, in_place: bool = False) -> LaunchTimes:
    """The times of an operator, of what it costs. in_place: it creates no tensor."""
    pace = gpu.machine.clock.host
    if not charge.kernels:
        return LaunchTimes(0.0, 0.0 if charge.host is None else pace.view, 0.0)
    host = (pace.in_place if in_place else pace.operator) + (charge.host or 0.0)
    return LaunchTimes(charge.seconds, host, pace.kernel * (charge.kernels - 1))


def operands(tensors: Iterable[torch.Tensor]) -> tuple[Operand, ...]:
    """Tensors as `cost` takes them."""
    return tuple(Operand(tuple(t.shape), t.dtype.itemsize, _strides(t)) for t in tensors)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()


def precision_of(library: str, dtypes: Iterable[torch.dtype]) -> Format:
    """ "fp32", or what tensor cores make of it: TF32 is on for convolutions and off for products, as PyTorch has it."""
    dtype = next((dtype.to_real() for dtype in dtypes if dtype.is_floating_point or dtype.is_complex), torch.float32)
    if dtype == torch.float32 and library and _allows_tf32("cuda", library) == "tf32":
        return "tf32"
    return _PRECISION.get(dtype, "fp32")
