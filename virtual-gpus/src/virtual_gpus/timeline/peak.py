"""What fills a GPU at its peak: every block by kind, from a log of allocations that is replayed once per step.

Which tensors are parameters, gradients and optimizer states, the optimizer says at its step. For all other blocks it
counts which function of PyTorch asked for them: the innermost one of `_KINDS` on the stack of the allocation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import CodeType, FrameType

import torch

from virtual_gpus.machine import VirtualGPU
from virtual_gpus.placement.storages import ScratchBlock, allocation_of, is_wrapper, parts_of

PARAMETERS, GRADIENTS, STATES = "parameters", "gradients", "optimizer states"
ACTIVATIONS, GATHERED, BUFFERS, OTHER = "activations", "gathered layers", "communication buffers", "other"
KINDS = (PARAMETERS, GRADIENTS, STATES, ACTIVATIONS, GATHERED, BUFFERS, OTHER)

# (end of a file's name, functions or None for all of them, kind), the first that fits.
_KINDS = (
    ("fsdp/_fully_shard/_fsdp_collectives.py", ("foreach_reduce",), BUFFERS),
    ("fsdp/_fully_shard/_fsdp_collectives.py", None, GATHERED),
    ("fsdp/_fully_shard/_fsdp_param.py", ("_init_sharded_param", "reset_sharded_param"), PARAMETERS),
    ("fsdp/_fully_shard/_fsdp_param.py", None, GATHERED),
    ("fsdp/_flat_param.py", None, GATHERED),
    ("fsdp/_runtime_utils.py", None, BUFFERS),
    ("virtual_gpus/patches/distributed.py", None, BUFFERS),
    ("nn/parallel/distributed.py", ("__init__", "_sync_module_states"), BUFFERS),
    ("torch/distributed/_functional_collectives.py", None, BUFFERS),
    ("torch/distributed/distributed_c10d.py", None, BUFFERS),
    ("torch/nn/modules/module.py", ("_apply", "to_empty"), PARAMETERS),
    ("torch/nn/modules/module.py", ("_call_impl",), ACTIVATIONS),
    ("torch/autograd/graph.py", ("_engine_run_backward",), ACTIVATIONS),
    ("torch/optim/optimizer.py", ("profile_hook_step", "wrapper"), OTHER),
)
_kind_of_code: dict[CodeType, str | None] = {}


class PeakLog:
    """The allocations of one GPU from now on, and what was in use at the highest moment so far.

    peak: bytes at that moment, as `torch.cuda.max_memory_allocated` counts them. by_kind: the same, bytes per kind.
    """

    def __init__(self, gpu: VirtualGPU):
        self._gpu, self._allocator = gpu, gpu.allocator
        self.peak, self.by_kind = 0, dict.fromkeys(KINDS, 0)
        self._serial_at: dict[int, int] = {}  # address -> number of the allocation that is there now
        self._live: dict[int, int] = {}  # number -> bytes, of those at the beginning of the log
        self._kinds: dict[int, str] = {}  # number -> kind, of all that are in `_live` or in `_log`
        self._log: list[tuple[int, int]] = []  # (number, bytes): allocated, or freed if the bytes are negative
        self._serial = 0
        with self._allocator.exclusive():
            for address, block in self._allocator.live_blocks.items():
                self._live[self._number(address, OTHER)] = block.size
            self._allocator.observers.append(self._hear)

    def stop(self) -> None:
        """Listen no more."""
        self.fold()
        with self._allocator.exclusive():
            self._allocator.observers.remove(self._hear)

    def _number(self, address: int, kind: str) -> int:
        self._serial += 1
        self._serial_at[address] = self._serial
        self._kinds[self._serial] = kind
        return self._serial

    def _hear(self, event: str, address: int, size: int) -> None:
        if event == "alloc":
            self._log.append((self._number(address, self._kind_now(address)), size))
        elif event in ("free", "free_requested") and address in self._serial_at:
            self._log.append((self._serial_at.pop(address), -size))

    def _kind_now(self, address: int) -> str:
        owner = self._allocator.live_blocks[address].owner
        if owner is not None and isinstance(owner(), ScratchBlock):
            return OTHER  # workspaces
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            kind = _kind_of(frame.f_code)
            if kind is not None:
                if kind is BUFFERS and frame.f_code.co_name == "foreach_reduce":
                    self.mark(GRADIENTS, frame.f_locals.get("unsharded_grads") or ())
                return kind
            frame = frame.f_back
        return ACTIVATIONS if torch.is_grad_enabled() else OTHER

    def mark(self, kind: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Say of what kind the blocks of `tensors` are."""
        for tensor in tensors:
            if tensor is None:
                continue
            for part in parts_of(tensor) if is_wrapper(type(tensor)) else (tensor,):
                allocation = allocation_of(part)
                if allocation is not None and allocation.gpu is self._gpu and allocation.block is not None:
                    serial = self._serial_at.get(allocation.block.address)
                    if serial is not None:
                        self._kinds[serial] = kind

    def fold(self) -> None:
        """Replay the log, keep what was in use at its highest moment if that is a new peak, and begin a new log."""
        with self._allocator.exclusive():
            log, self._log = self._log, list[tuple[int, int]]()
        used = highest = sum(self._live.values())
        place = 0
        for number, (_, size) in enumerate(log, 1):
            used += size
            if used > highest:
                highest, place = used, number
        live = self._live
        if highest > self.peak or not self.peak:
            at_peak = dict(live)
            _apply(log[:place], at_peak)
            self.peak, self.by_kind = highest, dict.fromkeys(KINDS, 0)
            for serial, size in at_peak.items():
                self.by_kind[self._kinds[serial]] += size
        _apply(log, live)
        self._kinds = {serial: self._kinds[serial] for serial in live}


def _apply(log: Iterable[tuple[int, int]], live: dict[int, int]) -> None:
    for serial, size in log:
        if size > 0:
            live[serial] = size
        else:
            del live[serial]


def _kind_of(code: CodeType) -> str | None:
    """The kind of what a function allocates; None if that says nothing, and its caller is to be asked."""
    try:
        return _kind_of_code[code]
    except KeyError:
        name = code.co_filename.replace("\\", "/")
        kind = None
        for file, functions, found in _KINDS:
            if name.endswith(file) and (functions is None or code.co_name in functions):
                kind = found
                break
        if kind is None and "/torch/nn/modules/" in name and code.co_name == "__init__":
            kind = PARAMETERS
        _kind_of_code[code] = kind
        return kind
