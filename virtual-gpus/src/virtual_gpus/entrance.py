"""Entrances: the functions through which PyTorch and the user's program call this package.

The traceback of an error ends at the line of the caller, as for errors from C++. A traceback that is kept therefore
holds no frame of this package and no tensor, except for mistakes in this package. The code behind an entrance can find
the Python instruction of the call, and the line of the program: the innermost one outside PyTorch and this package.
"""

import functools
import linecache
import os
import pathlib
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

import torch
import typing_extensions

from virtual_gpus.memory.allocator import OutOfMemory, oom_message

_HERE = str(pathlib.Path(__file__).parent)
# PyTorch, what wraps its old functions, and this package.
_NOT_OF_PROGRAM = (str(pathlib.Path(torch.__file__).parent) + os.sep, typing_extensions.__file__,
                   _HERE + os.sep, "<frozen")  # fmt: skip
# What Python raises for a mistake in a program. PyTorch's own errors of these types are IndexErrors with other words.
_MISTAKES, _INDEX = (AssertionError, AttributeError, NameError, LookupError), "index out of range"
_P = ParamSpec("_P")
_R = TypeVar("_R")


def entrance(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that is called from outside. Turns the allocator's OutOfMemory into PyTorch's error."""

    @functools.wraps(function)
    def entered(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            del args, kwargs
            text = seen_from_outside(error)
            if text is None:
                raise
        # Raised from here, with the inputs let go, the traceback keeps no tensor alive: what the program frees is free.
        raise torch.OutOfMemoryError(text)

    return entered


def seen_from_outside(error: BaseException) -> str | None:
    """The words of the torch.OutOfMemoryError that is raised instead of `error`; None: `error` itself is raised.

    Its traceback ends at the caller's line now. Functions that are entrances themselves call this, after they have let
    go of their arguments. None of their names may hold the new error, whose traceback holds them and their callers.
    """
    if error.__suppress_context__ and error.__context__ is not None:  # the same in other words: its frames hold inputs
        error.__context__.__traceback__ = error.__context__ = None
    if not isinstance(error, OutOfMemory):
        traceback = error.__traceback__  # below frames of this package may be others, as of a custom operator
        while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_HERE):
            traceback = traceback.tb_next
        is_mistake = isinstance(error, _MISTAKES) and not (isinstance(error, IndexError) and error.args != (_INDEX,))
        if traceback is not None or not is_mistake:
            error.__traceback__ = traceback
        return None
    text = oom_message(error, vars(error)["gpu"].index)  # see `VirtualGPU.allocate`
    error.__traceback__ = error.__context__ = None  # they hold the frames, and those the tensors
    return text


ENTERED = entrance(lambda: None).__code__  # the code of `entered`, which all entrances share
_dispatch: CodeType = ENTERED


def entrance_of_dispatch(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Mark the one function that is an entrance without the call that `entrance` adds: it runs for every operator."""
    global _dispatch
    _dispatch = function.__code__
    return function


def is_entrance(code: CodeType) -> bool:
    """True for the code of an entrance."""
    return code is ENTERED or code is _dispatch


def calling_frame() -> FrameType:
    """The frame that called the innermost entrance. In `__torch_dispatch__` it is the frame that called PyTorch.

    The search goes up the stack, so that no function needs to know its depth. Do not keep the frame. In a thread of
    C++, which no Python code called, it is the frame of the entrance itself.
    """
    frame: Any = sys._getframe()
    while frame.f_code is not ENTERED and frame.f_code is not _dispatch:
        frame = frame.f_back
    return frame.f_back or frame


def program_line() -> tuple[str, int, dict[str, Any]]:
    """File, line and module's globals of the innermost frame outside PyTorch and this package, or the outermost one."""
    frame = sys._getframe()
    while frame.f_back is not None and not is_of_program(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals


def quoted_line(file: str, line: int, names: dict[str, Any] | None = None) -> str:
    """ "train.py:12: loss.backward()". names: the module's globals, by which code outside files is found."""
    code = linecache.getline(file, line, names).strip()
    return f"{os.path.basename(file)}:{line}" + (f": {code}" if code else "")


@functools.cache
def is_of_program(filename: str) -> bool:
    """True for the code of a file outside PyTorch and this package."""
    return not filename.startswith(_NOT_OF_PROGRAM)
