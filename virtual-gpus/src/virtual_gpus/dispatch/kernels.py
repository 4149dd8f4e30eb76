"""Run an operator's own kernel: with the GPU's generator where it draws random numbers, and errors that explain."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from virtual_gpus import errors
from virtual_gpus.placement.random_numbers import count_draws, default_generator, device_of_generator, drawing_from
from virtual_gpus.shapes import known
from virtual_gpus.threads import this_thread

if TYPE_CHECKING:  # a call runs its kernel, so it lies above
    from virtual_gpus.dispatch.call import OpCall


def run_kernel(call: OpCall) -> Any:
    """The results of `call`, which are on no GPU yet."""
    if call.op.draws:
        return _draw(call)
    if call.gpu.machine.shapes_only:
        return known.ask(call, lambda: _run(call, call.kernel, call.args, call.kwargs))
    return _run(call, call.kernel, call.args, call.kwargs)


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
    if call.gpu.machine.shapes_only:
        result = known.ask(call, lambda: _run(call, kernel, args, kwargs))
    else:
        result = _run(call, kernel, args, kwargs)
    if generator is not None:
        elements = result.numel() if isinstance(result, torch.Tensor) else 1
        count_draws(generator, elements, call.gpu.spec.multi_processor_count)
    return result


def _run(call: OpCall, kernel: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    this_thread.inside = True
    try:
        if call.op.draws_by_default:
            with drawing_from(default_generator(call.gpu)):
                return kernel(*args, **kwargs)
        return kernel(*args, **kwargs)
    except RuntimeError as error:
        if "DefaultCPUAllocator" in str(error):
            raise errors.host_memory_ran_out(call.op.name) from None
        if str(error).startswith("Could not run '") and "'CPU' backend" in str(error):
            name = f"{call.func.namespace}::{call.op.name}"
            raise errors.not_modelled(f"{name}, which exists only for CUDA") from None
        raise
    finally:
        this_thread.inside = False


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
