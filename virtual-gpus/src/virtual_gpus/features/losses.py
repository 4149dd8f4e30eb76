"""Losses on CUDA: memory, time and what is refused of each (aten/src/ATen/native/Loss.cpp). `mse_loss`
and `smooth_l1_loss` reduce into the storage that was made for the loss of every element: the scalar keeps all of it
alive. Their meta kernels make a small one, so with shapes only the size must be put right."""

from math import prod
from typing import Any

import torch

from virtual_gpus import figures
from virtual_gpus.arithmetic import ceil_div
from virtual_gpus.clock.cost import READS_AND_WRITES, OperatorClass, bytes_of
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.recipes import channels_first_copy, not_deterministic, packed, packed_copies, take_buffers
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import StorageAllocation, gpu_of, nbytes, put

_FITTED = figures.beside(__file__)
_NO_REDUCTION = 0  # at::Reduction::None
_LOSS_THREADS = 32  # NLL_LOSS_THREADS in cuda/Loss.cu
_IMAGE_THREADS, _SHARE = 1024, 128  # CUDA_NUM_THREADS, and what divides blocks_per_sample in cuda/NLLLoss2d.cu
_raw_ctc_loss: Any = torch.ctc_loss


def nll_loss_of_images(call: OpCall) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The loss of classes, for images of scores. A loss per pixel takes any strides (cuda/NLLLoss2d.cu)."""
    inputs = ("target",) if "grad_output" in call.op.positions else ("self", "target")
    return call.run(*packed_copies(call, () if call["reduction"] == _NO_REDUCTION else inputs, channels_first_copy))


def _nll_cost(operation: Operation) -> Cost:
    """Each thread of one block adds up many rows, and of images each thread of many blocks many pixels."""
    fitted, forward = _FITTED["nll_loss"], "grad_output" not in operation.arguments
    (rows, *sides), per_row = operation.inputs[2 - forward].shape or (1,), "per_row" if forward else "per_row_backward"
    if sides:
        blocks, at_once = max(1, prod(sides) // (_IMAGE_THREADS * _SHARE)), 2 * operation.spec.multi_processor_count
        rows = _LOSS_THREADS * ceil_div(prod(sides), _IMAGE_THREADS * blocks) * ceil_div(rows * blocks, at_once)
    written = 0 if forward else bytes_of(operation.outputs)
    seconds = operation.kernel * (fitted["floor"] + fitted[per_row] * rows) + operation.reading(written)
    return Cost(seconds, 1 if not written else 2)


def reduced_in_place(call: OpCall) -> torch.Tensor:
    """A loss per element, summed up into the same storage by way of a second one, or of a scalar."""
    if call["reduction"] == _NO_REDUCTION:
        return call.run()
    result = call.compute()
    shape = torch._C._infer_size(call["self"].shape, call["target"].shape)
    whole = shape.numel() * result.element_size()
    put(result, StorageAllocation(call.gpu, whole))
    with call.scratch(whole if call.op.base in ("mse_loss", "smooth_l1_loss") else result.element_size()):
        take_buffers(call, torch.empty(shape, device="meta", dtype=result.dtype), max(4, result.itemsize))
    return call.place(result)


def reduced(call: OpCall) -> torch.Tensor:
    """A loss per element, then its sum or mean in a storage of its own."""
    return call.run_with(nbytes(call["self"]) if call["reduction"] != _NO_REDUCTION else 0)


def with_logits(call: OpCall) -> torch.Tensor:
    """binary_cross_entropy_with_logits: log-sigmoid, the loss per element and a scaled copy, then the reduction."""
    size = nbytes(call["self"])
    with call.scratch(size, size):
        result = call.run()
        if call["reduction"] != _NO_REDUCTION:
            take_buffers(call, call["self"], max(4, call["self"].itemsize))
    return result


def ctc_loss(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *args: Any, **kwargs: Any) -> Any:
    """The host reads the lengths (LossCTC.cpp), but not where C++ sees a dispatch mode, as here."""
    lengths = [input_lengths, target_lengths]
    if gpu_of(log_probs) is not None:
        lengths = [part.reshape(-1).tolist() if isinstance(part, torch.Tensor) else part for part in lengths]
    return _raw_ctc_loss(log_probs, targets, *lengths, *args, **kwargs)


_PICKS = OperatorClass(_nll_cost, arguments=("grad_output",))
_OF_IMAGES = not_deterministic("nll_loss2d_forward_out_cuda_template", lambda call: call["reduction"] != _NO_REDUCTION)
OPERATORS = {
    "nll_loss_forward": Row(_PICKS, packed("target"), refuses_more=True),
    "nll_loss_backward": Row(_PICKS, packed("target")),
    "nll_loss2d_forward": Row(_PICKS, nll_loss_of_images, _OF_IMAGES, refuses_more=True),
    "nll_loss2d_backward": Row(_PICKS, nll_loss_of_images),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "soft_margin_loss"), Row(READS_AND_WRITES, reduced_in_place)),
    "binary_cross_entropy": Row(READS_AND_WRITES, reduced_in_place, refuses_more=True),
    "huber_loss": Row(READS_AND_WRITES, reduced),
    "binary_cross_entropy_with_logits": Row(READS_AND_WRITES, with_logits),
    "_ctc_loss_backward": Row(READS_AND_WRITES, lambda call: call.run(nbytes(call["log_alpha"])),  # log_beta
                              not_deterministic("ctc_loss_backward_gpu")),
}  # fmt: skip


def patches() -> list[Patch]:
    return [(torch, "ctc_loss", ctc_loss)]
