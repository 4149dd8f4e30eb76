"""What the dispatch mode knows about each ATen operator, and one operator on its way through the mode.

`Operator` is read once from an operator's schema, and from its `Row`, in which a feature says what it knows of it. Most
need no row: their inputs must share a GPU and their outputs stay there. `OpCall` is one call: with what, on which GPU.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from virtual_gpus import errors
from virtual_gpus.clock.cost import READS_AND_WRITES, OperatorClass, Parts
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch import known
from virtual_gpus.gpus import GPUSpec, Precision
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.placement.creation_sites import Site, calling_site
from virtual_gpus.placement.random_numbers import count_draws, default_generator, device_of_generator, drawing_from
from virtual_gpus.placement.storages import UNRECORDED, Record, follow_size, gpu_of, place_all, put, scratch, tensors_in
from virtual_gpus.threads import below, this_thread

CUDA, CPU = torch._C.DispatchKey.CUDA, torch._C.DispatchKey.CPU
COMPOSITE = (torch._C.DispatchKey.CompositeExplicitAutograd, torch._C.DispatchKey.CompositeImplicitAutograd)
_Tensor, _LISTS = torch.Tensor, (list, tuple)
_Schema, _Func = torch._C.FunctionSchema, torch._ops.OpOverload | torch._ops.HigherOrderOperator
Route = Callable[["OpCall"], Any]  # gives what the operator returns


@dataclass(frozen=True)
class Row:
    """What a feature knows of an operator.

    time: how long it takes. recipe: how CUDA uses memory for it, see `dispatch.recipes`. check: raises what CUDA
    refuses before it runs. cpu_kernel: given an overload, what computes in the place of the CPU's kernel, or None.
    on_host: the arguments that CUDA wants, or takes, on the CPU. mixture: given an `OpCall`, an argument's name, the
    device of those before it and its own, the error for it, or None for the usual one. crosses: whether its tensors, or
    those of lists, may be on different devices. by_element: whether element i of its lists stays on a GPU of its own.
    size_is_known: whether the host knows the size of a result that hangs on values, and need not wait. waits: whether
    its recipe waits for the values that it reads. refuses_more: if kernels refuse what PyTorch takes without values.
    """

    time: OperatorClass
    recipe: Route | None = None
    check: Callable[["OpCall"], None] | None = None
    cpu_kernel: Callable[[torch._ops.OpOverload], Callable[..., Any] | None] | None = None
    on_host: Collection[str] = ()
    mixture: Callable[["OpCall", str, torch.device, torch.device], Exception | None] | None = None
    crosses: bool = False
    by_element: bool = False
    size_is_known: Callable[["OpCall"], bool] = lambda call: False
    waits: bool = False
    refuses_more: bool = False


# Features add theirs: by the base name of an operator ("mm"), or "_foreach_*" for all of these that have none; by
# namespace, the kind that all of its operators are; and by `Operator.kind`.
ROWS: dict[str, Row] = {}
KINDS: dict[str, str] = {}
ROUTES: dict[str, Route] = {}
AUTOCAST: dict[str, str] = {}  # by a name with its overload: what autocast does with it, see features/autocast.toml
_NO_ROW = Row(READS_AND_WRITES)
OPERATORS_SEEN: dict[int, "Operator"] = {}  # by the overload's id, since its own hash is a call into Python


def row_of(name: str) -> Row:
    """All that is known of the ATen operator `name` (no overload): its own row, or that of all with its first word.

    "add_" without a row has that of "add", less what computes a new tensor: its recipe and its kernel.
    """
    if name not in ROWS and (functional := ROWS.get(name.removesuffix("_"))):
        return replace(functional, recipe=None, cpu_kernel=None)
    return ROWS.get(name) or ROWS.get(f"{name[: name.find('_', 1)]}_*", _NO_ROW)


def cost(name: str, inputs: Parts, outputs: Parts, spec: GPUSpec, precision: Precision = "fp32") -> Cost:
    """What the ATen operator `name` (no overload) takes on a GPU of `spec`."""
    return row_of(name).time.formula(Operation(name, tuple(inputs), tuple(outputs), spec, precision))


class Operator:
    """The facts of one overload (`aten.mm.default`), found once and kept.

    name: "add.Tensor", with the overload; base: without. row: what its feature knows of it. kernel: what computes it.
    kernels: that by dispatch key, for an operator of higher order or in Python. positions, defaults: of its arguments.
    takes_first: so many arguments may be tensors, and named ones if takes_by_name. written: what it writes to, outputs
    if that is `out=`. keeps_answers: whether its results on meta tensors are new ones and follow from the forms of its
    inputs alone. is_composite: whether it calls operators that autograd sees. has_parts: whether it calls others.
    needs_values: whether it returns a value, or something whose size depends on values. arguments: those on which its
    time depends. wants_more: whether it has such arguments, or its time depends on strides. takes_generator: whether
    its numbers come from a generator that it is given. is_pointwise: by its tag; shapes of results follow from inputs.
    """

    def __init__(self, func: _Func):
        self.func = func  # kept, so that no other overload gets its id
        self.kernel: Callable[..., Any] = func
        self.kernels = _python_functions(func)
        self.takes_first: int | None = None
        self.takes_by_name = True
        self.keeps_answers = False
        self.tags: set[torch.Tag] = set(getattr(func, "tags", ()))  # one of higher order has none, and no schema
        self._read_schema(getattr(func, "_schema", None) or _Schema(f"::{func.name()}", "", [], [], False, False))
        self._read_dispatcher(func)
        self._read_random_numbers(func)
        self.needs_values = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & self.tags)
        self.is_pointwise = torch.Tag.pointwise in self.tags
        self.arguments = tuple(name for name in self.row.time.arguments if name in self.positions)
        self.wants_more = self.row.time.depends_on_strides or bool(self.arguments)
        self.recipe = self.row.recipe or OpCall.run
        self.route = ROUTES[self.kind]

    def _read_schema(self, schema: _Schema) -> None:
        """Its names, and what it does to its arguments."""
        self.name = schema.name.partition("::")[2] + (f".{schema.overload_name}" if schema.overload_name else "")
        self.base = self.name.partition(".")[0]
        self.row = row_of(self.base)
        self.positions = {a.name: position for position, a in enumerate(schema.arguments)}
        self.defaults = {a.name: a.default_value for a in schema.arguments}
        self._schema = schema
        self.written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        self.outputs = [a.name for a in schema.arguments if a.kwarg_only and a.name in self.written]  # `out=`
        self.changes_size = "resize" in self.base or self.base == "set_" or bool(self.outputs)
        self.in_place = bool(self.written) and not self.outputs
        first = schema.returns[0].alias_info if schema.returns else None
        self.is_view = first is not None and not first.is_write

    def _read_dispatcher(self, func: _Func) -> None:
        """What computes it by PyTorch's table of kernels: a kernel, one for each tensor of a list, or operators."""
        arguments, name, has = self._schema.arguments, func.name(), torch._C._dispatch_has_kernel_for_dispatch_key
        listed = self.kernels is None and torch._C._dispatch_has_kernel(name)  # TorchScript's prim::layout is not
        no_kernel = listed and not has(name, "CPU")
        in_parts = no_kernel and has(name, "CompositeImplicitAutograd")
        self.is_composite = self.kernels is not None or in_parts
        self.has_parts = no_kernel and not in_parts and has(name, "CompositeExplicitAutograd")
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "aten":
            instead = self.row.cpu_kernel
            self.kernel = (instead and instead(func)) or func._op  # as `func` does itself, with a call into Python
            takes = [a for a in arguments if "Tensor" in str(a.type)]
            self.takes_first = max((self.positions[a.name] + 1 for a in takes if not a.kwarg_only), default=0)
            self.takes_by_name = any(a.kwarg_only for a in takes)
            moves = self.is_view or self.row.crosses or self.changes_size or torch.Tag.inplace_view in self.tags
            self.keeps_answers = bool(takes) and not moves
        takes_lists = self.row.by_element and any(str(a.type) == "List[Tensor]" for a in arguments)
        self.by_element = takes_lists or func.namespace in KINDS

    def _read_random_numbers(self, func: _Func) -> None:
        """Whether it draws numbers, and which overload takes a generator: `randint.low` has `randint.low_generator`."""
        seeded, twin = torch.Tag.nondeterministic_seeded in self.tags, f"{self._schema.overload_name}_generator"
        self.has_generator = "generator" in self.positions
        packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) and seeded else None
        self.with_generator: Any = getattr(packet, twin.removeprefix("_"), None)
        self.takes_generator = self.has_generator or self.with_generator is not None
        self.draws_by_default = seeded and not self.takes_generator

    @property
    def kind(self) -> str:
        """What decides about the route of an operator: the first of these that it is."""
        if self.is_composite:
            return "composite"
        if "device" in self.positions:
            return "factory"
        if self.by_element:
            return KINDS.get(self.func.namespace, "list")
        if self.row.crosses:
            return "crossing"
        return "particular" if self.row.check or self.needs_values or self.changes_size else "ordinary"


def _python_functions(func: _Func) -> dict[Any, Callable[..., Any]] | None:
    """By dispatch key, those of an operator of higher order, or of `torch.library` for CUDA alone or all devices."""
    if isinstance(func, torch._ops.HigherOrderOperator):
        return func.py_kernels
    if func.namespace in ("aten", "prims"):  # PyTorch's own, in Python too, have one form on all devices
        return None
    name, keys = func.name().replace("::", "/"), (CUDA, CPU, *COMPOSITE)
    in_python = [key for key in keys if f"{name}/{key.name}" in torch.library._impls]
    of_cpu = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU") and COMPOSITE[0] not in in_python
    return None if of_cpu or not in_python else {key: partial(func._op_dk, key) for key in in_python}


def operator(func: torch._ops.OpOverload) -> Operator:
    """The facts of `func`, from the cache after the first time."""
    return OPERATORS_SEEN.get(id(func)) or OPERATORS_SEEN.setdefault(id(func), Operator(func))


# ---- a call ----------------------------------------------------------------------------------------------------------


class OpCall:
    """Made once per operator, in `__torch_dispatch__`; everything that handles the operator is given this object.

    func, op: the ATen overload and its facts. kernel: what computes it. args, kwargs: as the dispatcher passed them,
    later as the kernel gets them. tensors: all that were among them as they were passed. gpu: where the operator runs,
    which is the GPU of the first tensor that is on one (GPUs that are off do not count). None if no tensor is on a GPU.
    on_one_gpu: True if all tensors have a storage of their own on that GPU. all_placed: False if a tensor has no
    storage of its own, as sparse ones, if C++ made it for itself, or if its GPU is off.
    """

    __slots__ = ("all_placed", "args", "func", "gpu", "kernel", "kwargs", "on_one_gpu", "op", "tensors")
    gpu: VirtualGPU  # as recipes see it: only the routes are given calls without one

    def __init__(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.func, self.args, self.kwargs = func, args, kwargs
        self.op = op = OPERATORS_SEEN.get(id(func)) or operator(func)
        self.kernel = op.kernel
        tensors: list[torch.Tensor] = []
        self.tensors = tensors
        for value in args[: op.takes_first]:  # `tensors_in`, without its call: this runs for every operator
            if isinstance(value, _Tensor):
                tensors.append(value)
            elif isinstance(value, _LISTS):
                tensors += tensors_in(value)
        if kwargs and op.takes_by_name:
            tensors += tensors_in(tuple(kwargs.values()))
        gpu: Any = None
        on_one_gpu = all_placed = True
        for tensor in tensors:
            try:
                record: Record = tensor.untyped_storage()._record  # type: ignore  # see `record_of`
                where = record.gpu  # `gpu_of`, without its calls
            except (NotImplementedError, RuntimeError):
                record, where, on_one_gpu, all_placed = UNRECORDED, gpu_of(tensor), False, False
            if where is None:
                on_one_gpu, all_placed = False, all_placed and record.creation_site is None
            elif gpu is None and where.machine.on:
                gpu = where
            elif where is not gpu:
                on_one_gpu, all_placed = False, all_placed and where.machine.on
        self.gpu, self.on_one_gpu, self.all_placed = gpu, on_one_gpu and gpu is not None, all_placed

    def __getitem__(self, name: str) -> Any:
        """An argument by its name in the schema, or its default."""
        position = self.op.positions[name]
        if position < len(self.args):
            return self.args[position]
        return self.kwargs[name] if name in self.kwargs else self.op.defaults[name]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(argument name, tensor) in the schema's order; a list of tensors gives its name several times."""
        for name, value in [*zip(self.op.positions, self.args, strict=False), *self.kwargs.items()]:
            for tensor in tensors_in(value):
                yield name, tensor

    @property
    def site(self) -> Site:
        """The Python instruction that called into PyTorch. Looked for when asked, since few operators ask."""
        return calling_site()

    # ---- for recipes ----

    def read_instead(self, tensor: torch.Tensor) -> torch.Tensor:
        """Charge for reading `tensor`, which CUDA's kernel reads in place of the first one. Returns `tensor`."""
        self.tensors[0] = tensor
        return tensor

    def compute(self, has_generator: bool = False) -> Any:
        """The results of the operator's own kernel. They hold no GPU memory yet: `place` them, in CUDA's order."""
        op = self.op
        if op.takes_generator and not has_generator:
            return self._compute_random()
        if self.gpu.machine.shapes_only and op.keeps_answers:
            return known.ask(op, self._call_meta_kernel, self.args, self.kwargs, op.by_element, op.in_place)
        return self._call_kernel()

    def place(self, result: Any) -> Any:
        """Give results their blocks on the GPU: a tensor, None, or lists of them; `out=` grows. Returns `result`."""
        place_all(result, self.gpu)
        if self.op.changes_size:
            for _, tensor in self.named_tensors():
                follow_size(tensor)
        return result

    def run(self, *then: int) -> Any:
        """Compute, and place all results in the order in which they are returned. then: `scratch` for after that."""
        result = self.compute()
        place_all(result, self.gpu)
        if self.op.changes_size:  # `place` does both, but its call costs
            self.place(result)
        if then:
            scratch(self.gpu, *then)
        return result

    def run_with(self, *held: int) -> Any:
        """`run`, with `scratch` that CUDA takes before the results, and keeps until the kernel is done."""
        if not held:
            return self.run()
        with self.scratch(*held):
            return self.run()

    def compute_into(self, tensor: torch.Tensor) -> torch.Tensor:
        """Compute what CUDA writes into `tensor`, and PyTorch here does not. The result takes its block over."""
        return put(self.compute(), tensor.untyped_storage()._record)  # type: ignore  # see `record_of`

    def scratch(self, *sizes: int) -> scratch:
        """Blocks that CUDA's kernel takes on the way, as `storages.scratch` says. Raises OutOfMemory."""
        return scratch(self.gpu, *sizes)

    # ---- kernels ----

    def _compute_random(self) -> Any:
        """The results of an operator that draws numbers, from the generator that was asked for or the GPU's own."""
        op, gpu = self.op, self.gpu
        if op.has_generator:
            generator, position = asked_generator(self, "cuda") or default_generator(gpu), op.positions["generator"]
            given = None if gpu.machine.shapes_only else generator  # PyTorch's kernels in Python take none
            if position < len(self.args):
                self.args = (*self.args[:position], given, *self.args[position + 1 :])
            else:
                self.kwargs = {**self.kwargs, "generator": given}
        else:
            generator = default_generator(gpu)
            self.kernel, self.kwargs = op.with_generator, {**self.kwargs, "generator": generator}
        result = self.compute(has_generator=True)
        elements = result.numel() if isinstance(result, torch.Tensor) else 1
        count_draws(generator, elements, gpu.spec.multi_processor_count * gpu.spec.threads)
        return result

    def _call_meta_kernel(self) -> Any:
        """What PyTorch answers without values. The CPU's kernel refuses more, so where that shows, it is asked too."""
        result, op = self._call_kernel(), self.op
        counts = self.on_one_gpu and all(tensor.dtype is not torch.bool for tensor in self.tensors)  # not so of a mask
        if (op.row.refuses_more and counts) or (op.in_place and op.is_pointwise):
            self._refuse(None)
        return result

    def _call_kernel(self) -> Any:
        """What the kernel answers. Its errors are told in CUDA's words."""
        this_thread.in_kernel = True
        try:
            if self.op.draws_by_default:
                with drawing_from(default_generator(self.gpu)):
                    return self.kernel(*self.args, **self.kwargs)
            return self.kernel(*self.args, **self.kwargs)
        except Exception as error:
            self._refuse(error)
            raise
        finally:
            this_thread.in_kernel = False

    def _refuse(self, error: Exception | None) -> None:
        """Raise what CUDA says in place of a kernel's `error`, or of none. Without values, the CPU's kernel says it."""
        told, shapes_only = error, self.gpu.machine.shapes_only
        if shapes_only and self.func.namespace == "aten" and not self.op.takes_generator:  # it would draw
            told = self._error_of_cpu(error is not None) or error
        if told is not None:
            errors.raise_instead_of(told, self.func.name(), shapes_only)
            if told is not error:
                raise told from None

    def _error_of_cpu(self, refused: bool) -> Exception | None:
        """What the CPU's kernel says to these shapes, or None. It computes what it takes, so it is asked of few numbers
        first: equal sizes stay equal. refused: whether PyTorch refuses these without values, so it must those."""
        sizes = sorted({size for tensor in self.tensors for size in tensor.shape})
        few, more = ({size: min(size, least + rank) for rank, size in enumerate(sizes, 1)} for least in (8, 9))
        if (error := self._error_of_zeros(few)) is None or (self._error_of_zeros(few, "meta") is not None) != refused:
            return None
        again = self._error_of_zeros({} if refused else more)
        of_few = not refused and str(again) != str(error)  # in words about their sizes
        return None if of_few or str(again) == "ZeroDivisionError" or "DefaultCPUAllocator" in str(again) else again

    def _error_of_zeros(self, few: dict[int, int], device: str = "cpu") -> Exception | None:
        """What the kernel raises for zeros. few: what sizes become; if there are none, a tensor is one, many times."""
        written = [id(tensor) for name, tensor in self.named_tensors() if name in self.op.written]

        def stand_in(value: Any) -> Any:
            if isinstance(value, int):  # it may be a size
                return few.get(value, value)
            shape = [few.get(size, size) for size in value.shape]
            zeros = value.new_zeros(shape if few else (), device=device).expand(shape)
            return zeros.new_empty(shape) if id(value) in written else zeros if value.is_meta else value

        try:
            with below(), torch._C._DisableTorchDispatch():  # the program's modes do not see it
                args, kwargs = tree_map_only((_Tensor, int), stand_in, (self.args, self.kwargs))
                self.kernel(*args, **kwargs)
        except Exception as error:
            return error.with_traceback(None)  # its frames hold the tensors
        return None


def asked_generator(call: OpCall, device: str) -> torch.Generator | None:
    """The argument `generator`, if any. Raises RuntimeError if it is not of `device` (ATen/core/Generator.h)."""
    asked = call["generator"]
    if asked is not None and (given := device_of_generator(asked).type) != device:
        raise RuntimeError(f"Expected a '{device}' device type for generator but found '{given}'")
    return asked
