"""NCCL's rules for the collectives of a group of the backend "nccl", whose messages gloo carries.

Gloo compares shapes where NCCL only counts elements, and takes CPU tensors and strided ones. The methods of a process
group's object, which all functions of torch.distributed call, therefore check what ProcessGroupNCCL.cpp
(torch/csrc/distributed/c10d) checks, in its words, and then hand gloo tensors of the shapes that it expects.
"""

import copy
import functools
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from virtual_gpus import errors
from virtual_gpus.entrance import entrance
from virtual_gpus.errors import scalar_type
from virtual_gpus.features.distributed.arrivals import await_work, give_to_future, remember
from virtual_gpus.features.distributed.groups import is_nccl, nccl_error, require_backend, state_of
from virtual_gpus.features.distributed.one_rank import reducing, runs_alone
from virtual_gpus.features.nccl.traffic import MESSAGES, TRAFFIC, kind_of
from virtual_gpus.machine import active, get_machine
from virtual_gpus.patches.table import Patch, wrapped
from virtual_gpus.placement.storages import gpu_of, is_fake, is_wrapper, tensors_in
from virtual_gpus.threads import below, this_thread

_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
# What NCCL moves (`ncclDataType` in NCCLUtils.cpp); complex numbers go as pairs of real ones.
_MOVED = _FLOAT8 | {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16,
                    torch.float32, torch.float64, torch.complex64, torch.complex128}  # fmt: skip
_messages: weakref.WeakSet[Any] = weakref.WeakSet()  # works of messages: gloo may wait for one of them once only
_WRONG_TYPE = ("output tensor must have the same type as input tensor",
               "input tensor must be the same type as the output tensor.")  # fmt: skip
_WRONG_SIZE = ("output tensor size must be equal to world_size times input tensor size",
               "input tensor must be the same size as output size times world size")  # fmt: skip


# ---- what is refused ----------------------------------------------------------------------------------------------


def _check(call: "_Method", op: Any, tensors: Sequence[torch.Tensor]) -> None:
    """`check_gpu_single_tensor`, the types, and `getNcclReduceOp`. op: of a reduction, or None."""
    name, kind = call.name, kind_of(call.name)
    for tensor in tensors:
        if tensor.layout != torch.strided and name == "allreduce":
            raise RuntimeError("NCCL does not support all_reduce with sparse tensors")
        if gpu_of(tensor) is None or tensor.layout != torch.strided:
            raise ValueError("Tensors must be CUDA and dense")
        channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        if kind not in MESSAGES and not (tensor.is_contiguous() or channels_last):
            raise ValueError("Tensors must be contiguous")
        if tensor.dtype not in _MOVED:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {scalar_type(tensor)}")
        if tensor.dtype in _FLOAT8 and TRAFFIC[kind].reduces:
            raise RuntimeError("Float8 dtypes are not currenlty supported for NCCL reductions")
    if name == "alltoall" and len({gpu_of(tensor) for tensor in tensors}) > 1:
        raise ValueError("Tensors must be on the same device")
    roots = [value.rootRank for value in (*call.args, *call.rest.values()) if hasattr(value, "rootRank")]
    for root in [call.args[1]] if name in MESSAGES else roots:
        if not 0 <= root < call.group.size():
            raise _no_such_root(kind, root, call.group.size())
    if name in MESSAGES and call.args[1] == call.group.rank():
        raise errors.not_modelled("a message of a rank to itself", "Copy the tensor.")
    for refused in ("BAND", "BOR", "BXOR") if op is not None else ():
        if op == getattr(torch.distributed.ReduceOp, refused):
            raise ValueError(f"Cannot use ReduceOp.{refused} with NCCL")
    if op is not None and op == torch.distributed.ReduceOp.AVG and tensors[0].dtype == torch.bool:
        raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")


def _no_such_root(kind: str, root: int, ranks: int) -> Exception:
    """`assertRootRank` of Utils.hpp, and `ArgsCheck` of NCCL's argcheck.cc."""
    if TRAFFIC[kind].at_root:
        return ValueError(f"ProcessGroupNCCL::{kind}: invalid root rank: {root}")
    last = f"{kind.capitalize()} : invalid root {root} (root should be in the 0..{ranks} range)"
    return nccl_error("ProcessGroupNCCL.cpp", "argument", "Invalid value for an argument.", last)


def _sends_objects() -> bool:
    """Whether a function calls that asks where objects travel, see `process_groups._get_object_coll_device`."""
    return any("_get_object_coll_device" in frame.f_code.co_names for frame, _ in traceback.walk_stack(sys._getframe()))


# ---- what gloo is given -------------------------------------------------------------------------------------------


def _seen_as(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The elements of a dense tensor, in the order of its memory, in another shape."""
    if tensor.shape == torch.Size(shape):
        return tensor
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,), tensor.storage_offset()).view(shape)


def _as_bytes(value: Any) -> Any:
    """Float8 tensors as bytes, also within lists: gloo has no such type."""
    if isinstance(value, torch.Tensor):
        return value.view(torch.uint8) if value.dtype in _FLOAT8 else value
    return [_as_bytes(part) for part in value] if isinstance(value, (list, tuple)) else value


def _list_like(tensors: Any, other: Any) -> Any:
    """A list of tensors, each in the shape of the one tensor at the other side. Lists and tensors may be nested in a
    list of one, as C++ has them. Sizes that differ are left alone: gloo takes them, or refuses them."""
    shape = tensors_in([other])[0].shape
    if tensors and isinstance(tensors[0], (list, tuple)):
        return [_list_like(part, other) for part in tensors]
    return [_seen_as(t, shape) if t.numel() == shape.numel() else t for t in tensors]


def _one_for_all(group: Any, whole: torch.Tensor, part: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' parts and this rank's, in shapes for gloo. side: 0 if gathered in `whole`, 1 if scattered from it."""
    ranks = group.size()
    if whole.dtype != part.dtype:
        raise TypeError(_WRONG_TYPE[side])
    if whole.numel() != ranks * part.numel():
        raise ValueError(_WRONG_SIZE[side])
    if part.dim() and whole.shape == (ranks * part.shape[0], *part.shape[1:]):
        return whole, part
    return _seen_as(whole, (whole.numel(),)), _seen_as(part, (part.numel(),))


# ---- collectives that are several messages of gloo -----------------------------------------------------------------


@functools.cache
def _together() -> type:
    """The class, made late, since builds without torch.distributed have no Work."""

    class Together(torch._C._distributed_c10d.Work):
        """The work of several messages that are one collective of NCCL."""

        def __init__(self, works: Iterable[Any], results: list[torch.Tensor]):
            super().__init__()
            self._works, self._results = list(works), results

        def wait(self, timeout: timedelta = timedelta(0)) -> bool:
            return all([work.wait(timeout) for work in self._works])

        synchronize = wait

        def is_completed(self) -> bool:
            return all([work.is_completed() for work in self._works])

        def result(self) -> list[torch.Tensor]:
            return self._results

        def get_future(self) -> torch.futures.Future[Any]:
            with below():
                self.wait()
            done: torch.futures.Future[Any] = torch.futures.Future()
            done.set_result(self._results)
            return done

    return Together


class _Method(NamedTuple):
    """A call of a method of a process group, which gloo has as `function`. args: with all tensors."""

    group: Any
    name: str
    function: Callable[..., Any]
    args: list[Any]
    rest: dict[str, Any]


def _direct(call: _Method) -> Any:
    """Gloo's own method, with arguments as gloo takes them."""
    group, name, function, args, rest = call
    op, opts = _operation((*args, *rest.values()))
    outputs, row, args = tensors_in(args[:1]), TRAFFIC[kind_of(name)], _adapt(call)
    finish = _after_sum(op, outputs, group.size())
    if finish is None:
        return function(group, *args, **rest)
    work = _summed(call._replace(args=args), op, opts)
    if not row.root or opts is None or opts.rootRank == group.rank():
        with below():
            for output in outputs:
                finish(output)
    return work


def _after_sum(op: Any, outputs: Sequence[torch.Tensor], ranks: int) -> Callable[[torch.Tensor], object] | None:
    """What NCCL does on the way and gloo does not: it multiplies, or divides integers. None where gloo does it all."""
    if op is not None and op == torch.distributed.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        return lambda output: output.mul_(factor)
    if op is None or op != torch.distributed.ReduceOp.AVG or outputs[0].is_floating_point() or outputs[0].is_complex():
        return None
    return lambda output: output.div_(ranks, rounding_mode="trunc")


def _summed(call: _Method, op: Any, opts: Any) -> Any:
    """Have gloo add up in place of `op`, which is among the arguments or in the options."""
    group, _, function, args, rest = call
    ops = torch.distributed.ReduceOp
    if opts is None:
        return function(group, *[ops.SUM if value is op else value for value in args])
    own = copy.copy(op)  # `op` is a part of the options, which change
    opts.reduceOp = ops.SUM  # C++ copies the options; the program's own are to stay as they were
    try:
        return function(group, *args, **rest)
    finally:
        opts.reduceOp = own


def _adapt(call: _Method) -> list[Any]:
    """The arguments as gloo takes them. Raises where the sizes do not fit."""
    args, whole = [*call.args], TRAFFIC[kind_of(call.name)].whole
    with below():
        if len(whole) == 1 and isinstance(args[side := whole[0]], torch.Tensor):
            args[side], args[1 - side] = _one_for_all(call.group, args[side], args[1 - side], side)
        elif len(whole) == 1 and args[side]:
            args[side] = _list_like(args[side], args[1 - side])
        return [_as_bytes(value) for value in args]


def _all_gather(call: _Method) -> Any:
    """Where every rank's tensor has a size of its own: one broadcast from each rank, as in ProcessGroupNCCL.cpp."""
    group, outputs = call.group, tensors_in(call.args[:1])
    if len({output.shape for output in outputs}) <= 1:
        return _direct(call)
    outputs[group.rank()].copy_(_seen_as(tensors_in(call.args[1:])[0], outputs[group.rank()].shape))
    return _together()([group.broadcast(output, rank) for rank, output in enumerate(outputs)], outputs)


def _each_alone(call: _Method) -> Any:
    """Several collectives in one go one after the other."""
    group, (outputs, inputs, *options) = call.group, call.args
    one = group._allgather_base if kind_of(call.name) == "all_gather" else group._reduce_scatter_base
    works = [one(output, given, *options, **call.rest) for output, given in zip(outputs, inputs, strict=True)]
    return _together()(works, list(outputs))


def _gather_single(call: _Method) -> Any:
    """Gloo has it for lists only."""
    group, (whole, part, *options) = call.group, call.args
    parts = [list(whole.chunk(group.size()))] if options[0].rootRank == group.rank() else []
    return group.gather(parts, [part], *options)


# The methods of a process group, each with what carries it out.
_METHODS: dict[str, Callable[[_Method], Any]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce", "recv_anysource", "gather", "scatter",
                     "_allgather_base", "all_gather_single", "reduce_scatter", "_reduce_scatter_base", "send", "recv",
                     "reduce_scatter_single", "alltoall", "alltoall_base", "all_to_all_single"), _direct),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_single_coalesced",
                     "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), _each_alone),
    "allgather": _all_gather, "gather_single": _gather_single,
}  # fmt: skip


# ---- the methods -----------------------------------------------------------------------------------------------------


def _by_nccls_rules(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The method `name` of a process group, which gloo has as `function`."""

    @functools.wraps(function)
    @entrance
    def method(group: torch.distributed.ProcessGroup, *args: Any, **rest: Any) -> Any:
        tensors = tensors_in((*args, *rest.values()))
        if this_thread.in_kernel or not tensors or any(is_fake(type(t)) or is_wrapper(type(t)) for t in tensors):
            return function(group, *args, **rest)
        on_gpu = any(gpu_of(tensor) is not None for tensor in tensors)
        if on_gpu or not (get_machine().shapes_only and _sends_objects()):
            require_backend(group, "cuda" if on_gpu else "cpu")
        by_nccl, (op, _) = on_gpu and is_nccl(group), _operation((*args, *rest.values()))
        alone, listed = runs_alone(active()), [*args, *(rest.pop(key) for key in list(rest) if tensors_in(rest[key]))]
        call = _Method(group, name, function, listed, rest)
        if by_nccl:
            _check(call, op, tensors)
            if alone:  # nothing is sent
                _adapt(call)
        if alone or not by_nccl:
            with reducing(op):
                work = function(group, *listed, **rest)
        else:
            with torch.no_grad():  # not a decorator, whose frame of PyTorch's would be in every traceback
                work = _METHODS[name](call)
            if work is not None and kind_of(name) in MESSAGES:
                _messages.add(work)
            if work is not None and (block := state_of(group).coalescing) is not None:
                block.append(work)
        remember(work)
        return work

    return method


class _OfCpp:
    """A method of ProcessGroup that Python subclasses have as it was.

    When C++ calls a method of such a subclass (PyProcessGroup.hpp), pybind takes each function that is written in
    Python for the subclass's own: one that it inherits would then be called from C++ and call C++ again, for ever.
    NCCL's rules are not for such a group either, which has no backend.
    """

    def __init__(self, owner: type, name: str):
        self._owner, self._raw = owner, vars(owner)[name]
        self._checked = _by_nccls_rules(name, getattr(owner, name))
        self.__doc__, self.__name__ = self._raw.__doc__, name

    def __get__(self, group: Any, kind: type | None = None) -> Callable[..., Any]:
        kind = type(group) if kind is None else kind
        return (self._checked if kind is self._owner else self._raw).__get__(group, kind)


def _operation(values: Sequence[Any]) -> tuple[Any, Any]:
    """The operation of a reduction, and the options that hold it. None for what is not there."""
    opts = next((value for value in values if hasattr(value, "reduceOp")), None)
    kinds = torch.distributed.ReduceOp
    return opts.reduceOp if opts is not None else next((v for v in values if isinstance(v, kinds)), None), opts


def _wait(function: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> bool:
    """Gloo makes some results in a tensor of its own and copies them at `wait`, which NCCL does not: no GPU copies."""
    if not this_thread.in_kernel:
        await_work(work)
    if work in _messages and work.is_completed():
        return True
    with below():
        return function(work, *args, **kwargs)


def _get_future(function: Callable[..., Any], work: Any) -> torch.futures.Future[Any]:
    """`Work.get_future`. A collective is over once it is issued (`collectives.run`), so that `then` calls its
    function at once, as with NCCL, and all ranks issue what follows in one order."""
    give_to_future(work)
    return function(work)


# ---- coalescing ------------------------------------------------------------------------------------------------------


def _start_coalescing(function: Callable[..., Any], group: torch.distributed.ProcessGroup, device: torch.device) -> Any:
    """Gloo cannot put collectives together: they go one by one, and `_end_coalescing` gives one Work for all."""
    if not is_nccl(group) or runs_alone(active()):
        return function(group, device)
    state_of(group).coalescing = []


def _end_coalescing(function: Callable[..., Any], group: torch.distributed.ProcessGroup, device: torch.device) -> Any:
    works, state_of(group).coalescing = state_of(group).coalescing, None
    return function(group, device) if works is None else _together()(works, [])


def patches() -> list[Patch]:
    """See `features`. Methods that this PyTorch version lacks give no row."""
    if not torch.distributed.is_available():
        return []
    group = torch.distributed.ProcessGroup
    work = torch._C._distributed_c10d.Work
    rows: list[Patch] = [(group, name, _OfCpp(group, name)) for name in _METHODS if name in vars(group)]
    rows += wrapped(group, _start_coalescing, _end_coalescing)
    return rows + wrapped(work, wait=_wait, get_future=_get_future)
