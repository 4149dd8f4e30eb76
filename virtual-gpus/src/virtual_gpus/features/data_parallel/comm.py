"""The C++ functions below torch.nn.parallel.comm (torch/csrc/cuda/comm.cpp): broadcast, scatter and gather.

The functions of torch.nn.parallel.comm itself are PyTorch's own. What CUDA refuses is refused here, in the same words.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext

import torch
from torch._utils import _flatten_dense_tensors
from torch.nn.parameter import is_lazy

from virtual_gpus.dispatch.copies import move
from virtual_gpus.entrance import entrance
from virtual_gpus.features.cuda.devices import gpu_at
from virtual_gpus.features.data_parallel.parallel import collective_here
from virtual_gpus.placement.storages import gpu_of


@entrance
def _broadcast(tensor, devices):
    """Copies of `tensor` on each of `devices`; the one on its own GPU is the tensor itself."""
    for device in devices:
        _check(device >= 0, f"Expected non-negative device index, but got {device}")
    return [move(tensor, gpu_at(device)) for device in devices]


@entrance
def _broadcast_out(tensor, out):
    """Copy `tensor` into each tensor of `out`, which are on GPUs."""
    for index, target in enumerate(out):
        _check_output(index, target)
        _check(
            target.shape == tensor.shape,
            f"Expected all output tensors to have same shape as the source tensor {list(tensor.shape)}, but output "
            f"tensor at index {index} has shape {list(target.shape)}",
        )
    return [target.copy_(tensor) for target in out]


@entrance
def _broadcast_coalesced(tensors, devices, buffer_size: int):
    """Copies of many tensors on each of `devices`, sent in flat buffers of `buffer_size` bytes.

    The first device's list holds the tensors themselves, the others' hold pieces of flat buffers. Returns one list per
    device.
    """
    # C++ sends an UninitializedParameter, whose methods raise, like any other. DataParallel refuses it afterwards.
    tensors = [tensor.data if is_lazy(tensor) else tensor for tensor in tensors]
    gpus = [gpu_at(device) for device in devices]
    same = all(gpu_of(tensor) is gpus[0] for tensor in tensors)
    _check(same, f"All tensors must be on devices[0]: {devices[0]}")
    copies = [{} for _ in gpus[1:]]
    for chunk in _chunks([t for t in tensors if not t.is_sparse], buffer_size):
        for made, pieces in zip(copies, _sent(chunk, gpus[1:]), strict=True):
            made.update(zip(map(id, chunk), pieces, strict=True))
    return [list(tensors)] + [
        [move(t, gpu) if t.is_sparse else made[id(t)] for t in tensors]
        for made, gpu in zip(copies, gpus[1:], strict=True)
    ]


# c10::ScalarType, in its order: what remains at the end is sent type by type.
_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
          torch.complex32, torch.complex64, torch.complex128, torch.bool)  # fmt: skip


def _chunks(tensors, limit: int):
    """Groups of one dtype, each closed by the tensor that fills it (`take_tensors`, torch/csrc/utils/tensor_flatten).

    PyTorch's Python has a function of that name as well, which closes a group before it would overflow.
    """
    groups, sizes = defaultdict(list), defaultdict(int)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
        sizes[tensor.dtype] += tensor.numel() * tensor.element_size()
        if sizes[tensor.dtype] >= limit:
            yield groups.pop(tensor.dtype)
            sizes[tensor.dtype] = 0
    yield from (groups[t] for t in sorted(groups, key=lambda t: _TYPES.index(t) if t in _TYPES else len(_TYPES)))


@torch.no_grad()
def _sent(chunk, gpus):
    """Copies of a chunk's tensors on each GPU, cut from one flat buffer there; that at the source goes at once."""
    flat = _flatten_dense_tensors(chunk)
    if not gpus:
        return []
    with gpus[0].machine.without_time():  # NCCL sends to all at once
        made = [_pieces(move(flat, gpu, copy=True), chunk) for gpu in gpus]
    collective_here([gpu_of(flat), *gpus], "broadcast", flat.numel() * flat.element_size())
    return made


def _pieces(flat, like):
    """Tensors shaped as `like` on the storage of `flat`, each a tensor of its own rather than a view of it."""
    pieces, offset = [], 0
    for tensor in like:
        piece = torch.empty(0, dtype=flat.dtype, device=flat.device)
        pieces.append(piece.set_(flat.untyped_storage(), offset, tensor.size()))
        offset += tensor.numel()
    return pieces


@entrance
def _scatter(tensor, devices, chunk_sizes=None, dim: int = 0, streams=None):
    """Pieces of `tensor` along `dim`, one per device; a piece that is on its GPU already is not copied."""
    _check(devices, "Expected at least one device to scatter to")
    _check(
        chunk_sizes is None or len(chunk_sizes) == len(devices),
        "Expected devices and chunk_sizes to be of same length, but got "
        f"len(devices) = {len(devices)} and len(chunk_sizes) = {len(chunk_sizes or ())}",
    )
    gpus = [gpu_at(device) for device in devices]
    pieces = tensor.chunk(len(gpus), dim) if chunk_sizes is None else tensor.split_with_sizes(list(chunk_sizes), dim)
    made = []
    for index, (piece, gpu) in enumerate(zip(pieces, gpus, strict=False)):
        if gpu_of(tensor) is gpu:
            made.append(piece)
            continue
        with _on_stream(streams, index, gpu):
            # DataParallel copies inputs from the CPU on a stream of their own: their blocks come from segments of that.
            made.append(move(piece, gpu, blocking=not (streams and streams[index])))
    return made


@entrance
def _scatter_out(tensor, out, dim: int = 0, streams=None):
    """Copy the pieces of `tensor` along `dim` into the tensors of `out`, which are on GPUs and say how long each is."""
    _check(out, "Expected at least one output tensor to scatter to")
    dim %= tensor.dim()
    for index, target in enumerate(out):
        _check_output(index, target)
        expected = list(tensor.shape)
        if target.dim() == len(expected):
            expected[dim] = target.size(dim)
        _check(
            list(target.shape) == expected,
            f"Output tensor at index {index} has incorrect shape: {list(target.shape)}. Expected same shape except for "
            f"scatter dim {dim} as the source tensor: {list(tensor.shape)}",
        )
    sizes = [target.size(dim) for target in out]
    _check(
        sum(sizes) == tensor.size(dim),
        f"Total size for output tensors along scatter dim {dim} does not match the source tensor size at dim {dim}. "
        f"Expected {tensor.size(dim)}, but got total size {sum(sizes)}",
    )
    for index, (target, piece) in enumerate(zip(out, tensor.split_with_sizes(sizes, dim), strict=True)):
        with _on_stream(streams, index, gpu_of(target)):
            target.copy_(piece, non_blocking=True)
    return out


def _on_stream(streams, index: int, gpu):
    """A context in which copies to `gpu` run in the stream that is given for it, if one is."""
    stream = streams[index] if streams and index < len(streams) else None
    if stream is None:
        return nullcontext()
    _check(
        stream.device_index == gpu.index,
        f"Expected the device associated with the stream at index {index} (was {stream.device_index}) to match the "
        f"device supplied at that index (expected {gpu.index})",
    )
    return stream


@entrance
def _gather(tensors, dim: int, destination: int | None = None):
    """One tensor of all, along `dim`, on the GPU `destination` (None: the current one; -1: the CPU)."""
    size = _gathered_size(tensors, dim)
    device = torch.device("cpu") if destination == -1 else torch.device("cuda", destination)
    out = torch.empty(size, dtype=tensors[0].dtype, device=device, memory_format=_format(tensors))
    return _fill(out, tensors, dim)


@entrance
def _gather_out(tensors, out, dim: int):
    """`_gather` into `out`, a tensor on any device."""
    size = _gathered_size(tensors, dim)
    _check(list(out.shape) == size, f"Expected out tensor to have shape {size}, but got {list(out.shape)}")
    return _fill(out, tensors, dim)


def _fill(out, tensors, dim: int):
    for piece, tensor in zip(out.split_with_sizes([t.size(dim) for t in tensors], dim), tensors, strict=True):
        piece.copy_(tensor)
    return out


def _gathered_size(tensors, dim: int) -> list[int]:
    """The size of the result, once the inputs are found to fit together."""
    _check(tensors, "Expected at least one tensor to gather from")
    size = list(tensors[0].shape)
    for index, tensor in enumerate(tensors):
        where = f"tensor at index {index}"
        _check(
            gpu_of(tensor) is not None,
            f"Expected all input tensors to be CUDA tensors, but {where} has device {tensor.device}",
        )
        _check(
            tensor.dim() == len(size),
            f"Expected all input tensors to have the same number of dimensions, but {where}has {tensor.dim()} "
            f"dimensions, (expected {len(size)})",
        )
        size[dim] = tensor.size(dim)
        _check(
            list(tensor.shape) == size,
            f"Input {where} has invalid shape {list(tensor.shape)}, but expected {size}",
        )
    size[dim] = sum(tensor.size(dim) for tensor in tensors)
    return size


def _format(tensors) -> torch.memory_format:
    """Channels last if all tensors are."""
    last = all(t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
    plain = all(t.is_contiguous() for t in tensors)
    return torch.channels_last if last and not plain else torch.contiguous_format


def _check_output(index: int, target) -> None:
    _check(
        gpu_of(target) is not None,
        f"Expected all output tensors to be CUDA tensors, but output tensor at index {index} has device "
        f"'{target.device}'",
    )


def _check(holds, words: str) -> None:
    """TORCH_CHECK."""
    if not holds:
        raise RuntimeError(words)


def patches():
    """See `features`. A PyTorch without CUDA lacks these names, and its torch.nn.parallel.comm asks for them too."""
    functions = (_broadcast, _broadcast_out, _broadcast_coalesced, _scatter, _scatter_out, _gather, _gather_out)
    return [(torch._C, function.__name__, function) for function in functions]
