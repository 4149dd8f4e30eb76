"""Which storage lives on which virtual GPU.

A tensor on a virtual GPU is an ordinary CPU tensor (a meta tensor with `shapes_only`). What is known of its *storage*
stands in one record, the attribute `_record` of the storage's Python object. PyTorch keeps that object as long as the
storage itself, so the record lives exactly as long as the data, whatever holds it: a Python name, a view, or the
autograd graph. When the record of a storage on a GPU goes, its block goes back to the allocator.
"""

import functools
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, Self

import torch
from torch.overrides import has_torch_function_unary

from virtual_gpus.machine import VirtualGPU, active
from virtual_gpus.threads import this_thread

_CPU, _is_pinned = torch.device("cpu"), attrgetter("_record.pinned")
# Not `torch`'s, which are patches while GPUs are on.
_empty, _empty_strided = torch._C._VariableFunctions.empty, torch._C._VariableFunctions.empty_strided
RAW_DEVICE = torch._C.TensorBase.device.__get__  # as C++ sees it: cpu or meta
_NO_RULES, _data_ptr = torch._C._disabled_torch_dispatch_impl, torch._C.TensorBase.data_ptr
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions


# ---- records --------------------------------------------------------------------------------------------------------


class HostStorage:
    """The record of a storage in the computer's memory.

    creation_site: the Python instruction during which C++ made it, see `creation_sites`; None for the program's own.
    pinned: what `pin_memory` promised.
    """

    __slots__ = ("__weakref__", "creation_site", "pinned")
    gpu: None = None

    def __init__(self, creation_site: tuple[int, int] | str | None = None, pinned: bool = False):
        self.creation_site, self.pinned = creation_site, pinned


class StorageAllocation:
    """The record of a storage on a GPU, with its block. When it dies, the allocator has the block back."""

    __slots__ = ("__weakref__", "block", "gpu", "nbytes")
    creation_site, pinned = None, False

    def __init__(self, gpu: VirtualGPU, nbytes: int):
        self.gpu, self.nbytes = gpu, nbytes
        self.block = gpu.allocate(nbytes, self)

    def resize(self, nbytes: int) -> None:
        """A storage that grew gets a new block first, then lets the old one go, as `resize_` does on a GPU."""
        old, self.block = self.block, self.gpu.allocate(nbytes, self)
        self.nbytes = nbytes
        self.gpu.machine.follower.freed(id(self))
        self.gpu.allocator.free(old)


# What `_record` says of a storage of which nothing is known. `features.tensors.untyped_storage` puts it into
# torch.UntypedStorage while virtual GPUs are on, so asking any storage costs one look-up.
UNRECORDED = HostStorage()
Record = HostStorage | StorageAllocation


def record_of(storage: torch.UntypedStorage) -> Record:
    """The record of a storage, also where all virtual GPUs are off. PyTorch's stubs do not know `_record`."""
    return getattr(storage, "_record", UNRECORDED)


class ScratchBlock:
    """A block without a storage. It is given back when this object dies, so that Ctrl-C at any line loses none.

    One that no name holds is taken and given back at once, as a kernel does with its last temporary.
    """

    __slots__ = ("__weakref__", "block")

    def __init__(self, gpu: VirtualGPU, nbytes: int):
        self.block = gpu.allocate(nbytes, self)


class scratch:
    """Memory that a kernel takes on the way: a block of each size on `gpu`, in order.

    They are there until the block of code ends (`with scratch(...):`), or are given back at once (`scratch(...)`), the
    last one first, as a list lets go of its elements. A size of 0 takes nothing. Raises OutOfMemory, and keeps none.
    """

    __slots__ = ("_gpu", "_held")

    def __init__(self, gpu: VirtualGPU, *sizes: int):
        self._gpu = gpu
        self._held = list(map(ScratchBlock, repeat(gpu), filter(None, sizes)))

    def __enter__(self) -> Self:
        return self

    def take(self, *sizes: int) -> None:
        """Further blocks."""
        self._held.extend(map(ScratchBlock, repeat(self._gpu), sizes))

    def close(self, *error: object) -> None:
        """Give all blocks back."""
        self._held.clear()

    __exit__ = close


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, packed (a view or an expanded tensor may take less)."""
    return tensor.numel() * tensor.element_size()


# ---- tensors and their storages -------------------------------------------------------------------------------------


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors of an argument or result: itself, those in lists, tuples and the lists within, or none."""
    if not isinstance(value, (list, tuple)):
        return [value] if isinstance(value, torch.Tensor) else []
    if _TENSORS.issuperset(map(type, value)):  # as an optimizer's lists: many are faster so
        return list(value)
    tensors: list[torch.Tensor] = []
    for part in value:
        if isinstance(part, torch.Tensor):
            tensors.append(part)
        elif isinstance(part, (list, tuple)):
            tensors += tensors_in(part)
    return tensors


def has_values(tensor: torch.Tensor) -> bool:
    """False for a tensor on a virtual GPU with `shapes_only`."""
    gpu = gpu_of(tensor)
    return gpu is None or not gpu.machine.shapes_only


def storages(tensor: torch.Tensor) -> tuple[Any, ...]:
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


def is_hollow(tensor: torch.Tensor) -> bool:
    """True for a tensor without data whose class has rules for operators: a wrapper, which need not name its parts."""
    kind: Any = type(tensor)
    if kind.__torch_dispatch__ is _NO_RULES or is_fake(kind) or is_wrapper(kind):
        return is_wrapper(kind)
    allocation = allocation_of(tensor)
    return _data_ptr(tensor) == 0 if allocation is None else not allocation.nbytes


@functools.cache
def is_fake(kind: type) -> bool:
    """True for FakeTensor (torch/_subclasses/fake_tensor.py), which says that it is on a GPU and takes no memory."""
    return any(base.__name__ == "FakeTensor" for base in kind.__mro__)


def parts_of(tensor: Any) -> list[torch.Tensor]:
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


def allocation_of(tensor: torch.Tensor) -> StorageAllocation | None:
    """The tensor's block and its GPU, or None for a tensor that is not on a virtual GPU."""
    try:
        record: Record = tensor.untyped_storage()._record  # type: ignore  # see `record_of`
    except (NotImplementedError, RuntimeError):
        parts = storages(tensor)
        record = parts[-1]._record if parts else UNRECORDED
    if record.gpu is None and is_wrapper(type(tensor)):
        return next(map(allocation_of, parts_of(tensor)), None)
    return record if record.gpu is not None and record.gpu.machine.on else None


def former_gpu_of(tensor: torch.Tensor) -> VirtualGPU | None:
    """The virtual GPU that held `tensor` until it was switched off; None if there is none, or if it is on."""
    gpus = [storage._record.gpu for storage in storages(tensor)]
    return next((gpu for gpu in gpus if gpu is not None and not gpu.machine.on), None)


def gpu_of(tensor: torch.Tensor) -> VirtualGPU | None:
    """The virtual GPU that holds `tensor`, or None."""
    allocation = allocation_of(tensor)
    return None if allocation is None else allocation.gpu


def device_of(tensor: torch.Tensor) -> torch.device:
    """What `tensor.device` says: cuda:i for a tensor on a virtual GPU, else PyTorch's own answer."""
    if this_thread.in_kernel or has_torch_function_unary(tensor):  # PyTorch asks a mode or subclass, which asks here
        return RAW_DEVICE(tensor)
    try:  # `gpu_of` and `record_of`, without their calls: programs ask often
        gpu: VirtualGPU | None = getattr(tensor.untyped_storage(), "_record", UNRECORDED).gpu
        if gpu is None:
            if not is_wrapper(type(tensor)):
                return RAW_DEVICE(tensor)
        elif gpu.machine.on:
            return _cuda(gpu.index)
    except (NotImplementedError, RuntimeError):
        pass
    gpu = None if active() is None else gpu_of(tensor)
    return RAW_DEVICE(tensor) if gpu is None else _cuda(gpu.index)


@functools.cache
def _cuda(index: int) -> torch.device:
    return torch.device("cuda", index)


def block_address(tensor: torch.Tensor) -> int | None:
    """The address of a strided tensor's block on its virtual GPU. None if it is on no virtual GPU or takes no memory.

    The address is the one in `torch.cuda.memory._snapshot()`. `data_ptr()` is the address of the values on the host.
    """
    allocation = allocation_of(tensor)
    return None if allocation is None or allocation.block is None else allocation.block.address


def is_pinned(tensor: torch.Tensor) -> bool:
    """True for a CPU tensor that says it is pinned."""
    return all(map(_is_pinned, storages(tensor)))


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Let a new CPU tensor say that it is pinned. Returns `tensor`."""
    for storage in storages(tensor):
        storage._record = HostStorage(pinned=True)
    return tensor


# ---- placing --------------------------------------------------------------------------------------------------------


def put(tensor: torch.Tensor, allocation: StorageAllocation) -> torch.Tensor:
    """Let `tensor` live in a block that was taken before it was made, or in that of another tensor."""
    tensor.untyped_storage()._record = allocation  # type: ignore  # see `record_of`
    allocation.gpu.machine.follower.kernel("a kernel", (), [tensor])
    return tensor


def empty_in(
    allocation: StorageAllocation | None, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
) -> torch.Tensor:
    """A tensor in a block that was taken before, packed unless `strides` are given. None: on the host.

    No dispatch mode sees it. Nothing is written, so a CPU gives no memory for it either.
    """
    device = _CPU if allocation is None else allocation.gpu.machine.tensor_device
    if strides is None:
        tensor = _empty(size=shape, dtype=dtype, device=device)  # by its name: C++ parses it in less time
    else:
        tensor = _empty_strided(shape, strides, dtype=dtype, device=device)
    return tensor if allocation is None else put(tensor, allocation)


def place(tensor: torch.Tensor, gpu: VirtualGPU) -> torch.Tensor:
    """Give every storage of `tensor` that is on no GPU a block on `gpu`. Raises the allocator's OutOfMemory."""
    for storage in storages(tensor):
        if storage._record.gpu is None:
            storage._record = StorageAllocation(gpu, storage.nbytes())
    return tensor


def place_all(result: object, gpu: VirtualGPU) -> None:
    """`place` for whatever an operator returned: a tensor, nothing, or lists of them."""
    if isinstance(result, torch.Tensor):
        try:
            storage: Any = result.untyped_storage()  # as `place` does, without its calls: this runs for every result
        except (NotImplementedError, RuntimeError):
            place(result, gpu)
            return
        if storage._record.gpu is None:
            storage._record = StorageAllocation(gpu, storage.nbytes())
    elif isinstance(result, (list, tuple)):
        for part in result:
            place_all(part, gpu)


def follow_size(tensor: torch.Tensor) -> None:
    """Follow a storage whose size an operator changed (`resize_`, a growing `out=`)."""
    for storage in storages(tensor):
        record = storage._record
        if record.gpu is not None and record.nbytes != storage.nbytes():
            record.resize(storage.nbytes())
