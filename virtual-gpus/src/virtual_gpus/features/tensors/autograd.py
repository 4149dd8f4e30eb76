"""What autograd checks about devices in C++, where every tensor of a virtual GPU looks like a CPU tensor."""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from virtual_gpus import errors
from virtual_gpus.dispatch.copies import move
from virtual_gpus.entrance import entrance
from virtual_gpus.machine import VirtualGPU, active
from virtual_gpus.patches.table import Patch, around, in_package
from virtual_gpus.placement.creation_sites import forget_creation_site, was_made_in_cpp
from virtual_gpus.placement.storages import device_of, gpu_of, is_wrapper, place
from virtual_gpus.threads import this_thread

_raw_grad: Any = vars(torch._C.TensorBase)["grad"]  # a descriptor
_get_raw_grad = _raw_grad.__get__
_raw_apply = BackwardCFunction.apply
_raw_make_node = vars(torch.autograd.Function)["apply"]
_raw_run_backward = torch.autograd.graph._engine_run_backward
_oldest: list[torch.Tensor] = []  # see `_drop_what_waits`


def _get_grad(self: torch.Tensor) -> torch.Tensor | None:
    """`p.grad`: a gradient of zeros, which C++ made without asking for a GPU, belongs where p is."""
    gradient = _get_raw_grad(self)
    if gradient is None:
        return None
    try:
        if gradient.untyped_storage()._record.gpu is not None:  # as almost always, and optimizers ask often
            return gradient
    except (NotImplementedError, RuntimeError):
        pass
    return gradient if this_thread.in_kernel else beside(gradient, self)


@entrance
def beside(gradient: torch.Tensor | None, tensor: object) -> torch.Tensor | None:
    """A gradient or another result that C++ may have made without asking for a GPU, on that of `tensor`."""
    if gradient is not None and isinstance(tensor, torch.Tensor) and was_made_in_cpp(gradient):
        target = gpu_of(tensor)
        if target is not None:
            return place(gradient, target)
        forget_creation_site(gradient)
    return gradient


def _set_grad(self: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """`p.grad = g`: on p's own device only (torch/csrc/autograd/python_variable.cpp)."""
    is_checked = isinstance(gradient, torch.Tensor) and not this_thread.in_kernel and active()
    if is_checked and gpu_of(gradient) is not gpu_of(self):
        given, own = device_of(gradient), device_of(self)
        part = "type" if given.type != own.type else "index"
        what = "with device type" if part == "type" else "located on device with index"
        values = f"gradient {what} '{getattr(given, part)}' to a tensor {what} '{getattr(own, part)}'"
        hint = "Please ensure that the gradient and the tensor are on the same device"
        raise RuntimeError(f"attempting to assign a {values}. {hint}")
    _raw_grad.__set__(self, gradient)


def _engine_run_backward(outputs: Sequence[torch.Tensor | GradientEdge], *args: Any, **kwargs: Any) -> Any:
    """The start of every backward pass: a gradient that is handed in must be where its output is."""
    if this_thread.in_kernel:  # a recipe that lets the CPU find gradients
        return _raw_run_backward(outputs, *args, **kwargs)
    gradients = args[0] if args else ()
    pairs = enumerate(zip(outputs, gradients, strict=False))
    checked = tuple(g if isinstance(of, GradientEdge) else _checked(i, g, gpu_of(of)) for i, (of, g) in pairs)
    if len(checked) == len(gradients):
        args = (checked, *args[1:])
    outer, machine = this_thread.in_backward, active()
    clock = None if outer or machine is None else machine.clock
    this_thread.in_backward = True
    try:
        if clock is not None:
            clock.start_backward()
        with nullcontext() if machine is None else machine.around_backward(outputs, checked):
            gradients = _raw_run_backward(outputs, *args, **kwargs)
    except BaseException as error:
        if not outer:
            _drop_what_waits()
        if isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error):
            if any(isinstance(output, torch.Tensor) and gpu_of(output) for output in outputs):
                errors.raise_instead_of(error, "", shapes_only=False)
        raise
    finally:
        this_thread.in_backward = outer
        if clock is not None:
            clock.end_backward()
    inputs = args[3] if len(args) > 3 else ()
    return gradients if not gradients or len(gradients) != len(inputs) else tuple(map(beside, gradients, inputs))


def _drop_what_waits() -> None:
    """Let go of what a failed pass had still to do, gradients and all, as the engine's thread of a real GPU does.

    The CPU's queue belongs to the calling thread and keeps it. Youngest nodes come out first, numbered by the thread
    that made them: a pass through the first node of a new thread gets everything else out of its way.
    """
    if not _oldest:
        maker = threading.Thread(target=_make_oldest)
        maker.start()
        maker.join()
    leaf, node = _oldest
    _raw_run_backward((node,), (leaf.detach(),), True, False, (leaf,), allow_unreachable=True, accumulate_grad=False)


def _make_oldest() -> None:
    leaf = torch.zeros((), device="cpu", requires_grad=True)
    _oldest[:] = leaf, leaf.clone()


def _checked(index: int, gradient: object, target: VirtualGPU | None, words: str = "") -> Any:
    """As the engine's validate_outputs (torch/csrc/autograd/engine.cpp): 0-dim gradients move, others are refused."""
    if not isinstance(gradient, torch.Tensor) or gpu_of(gradient) is target or is_wrapper(type(gradient)):
        return gradient
    if target is not None and was_made_in_cpp(gradient):
        return place(gradient, target)
    if gradient.dim() == 0:
        return move(gradient, target)
    expected = "cpu" if target is None else f"cuda:{target.index}"
    where = f"expected device {expected} but got {device_of(gradient)}"
    raise RuntimeError(f"{words}invalid gradient at index {index} - {where}")


@entrance
def _apply(self: Any, *gradients: torch.Tensor | None) -> Any:
    """The backward pass of a Python function, for which the GPU of its results is the current one.

    Results that were not used have gradients of zeros, which the engine makes in C++: they belong on the result's GPU.
    The gradients that it returns must be where the inputs were. The engine numbers them among the tensors.
    """
    where = [gpu if gpu is not None and gpu.machine is active() else None for gpu in getattr(self, "_virtual_gpus", ())]
    for gradient, gpu in zip(gradients, where, strict=False):
        if gpu is not None and gradient is not None and was_made_in_cpp(gradient):
            place(gradient, gpu)
    own = next((gpu for gpu in where if gpu is not None), None)
    with nullcontext() if own is None else torch.cuda.device(own.index):  # the engine has a thread per GPU
        results = _raw_apply(self, *gradients)
    if this_thread.in_kernel:
        return results
    checked, words = list(results if isinstance(results, tuple) else (results,)), f"Function {self.name()} returned an "
    for index, (position, gpu) in enumerate(getattr(self, "_inputs", ())):
        if position < len(checked) and self.next_functions[index][0] is not None:
            target = gpu if gpu is not None and gpu.machine.on else None
            checked[position] = _checked(index, checked[position], target, words)
    return tuple(checked)


@entrance
def _make_node(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a Python function. Its node notes the GPU of each result, for zeros, and of each input."""
    results = _raw_make_node.__get__(None, cls)(*args, **kwargs)
    tensors = results if isinstance(results, tuple) else (results,)
    nodes = (getattr(tensor, "grad_fn", None) for tensor in tensors)
    node: Any = next((node for node in nodes if isinstance(node, BackwardCFunction)), None)
    if node is not None:
        node._virtual_gpus = [gpu_of(tensor) if isinstance(tensor, torch.Tensor) else None for tensor in tensors]
        node._inputs = [(i, gpu_of(value)) for i, value in enumerate(args) if isinstance(value, torch.Tensor)]
    return results


def _register_hook(function: Callable[..., Any], self: torch.Tensor, hook: Callable[..., Any]) -> Any:
    return function(self, entrance(around(hook, _same_device)))


def _same_device(hook: Callable[..., Any], gradient: torch.Tensor) -> Any:
    """A hook's result is where the gradient is (check_variable_result in torch/csrc/autograd/custom_function.cpp)."""
    result = hook(gradient)
    is_checked = isinstance(result, torch.Tensor) and not (was_made_in_cpp(gradient) or was_made_in_cpp(result))
    if is_checked and gradient.is_cuda != result.is_cuda:
        name, types = getattr(hook, "__name__", "<unknown>"), f"was {gradient.type()} got {result.type()}"
        raise RuntimeError(f"hook '{name}' has changed the type of value ({types})")
    return result


_make_node.__name__ = _apply.__name__ = "apply"  # by which programs know it, such as spmd_types' type checker


def patches() -> list[Patch]:
    grad = property(_get_grad, _set_grad, _raw_grad.__delete__, _raw_grad.__doc__)
    replaced: list[Patch] = [(torch.Tensor, "grad", grad), (BackwardCFunction, "apply", _apply)]
    replaced += [(torch.Tensor, "register_hook", around(torch.Tensor.register_hook, _register_hook))]
    replaced += [(torch.autograd.Function, "apply", classmethod(_make_node))]
    return replaced + in_package("torch.autograd", _engine_run_backward)
