"""Which storage lives on which virtual GPU.

A tensor on a virtual GPU is an ordinary CPU tensor (a meta tensor with `shapes_only`) whose *storage* carries a `Home`.
PyTorch keeps a storage's Python object as long as the storage itself, so the Home lives exactly as long as the data,
whoever holds it: a Python name, a view, or the autograd graph. When it goes, its block goes back to the allocator.
"""

from __future__ import annotations

import functools
import sys
import threading
from contextlib import contextmanager

import torch

from virtual_gpus.machine import VirtualGPU, VirtualMachine, active
from virtual_gpus.memory.allocator import OutOfMemory

RAW_DEVICE = torch._C.TensorBase.device.__get__  # what C++ thinks: cpu or meta

# `inside` is per thread: true while an operator runs below the dispatch mode. There `tensor.device` must be the raw
# device, since meta kernels are Python and read it.
local = threading.local()


@contextmanager
def below():
    """Compute below the accounting: operators run as they are, and nothing that they make is placed."""
    before, local.inside = is_inside(), True
    try:
        yield
    finally:
        local.inside = before


def is_inside() -> bool:
    """True while this thread runs an operator's kernel, where virtual devices must not show."""
    return getattr(local, "inside", False)


def allocate(gpu: VirtualGPU, nbytes: int, home):
    """A block of `nbytes` on `gpu` that lives as long as `home`, a Home or another object.

    Raises OutOfMemory, which then knows its GPU.
    """
    try:
        return gpu.allocator.malloc(nbytes, gpu.stream, gpu.allocator.owner_of(home))
    except OutOfMemory as error:
        error.gpu = gpu
        raise


class Home:
    """The block of one storage on one GPU. When it dies, the allocator has the block back (see `owner_of`)."""

    __slots__ = ("__weakref__", "block", "gpu", "nbytes")

    def __init__(self, gpu: VirtualGPU, nbytes: int):
        allocator = gpu.allocator
        if not allocator.device.context:
            gpu.start_context()
        self.gpu = gpu
        self.nbytes = nbytes
        try:  # as `allocate` does: this runs for every tensor, and each call costs
            self.block = allocator.malloc(nbytes, gpu.stream if gpu.streams else 0, allocator.owner_of(self))
        except OutOfMemory as error:
            error.gpu = gpu
            raise

    def resize(self, nbytes: int) -> None:
        """A storage that grew gets a new block first, then lets the old one go, as `resize_` does on a GPU."""
        old, self.block = self.block, allocate(self.gpu, nbytes, self)
        self.nbytes = nbytes
        self.gpu.allocator.free(old)


def storages(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, ...]:
    """Every storage of a tensor: one of a dense tensor, those of indices and values of a sparse one, of a wrapper's."""
    if is_wrapper(type(tensor)):
        return tuple(storage for part in parts_of(tensor) for storage in storages(part))
    try:
        return (tensor.untyped_storage(),)
    except (NotImplementedError, RuntimeError):
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # by vmap, grad, jvp
        parts = (torch._C._functorch.get_unwrapped(tensor),) if wrapped else _sparse_parts(tensor)
    return tuple(storage for part in parts for storage in storages(part))


@functools.cache
def is_wrapper(kind: type) -> bool:
    """True for tensors that hold others and no data of their own: DTensor, the parameters of fully_shard."""
    return hasattr(kind, "__tensor_flatten__")


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a wrapper holds, wrappers among them."""
    values = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [value for value in values if isinstance(value, torch.Tensor)]  # a DTensor lists its mesh too


def _sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a sparse tensor is made of, read below every mode."""
    with torch._C._DisableTorchDispatch():
        if tensor.layout == torch.sparse_coo:
            return tensor._indices(), tensor._values()
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def home_of(tensor: torch.Tensor) -> Home | None:
    """The tensor's Home, or None for a tensor that is not on a virtual GPU."""
    try:
        home = tensor.untyped_storage()._home
    except (NotImplementedError, RuntimeError):
        home, parts = None, storages(tensor)
        if parts:
            home = parts[-1]._home
    if home is None and is_wrapper(type(tensor)):
        home = next(map(home_of, parts_of(tensor)), None)
    return home if home is None or home.gpu.machine.on else None


def gpu_of(tensor: torch.Tensor) -> VirtualGPU | None:
    """The virtual GPU that holds `tensor`, or None."""
    home = home_of(tensor)
    return None if home is None else home.gpu


def place(tensor: torch.Tensor, gpu: VirtualGPU) -> torch.Tensor:
    """Give every homeless storage of `tensor` a block on `gpu`. Raises the allocator's OutOfMemory."""
    for storage in storages(tensor):
        if storage._home is None:
            storage._home = Home(gpu, storage.nbytes())
    return tensor


def place_all(result, gpu: VirtualGPU) -> None:
    """`place` for whatever an operator returned: a tensor, nothing, or lists of them."""
    if isinstance(result, torch.Tensor):
        try:
            storage = result.untyped_storage()
        except (NotImplementedError, RuntimeError):
            place(result, gpu)
            return
        if storage._home is None:
            storage._home = Home(gpu, storage.nbytes())
    elif isinstance(result, (list, tuple)):
        for part in result:
            place_all(part, gpu)


def resized(tensor: torch.Tensor) -> None:
    """Follow a storage whose size an operator changed (`resize_`, a growing `out=`)."""
    for storage in storages(tensor):
        if storage._home is not None and storage._home.nbytes != storage.nbytes():
            storage._home.resize(storage.nbytes())


# ---- tensors that C++ makes on the way ------------------------------------------------------------------------------
# Code in C++ asks for helpers of its own ("zeros with the options of this input"). It thinks that the input is on the
# CPU, so they arrive homeless. They are known by the Python instruction that was running when they were made: the same
# one that runs when they meet a GPU tensor. A learner's own `torch.zeros(3)` is another instruction, and stays put.

_ANYTIME = "any time"  # DDP's reducer makes its buckets once and fills them later


def caller(depth: int = 2) -> tuple[int, int] | str:
    """A key for the Python instruction that is calling into PyTorch now."""
    frame = sys._getframe(depth)
    if frame.f_code.co_filename.endswith(("nn/parallel/distributed.py", "nn\\parallel\\distributed.py")):
        return _ANYTIME
    return id(frame), frame.f_lasti


def remember_birth(tensor: torch.Tensor, key) -> None:
    """Note where C++ made this tensor; the zeros of a backward pass may be needed long after it."""
    key = _ANYTIME if getattr(local, "backward", False) else key
    for storage in storages(tensor):
        storage._born = key


def is_ours_to_adopt(tensor: torch.Tensor, key) -> bool:
    """True if C++ made `tensor` during the very call that now wants it on a GPU."""
    parts = storages(tensor)
    return bool(parts) and all(part._born is not None and part._born in (_ANYTIME, key) for part in parts)


# ---- devices -----------------------------------------------------------------------------------------------------


def device_of(tensor: torch.Tensor) -> torch.device:
    """What `tensor.device` says: cuda:i for a tensor on a virtual GPU, else PyTorch's own answer."""
    home = None if is_inside() else home_of(tensor)
    return RAW_DEVICE(tensor) if home is None or active() is None else torch.device("cuda", home.gpu.index)


def find_gpu(machine: VirtualMachine, device: torch.device) -> VirtualGPU:
    """The GPU that a cuda device names; no index means this thread's current one. Raises as CUDA does."""
    if not machine.gpus:
        raise RuntimeError("No CUDA GPUs are available")
    index = machine.current if device.index is None else device.index
    if not 0 <= index < len(machine.gpus):
        from virtual_gpus.errors import invalid_device_ordinal

        raise invalid_device_ordinal()
    return machine.gpus[index]
