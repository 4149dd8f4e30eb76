"""The C++ functions below torch.nn.parallel.comm (torch/csrc/cuda/comm.cpp): broadcast, scatter and gather.

The functions of torch.nn.parallel.comm itself are PyTorch's own. What CUDA refuses is refused here, in the same words.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch

from virtual_gpus import errors
from virtual_gpus.dispatch.copies import move
from virtual_gpus.entrance import entrance
from virtual_gpus.features.cuda.devices import gpu_at
from virtual_gpus.features.data_parallel.parallel import collective_here
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import gpu_of, nbytes, place_all
from virtual_gpus.threads import below

# c10::ScalarType, in its order: what remains at the end is sent type by type.
_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
          torch.complex32, torch.complex64, torch.complex128, torch.bool)  # fmt: skip


@entrance
def _broadcast(tensor: torch.Tensor, devices: list[int]) -> list[torch.Tensor]:
    """Copies of `tensor` on each of `devices`; the one on its own GPU is the tensor itself."""
    return [move(tensor, gpu_at(device)) for device in devices]


@entrance
def _broadcast_coalesced(tensors: list[torch.Tensor], devices: list[int], buffer_size: int) -> list[list[torch.Tensor]]:
    """Copies of many tensors on each of `devices`, sent in flat buffers of `buffer_size` bytes.

    Returns one list per device. The first holds the tensors themselves, the others hold pieces of flat buffers.
    """
    # C++ sends an UninitializedParameter, whose methods raise, like any other. DataParallel refuses it afterwards.
    tensors = [tensor.data if torch.nn.parameter.is_lazy(tensor) else tensor for tensor in tensors]
    gpus = [gpu_at(device) for device in devices]
    if any(gpu_of(tensor) is not gpus[0] for tensor in tensors):
        raise RuntimeError(f"All tensors must be on devices[0]: {devices[0]}")
    copies: list[dict[int, torch.Tensor]] = [{} for _ in gpus[1:]]
    for chunk in _chunks([t for t in tensors if not t.is_sparse], buffer_size):
        for by_id, pieces in zip(copies, _sent(chunk, gpus[1:]), strict=True):
            by_id.update(zip(map(id, chunk), pieces, strict=True))
    pairs = zip(copies, gpus[1:], strict=True)
    return [tensors, *([move(t, gpu) if t.is_sparse else by_id[id(t)] for t in tensors] for by_id, gpu in pairs)]


def _chunks(tensors: list[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Groups of one dtype, each closed by the tensor that fills it (`take_tensors`, torch/csrc/utils/tensor_flatten).

    PyTorch's Python has a function of that name as well, which closes a group before it would overflow.
    """
    groups, sizes = defaultdict[torch.dtype, list[torch.Tensor]](list), defaultdict[torch.dtype, int](int)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
        sizes[tensor.dtype] += nbytes(tensor)
        if sizes[tensor.dtype] >= limit:
            yield groups.pop(tensor.dtype)
            sizes[tensor.dtype] = 0
    yield from (groups[t] for t in sorted(groups, key=lambda t: _TYPES.index(t) if t in _TYPES else len(_TYPES)))


@torch.no_grad()
def _sent(chunk: list[torch.Tensor], gpus: list[VirtualGPU]) -> list[list[torch.Tensor]]:
    """Copies of a chunk's tensors on each GPU, cut from one flat buffer there; that at the source goes at once."""
    flat = torch._utils._flatten_dense_tensors(chunk)
    if not gpus:
        return []
    with below():
        copies = [torch._utils._unflatten_dense_tensors(flat.clone(), chunk) for _ in gpus]
        copies = [[piece.data for piece in pieces] for pieces in copies]  # tensors of their own rather than views
    for pieces, gpu in zip(copies, gpus, strict=True):
        place_all(pieces, gpu)
    collective_here([gpu_of(flat), *gpus], "broadcast", nbytes(flat))  # NCCL sends to all at once
    gpus[0].machine.follower.kernel("broadcast", [flat], chain(*copies))
    return copies


@entrance
def _scatter(
    tensor: torch.Tensor, devices: Sequence[int], chunk_sizes: Any = None, dim: int = 0, streams: Any = None
) -> list[torch.Tensor]:
    """Pieces of `tensor` along `dim`, one per device; a piece that is on its GPU already is not copied."""
    if chunk_sizes is not None and len(chunk_sizes) != len(devices):
        found = f"len(devices) = {len(devices)} and len(chunk_sizes) = {len(chunk_sizes)}"
        raise RuntimeError(f"Expected devices and chunk_sizes to be of same length, but got {found}")
    gpus = [gpu_at(device) for device in devices]
    pieces = tensor.chunk(len(gpus), dim) if chunk_sizes is None else tensor.split_with_sizes(list(chunk_sizes), dim)
    scattered = list[torch.Tensor]()
    for index, (piece, gpu) in enumerate(zip(pieces, gpus, strict=False)):
        if gpu_of(tensor) is gpu:
            scattered.append(piece)
            continue
        stream = streams[index] if streams else None
        with stream or nullcontext():
            # DataParallel copies inputs from the CPU on a stream of their own: their blocks come from segments of that.
            scattered.append(move(piece, gpu, blocking=stream is None))
    return scattered


@entrance
def _gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None = None) -> torch.Tensor:
    """One tensor of all, along `dim`, on the GPU `destination` (None: the current one; -1: the CPU)."""
    size = list(tensors[0].shape)
    size[dim] = sum(tensor.size(dim) for tensor in tensors)
    for index, tensor in enumerate(tensors):
        if gpu_of(tensor) is None:
            where = f"tensor at index {index} has device {tensor.device}"
            raise RuntimeError(f"Expected all input tensors to be CUDA tensors, but {where}")
        expected = size.copy()
        expected[dim] = tensor.size(dim)
        if list(tensor.shape) != expected:
            found = f"Input tensor at index {index} has invalid shape {list(tensor.shape)}"
            raise RuntimeError(f"{found}, but expected {expected}")
    device = torch.device("cpu" if destination == -1 else "cuda" if destination is None else f"cuda:{destination}")
    last = all(t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
    only_last = last and not all(t.is_contiguous() for t in tensors)
    layout = torch.channels_last if only_last else torch.contiguous_format
    out = torch.empty(size, dtype=tensors[0].dtype, device=device, memory_format=layout)
    for piece, tensor in zip(out.split_with_sizes([t.size(dim) for t in tensors], dim), tensors, strict=True):
        piece.copy_(tensor)
    return out


def patches() -> list[Patch]:
    """See `features`. A PyTorch without CUDA lacks these names, and its torch.nn.parallel.comm asks for them too."""
    rows: list[Patch] = [(torch._C, f.__name__, f) for f in (_broadcast, _broadcast_coalesced, _scatter, _gather)]
    for name in ("broadcast", "scatter", "gather"):
        refused = errors.refusing(f"torch.nn.parallel.comm.{name} with out", "Let it make the tensors.")
        rows.append((torch._C, f"_{name}_out", refused))
    return rows
