"""Records what every GPU does during a block of code, in modelled or measured time.

    with record_timeline() as timeline:
        step()
    timeline.seconds, timeline.utilisation(0)
    print(describe_timeline(timeline))
    print(describe_time_use(timeline))             # one line per GPU: how long it computes, and what it waits for

Virtual GPUs have a modelled clock. On real GPUs, torch.profiler measures the times, which slows the program down.
`timeline.modelled` says which of the two applies, and so do tables and pictures (`helpers.show.timeline_bars`). These
also take a timeline of `virtual_gpus.record_timeline`, which has more detail, but cannot be pickled.
"""

import gc
import json
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from helpers.engine import Recording, Span, busy_seconds, gpus_of, merged, record_modelled_timeline, seconds_covered
from helpers.gpus import Device, gpu_index, is_virtual, require_gpu, same_gpus

BLOCK = "helpers.measure.timeline"  # the name of the recorded block in torch.profiler's trace
_Kind = Literal["", "forward", "backward", "step", "copy", "collective"]
_ON_GPU: dict[str, _Kind] = {"kernel": "", "gpu_memcpy": "copy", "gpu_memset": ""}


@dataclass
class Timeline:
    """The recording, which is filled when the block ends. It can be pickled, so a rank can return it.

    seconds: how long the block took. modelled: whether its times are modelled, not measured. spans: the kernels, copies
    and collectives, each with its GPU, its start and end in seconds since the block began, its kind ("forward",
    "backward", "step", "copy" or "collective") and its name. memory: see `record_timeline`.
    """

    seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)
    modelled: bool = True
    memory: dict[int, list[tuple[float, int]]] = field(default_factory=dict)  # by GPU: (second, allocated bytes)

    def busy_seconds(self, gpu: Device) -> float:
        """Seconds in which a GPU ran kernels. Collectives count, and copies do not. Overlapping kernels count once."""
        return busy_seconds(self.spans, gpu_index(gpu, must_exist=False))

    def utilisation(self, gpu: Device) -> float:
        """The share of the block's time, from 0 to 1, in which a GPU ran kernels."""
        return self.busy_seconds(gpu) / self.seconds if self.seconds else 0.0

    @property
    def gpus(self) -> list[int]:
        """The indices of the GPUs that did something, in ascending order."""
        return gpus_of(self.spans)


class TimeUse(NamedTuple):
    """How one GPU spends its time. The five values are in seconds and add up to the timeline's `seconds`. If several
    apply at the same time, the first one counts.

    computing: the GPU runs a kernel that does not belong to a collective.
    collective: it takes part in a collective, so it sends or waits for another rank (busy, according to nvidia-smi).
    copying: a copy from or to this GPU is in progress.
    others: another GPU of this timeline works. This GPU may need its result, or the host may launch work too late.
    nothing: no GPU works, so the host has not launched any work that could start.
    """

    computing: float
    collective: float
    copying: float
    others: float
    nothing: float

    @property
    def waiting(self) -> float:
        """Seconds in which the GPU does not compute."""
        return sum(self) - self.computing


# ---- recording -------------------------------------------------------------------------------------------------------


@contextmanager
def record_timeline(memory: bool = False) -> Iterator[Timeline]:
    """Record what the GPUs do in the block. All GPUs finish their work before the block begins and before it ends. The
    timeline stays empty if the block fails.

    memory: also record what virtual GPUs, and only they, hold at each moment. Raises RuntimeError if there is no GPU,
    if the block calls `use_gpus`, whose new GPUs would not be recorded, and on real GPUs if a profiler is on already,
    so blocks cannot be nested there.
    """
    require_gpu()
    if memory:
        gc.collect()  # or cycles of earlier steps might be freed at any time in the block
    timeline = Timeline(modelled=is_virtual())
    if not timeline.modelled:
        yield from _measured(timeline)
        return
    with same_gpus(), record_modelled_timeline(memory) as clock:
        yield timeline
    timeline.seconds = clock.seconds
    timeline.spans = [span for span in clock.spans if span.gpu is not None]
    timeline.memory = clock.memory


def _measured(timeline: Timeline) -> Iterator[Timeline]:
    """Record with torch.profiler."""
    if torch.autograd._profiler_enabled():  # a second one can end the process without an error
        raise RuntimeError("A profiler is on already. On real GPUs, record one timeline at a time, without a profiler.")
    _wait_for_gpus()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(BLOCK), same_gpus():
            yield timeline
            _wait_for_gpus()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    timeline.seconds, timeline.spans = spans_of(events)


def _wait_for_gpus() -> None:
    """Wait for the GPUs that this process uses. To ask another one would create a CUDA context on it."""
    for index in range(torch.cuda.device_count()):
        if index == torch.cuda.current_device() or torch.cuda.memory_reserved(index):
            torch.cuda.synchronize(index)


def spans_of(events: Sequence[dict[str, Any]]) -> tuple[float, list[Span]]:
    """Return the seconds of the block and what the GPUs did, from the events of torch.profiler's trace.

    A kernel belongs to "step" if it was launched inside the optimizer's step, to "backward" if it was launched inside a
    function of autograd's backward pass, and otherwise to "forward".
    """
    events = [event for event in events if event.get("ph") == "X"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]  # the host's, not the GPUs'
    block = next((e for e in ranges if e["name"] == BLOCK), None)
    if block is None:
        raise RuntimeError("torch.profiler's trace lacks the recorded block. Is another profiler on? Switch it off.")
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in ranges if e["name"].startswith("Optimizer.step")]
    launched = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = {e.get("args", {}).get("correlation"): e for e in launched}
    backward: dict[int, list[tuple[float, float]]] = {}  # by thread; autograd has one for each GPU
    for event in events:
        if event["name"].startswith("autograd::engine::evaluate_function"):
            backward.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    # A function can contain others, such as those of a checkpoint that is computed again.
    backward = {thread: merged(functions) for thread, functions in backward.items()}
    spans: list[Span] = []
    for event in events:
        if event.get("cat") in _ON_GPU:
            launch = launches.get(event["args"].get("correlation"))
            kind = _ON_GPU[event["cat"]] or _phase(event["name"], launch, backward, steps)
            start = (event["ts"] - block["ts"]) / 1e6
            end = start + event["dur"] / 1e6
            spans += [Span(gpu, 0, start, end, kind, event["name"]) for gpu in _gpus(event["args"])]
    return block["dur"] / 1e6, sorted(spans, key=lambda span: span.start)


def _gpus(args: dict[str, Any]) -> list[int]:
    """Return the GPU of an event, or both GPUs of a copy, which has the two ends instead of "device"."""
    return [args["device"]] if "device" in args else sorted({args["fromDevice"], args["toDevice"]})


def _phase(
    name: str,
    launch: dict[str, Any] | None,
    backward: Mapping[int, Sequence[tuple[float, float]]],
    steps: Sequence[tuple[float, float]],
) -> _Kind:
    if name.startswith("nccl"):
        return "collective"
    if launch is None:
        return "forward"
    if any(start <= launch["ts"] <= end for start, end in steps):
        return "step"
    functions = backward.get(launch["tid"], ())
    last = bisect_right(functions, (launch["ts"], inf)) - 1  # the last that began before the launch
    return "backward" if last >= 0 and launch["ts"] <= functions[last][1] else "forward"


# ---- reading ---------------------------------------------------------------------------------------------------------


def time_use(timeline: Recording, gpu: Device) -> TimeUse:
    """Return how one GPU spent its time, in modelled or measured seconds like the timeline.

    A timeline contains only the GPUs of its process. If each rank is a process, record a timeline in each. Raises
    ValueError for a GPU that did nothing in the timeline.
    """
    index, work = gpu_index(gpu, must_exist=False), [span for span in timeline.spans if span.gpu is not None]
    if index not in gpus_of(work):
        raise ValueError(f"GPU {index} did nothing in this timeline. The GPUs that did are {gpus_of(work)}.")
    intervals: dict[str, list[tuple[float, float]]] = {kind: [] for kind in ("", "collective", "copy", "others")}
    for span in work:
        kind = "others" if span.gpu != index else span.kind if span.kind in intervals else ""
        intervals[kind].append((span.start, span.end))
    # A moment in which a GPU does several things counts for the first of them.
    counted: list[tuple[float, float]] = []
    parts: list[float] = []
    covered = 0.0
    for spans in intervals.values():
        counted += spans
        before, covered = covered, seconds_covered(counted)
        parts.append(covered - before)
    return TimeUse(*parts, nothing=max(0.0, timeline.seconds - covered))


def named_timelines(timelines: Mapping[str, Recording] | Recording) -> tuple[dict[str, Recording], str]:
    """Return the timelines by name, and whether their times are "modelled" or "measured".

    Raises ValueError if there are none, or if some are modelled and others measured, and TypeError for anything else.
    """
    named = dict(timelines) if isinstance(timelines, Mapping) else {"": timelines}
    for timeline in named.values():
        if not hasattr(timeline, "modelled"):
            raise TypeError(f"Pass what record_timeline gives, or several by name, not a {type(timeline).__name__}.")
    if not named:
        raise ValueError("There is no timeline to show. Pass one, or several by name.")
    kinds = {"modelled" if timeline.modelled else "measured" for timeline in named.values()}
    if len(kinds) > 1:
        raise ValueError("Some timelines are modelled and others measured. Show them one by one.")
    return named, kinds.pop()


def describe_time_use(timelines: Mapping[str, Recording] | Recording) -> str:
    """Return a table in modelled or measured ms, with a line for each GPU of each timeline, named by its key. It has
    more decimals if all timelines are shorter than a millisecond.

    Raises ValueError if there is none, or if some are modelled and others measured, and TypeError for anything else.
    """
    timelines, modelled_or_measured = named_timelines(timelines)
    heading = f"{modelled_or_measured} ms"
    rows: dict[str, str] = {}
    decimals = 1 if any(timeline.seconds >= 1e-3 for timeline in timelines.values()) else 4
    for name, timeline in timelines.items():
        for gpu in gpus_of(timeline.spans):
            figures = "".join(f"{1e3 * seconds:11.{decimals}f}" for seconds in time_use(timeline, gpu))
            rows[f"{name} cuda:{gpu}".strip()] = f"{1e3 * timeline.seconds:8.{decimals}f}{figures}"
    width = max(map(len, [heading, *rows]))
    lines = [f"{heading:{width}} {'in all':>8}" + "".join(f"{part:>11}" for part in TimeUse._fields)]
    return "\n".join([*lines, *(f"{name:{width}} {figures}" for name, figures in rows.items())])
