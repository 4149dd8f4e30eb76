"""What each operator costs on the clock: its sizes are looked up once, its seconds are kept.

The routes call `charge_op` after every operator on a GPU. Code that computes below the dispatch mode calls
`launch` with what CUDA would have run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from virtual_gpus.clock.clock import COPY_IN, COPY_OUT, TO_THE_CPU, TO_THE_GPU
from virtual_gpus.clock.links import COPIES
from virtual_gpus.clock.work import Cost, Operand, Operation
from virtual_gpus.dispatch.measured_calls import KernelCall, key_of
from virtual_gpus.dispatch.operators import OpCall, Operator
from virtual_gpus.gpus import Precision
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.placement.storages import tensors_in
from virtual_gpus.threads import this_thread

Tensors, TensorList, Operands = Iterable[torch.Tensor], Sequence[torch.Tensor], tuple[Operand, ...]
MaybeCall, Place = OpCall | KernelCall | None, VirtualGPU | None  # no place: the computer
_PRECISION: dict[torch.dtype, Precision] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
launch_times: dict[Any, "LaunchTimes"] = {}
_allows_tf32, _grad_enabled = torch._C._get_fp32_precision_getter, torch.is_grad_enabled
_Tensor, _Dtype, _stride = torch.Tensor, torch.dtype, torch.Tensor.stride
# Not comprehensions: a call into Python per operator costs, and a generator that is cut short swallows a Ctrl-C.
_form = attrgetter("shape", "dtype")
_PLAIN = frozenset((bool, int, float, str, type(None)))
_MOST = 65536  # times that are kept
_NO_MORE: tuple[Any, ...] = (), (), "", False


@dataclass(slots=True)  # no tuple and not frozen: attributes are read, and one is made, faster
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
        if type(result) is not _Tensor:
            made: Any = tuple(map(_form, tensors_in(result) or filled(call)))
        elif op.in_place and result is tensors[0]:
            made = None
        else:
            made = result.dtype if op.is_pointwise else (result.shape, result.dtype)  # its shape follows from theirs
        more = _more(call) if op.wants_more else None
        key = gpu.spec.kind, op, more, made
        for tensor in tensors:  # flat: tuples within tuples take longer to compare
            key += tensor.shape, tensor.dtype
    except RuntimeError:
        if any(part.is_nested or torch.nn.parameter.is_lazy(part) for part in (*tensors, *tensors_in(result))):
            return  # neither has a shape: they take no modelled time
        raise
    needs = launch_times.get(key) or keep(key, gpu, op, _operation(call, tensors_in(result) or filled(call), more))
    if needs.seconds:
        issue(gpu, op.base, tensors, needs, call)
    else:
        machine.clock.spend(needs.host, gpu.slot)


def issue(
    gpu: VirtualGPU, name: str, tensors: Tensors, needs: LaunchTimes, call: MaybeCall = None, trains: bool | None = None
) -> None:
    """Kernels in the current stream, which wait for what they read.

    call: whose measured seconds win. trains: whether autograd notes them down, which costs the host more. None: if it
    runs in this thread, or records and one of the tensors is trained.
    """
    machine, stream, seconds, host = gpu.machine, gpu.stream_of_thread.value, needs.seconds, needs.host
    if trains is None and not (trains := this_thread.in_backward) and _grad_enabled():
        for tensor in tensors:
            trains = trains or tensor.requires_grad
    if trains:
        host += machine.clock.host.training
    if machine.charger is not None:
        tensors = list(tensors)
        machine.charger.before(gpu, tensors)
    if call is not None and machine.measured is not None:
        seconds = machine.measured.seconds(key_of(call.func, call.args, call.kwargs), seconds)
    if gpu.late:
        gpu.late.hold(gpu, tensors)
    machine.clock.launch(gpu.slot, stream, seconds, host, name, needs.further)


def launch(
    gpu: VirtualGPU, name: str, charge: Cost, reads: TensorList, trains: bool = False, writes: TensorList = (),
    call: MaybeCall = None,
) -> None:  # fmt: skip
    """Kernels that the dispatch mode does not see. trains: if autograd notes them down, which only the caller knows."""
    issue(gpu, name, reads, times(gpu, charge), call, trains=trains or None)
    gpu.machine.follower.kernel(name, reads, writes)


def charge_read(call: OpCall) -> None:
    """`.item()`, and operators whose result's size hangs on values: the host waits for the GPU."""
    gpu, clock = call.gpu, call.gpu.machine.clock
    if gpu.late:
        gpu.late.hold(gpu, call.tensors)
    clock.notice(clock.mark(gpu.slot, gpu.stream), gpu.slot)


def send(size: int, source: Place, target: Place, pinned: bool, blocking: bool) -> None:
    """So many bytes over a link. It waits for the current streams of its GPUs, and they for it.

    Pageable memory goes through a buffer of the driver, so the host stands still meanwhile; from pinned memory, with
    `non_blocking=True`, it goes on. Each GPU has one engine for copies in each direction.
    """
    first, last = source or target, target or source
    assert first is not None and last is not None
    clock, link, name = first.machine.clock, first.machine.topology.pcie, TO_THE_GPU if source is None else TO_THE_CPU
    latency = link.latency * COPIES["start"]
    if first is not last:
        link, name = first.machine.topology.between(first.slot, last.slot), f"cuda:{first.index} to cuda:{last.index}"
        pinned, blocking, latency = True, False, link.latency
        clock.hand_over(first.slot, last.slot)
    speed = link.bandwidth * COPIES["reached"]
    if not pinned:
        speed, latency, blocking = min(speed, clock.host.pageable), clock.host.pageable_copy, True
    start = clock.spend(clock.host.copy, first.slot)
    if first is not last:
        clock.hand_over(first.slot, last.slot)
    ends = ((source, COPY_OUT), (target, COPY_IN))
    for gpu, engine in ends:
        if gpu is not None:
            start = max(start, clock.ready(gpu.slot, gpu.stream), clock.ready(gpu.slot, engine))
    end = start + latency + size / speed
    for gpu, engine in ends:
        if gpu is not None:
            clock.occupy(gpu.slot, engine, start, end, "copy", name)
            clock.hold(gpu.slot, gpu.stream, end)
    if blocking:
        clock.wait(end, first.slot)


# ---- what the formulas say -------------------------------------------------------------------------------------------


def filled(call: OpCall) -> list[torch.Tensor]:
    """What an operator writes on, as its schema says."""
    return [tensor for name, tensor in call.named_tensors() if name in (call.op.outputs or call.op.written)]


def _more(call: OpCall) -> tuple[Any, ...]:
    """What some classes of operators want to know beside shapes and types (see `OperatorClass`): the strides of each
    tensor, arguments, how fp32 numbers are multiplied, and a flag. Others get `_NO_MORE`."""
    op = call.op
    time, strides = op.row.time, ()
    if time.depends_on_strides:  # what has a storage of its own has strides
        strides = tuple(map(_stride if call.on_one_gpu else _strides, call.tensors))
    arguments = op.arguments and tuple(map(plain, map(call.__getitem__, op.arguments)))
    setting = time.tf32_setting
    return strides, arguments, setting and _allows_tf32("cuda", setting), time.flag()


def plain(value: Any) -> Any:
    """An argument, or a list of them, as `Operation` has it."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        return tuple(value if _PLAIN.issuperset(map(type, value)) else map(plain, value))
    return isinstance(value, _Tensor) or value


def _operation(call: OpCall, made: TensorList, extra: tuple[Any, ...] | None) -> Operation:
    """What the formula is given. Nothing that the key of `launch_times` lacks: its seconds are those of all such calls.

    made: the results, or the tensors that were written. extra: what `_more` returned; None if it was not asked.
    """
    op, (strides, arguments, _, flag) = call.op, extra or _NO_MORE
    outputs, inputs = (tuple(Operand(tuple(t.shape), t.itemsize) for t in tensors) for tensors in (made, call.tensors))
    if strides:
        inputs = tuple(part._replace(strides=at) for part, at in zip(inputs, strides, strict=True))
    if op.outputs:  # they come last
        inputs, outputs = inputs[: -len(made)], inputs[-len(made) :]
    elif op.in_place and len(made) == 1:
        outputs = inputs[:1]
    dtypes = [tensor.dtype for tensor in call.tensors]
    multiplied = next((dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex), torch.float32)
    return Operation(
        op.base, inputs, outputs, call.gpu.spec, precision_of(op.row.time.tf32_setting, multiplied),
        parts=1 + any(dtype.is_complex for dtype in dtypes), in_place=op.in_place,
        arguments=dict(zip(op.arguments, arguments, strict=True)), flag=flag,
    )  # fmt: skip


def keep(key: Any, gpu: VirtualGPU, op: Operator, operation: Operation) -> LaunchTimes:
    """The times of an operator by its formula, kept by `key`."""
    if len(launch_times) > _MOST:
        launch_times.clear()
    charge, in_place = op.row.time.formula(operation), bool(op.written) and not operation.lists
    return launch_times.setdefault(key, times(gpu, charge, in_place))


def times(gpu: VirtualGPU, charge: Cost, in_place: bool = False) -> LaunchTimes:
    """The times of an operator, of what it costs. in_place: it creates no tensor."""
    pace = gpu.machine.clock.host
    if not charge.kernels:
        return LaunchTimes(0.0, 0.0 if charge.host is None else pace.view, 0.0)
    host = (pace.in_place if in_place else pace.operator) + (charge.host or 0.0)
    return LaunchTimes(charge.seconds, host, pace.kernel * (charge.kernels - 1))


def operands(tensors: Tensors) -> Operands:
    """Tensors as `cost` takes them."""
    return tuple(Operand(tuple(t.shape), t.dtype.itemsize, _strides(t)) for t in tensors)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()


def precision_of(library: str, dtype: _Dtype) -> Precision:
    """ "fp32", or what tensor cores make of it: TF32 is on for convolutions and off for products, as PyTorch has it."""
    real = dtype.to_real()
    if real is torch.float32 and library and _allows_tf32("cuda", library) == "tf32":
        return "tf32"
    return _PRECISION.get(real, "fp32")
