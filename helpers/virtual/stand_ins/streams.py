"""Streams and events as objects that work. Until the clock exists everything on them has happened already.

`Event.elapsed_time` is 0.0 ms and says so once; the numbers themselves never depend on streams, since every operator
has run by the time its call returns.
"""

from __future__ import annotations

import itertools
import threading
import warnings

import torch

from helpers.virtual.machine import active
from helpers.virtual.stand_ins._table import in_package
from helpers.virtual.stand_ins.cuda import gpu_at

_ids = itertools.count(1)
_current = threading.local()  # (machine id, GPU index) -> stream, per thread as in CUDA
_CUDA = 1  # c10::DeviceType::CUDA


class Stream:
    """A queue of work on one GPU. `Stream(device=None, priority=0)`; also a context manager, as torch.Stream is."""

    def __init__(self, device=None, priority: int = 0, *, stream_id: int | None = None, **kwargs):
        self._index = gpu_at(device).index
        self.priority = priority
        self.stream_id = next(_ids) if stream_id is None else stream_id
        self.device_type = _CUDA
        self._outer: list[tuple[Stream, int]] = []

    @property
    def device(self) -> torch.device:
        """The stream's GPU."""
        return torch.device("cuda", self._index)

    @property
    def device_index(self) -> int:
        """Index of the stream's GPU."""
        return self._index

    @property
    def cuda_stream(self) -> int:
        """The handle: 0 for the default stream."""
        return self.stream_id

    def query(self) -> bool:
        """True if all work is done: always."""
        return True

    def synchronize(self) -> None:
        """Wait for all work: there is none left."""

    def wait_stream(self, stream: Stream) -> None:
        """Work given later waits for `stream`'s."""

    def wait_event(self, event: Event) -> None:
        """Work given later waits for `event`."""

    def record_event(self, event: Event | None = None) -> Event:
        """Put an event behind the work given so far."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        """CUDA graphs are not modelled."""
        return False

    def __enter__(self):
        self._outer.append((current_stream(self._index), active().current))
        active().current = self._index
        set_stream(self)
        return self

    def __exit__(self, *error) -> None:
        outer, index = self._outer.pop()
        set_stream(outer)
        active().current = index

    def __eq__(self, other) -> bool:
        return isinstance(other, Stream) and (self._index, self.stream_id) == (other._index, other.stream_id)

    def __hash__(self) -> int:
        return hash((self._index, self.stream_id))

    def __repr__(self) -> str:
        return f"torch.cuda.Stream(device=cuda:{self._index}, stream_id={self.stream_id})"


class Event:
    """A mark in a stream. `Event(enable_timing=False, blocking=False, interprocess=False)`."""

    def __init__(
        self, device=None, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **kwargs
    ):
        if isinstance(device, bool):  # torch.cuda.Event has no device argument: its first one is enable_timing
            device, enable_timing = None, device
        self.enable_timing = enable_timing
        self._stream: Stream | None = None

    @property
    def device(self) -> torch.device | None:
        """The GPU that the event was recorded on."""
        return None if self._stream is None else self._stream.device

    def record(self, stream: Stream | None = None) -> None:
        """Put the mark behind the work given so far to `stream` (default: the current one)."""
        self._stream = current_stream() if stream is None else stream

    def wait(self, stream: Stream | None = None) -> None:
        """Make `stream` wait for the mark."""

    def query(self) -> bool:
        """True: all work before the mark is done."""
        return True

    def synchronize(self) -> None:
        """Wait for the mark: it is passed."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds between two marks: 0.0 until the clock exists, with a warning. Errors as PyTorch's."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._stream is None or end_event._stream is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        warnings.warn("virtual GPUs have no clock yet: elapsed_time is 0.0 ms, not a measurement", stacklevel=2)
        return 0.0

    def __repr__(self) -> str:
        return "<torch.cuda.Event uninitialized>" if self._stream is None else f"<torch.cuda.Event on {self.device}>"


def _streams() -> dict:
    if not hasattr(_current, "streams"):
        _current.streams = {}
    return _current.streams


def default_stream(device=None) -> Stream:
    """The stream that everything runs on unless told otherwise (id 0)."""
    return Stream(gpu_at(device).index, stream_id=0)


def current_stream(device=None) -> Stream:
    """This thread's stream on a GPU."""
    gpu = gpu_at(device)
    return _streams().get((id(gpu.machine), gpu.index)) or default_stream(gpu.index)


def set_stream(stream: Stream | None) -> None:
    """Make `stream` this thread's stream on its GPU."""
    if stream is not None:
        gpu = gpu_at(stream.device)
        _streams()[id(gpu.machine), gpu.index] = stream
        gpu.streams.pop(threading.get_ident(), None)
        if stream.stream_id:
            gpu.streams[threading.get_ident()] = stream.stream_id


class StreamContext:
    """`with torch.cuda.stream(s):`; None changes nothing."""

    def __init__(self, stream: Stream | None):
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *error) -> None:
        if self.stream is not None:
            self.stream.__exit__()


def stream(stream: Stream | None) -> StreamContext:
    """A context in which work goes to `stream`."""
    return StreamContext(stream)


def forget(machine) -> None:
    """Drop this thread's streams of a machine that went off."""
    for key in [key for key in _streams() if key[0] == id(machine)]:
        del _streams()[key]


def rows():
    """See `stand_ins`."""
    return in_package(
        "torch.cuda", Stream, Event, StreamContext, stream, set_stream, current_stream, default_stream
    ) + [
        (torch, "Stream", Stream),
        (torch, "Event", Event),
    ]
