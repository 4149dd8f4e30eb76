"""What the engine knows of the running thread, in one object: `this_thread`."""

import threading
from typing import Generic, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

Value = TypeVar("Value")
OWN_THREAD = "virtual_gpus"  # how the names of this package's threads begin: they issue no operators


class ThreadState(threading.local):
    """One set of these attributes per thread. Every thread starts with the values that stand here."""

    in_kernel: bool = False
    """True while an operator's kernel runs. `tensor.device` is then what C++ says, since meta kernels are Python and
    read it, and no tensor that is made is placed."""

    in_backward: bool = False
    """True while autograd's engine runs a backward pass. On a real GPU that happens in a thread of its own."""

    mode: TorchDispatchMode | None = None
    """The dispatch mode through which this thread's operators are seen; None where it has not entered one."""


this_thread = ThreadState()


class OfEachThread(threading.local, Generic[Value]):
    """A value that each thread has for itself, with this one at first."""

    def __init__(self, value: Value) -> None:
        self.value = value


class below:
    """Compute below the accounting: operators run as they are, and nothing that they make is placed."""

    def __enter__(self) -> None:
        self._before, this_thread.in_kernel = this_thread.in_kernel, True

    def __exit__(self, *error: object) -> None:
        this_thread.in_kernel = self._before


class seen:
    """Have operators seen: while the dispatch mode works on one it is off, and what others make would be nowhere."""

    def __enter__(self) -> None:
        mode, self._pushed = this_thread.mode, False
        if mode is not None and mode not in _get_current_dispatch_mode_stack():
            _push_mode(mode)
            self._pushed = True

    def __exit__(self, *error: object) -> None:
        if self._pushed:
            _pop_mode()
