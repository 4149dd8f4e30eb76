"""One operator on its way through the dispatch mode: what was called, with what, on which GPU, and its kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from virtual_gpus import errors
from virtual_gpus.dispatch import known
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.operators import KNOWN, operator
from virtual_gpus.placement.creation_sites import Site, calling_site
from virtual_gpus.placement.random_numbers import count_draws, default_generator, device_of_generator, drawing_from
from virtual_gpus.placement.storages import UNRECORDED, Record, follow_size, gpu_of, place_all, put, scratch, tensors_in
from virtual_gpus.threads import this_thread


class OpCall:
    """Made once per operator, in `__torch_dispatch__`; everything that handles the operator is given this object.

    func, op: the ATen overload and its facts. kernel: what computes it. args, kwargs: as the dispatcher passed them,
    later as the kernel gets them. tensors: all that were among them as they were passed. gpu: the GPU that is on of the
    first tensor that has one, where the operator runs; None if there is none. on_one_gpu: True if all tensors have a
    storage of their own on that GPU. all_placed: False if one has none, as sparse ones, if C++ made it for itself, or
    if its GPU is off.

    A recipe (see `features.recipes`) takes it and runs the kernel as CUDA would use memory for it.
    """

    __slots__ = ("all_placed", "args", "func", "gpu", "kernel", "kwargs", "on_one_gpu", "op", "tensors")
    gpu: VirtualGPU  # as recipes see it: only the routes are given calls without one

    def __init__(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.func, self.args, self.kwargs = func, args, kwargs
        self.op = op = KNOWN.get(id(func)) or operator(func)
        self.kernel = op.kernel
        tensors: list[torch.Tensor] = []
        self.tensors = tensors
        for value in args[: op.takes_first]:  # `tensors_in`, without its call: this runs for every operator
            if isinstance(value, torch.Tensor):
                tensors.append(value)
            elif isinstance(value, (list, tuple)):
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
            elif not where.machine.on:
                on_one_gpu = all_placed = False
            elif gpu is None:
                gpu = where
            elif where is not gpu:
                on_one_gpu = False
        self.gpu, self.on_one_gpu, self.all_placed = gpu, on_one_gpu and gpu is not None, all_placed

    def __getitem__(self, name: str) -> Any:
        """An argument by its name in the schema, or its default."""
        position = self.op.positions[name]
        if position < len(self.args):
            return self.args[position]
        return self.kwargs[name] if name in self.kwargs else self.op.default(name)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(argument name, tensor) in the schema's order; a list of tensors gives its name several times."""
        for name, value in [*zip(self.op.names, self.args, strict=False), *self.kwargs.items()]:
            for tensor in tensors_in(value):
                yield name, tensor

    @property
    def site(self) -> Site:
        """The Python instruction that called into PyTorch. Looked for when asked, since few operators ask."""
        return calling_site()

    # ---- for recipes ----

    def compute(self) -> Any:
        """Run the operator's own kernel. Its results hold no GPU memory yet: `place` them, in CUDA's order."""
        if self.op.draws:
            return _draw(self)
        if self.gpu.machine.shapes_only:
            return known.ask(self.op, self.args, self.kwargs, lambda: _run(self, self.kernel, self.args, self.kwargs))
        return _run(self, self.kernel, self.args, self.kwargs)

    def place(self, result: Any) -> Any:
        """Give results their blocks on the GPU: a tensor, None, or lists of them; `out=` grows. Returns `result`."""
        place_all(result, self.gpu)
        if self.op.changes_size:
            for _, tensor in self.named_tensors():
                follow_size(tensor)
        return result

    def run(self, *then: int) -> Any:
        """Compute, and place all results in the order in which they are returned. then: `scratch` for after that."""
        result = self.place(self.compute())
        if then:
            with self.scratch(*then):
                pass
        return result

    def run_in_place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Run what CUDA does in place of `tensor`, and PyTorch here does not: the result takes its block over."""
        return put(self.compute(), tensor.untyped_storage()._record)  # type: ignore  # see `record_of`

    def scratch(self, *sizes: int) -> AbstractContextManager[None]:
        """Blocks that CUDA's kernel takes on the way, in order: `with call.scratch(nbytes):`. Raises OutOfMemory."""
        return scratch(self.gpu, *sizes)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _draw(call: OpCall) -> Any:
    """The results of an operator that draws numbers: from the generator that was asked for, or from the GPU's own."""
    op, kernel, args, kwargs, generator = call.op, call.kernel, call.args, call.kwargs, None
    if op.has_generator:
        generator = _generator(call)
        kwargs = {**kwargs, "generator": generator}
        if len(args) > (position := op.names.index("generator")):
            args = (*args[:position], kwargs.pop("generator"), *args[position + 1 :])
    elif op.with_generator is not None:
        generator = default_generator(call.gpu)
        kernel, kwargs = op.with_generator, {**kwargs, "generator": generator}
    run = partial(_run, call, kernel, args, kwargs)
    result = known.ask(op, call.args, call.kwargs, run) if call.gpu.machine.shapes_only else run()
    if generator is not None:
        elements = result.numel() if isinstance(result, torch.Tensor) else 1
        count_draws(generator, elements, call.gpu.spec.multi_processor_count)
    return result


def _run(call: OpCall, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    this_thread.in_kernel = True
    try:
        if call.op.draws_by_default:
            with drawing_from(default_generator(call.gpu)):
                return kernel(*args, **kwargs)
        return kernel(*args, **kwargs)
    except RuntimeError as error:
        if "DefaultCPUAllocator" in str(error):
            raise MemoryError(
                f"This computer ran out of its own memory in {call.op.name}. Virtual GPUs keep their tensors in that "
                "memory. Use a smaller batch, or use shapes_only=True, which keeps no values."
            ) from None
        if str(error).startswith("Could not run '") and "'CPU' backend" in str(error):
            name = f"{call.func.namespace}::{call.op.name}"
            raise errors.not_modelled(f"{name}, which exists only for CUDA") from None
        raise
    finally:
        this_thread.in_kernel = False


def refuse_gpu_generator(call: OpCall) -> None:
    """A GPU's generator draws no numbers on the CPU."""
    wanted = call["generator"]
    if wanted is not None and device_of_generator(wanted).type == "cuda":
        raise errors.wrong_generator("cpu", "cuda")


def _generator(call: OpCall) -> torch.Generator:
    """The generator that was asked for, checked for its device, or the GPU's default one."""
    wanted = call["generator"]
    if wanted is None:
        return default_generator(call.gpu)
    if device_of_generator(wanted).type != "cuda":
        raise errors.wrong_generator("cuda", device_of_generator(wanted).type)
    return wanted
