"""Where in the user's program something happened: Python stacks, taken and named by PyTorch's own unwinder.

A stack keeps code objects, no frames: it holds no tensor and no variable alive. Taking one costs a quarter of a
microsecond; names and line numbers are looked up when a snapshot is taken.
"""

import contextlib
import functools
import os
import pathlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from virtual_gpus.memory.allocator import Owner

Frame = dict[str, Any]  # "name", "filename", "line"
Moment = tuple[int, object]  # nanoseconds, stack
_HERE = str(pathlib.Path(__file__).parents[2]) + os.sep  # the package
# What lies between two frames of this package belongs to it as well: how it calls operators and its own contexts.
_BETWEEN = {torch._ops.__file__, torch.autograd.function.__file__, contextlib.__file__}


# The stack of this thread, innermost frame first. C++ frames are left out: they would be those of CPU kernels.
take: Callable[[], object] = functools.partial(torch._C._profiler.gather_traceback, True, True, False)


def _of_the_program(frames: list[Frame]) -> list[Frame]:
    """The frames without those of this package, and without what lies between two of those."""
    of_program: list[Frame] = []
    since_ours = None  # the length of `of_program` after the last frame of ours, while only _BETWEEN came since
    for frame in frames:
        if frame["filename"].startswith(_HERE):
            if since_ours is not None:
                del of_program[since_ours:]
            since_ours = len(of_program)
        else:
            of_program.append(frame)
            if frame["filename"] not in _BETWEEN:
                since_ours = None
    return of_program


def named(stacks: Iterable[object]) -> dict[int, list[Frame]]:
    """For each stack, by id: its frames, innermost first. Equal ones are one object, so that pickles are small."""
    distinct = {id(stack): stack for stack in stacks if stack is not None}
    frames_seen: dict[tuple[Any, ...], Frame] = {}
    stacks_seen: dict[tuple[int, ...], list[Frame]] = {}

    def shared(frames: list[Frame]) -> list[Frame]:
        frames = [frames_seen.setdefault(tuple(frame.values()), frame) for frame in _of_the_program(frames)]
        return stacks_seen.setdefault(tuple(map(id, frames)), frames)

    symbolized = _symbolized(list(distinct.values()))
    return {key: shared(frames) for key, frames in zip(distinct, symbolized, strict=True)}


def _symbolized(stacks: list[Any]) -> list[list[Frame]]:
    """The frames of each stack.

    PyTorch asks its compiler about code that it made. If nothing was compiled, that would first import the compiler,
    which takes longer than `import torch`. An attribute without the name that it looks for says that there is none.
    """
    if "_inductor" in vars(torch):
        return torch._C._profiler.symbolize_tracebacks(stacks)
    vars(torch)["_inductor"] = none = object()
    try:
        return torch._C._profiler.symbolize_tracebacks(stacks)
    finally:
        if vars(torch).get("_inductor") is none:  # else another thread has imported it meanwhile
            del torch._inductor


class Deaths:
    """When and where things died.

    Both are noted without a line of Python: a callback in Python would swallow a Ctrl-C that hits it. Two weak
    references do it. The younger one, which is called first, notes (nanoseconds, stack); the older one notes itself.
    """

    def __init__(self):
        self._notes: deque[Moment | Owner] = deque()
        self._last: Moment | None = None
        self._moments: dict[int, Moment | None] = {}  # by address
        self._watched: dict[int, tuple[Owner, weakref.ref[object]]] = {}
        moments = zip(iter(time.perf_counter_ns, None), iter(take, None), strict=False)
        self._note_moment = functools.partial(next, map(self._notes.append, moments))

    def watch(self, holder: object, address: int) -> None:
        """Note the death of `holder`, whose block is at `address`. Forgets what was watched under that address."""
        mark = Owner(holder, self._notes.append)
        mark.address = address
        self._watched[address] = mark, weakref.ref(holder, self._note_moment)

    def of(self, address: int) -> Moment | None:
        """The moment of the death that freed the block at `address`, once; None when nothing died."""
        while self._notes:
            note = self._notes.popleft()
            if isinstance(note, tuple):
                self._last = note
            else:
                self._moments[note.address] = self._last
        self._watched.pop(address, None)
        return self._moments.pop(address, None)
