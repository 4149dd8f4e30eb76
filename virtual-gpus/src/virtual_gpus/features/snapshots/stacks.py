"""Where in the user's program something happened: Python stacks, taken and named by PyTorch's own unwinder.

A stack keeps code objects, no frames: it holds no tensor and no variable alive. Taking one costs a quarter of a
microsecond; names and line numbers are looked up when a snapshot is taken.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import time
import weakref
from collections import deque
from collections.abc import Iterable
from itertools import repeat

import torch

from virtual_gpus.memory.allocator import Owner

_HERE = str(pathlib.Path(__file__).parents[2]) + os.sep  # the package
_gather = torch._C._profiler.gather_traceback
# What lies between two frames of this package belongs to it as well: how it calls operators and its own contexts.
_BETWEEN = {torch._ops.__file__, torch.autograd.function.__file__, contextlib.__file__}


def take() -> object:
    """The stack of this thread, innermost frame first. C++ frames are left out: they would be those of CPU kernels."""
    return _gather(True, True, False)


@functools.cache
def _is_ours(filename: str) -> bool:
    return filename.startswith(_HERE)


def _of_the_program(frames: list[dict]) -> list[dict]:
    """The frames without those of this package, and without what lies between two of those."""
    kept: list[dict] = []
    since_ours = None  # the length of `kept` after the last frame of ours, while only _BETWEEN came since
    for frame in frames:
        if _is_ours(frame["filename"]):
            if since_ours is not None:
                del kept[since_ours:]
            since_ours = len(kept)
        else:
            kept.append(frame)
            if frame["filename"] not in _BETWEEN:
                since_ours = None
    return kept


def named(stacks: Iterable[object]) -> dict[int, list[dict]]:
    """For each stack of an iterable, by its id: its frames as {"name", "filename", "line"}, innermost first.

    Equal frames and equal stacks are the same objects, which keeps a pickle of many of them small.
    """
    distinct = {id(stack): stack for stack in stacks if stack is not None}
    frames_seen: dict[tuple, dict] = {}
    stacks_seen: dict[tuple, list[dict]] = {}

    def shared(frames):
        frames = [frames_seen.setdefault(tuple(frame.values()), frame) for frame in _of_the_program(frames)]
        return stacks_seen.setdefault(tuple(map(id, frames)), frames)

    symbolized = _symbolized(list(distinct.values()))
    return {key: shared(frames) for key, frames in zip(distinct, symbolized, strict=True)}


def _symbolized(stacks: list) -> list[list[dict]]:
    """The frames of each stack.

    PyTorch asks its compiler about code that it made. If nothing was compiled, that would first import the compiler,
    which takes longer than `import torch`. An attribute without the name that it looks for says that there is none.
    """
    if "_inductor" in vars(torch):
        return torch._C._profiler.symbolize_tracebacks(stacks)
    torch._inductor = none = object()
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
        self._notes: deque = deque()
        self._moment: tuple | None = None
        self._found: dict[int, tuple | None] = {}
        self._watched: dict[int, tuple] = {}
        gathered = map(_gather, repeat(True), repeat(True), repeat(False))
        moments = zip(iter(time.perf_counter_ns, None), gathered, strict=False)
        self._note_moment = functools.partial(next, map(self._notes.append, moments))

    def watch(self, thing: object, address: int) -> None:
        """Note the death of `thing`, whose block is at `address`. Forgets who was watched under that address."""
        mark = Owner(thing, self._notes.append)
        mark.address = address
        self._watched[address] = mark, weakref.ref(thing, self._note_moment)

    def of(self, address: int) -> tuple | None:
        """(nanoseconds, stack) of the death that freed the block at `address`, once; None when nothing died."""
        while self._notes:
            note = self._notes.popleft()
            if isinstance(note, tuple):
                self._moment = note
            else:
                self._found[note.address] = self._moment
        self._watched.pop(address, None)
        return self._found.pop(address, None)
