"""The class `virtual_gpus`, which switches virtual GPUs on and off. It uses all other modules of the package."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from virtual_gpus import errors, features, machine
from virtual_gpus.dispatch import mode
from virtual_gpus.machine import VirtualMachine, active
from virtual_gpus.settings import Settings

_switching = threading.RLock()
_Function = TypeVar("_Function", bound=Callable[..., Any])


class virtual_gpus:
    """Switch on `count` virtual GPUs. Use it as a context manager, as a decorator, or with `.start()` and `.stop()`.

    Sets of GPUs can be nested. Entering returns the list of devices. Switching off restores PyTorch as it was.

    count: number of GPUs.
    memory: memory of each GPU, in bytes or as text ("16 GiB", "512 MiB"). None: the memory of the kind.
    kind: a name in `virtual_gpus.gpus.kinds()`, such as "A100" or "H200".
    shapes_only: keep sizes, but no values. Use it for jobs that are larger than this computer.
    honour_visible_devices: let CUDA_VISIBLE_DEVICES hide and reorder GPUs, as on a real machine.
    torch_version: the PyTorch version whose memory rules apply, "2.11" to "2.15", for example that of a cluster. None:
        the installed version.
    links, hosts, network, adapters: the connections of the GPUs, for the modelled clock. They are explained in
        `help("virtual_gpus.clock.links.arrange")`.
    measured: a file, or a folder of files, with measured seconds of operators, which the modelled clock prefers to its
        formulas: `help("virtual_gpus.clock.measured")`.
    children: let Python programs that are started with `subprocess` have these GPUs too, and let all programs that are
        started have an `nvidia-smi`. How it works and what switches it off: `help("virtual_gpus.processes.children")`.
    check_races: raise `virtual_gpus.RaceError` where two streams, or a stream and the host, use the same memory and
        nothing orders them. `help("virtual_gpus.features.races")` says how.
    refuse_forks: raise CUDA's RuntimeError in a forked process whose parent has used a GPU. Without it, such a process
        inherits GPUs and tensors, which no real GPU allows.
    rank, world_size: be one rank of a job of `world_size` ranks, whose other ranks do not exist. Each host of the job
        has `count` GPUs. `help("virtual_gpus.processes.one_rank")` says what the program sees.

    Raises ValueError or TypeError for an invalid argument.
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
        children: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        adapters: int = 1,
        measured: str | os.PathLike[str] | None = None,
        check_races: bool = False,
        refuse_forks: bool = False,
    ) -> None:
        self._settings = Settings(
            count, memory, kind, shapes_only, honour_visible_devices, torch_version, links, hosts, network, children,
            rank, world_size, adapters, None if measured is None else os.path.abspath(measured), check_races,
            refuse_forks,
        )  # fmt: skip
        self._machine: VirtualMachine | None = None

    def start(self) -> list[torch.device]:
        """Switch the GPUs on and return their devices, cuda:0 first. Raises RuntimeError if they are already on."""
        with _switching:
            if self._machine is not None:
                raise RuntimeError("These virtual GPUs are already on. Call stop() first, or create new ones.")
            first = active() is None
            made = VirtualMachine(self._settings)
            made.no_room_for_context = errors.no_room_for_context
            made.not_initialized = errors.not_initialized
            made.start_in_child = start
            features.start(made)
            self._machine = made
            machine.push(made)
            try:
                if first:
                    features.install()
                mode.enter_thread()
            except BaseException:
                self.stop()
                raise
            return [torch.device("cuda", gpu.index) for gpu in self._machine.gpus]

    def stop(self) -> None:
        """Switch the GPUs off and restore PyTorch as it was. Does nothing if they are already off."""
        with _switching:
            if self._machine is None:
                return
            features.stop(self._machine)
            machine.remove(self._machine)
            self._machine = None
            if active() is None:
                mode.leave_thread()
                features.uninstall()

    def __enter__(self) -> list[torch.device]:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __call__(self, function: _Function) -> _Function:
        """Decorate a function so that every call gets new GPUs. A generator has them until it ends."""

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
    """Switch on the GPUs of `settings`. A spawned process calls this function by name (see `features.processes`)."""
    virtual_gpus(**settings.arguments()).start()


def start_inherited(settings: dict[str, Any]) -> None:
    """Switch on what the parent of this process offers. Its `sitecustomize` calls this once torch has been imported."""
    virtual_gpus(**settings).start()
    inherited = active()
    assert inherited is not None
    inherited.look_again()  # the program may set CUDA_VISIBLE_DEVICES in its first lines


def active_machine() -> VirtualMachine | None:
    """The machine of the virtual GPUs that are on, or None. Tools that draw or explain it use this."""
    return active()


def renew_inherited() -> None:
    """In a forked process, replace the parent's virtual GPUs by empty ones with the same settings.

    Afterwards, the tensors on the parent's GPUs are CPU tensors in this process. In other processes this does nothing.
    """
    inherited = active()
    if inherited is not None and inherited.is_inherited:
        start(inherited.settings)
        machine.remove(inherited)
