"""Switching virtual GPUs on and off: the class `virtual_gpus`, on top of everything else."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from virtual_gpus import errors, machine, operators, ops, patches
from virtual_gpus.dispatch import mode
from virtual_gpus.machine import VirtualMachine, active
from virtual_gpus.memory import history
from virtual_gpus.settings import Settings

operators.RECIPES.update(ops.RECIPES)

_switching = threading.RLock()
_Function = TypeVar("_Function", bound=Callable[..., Any])


class virtual_gpus:
    """`count` virtual GPUs: a context manager, a decorator, or `.start()` and `.stop()`. Nests; restores everything.

    memory: per GPU, bytes or text ("16 GiB", "512 MiB"); None takes the kind's own. kind: K80, TITAN Xp, V100, T4,
    A100, H100 or H200. shapes_only: sizes without data or arithmetic, for jobs larger than this computer.
    links, hosts, network: how the GPUs are joined, for the modelled clock (`help("virtual_gpus.clock.links.arrange")`).
    honour_visible_devices: let CUDA_VISIBLE_DEVICES hide and reorder GPUs, as on a real machine. torch_version: use
    memory as that PyTorch does ("2.11" to "2.15"), say a cluster's; None: as the installed one does. Entering gives the
    list of devices. Raises ValueError for a bad argument.
    """

    def __init__(
        self,
        count: int = 1,
        *,
        memory: int | str | None = None,
        kind: str = "H200",
        shapes_only: bool = False,
        honour_visible_devices: bool = True,
        torch_version: str | None = None,
        links: str | Sequence[Sequence[str]] | None = None,
        hosts: int = 1,
        network: str = "Ethernet 100",
    ) -> None:
        self._settings = Settings(
            count, memory, kind, shapes_only, honour_visible_devices, torch_version, links, hosts, network
        )
        self._machine: VirtualMachine | None = None

    def start(self) -> list[torch.device]:
        """Switch on. Returns the devices, cuda:0 first."""
        with _switching:
            if self._machine is not None:
                raise RuntimeError("These virtual GPUs are already on. Call stop() first, or create new ones.")
            first = active() is None
            self._machine = made = VirtualMachine(self._settings)
            made.first_options = lambda: patches.allocator_settings.from_environment(made)
            made.no_room_for_context = errors.no_room_for_context
            made.start_in_child = start
            machine.push(made)
            try:
                if first:
                    patches.install()
                mode.enter_thread()
            except BaseException:
                self.stop()
                raise
            return [torch.device("cuda", gpu.index) for gpu in self._machine.gpus]

    def stop(self) -> None:
        """Switch off and put everything back. Does nothing when they are off."""
        with _switching:
            if self._machine is None:
                return
            machine.remove(self._machine)
            patches.streams.forget(self._machine)
            history.forget(self._machine)
            self._machine = None
            if active() is None:
                mode.leave_thread()
                patches.uninstall()

    def __enter__(self) -> list[torch.device]:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __call__(self, function: _Function) -> _Function:
        """As a decorator: fresh GPUs for every call. A generator has them from its first `next` until it ends."""

        @functools.wraps(function)
        def with_gpus(*args: Any, **kwargs: Any) -> Any:
            with virtual_gpus(**self._settings.arguments()):
                return function(*args, **kwargs)

        @functools.wraps(function)
        def generator_with_gpus(*args: Any, **kwargs: Any) -> Any:
            with virtual_gpus(**self._settings.arguments()):
                return (yield from function(*args, **kwargs))

        @functools.wraps(function)
        async def coroutine_with_gpus(*args: Any, **kwargs: Any) -> Any:
            with virtual_gpus(**self._settings.arguments()):
                return await function(*args, **kwargs)

        decorated: Callable[..., Any] = with_gpus
        if inspect.iscoroutinefunction(function):
            decorated = coroutine_with_gpus
        elif inspect.isgeneratorfunction(function):
            decorated = generator_with_gpus
        return cast(_Function, decorated)


def start(settings: Settings) -> None:
    """Switch on what `settings` ask for. A spawned process calls this by its name, see `patches.processes`."""
    virtual_gpus(**settings.arguments()).start()


def active_machine() -> VirtualMachine | None:
    """The machine that answers now, or None: for tools that draw or explain it."""
    return active()


def renew_inherited() -> None:
    """In a forked process: empty virtual GPUs in place of those of the parent, with the same settings.

    Tensors that the parent had on its GPUs are CPU tensors here afterwards. In any other process nothing happens.
    """
    inherited = active()
    if inherited is not None and inherited.is_inherited:
        start(inherited.settings)
        machine.remove(inherited)
