"""The class `virtual_gpus`, which switches virtual GPUs on and off. It uses all other modules of the package."""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from virtual_gpus import features, machine
from virtual_gpus.dispatch import mode
from virtual_gpus.machine import VirtualMachine, active
from virtual_gpus.settings import Settings, described

_switching = threading.RLock()
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Arguments = ParamSpec("_Arguments")
active_machine = active  # for tools that draw or explain it


def _takes(
    maker: Callable[_Arguments, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _Arguments], None]]:
    """A method has the arguments of `maker`, for type checkers and for `help`."""

    def decorate(method: Callable[..., None]) -> Callable[Concatenate[Any, _Arguments], None]:
        signature = inspect.signature(maker)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        vars(method)["__signature__"] = signature.replace(parameters=[own, *signature.parameters.values()])
        return method

    return decorate


class virtual_gpus:
    """Switch on `count` virtual GPUs. Use it as a context manager, as a decorator, or with `.start()` and `.stop()`.

    Sets of GPUs can be nested. Entering returns the list of devices. Switching off restores PyTorch as it was.

    Raises ValueError or TypeError for an invalid argument.
    """

    @_takes(Settings)
    def __init__(self, *args: Any, **settings: Any) -> None:
        self._settings = Settings(*args, **settings)
        self._machine: VirtualMachine | None = None

    def start(self) -> list[torch.device]:
        """Switch the GPUs on and return their devices, cuda:0 first. Raises RuntimeError if they are already on."""
        with _switching:
            if self._machine is not None:
                raise RuntimeError("These virtual GPUs are already on. Call stop() first, or create new ones.")
            first = active() is None
            new_machine = VirtualMachine(self._settings)
            new_machine.start_in_child = start
            features.start(new_machine)
            try:
                machine.push(new_machine)
            except BaseException:
                features.stop(new_machine)
                raise
            self._machine = new_machine
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
        """Decorate a function so that every call gets new GPUs. Raises TypeError for a generator or a coroutine."""
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError("A generator or a coroutine cannot be decorated. Write `with virtual_gpus(...):` in it.")

        @functools.wraps(function)
        def with_gpus(*args: Any, **kwargs: Any) -> Any:
            with virtual_gpus(**self._settings.arguments()):
                return function(*args, **kwargs)

        return cast(_Function, with_gpus)


virtual_gpus.__doc__ = str(virtual_gpus.__doc__).replace("    Raises ", f"{described()}\n\n    Raises ")


def start(**settings: Any) -> None:
    """Switch on GPUs before a program that may set CUDA_VISIBLE_DEVICES in its first lines.

    Spawned processes (see `features.multiprocessing`) and `sitecustomize` in those that inherit GPUs call it by name.
    """
    gpus = virtual_gpus(**settings)
    gpus.start()
    cast(VirtualMachine, gpus._machine).look_again()


def renew_inherited() -> None:
    """In a forked process, replace the parent's virtual GPUs by empty ones with the same settings.

    Afterwards, the tensors on the parent's GPUs are CPU tensors in this process. In other processes this does nothing.
    """
    inherited = active()
    if inherited is not None and inherited.is_inherited:
        virtual_gpus(**inherited.settings.arguments()).start()
        machine.remove(inherited)
