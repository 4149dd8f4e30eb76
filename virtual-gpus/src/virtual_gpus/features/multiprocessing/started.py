"""New threads and new processes see the virtual GPUs too.

Dispatch modes are per thread, so every thread that starts enters one; so does a thread that was there before, for
each call that an executor or an event loop gives it. A forked process inherits all of it. A spawned one starts bare:
the patch sends the machine's settings along, and the child switches its GPUs on before it imports or unpickles more.
"""

import concurrent.futures.thread
import multiprocessing.process
import multiprocessing.spawn
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from virtual_gpus.dispatch.mode import in_mode
from virtual_gpus.machine import VirtualMachine, get_machine
from virtual_gpus.patches.table import Patch
from virtual_gpus.processes import children
from virtual_gpus.processes.shared_memory import FOLDER

_raw_preparation = multiprocessing.spawn.get_preparation_data
_MAIN = ("init_main_from_name", "init_main_from_path")


def get_preparation_data(name: str) -> dict[str, object]:
    """What a spawned child is told first; importing the main program is put off until its GPUs are on."""
    return {k: v for k, v in _raw_preparation(name).items() if k not in _MAIN}


class _FirstOfAll:
    """Unpickling goes from left to right: this switches the GPUs on before it comes to classes of the main program."""

    def __init__(self, machine: VirtualMachine, main: dict[str, Any]):
        self._arguments = (machine.start_in_child, machine.settings.arguments(), main, os.environ.get(FOLDER))

    def __reduce__(self) -> tuple[Any, ...]:
        return _switch_on, self._arguments


def _reduce_process(self: Any, protocol: int) -> tuple[Any, ...]:
    """Pickle a process so that the child switches its virtual GPUs on before anything else of it is unpickled."""
    main = {k: v for k, v in _raw_preparation(self._name).items() if k in _MAIN}
    make, arguments, *rest = object.__reduce_ex__(self, protocol)
    return (_rebuild_process, (_FirstOfAll(get_machine(), main), make, arguments), *rest)


def _switch_on(start: Callable[..., None], settings: dict[str, Any], main: dict[str, Any], folder: str | None) -> None:
    if folder is not None:
        os.environ[FOLDER] = folder  # a fork server's children have the environment of its start, with another folder
    start(**settings)
    for key, program in main.items():  # by `spawn._fixup_main_from_name` or `_fixup_main_from_path`
        vars(multiprocessing.spawn)[key.replace("init", "_fixup")](program)


def _rebuild_process(_: object, make: Callable[..., object], arguments: tuple[Any, ...]) -> object:
    return make(*arguments)


def start(machine: VirtualMachine) -> None:
    """Let programs that are started with `subprocess` have the GPUs, if the settings say so."""
    if machine.settings.children:
        machine.variables |= children.variables(machine.facts())


def patches() -> list[Patch]:
    runs = [(threading.Thread, "_bootstrap_inner"), (concurrent.futures.thread._WorkItem, "run")]
    if "asyncio.events" in sys.modules:  # else no event loop is running
        runs.append((sys.modules["asyncio.events"].Handle, "_run"))
    return [(owner, name, in_mode()(getattr(owner, name))) for owner, name in runs] + [
        (multiprocessing.spawn, "get_preparation_data", get_preparation_data),
        (multiprocessing.process.BaseProcess, "__reduce_ex__", _reduce_process),
    ]
