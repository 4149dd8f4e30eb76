"""The clock while a CUDA graph is captured, and what a replay of the graph takes. No torch here.

What is captured does not run. It is put on streams of its own, one behind the other without waiting for any host, so
that in the end it is known how long the GPU needs for the whole graph. The host pays for the capture as for work that
it issues. Work on other streams goes to the usual clock.
"""

from __future__ import annotations

from collections.abc import Container

from virtual_gpus.clock.clock import Clock, Track

_OF_THE_HOST = ("spend", "time_of", "wait", "start_backward", "end_backward", "meet", "done")  # as on the usual clock


class GraphClock(Clock):
    """Stands before the clock `outer` for streams in `captured`, (slot, stream) pairs. Times of captured work: seconds
    since the start of the graph."""

    def __init__(self, outer: Clock, captured: Container[tuple[int, int]]):
        self.outer, self.captured, self.host = outer, captured, outer.host
        self.tracks = [Track() for _ in outer.tracks]
        vars(self).update({name: getattr(outer, name) for name in _OF_THE_HOST})

    def __getattr__(self, name: str):
        return getattr(self.outer, name)  # the host's time above all

    def seconds(self) -> dict[int, float]:
        """How long each GPU is at work in one replay, by slot."""
        return {slot: track.done for slot, track in enumerate(self.tracks) if track.done}

    # ---- work on a stream ----

    def launch(self, gpu: int, stream: int, seconds: float, host: float, name: str, further: float = 0.0) -> None:
        """See `Clock`."""
        if (gpu, stream) not in self.captured:
            self.outer.launch(gpu, stream, seconds, host, name, further)
            return
        self.outer.spend(host + further, gpu)
        track = self.tracks[gpu]
        track.streams[stream] = track.take(track.streams.get(stream, 0.0), seconds) + seconds

    def occupy(self, gpu: int, lane: int | str, start: float, end: float, kind: str, name: str, kernel: bool) -> None:
        """See `Clock`."""
        if self._is_inner(gpu, lane):
            streams = self.tracks[gpu].streams
            streams[lane] = max(streams.get(lane, 0.0), end)
        else:
            self.outer.occupy(gpu, lane, start, end, kind, name, kernel)

    def ready(self, gpu: int, lane: int | str) -> float:
        """See `Clock`."""
        return super().ready(gpu, lane) if self._is_inner(gpu, lane) else self.outer.ready(gpu, lane)

    def hold(self, gpu: int, lane: int | str, until: float) -> None:
        """See `Clock`."""
        super().hold(gpu, lane, until) if self._is_inner(gpu, lane) else self.outer.hold(gpu, lane, until)

    def mark(self, gpu: int, stream: int) -> float:
        """See `Clock`."""
        return super().ready(gpu, stream) if self._is_inner(gpu, stream) else self.outer.mark(gpu, stream)

    def _is_inner(self, gpu: int, lane: int | str) -> bool:
        return (gpu, lane) in self.captured
