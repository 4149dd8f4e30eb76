"""What `MemoryMonitor` recorded on one GPU: the curve, the phases, the peak, and what held it."""

from bisect import bisect
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import NamedTuple

from helpers.gpus import round_size
from helpers.measure.monitor.trace import Life, Timeline
from helpers.measure.monitor.watch import Known
from helpers.measure.sizes import format_bytes

KINDS = ("parameters", "gradients", "optimizer state", "activations", "other")


class Mark(NamedTuple):
    """From after `event` on it is `phase`, and `known` is held; `allocated`: the allocator's own figure then.

    made: bytes asked for, of each gradient that the backward pass has made which ends here. copies: the same of each
    copy of a parameter or a buffer that DataParallel has made for the replica which begins here.
    """

    event: int
    allocated: int
    phase: str | None
    known: Known
    made: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()


class Span(NamedTuple):
    """A phase: the events after `start` up to and including `end`."""

    start: int
    end: int
    phase: str | None


class Peak(NamedTuple):
    """The most that was allocated on `gpu`, in bytes, after event number `event`, in `phase` (None: in none)."""

    gpu: int
    bytes: int
    event: int
    phase: str | None

    def __str__(self) -> str:
        where = f", in {self.phase}" if self.phase else ""
        return f"GPU {self.gpu}: {format_bytes(self.bytes)} at event {self.event:,}{where}"


@dataclass(frozen=True)
class Run:
    """One GPU."""

    gpu: int
    timeline: Timeline
    marks: Sequence[Mark]

    def spans(self) -> list[Span]:
        """The phases in order and without gaps; None is what lies between two."""
        found: list[Span] = []
        ends = [*(mark.event for mark in self.marks[1:]), self.timeline.last]
        for mark, end in zip(self.marks, ends, strict=True):
            if found and found[-1].start == found[-1].end:
                found.pop()
            joined = found.pop().start if found and found[-1].phase == mark.phase else mark.event
            found.append(Span(joined, end, mark.phase))
        return found

    def peak(self) -> Peak:
        """The most that was allocated, and when: the first time."""
        most = max(self.timeline.allocated)
        event = self.timeline.allocated.index(most) + self.timeline.lost
        phase = next((span.phase for span in self.spans() if span.start < event <= span.end), None)
        return Peak(self.gpu, most, event, phase)

    def at_peak(self) -> dict[str, int]:
        """Bytes by kind (`KINDS`) at the peak; they add up to it."""
        peak = self.peak()
        known, copies = self._known_at(peak), self._copies_at(peak.event)
        gradients = known.gradients + self._gradients_on_their_way(peak.event)
        found, left = {}, peak.bytes
        parameters = known.parameters + sum(round_size(life.requested) for life in copies)
        sizes = parameters, gradients, known.states, self._activations(peak.event, copies)
        for kind, size in zip(KINDS, sizes, strict=False):
            found[kind] = min(size, left)
            left -= found[kind]
        return found | {"other": left}

    def note(self) -> str:
        """What is not exact about the curve, or ""."""
        line = self.timeline
        if line.lost:
            return f"GPU {self.gpu}: the first {line.lost:,} events were no longer in PyTorch's memory history."
        off = max(abs(line.after(mark.event) - mark.allocated) for mark in self.marks)
        return f"GPU {self.gpu}: the curve is up to {format_bytes(off)} off what the allocator counts." if off else ""

    def _known_at(self, peak: Peak) -> Known:
        if peak.phase == "step":  # what a step makes is counted when it ends
            return next((mark.known for mark in self.marks if mark.event >= peak.event), self.marks[-1].known)
        return [mark.known for mark in self.marks if mark.event <= peak.event][-1]

    def _gradients_on_their_way(self, event: int) -> int:
        """Bytes at `event` that the backward pass at work has taken for gradients: blocks that it leaves behind, of the
        sizes of those that are new when it ends."""
        for begin, end in pairwise(self.marks):
            if end.made and begin.event <= event < end.event:
                left = [life for life in self.timeline.lives if begin.event < life.born <= end.event < life.died]
                wanted, held = Counter(end.made), 0
                for life in sorted(left, key=lambda life: life.born):
                    wanted[life.requested] -= 1
                    if wanted[life.requested] >= 0 and life.born <= event:
                        held += life.size
                return held
        return 0

    def _copies_at(self, event: int) -> set[Life]:
        """DataParallel's copies that are in use at `event`: when a replica begins, the last blocks of their sizes."""
        if not any(mark.copies for mark in self.marks):
            return set()
        lives, found = sorted(self.timeline.lives, key=lambda life: life.born), set()
        for mark in self.marks:
            wanted = Counter(mark.copies)
            place = bisect(lives, mark.event, key=lambda life: life.born)
            while wanted.total() and place:
                place -= 1
                life = lives[place]
                if life.died > mark.event and wanted[life.requested]:
                    wanted[life.requested] -= 1
                    found.add(life)
        return {life for life in found if life.born <= event < life.died}

    def _activations(self, event: int, copies: Collection[Life]) -> int:
        alive = [life for life in self.timeline.lives if life.born <= event < life.died and life not in copies]
        forwards = [span for span in self.spans() if span.phase == "forward" and span.start < span.end]
        held = 0
        for span, following in zip_longest(forwards, forwards[1:]):
            # Where memory ran out, everything alive was wanted: what came after is the error's way out.
            end = next((oom for oom in self.timeline.ooms if span.start <= oom <= span.end), span.end)
            limit = following.end if following else self.timeline.last + 1
            held += sum(life.size for life in alive if span.start < life.born <= span.end and end < life.died <= limit)
        return held
