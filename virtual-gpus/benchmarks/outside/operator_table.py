"""Every operator of PyTorch's own table of operators, on a virtual GPU and on the CPU.

The table is torch.testing._internal.common_methods_invocations.op_db. It needs NumPy and the package expecttest.

    pytest -m outside tests/test_outside.py -k operators
"""

import gc
import itertools
import unittest.mock
import warnings
from contextlib import nullcontext

import torch
from torch.utils._pytree import tree_leaves, tree_map
from virtual_gpus import virtual_gpus

SAMPLES = 8  # of each operator
PARTS = 10

# What differs, and why. Everything else is equal: values, shapes, strides, dtypes, devices, gradients.
NO_VALUES = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
             "as_strided.partial_views")  # fmt: skip  # never written; the last one reads around the sample's own view
NO_CUDA_KERNEL = ("histogram", "histogramdd")  # PyTorch has none
CUDAS_STRIDES = ("nn.functional.scaled_dot_product_attention",)  # flash attention keeps the heads innermost
# Of an empty matrix C++ makes the rank by itself. `torch.linalg.matrix_rank` then puts it on the GPU, but the
# table has kept PyTorch's own function.
MAY_BE_ON_THE_CPU = ("linalg.matrix_rank", "linalg.matrix_rank.hermitian")
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 1e-2, torch.float32: 1e-4, torch.complex64: 1e-4}


def moved(tensor: torch.Tensor, device) -> torch.Tensor:
    """A copy on `device` with the same strides, which `to` keeps only for dense tensors."""
    copy = tensor.detach().to(device, copy=True)
    if copy.layout == torch.strided and copy.stride() != tensor.stride():
        if 0 not in tensor.stride():
            copy = torch.empty_strided(copy.shape, tensor.stride(), dtype=copy.dtype, device=device).copy_(copy)
        elif tensor.dim() and tensor.stride(0) == 0:
            copy = copy[:1].expand(tensor.shape)
    return copy.requires_grad_(tensor.requires_grad)


def arguments(sample, device) -> tuple:
    """(input, args, kwargs) of a sample, with its tensors on `device` and its device named so."""

    def place(value):
        if isinstance(value, torch.Tensor):
            return moved(value, device)
        return torch.device(device) if isinstance(value, torch.device) else value

    kwargs = {name: device if name == "device" else value for name, value in sample.kwargs.items()}
    return tree_map(place, (sample.input, list(sample.args), kwargs))


def tensors(value) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def run(function, sample, device, with_grad: bool, seed: int = 0) -> list[torch.Tensor | None]:
    """All tensors that a call returns, and the gradients of its inputs. seed: added to what the table sets."""
    first, args, kwargs = arguments(sample, device)
    inputs = tensors((first, args, kwargs))
    set_seed = torch.manual_seed
    with unittest.mock.patch.object(torch, "manual_seed", lambda number: set_seed(number + seed)):
        torch.manual_seed(7)
        with nullcontext() if inputs else torch.device(device):
            made = tensors(function(first, *args, **kwargs))
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    roots = [tensor for tensor in made if tensor.requires_grad]
    if not (with_grad and leaves and roots):
        return made
    ones = [torch.ones_like(root) for root in roots]
    return made + list(torch.autograd.grad(roots, leaves, ones, allow_unused=True))


def check(name: str, function, sample, with_grad: bool) -> None:
    """An error says what is not as on the CPU."""
    results = []
    for device in ("cpu", "cuda:0"):
        try:
            results.append(run(function, sample, device, with_grad))
        except Exception as error:  # the operator's, which both must raise
            results.append(error)
    on_cpu, on_gpu = results
    failed = [isinstance(result, Exception) for result in results]
    if any(failed):
        refused = name in NO_CUDA_KERNEL and isinstance(on_gpu, NotImplementedError)
        assert refused or all(failed), f"{on_cpu!r} on the CPU, {on_gpu!r} on the GPU"[:400]
        return
    is_drawn = name in NO_VALUES
    for one, other in zip(on_cpu, on_gpu, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert other.is_cuda or name in MAY_BE_ON_THE_CPU, other.device
        assert (one.dtype, one.layout, one.shape) == (other.dtype, other.layout, other.shape)
        if one.layout == torch.strided and one.numel() and name not in CUDAS_STRIDES:
            assert one.stride() == other.stride()
        if not is_drawn and not close(one, other):
            draws = [run(function, sample, "cpu", False, seed) for seed in (0, 1)]
            is_drawn = not all(map(close, *draws))
            assert is_drawn, "other values"


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    tolerance = TOLERANCE.get(one.dtype, 1e-7)
    try:
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True, check_device=False)
    except AssertionError:
        return False
    return True


def wanted_dtype(op) -> torch.dtype | None:
    """Floating point where there is one."""
    wanted = (torch.float32, torch.int64, torch.complex64, torch.bool)
    return next((dtype for dtype in wanted if dtype in op.supported_dtypes("cpu")), None)


def differences(part: int) -> dict[str, str]:
    """What is not as on the CPU in every tenth row of the table, by the operator's name."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = {}
    with virtual_gpus(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in op_db[part::PARTS]:
            name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
            dtype = wanted_dtype(op)
            if dtype is None:
                continue
            with_grad = op.supports_autograd and dtype.is_floating_point
            torch.manual_seed(0)
            samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=with_grad), SAMPLES))
            gc.collect()
            before = torch.cuda.memory_allocated()
            try:
                for sample in samples:
                    check(name, op, sample, with_grad)
            except AssertionError as error:
                found[name] = str(error)
            if torch.cuda.memory_allocated() != before:
                gc.collect()
            if torch.cuda.memory_allocated() != before:
                found[name] = f"{torch.cuda.memory_allocated() - before} bytes are not given back"
    return found
