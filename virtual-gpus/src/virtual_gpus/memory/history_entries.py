"""What a history of memory is made of: its events, the blocks in use, what was asked of it. See `history`."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

NEVER, STATE, ALLOC, ALL = range(4)  # which events get a stack: none, live blocks, allocations too, frees too
ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
           "segment_unmap", "snapshot", "oom", "annotate")  # fmt: skip


class _Thread(threading.local):
    """What each thread's events are labelled with."""

    metadata = ""


thread = _Thread()


@dataclass(frozen=True)
class Settings:
    """What _record_memory_history was told. `every_thread`: annotations of all threads, or of `own_thread` only."""

    max_entries: int
    context: int
    skipped: frozenset = frozenset()
    every_thread: bool = False
    own_thread: int = field(default_factory=threading.get_ident)


class Entry(NamedTuple):
    """One event. `value`: an address, or the free bytes of an "oom". `stack` and `forward`: None if not taken.

    They are kept as their fields in a row, which is faster, and which leaves the garbage collector nothing to look at.
    There "free" stands for "free_requested" and "free_completed" at one moment.
    """

    action: str
    value: int
    size: int
    stream: int
    time: int
    stack: object = None
    forward: list | None = None
    metadata: str = ""


class Live(NamedTuple):
    """A used block: what was requested, its stream, what it belongs to (see `owner_of`), and where it was made."""

    requested: int
    stream: int
    owner: object
    stack: object = None
    forward: list | None = None
