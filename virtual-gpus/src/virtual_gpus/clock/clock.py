"""The clock: one host that issues work, GPUs that do it on streams, and what waits for what. No torch here.

    clock = Clock(2)
    clock.launch(0, stream=0, seconds=1e-3, host=1e-5, name="mm")  # the host goes on after 10 microseconds
    clock.wait(clock.mark(0, 0))                                   # ... and waits until the GPU is done

Times are modelled seconds since the machine was switched on. The rules are CUDA's. The host pays to issue each
operator. A stream does its work in order, each piece once the host has issued it and the stream is free. Streams of one
GPU share its multiprocessors, so their kernels take turns, and those of a stream with a priority come first. Other work
runs beside them, such as copies. A kernel is slower by the part of the multiprocessors that such work holds meanwhile.
Events carry a time from one stream to another, or to the host. Nothing else makes one of them wait.

Whatever is issued has its times at once, since nothing issued later can change them. So nothing needs to be kept, and
the clock costs a few microseconds per operator. What is kept: for each GPU when it was busy during the last second
(what nvidia-smi shows), and everything while a `Timeline` records.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from virtual_gpus import figures

# "": a kernel, for which a timeline has one of the next three.
SpanKind = Literal["", "forward", "backward", "step", "copy", "collective", "wait"]
COPY_IN, COPY_OUT = "copy in", "copy out"
TO_THE_GPU, TO_THE_CPU = "to the GPU", "to the CPU"  # names of copies from and to the computer
HOST_LANE = "host"
_WINDOW = 1.0  # seconds that nvidia-smi's utilization looks back: a sixth of a second to one second
_KEPT_GAPS = 64  # chosen: what is issued later may still fill them
_KEPT_BESIDE = 16  # chosen: more than run beside one kernel


class HostCosts(NamedTuple):
    """Seconds that one host thread needs to issue work: [host] in `figures/host.toml`. pageable: bytes per second."""

    view: float
    operator: float
    in_place: float
    kernel: float
    training: float
    copy: float
    pageable_copy: float
    wait: float
    pageable: float


HOST = HostCosts(**figures.read("host.toml")["host"])


class Span(NamedTuple):
    """Work on a GPU (or waiting of the host, gpu None): stream or engine, start and end in seconds, what it was.

    kernel: what CUDA calls a kernel whose operator has another name. sent: the bytes that the busiest GPU of a
    collective sends or receives.
    """

    gpu: int | None
    lane: int | str
    start: float
    end: float
    kind: SpanKind
    name: str
    kernel: str = ""
    sent: float = 0.0


def _cut(gap: list[float], start: float, end: float) -> None:
    """Take a time out of an idle one, [start, end], of which the longer part is left."""
    gap[:] = (end, gap[1]) if gap[1] - end > start - gap[0] else (gap[0], start)


class Track:
    """One GPU: when each stream is free, and when the multiprocessors are."""

    __slots__ = ("beside", "busy", "free_from", "gaps", "streams", "urgent", "urgent_from")

    def __init__(self):
        self.streams: dict[int | str, float] = {}
        self.free_from = 0.0  # the multiprocessors, after the last kernel so far
        self.gaps: deque[list[float]] = deque(maxlen=_KEPT_GAPS)  # idle times before that, if streams share them
        self.busy: deque[float] = deque()  # starts and ends in turn, merged, of the last second: no object per span
        self.urgent: set[int] = set()  # streams that were made with a priority
        self.urgent_from = 0.0  # the multiprocessors, after the last kernel of these
        self.beside: deque[tuple[float, float, float]] = deque(maxlen=_KEPT_BESIDE)  # starts, ends, and what is held

    def take(self, earliest: float, seconds: float) -> float:
        """When a kernel that may start at `earliest` gets the multiprocessors."""
        free = self.free_from
        if earliest >= free:
            if len(self.streams) > 1 and earliest > free:
                self.gaps.append([free, earliest])
            self.free_from = earliest + seconds
            return earliest
        for gap in self.gaps.copy():  # in one piece: a thread that was left over may add to them meanwhile
            start = max(gap[0], earliest)
            if start + seconds <= gap[1]:
                _cut(gap, start, start + seconds)
                return start
        self.free_from = free + seconds
        return free

    def take_first(self, earliest: float, seconds: float) -> float:
        """`take` for a stream with a priority: it waits for kernels of such streams, and those of others end later."""
        start = max(earliest, self.urgent_from)
        end = self.urgent_from = start + seconds
        free = self.free_from
        if start >= free:
            return self.take(start, seconds)
        displaced = min(end, free) - start  # seconds of kernels that were issued before, so without the gaps in between
        for gap in self.gaps.copy():
            idle = min(end, gap[1]) - max(start, gap[0])
            if idle > 0:
                displaced -= idle
                _cut(gap, start, end)
        self.free_from = max(free, end) + displaced
        self.note(free, self.free_from)
        for stream, until in self.streams.copy().items():
            if start < until <= free and isinstance(stream, int) and stream not in self.urgent:
                self.streams[stream] = self.free_from - (free - until)  # the last one ends exactly then
        return start

    def share(self, start: float, end: float, held: float) -> None:
        """Other work holds part of the multiprocessors: kernels issued before end later, and later ones are slower."""
        free = self.free_from
        delay = held * max(0.0, min(end, free) - start)
        if delay:
            self.free_from = free + delay
            for stream, until in self.streams.copy().items():
                if until >= free and isinstance(stream, int):
                    self.streams[stream] = until + delay
        if end > free:
            self.beside.append((max(start, free), end, held))

    def slowed(self, start: float, seconds: float) -> float:
        """The seconds of a kernel from `start` on, with the work beside it. Several together hold the largest part."""
        beside = self.beside
        while beside and beside[0][1] <= start:
            beside.popleft()
        together = sum(max(0.0, min(end, start + seconds) - max(begin, start)) for begin, end, _ in beside)
        return seconds + max((held for *_, held in beside), default=0.0) * min(together, seconds)

    def note(self, start: float, end: float) -> None:
        """Remember a busy time for `load`."""
        busy = self.busy
        if not busy or start > busy[-1]:
            busy.extend((start, end))
            if len(busy) > 1024 and busy[1] < end - _WINDOW:
                while busy[1] < end - _WINDOW:
                    busy.popleft()
                    busy.popleft()
        elif end > busy[-1]:
            busy[-1] = end

    def load(self, now: float) -> float:
        """Share of the last second before `now` (of the time so far, if that is less) in which kernels ran."""
        since = max(0.0, now - _WINDOW)
        # In one piece, and from its end: the caller, such as a live panel, is often another thread, and the first
        # half of a span may just have been forgotten.
        times = list(self.busy)[::-1]
        spans = zip(times[1::2], times[::2], strict=False)
        busy = sum(max(0.0, min(end, now) - max(start, since)) for start, end in spans)
        return busy / (now - since) if now > since else 0.0

    @property
    def done(self) -> float:
        """When all work issued so far is done."""
        return max(self.streams.values(), default=0.0)


class Clock:
    """`count` GPUs and their host. now: the host's time. share: threads that share its interpreter, DataParallel's."""

    def __init__(self, count: int, host: HostCosts = HOST):
        self.host = host
        self.now = 0.0
        self.share = 1
        self.tracks = [Track() for _ in range(count)]
        self.timelines: list[Any] = []
        self.issued = 0  # operators so far
        self._threads: dict[int, float] | None = None  # autograd's, one per GPU, during a backward pass
        self._began = 0.0

    # ---- the host ----

    def spend(self, seconds: float, gpu: int | None = None) -> float:
        """The host works; on behalf of `gpu` during a backward pass, whose thread then pays. Returns its time after."""
        threads = self._threads
        if threads is None or gpu is None:
            self.now += seconds * self.share
            return self.now
        now = threads[gpu] = threads.get(gpu, self._began) + seconds * self.share
        return now

    def time_of(self, gpu: int) -> float:
        """The time of the host thread that issues work to `gpu`."""
        return self.now if self._threads is None else self._threads.get(gpu, self._began)

    def wait(self, until: float, gpu: int | None = None) -> None:
        """The host stands still until a time that a stream or an event gave."""
        before = self.now if gpu is None else self.time_of(gpu)
        after = max(before, until)
        if self._threads is not None and gpu is not None:
            self._threads[gpu] = after
        else:
            self.now = after
        for timeline in self.timelines if after > before else ():
            timeline.add(Span(None, HOST_LANE, before, after, "wait", "wait"))

    def notice(self, until: float, gpu: int | None = None) -> None:
        """`wait`, and the time that the host needs to notice that it is over."""
        self.wait(until, gpu)
        self.spend(self.host.wait, gpu)

    # ---- ordering ----

    # Here, times are numbers, and order nothing more. A clock that keeps with them which work is done by then, as the
    # search for races does, overrides these three, and `mark`, `done`, `hold` and `wait`, which pass it on.

    def latest(self, times: Iterable[float]) -> float:
        """The latest of several times; 0 if there are none."""
        return max(times, default=0.0)

    def observe(self, until: float) -> None:
        """The host has asked whether a time is past, and it is."""

    def join(self, *lanes: tuple[int, int | str]) -> None:
        """Each of several lanes, (GPU, stream), waits for all others."""

    def start_backward(self) -> None:
        """Autograd has a thread per GPU, in C++: they issue work side by side."""
        if self._threads is None:
            self._began = self.now
            self._threads = {}

    def end_backward(self) -> None:
        """The caller goes on when the last thread is through."""
        if self._threads is not None:
            self.now = max([self.now, *self._threads.values()])
            self._threads = None

    def hand_over(self, first: int, second: int) -> float:
        """One thread of autograd hands work to another: both are as late as the later one. Returns that time."""
        if self._threads is None:
            return self.now
        late = max(self.time_of(first), self.time_of(second))
        self._threads[first] = self._threads[second] = late
        return late

    # ---- the GPUs ----

    def launch(self, gpu: int, stream: int | str, seconds: float, host: float, name: str, further: float = 0.0) -> None:
        """Kernels of one operator. host: seconds to issue the first one; further: to issue the others, meanwhile.

        Kernels that end before the next one is issued leave gaps, which count as idle: the span is moved to its end.
        """
        if self._threads is None:
            now = self.now = self.now + host * self.share
        else:
            now = self.spend(host, gpu)
        self.issued += 1
        track = self.tracks[gpu]
        streams = track.streams
        start = streams.get(stream, 0.0)
        if now > start:
            start = now
        if track.beside:
            seconds = track.slowed(max(start, track.free_from), seconds)
        if start >= track.free_from and len(streams) < 2 and not track.urgent:  # `take` of a free GPU, without its call
            track.free_from = end = start + seconds
        else:
            start = (track.take_first if stream in track.urgent else track.take)(start, seconds)
            end = start + seconds
        if further:
            end = max(end, self.spend(further, gpu))
            start, track.free_from = end - seconds, max(track.free_from, end)
        streams[stream] = end
        track.note(start, end)
        if self.timelines:  # asked first: a loop over none takes longer
            for timeline in self.timelines:
                timeline.add(Span(gpu, stream, start, end, "", name))

    def occupy(
        self, gpu: int, lane: int | str, start: float, end: float, kind: SpanKind, name: str, kernel: str = "",
        held: float = 0.0, sent: float = 0.0,
    ) -> None:  # fmt: skip
        """Note work whose times are known, such as a copy, on `lane`. kernel: its name, if it counts as load. held: the
        part of the multiprocessors that it takes from other kernels. sent: see `Span`."""
        track = self.tracks[gpu]
        if held and end > start:
            track.share(start, end, held)
        track.streams[lane] = max(track.streams.get(lane, 0.0), end)
        self.issued += 1
        if kernel:
            track.note(start, end)
        for timeline in self.timelines if end > start else ():
            timeline.add(Span(gpu, lane, start, end, kind, name, kernel, sent))

    def ready(self, gpu: int, lane: int | str) -> float:
        """When a stream or engine has done what was issued to it."""
        return self.tracks[gpu].streams.get(lane, 0.0)

    def hold(self, gpu: int, lane: int | str, until: float) -> None:
        """Work that comes to this stream waits until then."""
        streams = self.tracks[gpu].streams
        if until > streams.get(lane, 0.0):
            streams[lane] = until

    def mark(self, gpu: int, stream: int) -> float:
        """An event: the time when the work issued to `stream` so far is done, or now if it is done already."""
        return max(self.ready(gpu, stream), self.time_of(gpu))

    def done(self, gpu: int) -> float:
        """When all streams of a GPU are through."""
        return self.tracks[gpu].done
