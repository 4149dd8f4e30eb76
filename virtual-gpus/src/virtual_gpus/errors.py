"""PyTorch's own error texts and types, for the mistakes that virtual GPUs must refuse as real ones do.

Whether an operator checks its arguments one by one ("got mat2 is on cpu, different from other tensors on cuda:0") or
all together ("found at least two devices") stands in native_functions.yaml, which every torch wheel carries: operators
marked `device_check: NoCheck` leave the check to TensorIterator, the others get the generated one.
"""

from __future__ import annotations

import functools
import pathlib
import re
import warnings
from types import FrameType

import torch

from virtual_gpus.machine import VirtualGPU
from virtual_gpus.memory.allocator import OutOfMemory, oom_message


class NotModelled(NotImplementedError):
    """A PyTorch function or operator that virtual GPUs do not have. Nothing falls back to the CPU silently."""


def not_modelled(what: str) -> NotModelled:
    """The error for `what` ("torch.cuda.CUDAGraph", "aten::foo")."""
    return NotModelled(
        f"{what} is not modelled by virtual GPUs. It needs a real GPU: run with GPUS=real on a machine that has one. "
        'What is modelled stands in help("virtual_gpus").'
    )


def not_ready() -> RuntimeError:
    """What cudaEventElapsedTime and its like say while work is still under way."""
    return torch.AcceleratorError("CUDA error: device not ready")


def invalid_device_ordinal() -> Exception:
    """CUDA's answer to a GPU that does not exist (c10/cuda/CUDAException.cpp)."""
    return _cuda_error("invalid device ordinal", "GPU device may be out of range, do you have enough GPUs?")


def no_room_for_context() -> Exception:
    """CUDA's answer to a process that comes to a GPU which other processes have filled."""
    where = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
    return _cuda_error("out of memory", f"Search for `cudaErrorMemoryAllocation' in {where} for more information.")


def _cuda_error(what: str, hint: str) -> Exception:
    return torch.AcceleratorError(
        f"CUDA error: {what}\n"
        f"{hint}\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, "
        "so the stacktrace below might be incorrect.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Device-side assertion tracking was not enabled by user."
    )


def numpy_of_gpu_tensor(device: torch.device) -> TypeError:
    """`Tensor.numpy()` of a GPU tensor (torch/csrc/utils/tensor_numpy.cpp)."""
    return TypeError(
        f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
    )


def wrong_generator(wanted: str, found: str) -> RuntimeError:
    """A CPU generator for a GPU tensor or the reverse (aten/src/ATen/core/Generator.h)."""
    return RuntimeError(f"Expected a '{wanted}' device type for generator but found '{found}'")


def out_of_memory_text(error: OutOfMemory, gpu: VirtualGPU) -> str:
    """PyTorch's sentence for an allocation that does not fit, with this GPU's figures."""
    return oom_message(error, gpu.index, gpu.machine.settings.version)


def needs_values(what: str) -> RuntimeError:
    """What `shapes_only` cannot answer: anything that depends on numbers inside a tensor."""
    return RuntimeError(
        f"{what} needs the values of a tensor on a virtual GPU, and shapes_only=True keeps none. "
        "Leave this call out, or run without shapes_only."
    )


def host_memory_ran_out(operator: str) -> MemoryError:
    """The laptop's memory is full, not the virtual GPU's."""
    return MemoryError(
        f"this computer's own memory ran out in {operator}: virtual GPUs keep their tensors in it. "
        "Take a smaller batch, or shapes_only=True, which needs no memory."
    )


# ---- tensors on different devices ------------------------------------------------------------------------------------

# Operators whose CUDA form is another operator, which is the one that complains: name -> (method, renamed arguments).
_CHECKED_AS = {
    "embedding": ("wrapper_CUDA__index_select", {"weight": "self", "indices": "index"}),
}


@functools.lru_cache(maxsize=1)
def _yaml_entries() -> dict[str, str]:
    """native_functions.yaml as {"mm": "...", "mm.out": "..."}: the lines below each `- func:`."""
    import torchgen

    path = pathlib.Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    text = path.read_text() if path.exists() else ""
    parts = re.split(r"^- func: ([\w.]+)\(", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@functools.cache
def checks_each_argument(name: str) -> bool:
    """True if CUDA compares the devices of this operator's arguments one by one, 0-dim ones as well."""
    entry = _yaml_entries().get(name)
    if entry is None:
        return False
    delegate = re.search(r"structured_delegate: ([\w.]+)", entry)
    if delegate:
        entry += _yaml_entries().get(delegate.group(1), "")
    return "device_check: NoCheck" not in entry


def _method(name: str) -> str:
    """torchgen's name of the generated CUDA function (torchgen/dest/register_dispatch_key.py)."""
    base, _, overload = name.partition(".")
    entry = _yaml_entries().get(name, "")
    if "structured: True" in entry or "structured_delegate:" in entry:
        return f"wrapper_CUDA_{base}" + (f"_{overload}" if overload else "")
    return f"wrapper_CUDA_{overload}_{base}"


def argument_elsewhere(name: str, argument: str, found: torch.device, common: torch.device) -> RuntimeError:
    """The generated check's error (c10/core/impl's common_device_check_failure)."""
    base = name.partition(".")[0]
    method, renamed = _CHECKED_AS.get(base, (None, {}))
    return RuntimeError(
        f"Expected all tensors to be on the same device, but got {renamed.get(argument, argument)} is on {found}, "
        f"different from other tensors on {common} (when checking argument in method {method or _method(name)})"
    )


def two_devices(first: torch.device, second: torch.device) -> RuntimeError:
    """TensorIterator's error (aten/src/ATen/TensorIterator.cpp)."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}!"
    )


def other_machine(device: torch.device) -> RuntimeError:
    """Tensors of an outer `virtual_gpus` and of one inside it: the same names, but other GPUs."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but one on {device} belongs to other virtual_gpus(...) than "
        "the rest: sets inside one another are different GPUs. Copy it over with .to(...)"
    )


def gpu_is_off(gpu: VirtualGPU) -> RuntimeError:
    """A tensor whose virtual GPUs were switched off meets a tensor of those that are on."""
    return RuntimeError(
        "Expected all tensors to be on the same device, but one of them was made on "
        f"{_off(gpu)} Make it again on the GPUs that are on, or move it there with .to(...)."
    )


def warn_of_gpu_that_is_off(gpu: VirtualGPU, frame: FrameType) -> None:
    """Say once per set of GPUs that its tensors are computed with on the CPU, while other virtual GPUs are on.

    frame: whose line the warning names.
    """
    if not gpu.machine.said_that_it_is_off:
        gpu.machine.said_that_it_is_off = True
        text = f"A tensor is used that was made on {_off(gpu)} Make it again, or move it with .to(...)."
        warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


def _off(gpu: VirtualGPU) -> str:
    what = "has no values, since they kept none" if gpu.machine.shapes_only else "is in the computer's memory now"
    return (
        f"cuda:{gpu.index} of virtual GPUs that are off: a later use_gpus(...) replaced them, or their block ended. "
        f"The tensor {what}."
    )


def lengths_on_gpu(name: str, tensor: torch.Tensor) -> RuntimeError:
    """The lengths of a packed sequence are read by the host (aten/src/ATen/native/PackedSequence.cpp)."""
    kind = torch._C.TensorBase.type(tensor).split(".")[-1].removesuffix("Tensor")
    return RuntimeError(
        f"'{name}' argument should be a 1D CPU int64 tensor, but got {tensor.dim()}D {tensor.device} {kind} tensor"
    )


def indices_elsewhere(indexed: torch.device) -> RuntimeError:
    """`x[i]` with `i` on a GPU that does not hold `x` (aten/src/ATen/native/IndexingUtils.h)."""
    return RuntimeError(f"indices should be either on cpu or on the same device as the indexed tensor ({indexed})")


def mask_elsewhere(mask: torch.device, self_: torch.device) -> RuntimeError:
    """`x.masked_fill(mask, ...)` with a mask on another device (aten/src/ATen/native/cuda/Indexing.cu)."""
    return RuntimeError(f"expected self and mask to be on the same device, but got mask on {mask} and self on {self_}")


def convolution_weight_elsewhere(input_type: str, weight_type: str) -> RuntimeError:
    """A convolution whose weight stayed on another device (aten/src/ATen/native/Convolution.cpp)."""
    return RuntimeError(f"Input type ({input_type}) and weight type ({weight_type}) should be the same")


def no_cuda_kernel(name: str) -> NotImplementedError:
    """An operator that has no CUDA form at all."""
    return NotImplementedError(
        f"Could not run '{name}' with arguments from the 'CUDA' backend: PyTorch has no CUDA kernel for it, so a real "
        "GPU would refuse it as well."
    )
