"""What the dispatch mode must know about each ATen operator, read once from its schema.

Most operators need nothing: their inputs must share a GPU and their outputs stay there. The few groups that differ
(factories, random numbers, lists of tensors, copies across devices) are recognised here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._library.custom_ops import OPDEFS

from virtual_gpus.clock.cost import FREE, READS_AND_WRITES, OperatorClass, Parts, bytes_of, moves
from virtual_gpus.clock.work import Cost, Format, Operation
from virtual_gpus.gpus import GPUSpec

# Of the devices that a custom operator has functions for; None stands for all others.
_KEYS = {"cuda": torch._C.DispatchKey.CUDA, "cpu": torch._C.DispatchKey.CPU,
         None: torch._C.DispatchKey.CompositeExplicitAutograd}  # fmt: skip

_CROSSES_DEVICES = {"copy_", "_foreach_copy_", "set_", "_copy_from", "_copy_from_and_resize", "record_stream",
                    "_has_compatible_shallow_copy_type"}  # fmt: skip
# What C++ takes for CPU tensors in the place of CUDA's operators.
_THE_CPU_S = ("_scaled_dot_product_flash_attention_for_cpu", "mkldnn_", "slow_conv3d_forward", "_functional_assert")
Kind = Literal["composite", "factory", "collective", "list", "crossing", "particular", "ordinary"]
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")  # namespaces
_Schema, _Func = torch._C.FunctionSchema, torch._ops.OpOverload | torch._ops.HigherOrderOperator
_Call = Any  # a `dispatch.op_call.OpCall`, which is of a higher layer
Route = Callable[[_Call], Any]  # gives what the operator returns


@dataclass(frozen=True)
class Row:
    """What a feature knows of an operator.

    cost: how long it takes. recipe: how CUDA uses memory for it, see `features.recipes`. check: what CUDA refuses or
    waits for before it runs. cpu_kernel: given an overload, what computes in the place of the CPU's kernel, or None.
    on_host: the arguments that CUDA wants, or takes, on the CPU. mixture: given an `OpCall`, an argument's name, the
    device of those before it and its own, the error for it, or None for the usual one.
    """

    cost: OperatorClass
    recipe: Route | None = None
    check: Callable[[_Call], None] | None = None
    cpu_kernel: Callable[[torch._ops.OpOverload], Callable[..., Any] | None] | None = None
    on_host: Collection[str] = ()
    mixture: Callable[[_Call, str, torch.device, torch.device], Exception | None] | None = None


# By the base name of an operator ("mm"), or "_foreach_*" for all of these that have none, and by `Operator.kind`;
# features add theirs. What only fills tensors writes its result, or its argument.
_FILL = Row(moves("fill", lambda operation: bytes_of(operation.outputs or operation.inputs[:1])))
ROWS: dict[str, Row] = {
    **dict.fromkeys(("zero_", "fill_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros",
                     "new_ones", "new_full", "arange", "bernoulli_", "normal_", "uniform_", "random_", "randn", "rand",
                     "randint"), _FILL),
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_",
                     "resize_", "lift_fresh", "_reshape_alias"), Row(FREE)),
}  # fmt: skip
ROUTES: dict[Kind, Route] = {}
_NO_ROW = Row(READS_AND_WRITES)


def row_of(name: str) -> Row:
    """All that is known of the ATen operator `name` (no overload): its own row, or that of all with its first word."""
    return ROWS.get(name) or ROWS.get(f"{name[: name.find('_', 1)]}_*", _NO_ROW)


def cost(name: str, inputs: Parts, outputs: Parts, spec: GPUSpec, precision: Format = "fp32") -> Cost:
    """What the ATen operator `name` (no overload) takes on a GPU of `spec`."""
    return row_of(name).cost.cost(Operation(name, tuple(inputs), tuple(outputs), spec, precision))


class Operator:
    """The facts of one overload (`aten.mm.default`), found once and kept."""

    def __init__(self, func: _Func):
        self.func = func  # kept, so that no other overload gets its id
        self.kernel: Callable[..., Any] = func  # what computes
        self.kernels = _python_functions(func)  # by dispatch key, if of higher order or in Python
        self.takes_first: int | None = None  # tensors: among so many arguments first
        self.takes_by_name = True  # ... and among named ones
        self.tags: set[torch.Tag] = set(getattr(func, "tags", ()))  # one of higher order has none, and no schema
        self._read_schema(getattr(func, "_schema", None) or _Schema(f"::{func.name()}", "", [], [], False, False))
        self._read_namespace(func)
        self._read_random_numbers(func)
        self.needs_values = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & self.tags)
        row = row_of(self.base)
        self.formula, self.tf32_setting = row.cost.cost, row.cost.tf32_setting
        self.depends_on_strides = row.cost.depends_on_strides
        self.arguments = tuple(name for name in row.cost.arguments if name in self.positions)
        self.wants_more = self.depends_on_strides or bool(self.arguments)
        self.check, self.recipe = row.check or (_refuse if self.is_missing else None), row.recipe
        self.allowed_on_host, self.mixture = row.on_host, row.mixture
        self.route = ROUTES[self.kind]

    def _read_schema(self, schema: _Schema) -> None:
        """Its names, and what it does to its arguments."""
        self.name = schema.name.partition("::")[2] + (f".{schema.overload_name}" if schema.overload_name else "")
        self.base = self.name.partition(".")[0]
        self.names = [a.name for a in schema.arguments]
        self.positions = {name: position for position, name in enumerate(self.names)}
        self._schema, self._defaults = schema, dict[str, Any]()
        self.is_index = "index" in self.base and "indices" in self.names
        self.crosses = self.base in _CROSSES_DEVICES
        self.written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        self.outputs = [a.name for a in schema.arguments if a.kwarg_only and a.name in self.written]  # `out=`
        self.changes_size = "resize" in self.base or self.base == "set_" or bool(self.outputs)
        self.in_place, self.filled = bool(self.written) and not self.outputs, self.outputs or self.written
        first = schema.returns[0].alias_info if schema.returns else None
        self.is_view = first is not None and not first.is_write

    def _read_namespace(self, func: _Func) -> None:
        """What computes it, and whether that is one kernel, one for each tensor of lists, or several operators."""
        arguments, name, has = self._schema.arguments, func.name(), torch._C._dispatch_has_kernel_for_dispatch_key
        self.is_composite = self.kernels is not None or has(name, "CompositeImplicitAutograd") and not has(name, "CPU")
        self.is_missing = False  # in PyTorch for CUDA; a build for CPUs alone cannot tell
        self.keeps_answers = False  # it does no more to tensors without values than to make new ones from given ones
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "aten":
            on_cuda = not torch.version.cuda or torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CUDA")
            self.is_missing = not on_cuda and has(name, "CPU") and not self.base.startswith(_THE_CPU_S)
            instead = row_of(self.base).cpu_kernel
            self.kernel = (instead and instead(func)) or func._op  # as `func` does itself, with a call into Python
            takes = [a for a in arguments if "Tensor" in str(a.type)]
            self.takes_first = max((self.names.index(a.name) + 1 for a in takes if not a.kwarg_only), default=0)
            self.takes_by_name = any(a.kwarg_only for a in takes)
            moves = self.is_view or self.crosses or self.changes_size or torch.Tag.inplace_view in self.tags
            self.keeps_answers = bool(takes) and not moves
        self.is_collective = func.namespace in _COLLECTIVES
        self.is_fused = self.base.startswith("_fused_") and [a.type.kind() for a in arguments[:1]] == ["ListType"]
        self.by_element = self.is_fused or self.base.startswith("_foreach_") or self.is_collective

    def _read_random_numbers(self, func: _Func) -> None:
        """Whether it draws numbers, and how it is given a generator."""
        self.has_generator = "generator" in self.names
        self.with_generator = _overload_with_generator(func)
        seeded = torch.Tag.nondeterministic_seeded in self.tags
        self.draws_by_default = seeded and not self.has_generator and not self.with_generator
        self.draws = self.has_generator or self.draws_by_default or self.with_generator is not None

    @property
    def kind(self) -> Kind:
        """What decides about the route of an operator: the first of these that it is."""
        if self.is_composite:
            return "composite"
        if "device" in self.names:
            return "factory"
        if self.crosses:
            return "crossing"
        if self.by_element:
            return "collective" if self.is_collective else "list"
        return "particular" if self.check or self.needs_values or self.changes_size else "ordinary"

    def default(self, name: str) -> Any:
        """What an argument is that is not given."""
        if name not in self._defaults:  # asked once: each answer is made anew in C++
            self._defaults[name] = self._schema.arguments[self.positions[name]].default_value
        return self._defaults[name]


def _python_functions(func: _Func) -> dict[Any, Callable[..., Any]] | None:
    """By dispatch key, those of an operator of higher order or a `torch.library.custom_op` for all devices, if any."""
    if isinstance(func, torch._ops.HigherOrderOperator):
        return func.py_kernels
    made = OPDEFS.get(func._schema.name)
    of = {} if made is None else made._backend_fns
    return {key: of[device] for device, key in _KEYS.items() if device in of} if None in of else None


def _refuse(call: _Call) -> None:
    """Raise PyTorch's own error for an operator that it has no kernel of for CUDA."""
    call.func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *call.args, **call.kwargs)


def _overload_with_generator(func: _Func) -> torch._ops.OpOverload | None:
    """`randn.default` -> `randn.generator`, `randint.low` -> `randint.low_generator`; None where there is none."""
    if isinstance(func, torch._ops.HigherOrderOperator) or torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    twin = f"{func._schema.overload_name}_generator".removeprefix("_")
    packet = func.overloadpacket
    return getattr(packet, twin) if twin in packet.overloads() else None


KNOWN: dict[int, Operator] = {}  # by the overload's id, since its own hash is a call into Python


def operator(func: torch._ops.OpOverload) -> Operator:
    """The facts of `func`, from the cache after the first time."""
    return KNOWN.get(id(func)) or KNOWN.setdefault(id(func), Operator(func))
