"""Watches a model and its optimizer for `MemoryMonitor`: marks the phases, and counts whose the bytes are.

Counted from the tensors themselves, once per storage, rounded up to the allocator's 512 bytes:

    parameters        of the model, its buffers too, and the copies that nn.DataParallel makes, when a pass begins
    gradients         when a pass begins, and one by one as each parameter's gradient is complete
    optimizer state   when the optimizer has finished a step
"""

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import nn

from helpers.monitor_trace import ROUND


@dataclass(frozen=True)
class Known:
    """Bytes on one GPU that are known by name; `copies` is the part of `parameters` that DataParallel made."""

    parameters: int = 0
    gradients: int = 0
    states: int = 0
    copies: int = 0


def storages(tensors: Iterable[torch.Tensor | None]) -> dict[int, tuple[int, int]]:
    """storage -> (GPU, bytes of its block) for the tensors that are on GPUs."""
    found = {}
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            storage = tensor.untyped_storage()
            found[storage._cdata] = tensor.device.index, -(-storage.nbytes() // ROUND) * ROUND
    return found


def on_gpu(found: dict[int, tuple[int, int]], gpu: int) -> int:
    """Bytes of `storages` on one GPU."""
    return sum(size for where, size in found.values() if where == gpu)


class Watch:
    """Hooks on `model` and `optimizer` that tell `monitor` what begins, what ends, and what is held.

    Needs of the monitor: `indices`, `mark(phase, gpus)`, and `known`, a `Known` per GPU, which is written here.
    """

    def __init__(self, monitor, model: nn.Module, optimizer: torch.optim.Optimizer | None):
        self._monitor, self._model, self._optimizer = monitor, model, optimizer
        self.parallel = isinstance(model, nn.DataParallel)
        self._hooks, self._seen, self._passing = ExitStack(), {}, False
        self._lock = threading.Lock()  # replicas run in threads of their own, gradients arrive in the engine's

    def start(self) -> None:
        """Attach the hooks and count what is there already."""
        hook = self._model.register_forward_pre_hook(self._forward_begins)
        hooks = [hook, self._model.register_forward_hook(self._forward_ends)]
        if self.parallel:
            hooks.append(self._model.module.register_forward_pre_hook(self._replica_begins))
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                hooks.append(parameter.register_post_accumulate_grad_hook(self._gradient_is_there))
        if self._optimizer is not None:
            hooks.append(self._optimizer.register_step_pre_hook(self._step_begins))
            hooks.append(self._optimizer.register_step_post_hook(self._step_ends))
        for hook in hooks:
            self._hooks.callback(hook.remove)
        self._count_all()
        self._count_states()

    def stop(self) -> None:
        """Take the hooks off."""
        self._hooks.close()

    def backward_ended(self) -> None:
        """The graph is gone, and with it DataParallel's copies."""
        self._passing = False
        for gpu, known in self._monitor.known.items():
            self._know(gpu, parameters=known.parameters - known.copies, copies=0)

    def _know(self, gpu: int, **changes) -> None:
        self._monitor.known[gpu] = replace(self._monitor.known[gpu], **changes)

    def _count_all(self) -> None:
        self._own = storages([*self._model.parameters(), *self._model.buffers()])
        self._copies = {}
        self._seen = storages(parameter.grad for parameter in self._model.parameters())
        for gpu in self._monitor.indices:
            held, gradients = on_gpu(self._own, gpu), on_gpu(self._seen, gpu)
            self._know(gpu, parameters=held, copies=0, gradients=gradients)

    def _count_states(self) -> None:
        kept = () if self._optimizer is None else self._optimizer.state.values()
        found = storages(value for state in kept for value in state.values() if isinstance(value, torch.Tensor))
        for gpu in self._monitor.indices:
            self._know(gpu, states=on_gpu(found, gpu))

    def _forward_begins(self, module, inputs) -> None:
        replica = getattr(module, "_is_replica", False)  # the model itself was watched, and DataParallel wraps it
        with self._lock:
            if not (replica and self._passing):  # the first of the replicas begins the pass
                self._passing = True
                self._count_all()
            self._monitor.mark("forward")
        if replica:
            self._replica_begins(module, inputs)

    def _replica_begins(self, module, inputs) -> None:
        held = [
            tensor
            for part in module.modules()
            for tensor in (*getattr(part, "_former_parameters", {}).values(), *part._buffers.values())
        ]
        new = {key: place for key, place in storages(held).items() if key not in self._own}
        with self._lock:
            self._copies.update(new)
            for gpu in {gpu for gpu, _ in new.values()}.intersection(self._monitor.indices):
                copies = on_gpu(self._copies, gpu)
                self._know(gpu, parameters=on_gpu(self._own, gpu) + copies, copies=copies)
                self._monitor.mark(None, [gpu], same_phase=True)

    def _forward_ends(self, module, inputs, outputs) -> None:
        # With gradients the phase goes on until backward() begins: the loss belongs to the forward pass.
        if not torch.is_grad_enabled():
            self._monitor.mark(None)

    def _gradient_is_there(self, parameter: torch.Tensor) -> None:
        with self._lock:
            for key, (gpu, size) in storages([parameter.grad]).items():
                if key not in self._seen and gpu in self._monitor.known:
                    self._seen[key] = gpu, size
                    self._know(gpu, gradients=self._monitor.known[gpu].gradients + size)
                    self._monitor.mark(None, [gpu], same_phase=True)

    def _step_begins(self, optimizer, arguments, keywords) -> None:
        self._monitor.mark("step")

    def _step_ends(self, optimizer, arguments, keywords) -> None:
        self._count_states()
        self._monitor.mark(None)
