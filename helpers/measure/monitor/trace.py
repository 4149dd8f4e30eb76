"""A run's memory, event by event, out of PyTorch's own memory history.

`torch.cuda.memory._record_memory_history` notes every allocation and every free with its address and the bytes that
were asked for. The allocator hands out more, by rules that `helpers.gpus.replay` knows: it plays the history back from
the state at the beginning, so that the sum is `torch.cuda.memory_allocated`, to the byte. Events are counted as the
allocator's own counters count them: 1 for an allocation, 1 for a free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from helpers.gpus import replay

COUNTED = ("alloc", "free_requested")  # the actions that the allocator's counters count


class Count(NamedTuple):
    """The allocator's own counters of one GPU: allocations and frees so far, and bytes allocated and reserved now."""

    events: int
    allocated: int
    reserved: int


class Life(NamedTuple):
    """A block of `size` bytes in use from event `born` (0: before the run) until event `died` (after the last: not).

    requested: the bytes that were asked for, 0 for a block from before the run.
    """

    size: int
    born: int
    died: int
    requested: int = 0


@dataclass
class Timeline:
    """One GPU. `allocated[n]`: bytes after event n; 0 is the beginning. `ms`: when, from the first event on.

    ooms: the events after which memory ran out. reserved: bytes that PyTorch kept at the end; its most is
    `peak_reserved`. lost: events at the beginning that PyTorch's history no longer held; the curve starts after them,
    at event `lost`.
    """

    allocated: list[int]
    ms: list[float]
    lives: list[Life]
    ooms: list[int]
    reserved: int
    peak_reserved: int
    lost: int = 0

    @property
    def last(self) -> int:
        """The number of the last event."""
        return self.lost + len(self.allocated) - 1

    def after(self, event: int) -> int:
        """Bytes allocated after `event`."""
        return self.allocated[min(max(0, event - self.lost), len(self.allocated) - 1)]


def timeline(segments: Sequence[Mapping], trace: Sequence[Mapping], before: Count, after: Count) -> Timeline:
    """One GPU's run: its `segments` at the beginning, its `trace` at the end, the counters at both.

    The trace may begin earlier (somebody else was recording already) or later (it is a ring): it is aligned at its
    end, by the number of events that the counters saw.
    """
    total = max(0, after.events - before.events)  # less where somebody set the counters to 0; `Run.note` tells
    mine, lost = _last(trace, total)
    known = () if lost else segments
    blocks = (block for segment in known for block in segment["blocks"] if block["state"] != "inactive")
    born = {block["address"]: (block["size"], 0, 0) for block in blocks}
    line = Timeline([before.allocated], [0.0], [], [], before.reserved, before.reserved, lost)
    states = replay(mine, known)
    start = last = next(states)
    event = lost
    for entry, state in zip(mine, states, strict=True):
        action, change, last = entry["action"], state.allocated - last.allocated, state
        line.reserved = before.reserved + state.reserved - start.reserved
        line.peak_reserved = max(line.peak_reserved, line.reserved)
        if action == "oom":
            line.ooms.append(event)
        if action not in COUNTED:
            continue
        event += 1
        if action == "alloc":
            born[entry["addr"]] = change, event, entry["size"]
        else:
            _, since, requested = born.pop(entry["addr"], (0, 0, 0))
            line.lives.append(Life(-change, since, event, requested))
        line.allocated.append(line.allocated[-1] + change)
        line.ms.append(entry["time_us"] / 1000)
    line.lives += [Life(size, since, event + 1, requested) for size, since, requested in born.values()]
    if lost:  # what was there when the history begins is known only from the end
        shift = after.allocated - line.allocated[-1]
        line.allocated = [size + shift for size in line.allocated]
    line.ms[1:] = [moment - line.ms[1] for moment in line.ms[1:]]
    return line


def _last(trace: Sequence[Mapping], total: int) -> tuple[Sequence[Mapping], int]:
    """The end of `trace` with `total` events, and what happened to segments on the way to the first of them; and how
    many of these events the trace does not have."""
    places = [place for place, entry in enumerate(trace) if entry["action"] in COUNTED]
    start = 0 if total > len(places) else places[-total] if total else len(trace)
    while start and trace[start - 1]["action"].startswith(("segment", "oom")):
        start -= 1
    return trace[start:], max(0, total - len(places))
