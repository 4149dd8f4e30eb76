"""Streams and events on the modelled clock: queues of work on a GPU, and marks in them.

Numbers never depend on streams, since every operator has run by the time its call returns. When it would have run on a
GPU, and who would have waited for whom, is the clock's.
"""

import bisect
import threading
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from typing import Any, Self

import torch

from virtual_gpus import errors
from virtual_gpus.clock.cost import FREE
from virtual_gpus.dispatch.operators import Row
from virtual_gpus.features.cuda.devices import gpu_at
from virtual_gpus.machine import Kept, VirtualGPU, VirtualMachine
from virtual_gpus.patches.table import Patch, in_package
from virtual_gpus.placement.storages import gpu_of, storages

_POOL = 32  # streams of a GPU and a priority, handed out in turn (c10/cuda/CUDAStream.cpp)
_CUDA = 1  # c10::DeviceType::CUDA
OPERATORS = {"record_stream": Row(FREE, crosses=True), "record_grad_output_stream": Row(FREE)}
_raw_record_stream: Callable[..., None] = torch._C.TensorBase.record_stream
_Device, _Id = torch.device | str | int | None, int | None


def is_current_stream_capturing() -> bool:
    """No CUDA graph captures a stream here. Optimizers and libraries ask."""
    return False


class Stream:
    """A queue of work on one GPU. `Stream(device=None, priority=0)`; also a context manager, as torch.Stream is."""

    def __init__(
        self, device: _Device = None, priority: int = 0, *, stream_id: _Id = None, device_index: _Id = None, **_: Any
    ):
        self.device_index = gpu_at(device if device_index is None else device_index).index
        least, greatest = self.priority_range()
        self.priority = max(greatest, min(priority, least))
        if stream_id is None:
            stream_id = 1 - self.priority * _POOL + next(_streams.of(self._gpu).made[self.priority]) % _POOL
            if self.priority < 0:
                self._gpu.machine.clock.tracks[self._gpu.slot].urgent.add(stream_id)
        self.stream_id = self.cuda_stream = stream_id  # 0 for the default stream
        self.device_type = _CUDA
        self._outer: list[tuple[Stream, int]] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest one that PyTorch supports (c10/cuda/CUDAStream.h). The clock knows two."""
        return 0, -3

    @property
    def device(self) -> torch.device:
        """The stream's GPU."""
        return torch.device("cuda", self.device_index)

    @property
    def _gpu(self) -> VirtualGPU:
        return gpu_at(self.device_index)

    def _mark(self) -> float:
        gpu = self._gpu
        return gpu.machine.clock.mark(gpu.slot, self.stream_id)

    def query(self) -> bool:
        """True if all work given so far is done, on the modelled clock."""
        return _is_past(self._gpu, self._mark())

    def synchronize(self) -> None:
        """The host waits for the work given so far."""
        self._gpu.machine.clock.notice(self._mark())

    def wait_stream(self, stream: "Stream") -> None:
        """Work given later waits for what `stream` has been given so far."""
        self._hold(stream._mark())

    def wait_event(self, event: "Event") -> None:
        """Work given later waits for `event`, if it was recorded."""
        if event._stream is not None:
            self._hold(event._time)

    def _hold(self, until: float) -> None:
        gpu = self._gpu
        gpu.machine.clock.hold(gpu.slot, self.stream_id, until)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Put an event behind the work given so far."""
        event = Event() if event is None else event
        event.record(self)
        return event

    is_capturing = staticmethod(is_current_stream_capturing)

    def __enter__(self) -> Self:
        self._outer.append((current_stream(self.device_index), self._gpu.machine.current))
        set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        outer, index = self._outer.pop()
        set_stream(outer)
        self._gpu.machine.current = index

    def __eq__(self, other: object) -> bool:
        same_gpu = isinstance(other, Stream) and self.device_index == other.device_index
        return same_gpu and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return hash((self.device_index, self.stream_id))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class ExternalStream(Stream):
    """A stream of another library: none has any on a virtual GPU."""

    __init__ = errors.refusing("torch.cuda.ExternalStream")


class _Streams(threading.local):
    """Of a GPU: this thread's stream (None: the default one), its changes (`make_current`), and what all made."""

    stream: Stream | None = None
    default: Stream | None = None

    def __init__(self, made: "defaultdict[int, count[int]]") -> None:
        self.made, self.changes = made, list[tuple[int, Stream | None]]()


_streams = Kept(lambda gpu: _Streams(defaultdict(count)))


class Event:
    """A mark in a stream. `Event(enable_timing=False, blocking=False, interprocess=False)`."""

    # others: blocking, interprocess and external, which make no difference here
    def __init__(self, device: _Device = None, enable_timing: bool = False, *others: bool, **by_name: bool):
        if isinstance(device, bool):  # torch.cuda.Event has no device argument: its first one is enable_timing
            device, enable_timing = None, device
        self.enable_timing = enable_timing
        self._stream: Stream | None = None
        self._time = 0.0  # modelled seconds at which the mark is passed, if it was recorded

    @property
    def device(self) -> torch.device | None:
        """The GPU that the event was recorded on."""
        return None if self._stream is None else self._stream.device

    @property
    def event_id(self) -> int:
        """The handle of CUDA's event, which is made when it is first recorded: 0 before that."""
        return 0 if self._stream is None else id(self)

    cuda_event = event_id

    def record(self, stream: Stream | None = None) -> None:
        """Put the mark behind the work given so far to `stream` (default: the current one)."""
        stream = stream or current_stream()
        own, given = (self._stream or stream).device_index, stream.device_index
        if own != given:
            raise RuntimeError(f"Event device {own} does not match recording stream's device {given}.")
        self._stream, self._time = stream, stream._mark()

    def wait(self, stream: Stream | None = None) -> None:
        """Make `stream` (default: the current one) wait for the mark."""
        (current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        """True if all work before the mark is done, on the modelled clock."""
        return self._stream is None or _is_past(self._stream._gpu, self._time)

    def synchronize(self) -> None:
        """The host waits for the mark."""
        if self._stream is not None:
            self._stream._gpu.machine.clock.notice(self._time)

    def elapsed_time(self, end_event: "Event") -> float:
        """Modelled milliseconds between two marks. Errors as PyTorch's (c10/cuda/CUDAEvent.h)."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._stream is None or end_event._stream is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        if self.device != end_event.device:
            raise errors.cuda_error("invalid resource handle", "cudaErrorInvalidResourceHandle")
        return (end_event._time - self._time) * 1e3

    # Each process has a clock of its own.
    ipc_handle = errors.refusing("torch.cuda.Event.ipc_handle")
    from_ipc_handle = staticmethod(errors.refusing("torch.cuda.Event.from_ipc_handle"))

    def __repr__(self) -> str:
        return "<torch.cuda.Event uninitialized>" if self._stream is None else f"<torch.cuda.Event on {self.device}>"


def _is_past(gpu: VirtualGPU, time: float) -> bool:
    clock = gpu.machine.clock
    if time > clock.now:
        return False
    clock.observe(time)
    return True


def default_stream(device: _Device = None) -> Stream:
    """The stream that everything runs on unless told otherwise (id 0)."""
    gpu = gpu_at(device)
    streams = _streams.of(gpu)
    streams.default = streams.default or Stream(gpu.index, stream_id=0)
    return streams.default


def current_stream(device: _Device = None) -> Stream:
    """This thread's stream on a GPU."""
    gpu = gpu_at(device)
    return _streams.of(gpu).stream or default_stream(gpu.index)


def set_stream(stream: Stream | None) -> None:
    """Make `stream` this thread's stream on its GPU, and that GPU the current one."""
    if stream is not None:
        gpu = stream._gpu
        make_current(gpu, stream)
        gpu.machine.current = stream.device_index


def _cuda_setStream(stream_id: int, device_index: int, device_type: int = _CUDA) -> None:
    """`set_stream` by the numbers of a stream."""
    set_stream(Stream(device_index, stream_id=stream_id))


def record_stream(self: torch.Tensor, stream: Stream) -> None:
    """Tell the allocator of a second stream: once freed, the block waits until that stream has come so far."""
    gpu = gpu_of(self)
    if gpu is None:
        return _raw_record_stream(self, stream)
    other = gpu.machine.gpus[stream.device_index].slot, stream.stream_id
    for storage in storages(self):
        storage._record.gpu.allocator.record_stream(storage._record.block, other)
        gpu.machine.follower.used_by(storage._record, *other)


# ---- which stream a node of autograd belongs to ---------------------------------------------------------------------

# C++ numbers the nodes of a thread in the order in which they are made. So each change of the current stream is noted
# with the number of the next node, and a node's number says which stream was current when it was made.
_next_number = torch._C._autograd._get_sequence_nr
_KEPT = 4096  # changes per GPU: older nodes belong to the default stream


def make_current(gpu: VirtualGPU, stream: Stream) -> None:
    """Make `stream` this thread's stream on `gpu`, and note it with the next node's number (None: the default one)."""
    current, number = _streams.of(gpu), _next_number()
    current.stream, gpu.stream_of_thread.value = stream if stream.stream_id else None, stream.stream_id
    changes = current.changes
    if changes and changes[-1][0] == number:
        changes.pop()  # no node was made meanwhile
    if (changes[-1][1] if changes else None) != current.stream:
        changes.append((number, current.stream))
    if len(changes) > _KEPT:
        del changes[: _KEPT // 2]


def have_changed(machine: VirtualMachine) -> bool:
    """True if this thread may have made nodes on a stream other than the default one, or is on one now."""
    return any(_streams.of(gpu).changes for gpu in machine.slots)


def stream_of_node(gpu: VirtualGPU, number: int) -> Stream:
    """The stream of `gpu` that was current when this thread made the node of that number."""
    changes = _streams.of(gpu).changes
    index = bisect.bisect_right(changes, number, key=lambda change: change[0])
    stream = changes[index - 1][1] if index else None
    return default_stream(gpu.index) if stream is None else stream


def patches() -> list[Patch]:
    of_cuda = in_package("torch.cuda", Stream, ExternalStream, Event, set_stream, current_stream, default_stream,
                         errors.refusing("torch.cuda.get_stream_from_external"), is_current_stream_capturing,
                         _cuda_isCurrentStreamCapturing=is_current_stream_capturing)  # fmt: skip
    return of_cuda + in_package("torch.accelerator", set_stream, current_stream) + [
        (torch, "Stream", Stream), (torch, "Event", Event), (torch.Tensor, "record_stream", record_stream),
        (torch._C, "_cuda_setStream", _cuda_setStream),
        (torch._C, "_cuda_isCurrentStreamCapturing", is_current_stream_capturing),
    ]  # fmt: skip
