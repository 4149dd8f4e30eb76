"""What the modelled GPUs did while torch.profiler looked on, as the rows that it has for real ones.

The profiler itself measures the CPU, in real time. The work of the GPUs comes from the modelled clock. It hangs on the
operator that issued it by the real moment at which the clock heard of it.
"""

import bisect
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from virtual_gpus.clock.clock import COPY_IN, COPY_OUT, TO_THE_CPU, TO_THE_GPU, Span
from virtual_gpus.machine import VirtualMachine
from virtual_gpus.timeline.spans import lane_name

_LANES: dict[str, int] = {COPY_IN: 1001, COPY_OUT: 1002}  # beside the numbers of streams; collectives have the next
_OURS = "PythonDispatchMode"  # the profiler's name for what the engine does around each operator


class DeviceRecord:
    """The spans of one profile, from the moment when it is made until `stop`."""

    def __init__(self, machine: VirtualMachine):
        self._machine, self._work, self._began = machine, list[tuple[Span, int]](), machine.clock.now
        machine.clock.timelines.append(self)

    def stop(self) -> None:
        self._machine.clock.timelines.remove(self)

    def add(self, span: Span) -> None:
        """The clock calls this for every span. A copy between two GPUs, heard of on both, counts on its source."""
        if span.gpu is not None and (span.lane != COPY_IN or span.name == TO_THE_GPU):
            self._work.append((span, time.time_ns()))

    def _visible(self) -> Iterator[tuple[int, Span, int]]:
        """(index of the GPU, span, real nanoseconds since 1970 at which it was issued), as the profiler counts."""
        index = {gpu.slot: gpu.index for gpu in self._machine.gpus}
        return ((index[span.gpu], span, issued) for span, issued in self._work if span.gpu in index)

    def merge(self, events: list[FunctionEvent], trace_start: int, keep_cpu: bool) -> list[FunctionEvent]:
        """The profiler's events (keep_cpu: those too) with the GPUs', in its order. trace_start: ns since 1970."""
        if keep_cpu:
            hosts = [e for e in events if e.device_type == DeviceType.CPU and not e.is_async and e.name != _OURS]
            hosts.sort(key=_start)
            events = [event for event in events if event.name != _OURS]
            for index, span, issued in self._visible():
                host = _operator_at((issued - trace_start) / 1e3, hosts)
                if host is not None:
                    host.append_kernel(_name(span), index, (span.end - span.start) * 1e6)
        else:
            events = []
        of_gpus = [self._event(number, index, span) for number, (index, span, _) in enumerate(self._visible(), 1)]
        return sorted(events + of_gpus, key=lambda event: (event.time_range.start, -event.time_range.end))

    def _event(self, number: int, gpu: int, span: Span) -> FunctionEvent:
        begin, end = ((moment - self._began) * 1e6 for moment in (span.start, span.end))
        return FunctionEvent(
            -number, _name(span), _lane(span), begin, end, trace_name=_name(span), use_device="cuda",
            device_type=DeviceType.CUDA, device_index=gpu, device_resource_id=_lane(span), input_shapes=[], stack=[],
        )  # fmt: skip

    def add_to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Add a process for each GPU to the profiler's JSON file. Its modelled time starts with the file."""
        path = Path(path)
        trace: dict[str, Any] = json.loads(path.read_text("utf-8"))
        events = trace["traceEvents"]
        start = min((event["ts"] for event in events if event.get("ph") == "X"), default=0.0)
        named: set[tuple[int, int | str]] = set()
        for gpu, span, _ in self._visible():
            if (gpu, span.lane) not in named:
                named.add((gpu, span.lane))
                for name, label in (("process_name", f"cuda:{gpu} (modelled)"), ("thread_name", lane_name(span.lane))):
                    events.append({"ph": "M", "name": name, "pid": gpu, "tid": _lane(span), "args": {"name": label}})
            category = "gpu_memcpy" if span.kind == "copy" else "kernel"
            events.append({"ph": "X", "cat": category, "name": _name(span), "pid": gpu, "tid": _lane(span),
                           "ts": start + (span.start - self._began) * 1e6, "dur": (span.end - span.start) * 1e6,
                           "args": {"device": gpu, "stream": _lane(span)}})  # fmt: skip
        path.write_text(json.dumps(trace), "utf-8")


def _operator_at(moment: float, hosts: list[FunctionEvent]) -> FunctionEvent | None:
    """The operator that ran at a moment (microseconds of the trace), of `hosts` in the order of their starts, or None.

    The mode has called the operator once more by then, inside the first call. The profiler makes one event of the
    two, with what hangs on the inner one (`EventList._remove_dup_nodes`).
    """
    later: list[FunctionEvent] = []  # which ended before
    for event in reversed(hosts[: bisect.bisect(hosts, moment, key=_start)]):
        later.append(event)
        if event.time_range.end >= moment:
            return next(inner for inner in later if inner.name == event.name)
    return None


def _start(event: FunctionEvent) -> float:
    return event.time_range.start


def _name(span: Span) -> str:
    name = span.kernel or span.name
    if span.kind == "copy":
        name = {TO_THE_GPU: "Memcpy HtoD", TO_THE_CPU: "Memcpy DtoH"}.get(name, "Memcpy PtoP")
    return f"{name} (modelled)"


def _lane(span: Span) -> int:
    return _LANES.setdefault(span.lane, 1001 + len(_LANES)) if isinstance(span.lane, str) else span.lane
