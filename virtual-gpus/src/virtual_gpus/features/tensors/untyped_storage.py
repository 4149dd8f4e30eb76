"""Storages: where they say they are, and how torch.save, torch.load and deepcopy carry them to a GPU."""

import io
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from virtual_gpus import errors
from virtual_gpus.dispatch.mode import enter_thread
from virtual_gpus.entrance import entrance
from virtual_gpus.features.tensors.device_numbers import named
from virtual_gpus.machine import VirtualGPU, active, find_gpu
from virtual_gpus.patches.table import Patch, around
from virtual_gpus.placement.storages import UNRECORDED, HostStorage, StorageAllocation, record_of
from virtual_gpus.threads import this_thread

_base: Any = torch._C.StorageBase  # types know little of it
_raw_device, _raw_resize, _raw_new = _base.device.__get__, _base.resize_, _base.__new__
_raw_getitem, _raw_cpu = torch.UntypedStorage.__getitem__, torch.UntypedStorage.cpu
_raw_clone = torch.UntypedStorage.clone
_written: set[str] = set()  # files that this process has saved with sizes only


@entrance
def __new__(cls: type, *args: Any, device: torch.types.Device = None, **kwargs: Any) -> torch.UntypedStorage:
    """`UntypedStorage(size or bytes, device="cuda")`. Made on the CPU, since C++ would ask the driver for the GPU."""
    machine = active()
    if device is None or machine is None or torch.device(named(device)).type != "cuda":
        return _raw_new(cls, *args, **kwargs) if device is None else _raw_new(cls, *args, device=device, **kwargs)
    enter_thread()
    gpu = find_gpu(machine, torch.device(named(device)))
    size = len(args[0]) if args and not isinstance(args[0], int) else (*args, kwargs.get("size", 0))[0]
    record = StorageAllocation(gpu, size)  # first: what cannot fit fills nothing
    if machine.shapes_only:
        args, kwargs = (size,), dict[str, Any]()
    storage = _raw_new(cls, *args, device=machine.tensor_device, **kwargs)
    storage._record = record
    return storage


@entrance
def new(self: torch.UntypedStorage) -> torch.UntypedStorage:
    """An empty storage on the same device."""
    gpu = _gpu(self)
    return type(self)(device=_raw_device(self) if gpu is None else torch.device("cuda", gpu.index))


def __getitem__(self: torch.UntypedStorage, index: int | slice) -> int | torch.UntypedStorage:
    """A byte, or for a slice a storage that shares the memory and with it the GPU."""
    part: Any = _raw_getitem(self, index)
    if isinstance(index, slice) and _gpu(self) is not None:
        part._record = record_of(self)
    return part


def device(self: torch.UntypedStorage) -> torch.device:
    """cuda:i for the storage of a tensor on a virtual GPU."""
    gpu = None if this_thread.in_kernel else _gpu(self)
    return _raw_device(self) if gpu is None else torch.device("cuda", gpu.index)


def _gpu(storage: torch.UntypedStorage) -> VirtualGPU | None:
    """The GPU that holds a storage; None if none does, or if its virtual GPUs are off."""
    gpu = record_of(storage).gpu
    return gpu if gpu is not None and gpu.machine.on else None


@entrance
def to(self: torch.UntypedStorage, *, device: torch.types.Device, non_blocking: bool = False) -> torch.UntypedStorage:
    """A copy on `device` (torch.load uses this for map_location), or the storage itself when it is there."""
    device = torch.device(named(device))
    machine = active()
    if machine is None or (device.type != "cuda" and _gpu(self) is None):
        return torch._utils._to(self, device, non_blocking)
    target = find_gpu(machine, device) if device.type == "cuda" else None
    if target is not None and _gpu(self) is target:
        return self
    copied: Any = _copy(self, target)
    if target is None and non_blocking:
        copied._record = HostStorage(pinned=True)
    return copied


def _copy(storage: torch.UntypedStorage, target: VirtualGPU | None) -> torch.UntypedStorage:
    """A new storage with the same bytes, on `target` (None: the CPU)."""
    device = torch.device("cpu") if target is None else target.machine.tensor_device
    if _raw_device(storage).type == "meta" and _gpu(storage) is None:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    if _raw_device(storage).type == "meta" != device.type:
        raise errors.needs_values("copying a storage to the CPU")
    copied: Any = torch.UntypedStorage(storage.nbytes(), device=device)
    if device.type == "cpu":
        with torch._C._DisableTorchDispatch():
            copied.copy_(storage, False)
    if target is not None:
        copied._record = StorageAllocation(target, copied.nbytes())
    return copied


def cpu(self: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy in the computer's memory; the storage itself when it is there."""
    return _raw_cpu(self) if _gpu(self) is None else _copy(self, None)


@entrance
def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy on the same device (deepcopy uses this)."""
    gpu = _gpu(self)
    return _raw_clone(self) if gpu is None else _copy(self, gpu)


@entrance
def resize_(self: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
    """Another size in place, on the same GPU: fully_shard empties a storage with 0 and fills it again."""
    record = record_of(self)
    if record.gpu is not None and record.gpu.machine.on and record.nbytes != nbytes:
        record.resize(nbytes)  # first, so that what cannot fit fills nothing
    return _raw_resize(self, nbytes)


def save(function: Callable[..., None], obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
    """`torch.save`. With sizes only, it opens a file once all is known to have values. It leaves alone what was there
    before the program: what came from a GPU by `.cpu()` is nan."""
    machine = active()
    if machine is None or not machine.shapes_only:
        return function(obj, f, *args, **kwargs)
    path = os.path.abspath(f) if isinstance(f, (str, os.PathLike)) else None
    if path is not None and path not in _written and os.path.exists(path):
        warnings.warn(f"With shapes_only=True, torch.save leaves {f} as it is, since values are not kept", stacklevel=2)
        return
    whole = io.BytesIO()
    function(obj, whole, *args, **kwargs)
    if path is None:
        f.write(whole.getbuffer())
    else:
        with open(path, "wb") as file:
            file.write(whole.getbuffer())
        _written.add(path)


def patches() -> list[Patch]:
    """See `features`, and `placement.storages` for `_record`."""
    storage = torch.UntypedStorage
    rows = [(storage, "_record", UNRECORDED), (storage, "device", property(device))]
    rows += [(module, "save", around(torch.save, save)) for module in (torch, torch.serialization)]
    return rows + [(storage, f.__name__, f) for f in (__new__, new, __getitem__, to, cpu, clone, resize_)]
