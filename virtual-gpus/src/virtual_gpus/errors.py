"""Errors of virtual GPUs: PyTorch's own texts for mistakes that real GPUs refuse, and texts for what is not modelled.

Here are those of the layers below the features, and those that several modules need. Others are where they are raised.

Some operators check the devices of their arguments one by one ("got mat2 is on cpu, different from other tensors on
cuda:0"), others check them all together ("found at least two devices"). The file native_functions.yaml, which is part
of every torch wheel, says which. Operators marked `device_check: NoCheck` leave the check to TensorIterator. All others
that have a kernel for CUDA use the generated check; those without one are made of operators that check.
"""

import functools
import pathlib
import re
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch

from virtual_gpus import figures

WORDS: dict[str, str] = {}  # of features, whose figures have them: see `raise_instead_of`


class NotModelled(NotImplementedError):
    """A PyTorch function or operator that virtual GPUs do not model. They never fall back to the CPU silently."""


def not_modelled(what: str, instead: str = "") -> NotModelled:
    """The error for `what` ("torch.cuda.CUDAGraph", "aten::foo"). instead: a sentence about another way."""
    return NotModelled(
        f"Virtual GPUs do not model {what}. {instead + ' ' if instead else ''}To use it, run without virtual GPUs on a "
        "machine that has a real GPU. "
        'The known limits are listed in help("virtual_gpus").'
    )


def refusing(path: str, instead: str = "") -> Callable[..., Any]:
    """A function that only says that `path` ("torch.cuda.temperature") is not modelled. instead: another way."""

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise not_modelled(path, instead)

    refused.__name__ = path.rpartition(".")[2]
    return refused


def cuda_error(what: str, hint: str) -> Exception:
    """The exception of c10/cuda/CUDAException.cpp. hint: PyTorch's own, or the name of the error, to search for."""
    if hint.startswith("cudaError"):
        where = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
        hint = f"Search for `{hint}' in {where} for more information."
    return torch.AcceleratorError(
        f"CUDA error: {what}\n"
        f"{hint}\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, "
        "so the stacktrace below might be incorrect.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Device-side assertion tracking was not enabled by user."
    )


class NeedsValues(RuntimeError):
    """A call depends on the values inside a tensor, which `shapes_only` does not keep."""


def needs_values(what: str) -> NeedsValues:
    """The error for a call that depends on the values inside a tensor, which `shapes_only` does not keep."""
    return NeedsValues(
        f"With shapes_only=True, virtual GPUs keep no values, but {what} needs them. "
        "Leave out this call, or run without shapes_only."
    )


# ---- tensors on different devices ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _yaml_entries() -> dict[str, str]:
    """native_functions.yaml as {"mm": "...", "mm.out": "..."}: the lines below each `- func:`."""
    import torchgen

    path = pathlib.Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    parts = re.split(r"^- func: ([\w.]+)\(", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@functools.cache
def checks_each_argument(name: str) -> bool:
    """True if CUDA compares the devices of this operator's arguments one by one, including 0-dim arguments.

    It does in the function that is generated for CUDA (torchgen's `gen_device_check`), which `stack` lacks.
    """
    entry = _yaml_entries().get(name, "")
    delegate = re.search(r"structured_delegate: ([\w.]+)", entry)
    kernels = _yaml_entries()[delegate.group(1)] if delegate else entry
    has_kernel = re.search(r"^    (\w+, )*CUDA[,:]", kernels, re.MULTILINE) is not None
    return has_kernel and "device_check: NoCheck" not in entry


def _method(name: str) -> str:
    """torchgen's name of the generated CUDA function (torchgen/dest/register_dispatch_key.py)."""
    base, _, overload = name.partition(".")
    entry = _yaml_entries().get(name, "")
    base += "_out" if re.match(r"[^>]*\*, [^>]*!\)", entry) else ""  # it is given its results by name
    if "structured: True" in entry or "structured_delegate:" in entry:
        return f"wrapper_CUDA_{base}" + (f"_{overload}" if overload else "")
    return f"wrapper_CUDA_{overload}_{base}"


def argument_elsewhere(name: str, argument: str, device: torch.device, common: torch.device) -> RuntimeError:
    """The generated check's error (c10/core/impl's common_device_check_failure)."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but got {argument} is on {device}, "
        f"different from other tensors on {common} (when checking argument in method {_method(name)})"
    )


def two_devices(first: torch.device, second: torch.device) -> RuntimeError:
    """TensorIterator's error (aten/src/ATen/TensorIterator.cpp)."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}!"
    )


def gpu_is_off(gpu: Any) -> RuntimeError:
    """The error for a tensor whose virtual GPUs are off, in one operator with a tensor on GPUs that are on."""
    return RuntimeError(
        "Expected all tensors to be on the same device, but one of them was made on "
        f"{_off(gpu)} Create it again on the GPUs that are on now, or move it there with .to(...)."
    )


def warn_of_gpu_that_is_off(gpu: Any, frame: FrameType) -> None:
    """Warn that an operator runs on the CPU because its tensor's virtual GPUs are off, while others are on.

    The warning appears once per set of GPUs. frame: the caller whose line the warning names.
    """
    if not gpu.machine.said_that_it_is_off:
        gpu.machine.said_that_it_is_off = True
        text = f"This line uses a tensor that was made on {_off(gpu)} Create it again, or move it with .to(...)."
        warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


def _off(gpu: Any) -> str:
    values = "has no values, because those GPUs kept none" if gpu.machine.shapes_only else "is now on the CPU"
    return (
        f"cuda:{gpu.index} of virtual GPUs that are off. They were stopped or replaced, or their block ended. "
        f"The tensor {values}."
    )


def scalar_type(tensor: torch.Tensor) -> str:
    """The type of a tensor's numbers as C++ calls it: "Float" for torch.float32."""
    return torch._C.TensorBase.type(tensor).rpartition(".")[2].removesuffix("Tensor")


def other_scalar_type(tensor: torch.Tensor, other: torch.Tensor) -> RuntimeError:
    """The error for `other`, which a kernel reads as numbers of the type of `tensor` (TensorMethods.cpp)."""
    return RuntimeError(f"expected scalar type {scalar_type(tensor)} but found {scalar_type(other)}")


def raise_instead_of(error: Exception, operator: str, shapes_only: bool) -> None:
    """Raise what the program is told in place of a kernel's `error`, if anything: kernels and types of tensors have
    CUDA's names (errors.toml). operator: "aten::mm", with its overload."""
    text, name = str(error), operator.partition("::")[2]
    if "DefaultCPUAllocator" in text:
        raise MemoryError(
            f"This computer ran out of its own memory in {name}. Virtual GPUs keep their tensors in "
            "that memory. Use a smaller batch, or use shapes_only=True, which keeps no values."
        ) from None
    if text.startswith("Could not run '") and "'CPU' backend" in text:
        raise not_modelled(f"{operator}, which exists only for CUDA") from None
    if shapes_only and isinstance(error, NotImplementedError) and "Meta" in text:
        raise needs_values(name.partition(".")[0]) from None
    words = text
    for of_cpu, of_cuda in (WORDS | figures.beside(__file__)).items():
        words = re.sub(of_cpu, of_cuda, words)
    if words != text:
        raise type(error)(words) from None
