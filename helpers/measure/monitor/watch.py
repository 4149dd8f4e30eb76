"""Watches a model and its optimizer for `MemoryMonitor`: marks the phases, and counts whose the bytes are.

Counted from the tensors themselves, once per storage, rounded up to the allocator's 512 bytes:

    parameters        of the model, its buffers too, when a pass begins
    copies            of them that nn.DataParallel makes, when a replica begins; `Run` follows each until it is gone,
                      which for what backward does not need is the end of the forward pass
    gradients         when a forward or a backward pass begins, and when the backward pass has ended
    optimizer state   when the optimizer has finished a step

A step has a handful of these moments, however many parameters there are: a hook on each parameter would cost a real
step of many small layers more than the rest of the monitor.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import nn

from helpers.gpus import round_size


class Known(NamedTuple):
    """Bytes on one GPU that are known by name."""

    parameters: int = 0
    gradients: int = 0
    states: int = 0


Storages = dict[int, tuple[int, int]]  # storage -> (GPU, bytes that it asked the allocator for)


def storages(tensors: Iterable[torch.Tensor | None]) -> Storages:
    """The storages of the tensors that are on GPUs, each once."""
    found, strided = {}, torch.strided
    for tensor in tensors:
        if tensor is None or (gpu := tensor.get_device()) < 0:  # -1 for the CPU
            continue
        for part in (tensor,) if tensor.layout is strided else _parts(tensor):
            storage = part.untyped_storage()
            found[storage._cdata] = gpu, storage.nbytes()
    return found


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """What a sparse tensor is made of; of other kinds nothing is known."""
    return (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else ()


def on_gpus(found: Storages) -> Counter:
    """Bytes of `storages` on each GPU, as the allocator rounds them."""
    held = Counter()
    for gpu, size in found.values():
        held[gpu] += round_size(size)
    return held


class Holdings:
    """What all watches of one monitor found: `known` is a `Known` per GPU. What two of them watch counts once."""

    def __init__(self, gpus: Iterable[int]):
        self.known = {gpu: Known() for gpu in gpus}
        self._found: dict[str, dict[Watch, Storages]] = {kind: {} for kind in Known._fields}

    def tell(self, kind: str, watch: "Watch", found: Storages) -> None:
        """From now on `watch` finds `found` of this kind, a field of `Known`."""
        told = self._found[kind]
        if told.get(watch) == found:  # as at most moments
            return
        told[watch] = found
        together = found if len(told) == 1 else {key: place for each in told.values() for key, place in each.items()}
        held = on_gpus(together)
        for gpu, known in self.known.items():
            self.known[gpu] = known._replace(**{kind: held[gpu]})


class Watch:
    """Hooks on `model` and `optimizer` that tell `monitor` what begins, what ends, and what is held.

    Needs of the monitor: `mark`, `in_backward`, `holdings`, and `lock`: replicas run in threads of
    their own.
    """

    def __init__(self, monitor, model: nn.Module, optimizer: torch.optim.Optimizer | None):
        self._monitor, self._model, self._optimizer = monitor, model, optimizer
        self._hooks, self._passing = ExitStack(), False
        self._parameters: list[nn.Parameter] = []
        self._own: Storages = {}
        self._gradients: Storages = {}

    def start(self) -> None:
        """Attach the hooks and count what is there already."""
        hook = self._model.register_forward_pre_hook(self._forward_begins)
        hooks = [hook, self._model.register_forward_hook(self._forward_ends)]
        if isinstance(self._model, nn.DataParallel):
            hooks.append(self._model.module.register_forward_pre_hook(self._replica_begins))
        if self._optimizer is not None:
            hooks.append(self._optimizer.register_step_pre_hook(self._step_begins))
            hooks.append(self._optimizer.register_step_post_hook(self._step_ends))
        for hook in hooks:
            self._hooks.callback(hook.remove)
        self._count_parameters()
        self.count_gradients()
        self._count_states()

    def stop(self) -> None:
        """Take the hooks off."""
        self._hooks.close()

    def count_gradients(self) -> Storages:
        """Count the gradients that are there now. Returns those that the last count had not found."""
        before, self._gradients = self._gradients, storages([parameter.grad for parameter in self._parameters])
        self._tell("gradients", self._gradients)
        return {key: place for key, place in self._gradients.items() if key not in before}

    def backward_ended(self) -> None:
        """The next replica begins a new pass."""
        self._passing = False

    def _tell(self, kind: str, found: Storages) -> None:
        self._monitor.holdings.tell(kind, self, found)

    def _count_parameters(self) -> None:
        modules = _modules(self._model)
        self._parameters = [part for module in modules for part in module._parameters.values() if part is not None]
        self._own = storages([*self._parameters, *(part for module in modules for part in module._buffers.values())])
        self._tell("parameters", self._own)

    def _count_states(self) -> None:
        if self._optimizer is not None:
            self._tell("states", storages(_state_tensors(self._optimizer)))

    def _forward_begins(self, module, inputs) -> None:
        if self._monitor.in_backward:  # a checkpoint computes again what the backward pass needs
            return
        replica = getattr(module, "_is_replica", False)  # the model itself was watched, and DataParallel wraps it
        with self._monitor.lock:
            if not (replica and self._passing):  # the first of the replicas begins the pass
                self._passing = True
                self._count_parameters()
                self.count_gradients()
            self._monitor.mark("forward")
        if replica:
            self._replica_begins(module, inputs)

    def _replica_begins(self, module, inputs) -> None:
        if self._monitor.in_backward:
            return
        held = [
            tensor
            for part in module.modules()
            for tensor in (*getattr(part, "_former_parameters", {}).values(), *part._buffers.values())
        ]
        new = {key: place for key, place in storages(held).items() if key not in self._own}
        if new:
            with self._monitor.lock:
                self._monitor.mark(None, {gpu for gpu, _ in new.values()}, same_phase=True, copies=new)

    def _forward_ends(self, module, inputs, outputs) -> None:
        # With gradients the phase goes on until backward() begins: the loss belongs to the forward pass.
        if not torch.is_grad_enabled() and not self._monitor.in_backward:
            with self._monitor.lock:
                self._monitor.mark(None)

    def _step_begins(self, optimizer, arguments, keywords) -> None:
        self._monitor.mark("step")

    def _step_ends(self, optimizer, arguments, keywords) -> None:
        self._count_states()
        self._monitor.mark("backward" if self._monitor.in_backward else None)  # a step may be a gradient's hook


def _modules(model: nn.Module) -> set[nn.Module]:
    """`model.modules()`, whose generators within generators take as long as all the counting."""
    found, left = set(), [model]
    while left:
        module = left.pop()
        if module is not None and module not in found:
            found.add(module)
            left += module._modules.values()
    return found


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """An optimizer's state: tensors, and lists of them (LBFGS)."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                yield from (part for part in value if isinstance(part, torch.Tensor))
