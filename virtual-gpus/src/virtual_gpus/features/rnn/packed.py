"""Packed sequences: the host reads their lengths, on the CPU (aten/src/ATen/native/PackedSequence.cpp)."""

from __future__ import annotations

from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.errors import scalar_type
from virtual_gpus.placement.storages import gpu_of


def packed(call: OpCall):
    """The data on the GPU, the lengths on the CPU."""
    result = call.compute()
    call.place(result[0])
    return result


def check_lengths(call: OpCall) -> None:
    """Raises PyTorch's RuntimeError for lengths on a GPU."""
    lengths = call["lengths"]
    if gpu_of(lengths) is not None:
        found = f"{lengths.dim()}D {lengths.device} {scalar_type(lengths)} tensor"
        raise RuntimeError(f"'lengths' argument should be a 1D CPU int64 tensor, but got {found}")


RECIPES = dict.fromkeys(("_pack_padded_sequence", "_pad_packed_sequence"), packed)
CHECKS = {"_pack_padded_sequence": check_lengths}
ON_THE_HOST = {"_pack_padded_sequence": {"lengths"}} | dict.fromkeys(
    ("_pad_packed_sequence", "_pack_padded_sequence_backward", "lstm", "gru", "rnn_tanh", "rnn_relu"), {"batch_sizes"}
)
