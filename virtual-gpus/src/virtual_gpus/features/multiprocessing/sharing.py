"""A GPU tensor in another process: what CUDA does with handles of GPU memory (CUDA IPC), with shared memory here.

PyTorch's own code sends GPU tensors through queues, pipes and the arguments of processes (torch/multiprocessing/
reductions.py). It asks C++ for a handle in the one process and for the storage behind it in the other. Both processes
then have the same numbers. The memory counts in the process that made the tensor, as on a real GPU.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from virtual_gpus.machine import find_gpu, get_machine
from virtual_gpus.patches.table import Patch, wrapped
from virtual_gpus.placement.storages import StorageAllocation, record_of
from virtual_gpus.threads import below


class _SharedStorage:
    """The storage itself on its way. It travels as that of a CPU tensor does, in shared memory."""

    def __init__(self, storage: torch.UntypedStorage):
        self.storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        with below():  # where the storage says that it is on the CPU
            if self.storage.device.type == "meta":
                return _arrived, (functools.partial(torch.UntypedStorage, device="meta"), (self.storage.nbytes(),))
            return _arrived, torch.multiprocessing.reductions.reduce_storage(self.storage)


def _arrived(rebuild: Callable[..., torch.UntypedStorage], arguments: tuple[Any, ...]) -> _SharedStorage:
    return _SharedStorage(rebuild(*arguments))


def _share_cuda_(self: Any) -> tuple[int, bytes, int, int, bytes, int, _SharedStorage, bool]:
    """The storage as PyTorch sends it: GPU, handle, bytes, counters, events. Raises RuntimeError for the CPU's."""
    gpu = record_of(self).gpu
    if gpu is None or not gpu.machine.on:
        raise RuntimeError("_share_cuda_: only available on CUDA")
    if not hasattr(self, "_handle"):
        self._handle = os.urandom(16)
    return gpu.index, self._handle, self.nbytes(), 0, b"", 0, _SharedStorage(self), False


@staticmethod
def _new_shared_cuda(device: int, handle: bytes, nbytes: int, *others: Any) -> torch.UntypedStorage:
    """The storage behind a handle. Its memory is another process's; in the process that made it, it is that storage."""
    storage = others[3].storage  # of the `_SharedStorage`
    if record_of(storage).gpu is None:
        storage._record = allocation = StorageAllocation(find_gpu(get_machine(), torch.device("cuda", device)), 0)
        allocation.nbytes, storage._handle = nbytes, handle
    return storage


def share_memory_(function: Callable[..., Any], self: torch.UntypedStorage) -> torch.UntypedStorage:
    """Put the numbers, if there are any, into shared memory for forked processes. CUDA has them there in any case."""
    with below():  # where the storage says that it is on the CPU
        has_numbers = record_of(self).gpu is None or self.device.type != "meta"
        return function(self) if has_numbers else self


def is_shared(function: Callable[..., Any], self: torch.UntypedStorage) -> bool:
    return record_of(self).gpu is not None or function(self)


def patches() -> list[Patch]:
    functions = (_share_cuda_, _new_shared_cuda)
    rows: list[Patch] = [(torch.UntypedStorage, function.__name__, function) for function in functions]
    rows += wrapped(torch.UntypedStorage, share_memory_, is_shared)
    # Shared memory goes with its last user: there is nothing to count.
    return [*rows, (torch.UntypedStorage, "_release_ipc_counter_cuda", lambda *_: None)]
