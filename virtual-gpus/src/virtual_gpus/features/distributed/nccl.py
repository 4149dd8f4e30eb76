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
from virtual_gpus.features.distributed.groups import is_nccl, nccl_error, refuse, require_backend, state_of
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


# ---- what is refused ----------------------------------------------------------------------------------------------


def _check(call: "_Method", op: Any, tensors: Sequence[torch.Tensor]) -> None:
    """`check_gpu_single_tensor`, the types, `getNcclReduceOp`, and the sizes. op: of a reduction, or None."""
    name, kind, row, ranks = call.name, kind_of(call.name), TRAFFIC[kind_of(call.name)], call.group.size()
    for tensor in tensors:
        refuse(name == "allreduce" and tensor.layout != torch.strided, "sparse")
        refuse(gpu_of(tensor) is None or tensor.layout != torch.strided, "elsewhere")
        channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        refuse(kind not in MESSAGES and not (tensor.is_contiguous() or channels_last), "strided")
        refuse(tensor.dtype not in _MOVED, "type", type=scalar_type(tensor))
        refuse(tensor.dtype in _FLOAT8 and row.reduces, "float8")
    refuse(name == "alltoall" and len({gpu_of(tensor) for tensor in tensors}) > 1, "devices")
    if call.root is not None and not 0 <= call.root < ranks:
        refuse(row.at_root, "root", kind=kind, root=call.root)  # else NCCL does (argcheck.cc)
        last = f"{kind.capitalize()} : invalid root {call.root} (root should be in the 0..{ranks} range)"
        raise nccl_error("ProcessGroupNCCL.cpp", "argument", "Invalid value for an argument.", last)
    if name in MESSAGES and call.root == call.group.rank():
        raise errors.not_modelled("a message of a rank to itself", "Copy the tensor.")
    for refused in ("BAND", "BOR", "BXOR") if op is not None else ():
        refuse(op == getattr(torch.distributed.ReduceOp, refused), "operation", op=refused)
    mean = op is not None and op == torch.distributed.ReduceOp.AVG
    refuse(mean and tensors[0].dtype == torch.bool, "mean of booleans")
    for side in reversed(row.whole):
        sides = call.args[side], call.args[1 - side]
        for whole, part in zip(*sides, strict=True) if name.endswith("_coalesced") else [sides]:
            _check_parts(call, side, whole, part)


def _check_parts(call: "_Method", side: int, whole: Any, part: Any) -> None:
    """The parts of all ranks, which are results (side 0) or given (1), beside the part of this rank."""
    row, ranks, name = TRAFFIC[kind_of(call.name)], call.group.size(), ("output", "input")[side]
    shown = {"kind": kind_of(call.name), "side": name, "Side": name.capitalize(), "ranks": ranks}
    if call.root not in (None, call.group.rank()):
        refuse(not isinstance(part, torch.Tensor) and len(whole) > 0, "list elsewhere", **shown)
    elif isinstance(whole, torch.Tensor) and row.whole == (0, 1):  # `checkSplitSizes` of Utils.hpp
        splits = [value for value in (*call.args, *call.rest.values()) if isinstance(value, (list, tuple))]
        rows, sizes = whole.size(0), splits[side]
        refuse(not sizes and rows % ranks != 0, "equal splits")
        refuse(len(sizes or range(ranks)) != ranks, "number of splits")
        refuse(sum(sizes or [rows]) != rows, "sum of splits")
        refuse(not any(splits) and whole.numel() != part.numel(), "all_to_all")
    elif isinstance(whole, torch.Tensor):
        refuse(whole.dtype != part.dtype, f"type of {name}")
        refuse(whole.numel() != ranks * part.numel(), f"size of {name}")
    else:
        lists = [whole] if isinstance(part, torch.Tensor) or row.whole == (0, 1) else whole  # a list in a list, in C++
        refuse(len(lists) != 1, "no list", **shown)
        refuse(len(lists[0]) != ranks, "list", count=len(lists[0]), **shown)
        own, mine = tensors_in([part])[0], lists[0][call.group.rank()]
        for i, one in enumerate(lists[0]) if row.root else ():
            refuse(one.dtype != own.dtype, "type in list", i=i, types=(own.dtype, one.dtype), **shown)
            sizes = [", ".join(map(str, tensor.shape)) for tensor in (own, one)]
            refuse(one.shape != own.shape, "size in list", i=i, sizes=sizes, **shown)
        refuse(row.whole != (0, 1) and mine.numel() != own.numel(), "uneven sum" if row.reduces else "uneven")


def _sends_objects() -> bool:
    """Whether a function calls that asks where objects travel, see `process_groups._get_object_coll_device`."""
    return any("_get_object_coll_device" in frame.f_code.co_names for frame, _ in traceback.walk_stack(sys._getframe()))


# ---- what gloo is given -------------------------------------------------------------------------------------------


def _seen_as(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The elements of a dense tensor, in the order of its memory, in another shape."""
    if tensor.shape == torch.Size(shape):
        return tensor
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,), tensor.storage_offset()).view(shape)


def _for_gloo(value: Any, shape: torch.Size | None) -> Any:
    """Tensors, also within lists: in this shape if that is of their size, and float8 as bytes, which gloo lacks."""
    if isinstance(value, (list, tuple)):
        return [_for_gloo(part, shape) for part in value]
    if not isinstance(value, torch.Tensor):
        return value
    value = value if shape is None or shape.numel() != value.numel() else _seen_as(value, shape)
    return value.view(torch.uint8) if value.dtype in _FLOAT8 else value


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

    @property
    def root(self) -> int | None:
        """The root, as a rank of the group, or the other rank of a message. None for what has neither."""
        given = (getattr(value, "rootRank", value) for value in (*self.args, *self.rest.values()))
        has_one = TRAFFIC[kind_of(self.name)].root or self.name in MESSAGES
        return next((value for value in given if isinstance(value, int)), 0) if has_one else None


def _direct(call: _Method) -> Any:
    """Gloo's own method, with arguments as gloo takes them."""
    group, _, function, args, rest = call
    op, opts = _operation((*args, *rest.values()))
    outputs, args = tensors_in(args[:1]), _adapt(call)
    finish = _after_sum(op, outputs, group.size())
    if finish is None:
        return function(group, *args, **rest)
    work = _summed(call._replace(args=args), op, opts)
    if call.root in (None, group.rank()):
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
    """The arguments as gloo takes them, which compares shapes where NCCL counts elements."""
    args, whole, shape = [*call.args], TRAFFIC[kind_of(call.name)].whole, None
    with below():
        if len(whole) == 1:
            parts, part = args[whole[0]], args[1 - whole[0]]
            if not isinstance(parts, torch.Tensor):
                shape = tensors_in([part])[0].shape
            elif not part.dim() or parts.shape != (call.group.size() * part.shape[0], *part.shape[1:]):
                args[:2] = [_seen_as(one, (one.numel(),)) for one in args[:2]]
        return [_for_gloo(value, shape) for value in args]


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
    parts = [each.view(part.shape) for each in whole.view(-1).chunk(group.size())] if call.root == group.rank() else []
    return group.gather([parts] if parts else [], [part], *options)


def _way(name: str) -> Callable[[_Method], Any]:
    """What carries out a method of a process group."""
    if name.endswith("_coalesced") and TRAFFIC[kind_of(name)].whole:
        return _each_alone
    return {"allgather": _all_gather, "gather_single": _gather_single}.get(name, _direct)


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
        if alone or not by_nccl:
            with reducing(op):
                work = function(group, *listed, **rest)
        else:
            with torch.no_grad():  # not a decorator, whose frame of PyTorch's would be in every traceback
                work = _way(name)(call)
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
    """See `features`. NCCL has no allgather_coalesced."""
    if not torch.distributed.is_available():
        return []
    group = torch.distributed.ProcessGroup
    work = torch._C._distributed_c10d.Work
    rows: list[Patch] = [
        (group, name, _OfCpp(group, name)) for name in vars(group) if kind_of(name) and name != "allgather_coalesced"
    ]
    rows += wrapped(group, _start_coalescing, _end_coalescing)
    return rows + wrapped(work, wait=_wait, get_future=_get_future)
