"""`record_timeline` records what the modelled host and GPUs do during a block of code, and when.

    with record_timeline() as t:
        step()
    t.seconds             # modelled wall time until all work of the step is done
    t.busy_seconds(0)     # the part in which GPU 0 ran kernels
    t.communication(0)    # its collectives: bytes, seconds, and those not hidden behind computation
    t.plot()              # one row per stream
    animate(t, title="A step")      # of virtual_gpus.timeline.animate: the same as a picture that moves
    t.save("step.json")   # opens in Perfetto (https://ui.perfetto.dev) and chrome://tracing

With `record_timeline(memory=True)`, `t.memory[0]` is what GPU 0 holds at which moment.

The recording waits for all GPUs before and after the block, as `torch.cuda.synchronize()` does.
"""

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from virtual_gpus.clock.clock import Span, SpanKind
from virtual_gpus.files import write_whole
from virtual_gpus.machine import VirtualGPU, VirtualMachine, active, recordable
from virtual_gpus.memory.device import Event, Observer
from virtual_gpus.threads import this_thread
from virtual_gpus.timeline.spans import COLOURS, Communication, busy_seconds, communication, lane_name, merged, rows_of

if TYPE_CHECKING:  # matplotlib is an extra
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


class Timeline:
    """The recorded spans of work. Times are modelled seconds from the beginning of the block.

    memory: (moment, allocated bytes) for each GPU, in order, if it was asked for. The moment of an allocation or a free
    is the one at which the GPU's default stream has done what was issued before it, as the GPU may be behind the host.
    """

    modelled = True  # other recordings are measured, see `timeline.animate.Recording`

    def __init__(self, machine: VirtualMachine, memory: bool = False) -> None:
        self._machine = machine
        self.memory: dict[int, list[tuple[float, int]]] = {}
        self._observers: list[tuple[VirtualGPU, Observer]] = []
        self.work_name: str | None = None  # of what is issued from now on, see `name_work`
        self._in_step = False
        self._raw: list[Span] = []
        self._began = self._wait_for_all()
        self._ended: float | None = None
        self._hooks = [register_optimizer_step_pre_hook(functools.partial(self._note_step, True)),
                       register_optimizer_step_post_hook(functools.partial(self._note_step, False))]  # fmt: skip
        machine.clock.timelines.append(self)
        for gpu in machine.gpus if memory else ():
            self.memory[gpu.index] = [(0.0, gpu.allocator.allocated)]
            with gpu.allocator.exclusive():
                self._observers.append((gpu, functools.partial(self._hear, gpu)))
                gpu.allocator.observers.append(self._observers[-1][1])

    # ---- recording ----

    def stop(self) -> None:
        """Stop listening, and wait for all GPUs."""
        for gpu, observer in self._observers:
            with gpu.allocator.exclusive():
                gpu.allocator.observers.remove(observer)
        self._machine.clock.timelines.remove(self)
        for hook in self._hooks:
            hook.remove()
        self._ended = self._wait_for_all()

    def _wait_for_all(self) -> float:
        clock = self._machine.clock
        clock.wait(max(track.done for track in clock.tracks))
        return clock.now

    def _note_step(self, runs: bool, *_: object) -> None:
        self._in_step = runs

    def _hear(self, gpu: VirtualGPU, event: Event, address: int, size: int) -> None:
        if event not in ("alloc", "free", "free_requested"):
            return
        curve = self.memory[gpu.index]
        before, used = curve[-1]
        moment = max(before, self._machine.clock.mark(gpu.slot, 0) - self._began)
        curve.append((moment, used + size if event == "alloc" else used - size))

    def add(self, span: Span) -> None:
        """Add a span. The clock calls this for every span."""
        if not span.kind:
            kind: SpanKind = "step" if self._in_step else "backward" if this_thread.in_backward else "forward"
            span = span._replace(kind=kind)
        self._raw.append(span._replace(name=f"{span.name} {self.work_name}") if self.work_name else span)

    # ---- results ----

    @property
    def seconds(self) -> float:
        """Modelled wall time of the block in seconds, until all of its work is done. Raises RuntimeError before."""
        if self._ended is None:
            raise RuntimeError("The timeline is still recording. Read it after the `with` block.")
        return self._ended - self._began

    @property
    def spans(self) -> list[Span]:
        """All work in the order of issue: GPU (its index, or None for the host), lane, start, end, kind, name."""
        _, began = self.seconds, self._began  # the first raises before the end
        index = {None: None} | {gpu.slot: gpu.index for gpu in self._machine.gpus}
        visible = (s for s in self._raw if s.gpu in index)
        return [s._replace(gpu=index[s.gpu], start=s.start - began, end=s.end - began) for s in visible]

    def busy_seconds(self, gpu: int, copies: bool = False) -> float:
        """Seconds in which a GPU ran kernels, or with `copies` also copies: see `timeline.spans.busy_seconds`."""
        return busy_seconds(self.spans, self._index(gpu), copies)

    def _index(self, gpu: int | str | torch.device) -> int:
        index = gpu if isinstance(gpu, int) else torch.device(gpu).index
        if not isinstance(index, int) or not 0 <= index < len(self._machine.gpus):
            raise ValueError(f"There is no GPU {gpu!r}. Choose a GPU from 0 to {len(self._machine.gpus) - 1}.")
        return index

    def utilisation(self, gpu: int) -> float:
        """The fraction of the block's time, 0 to 1, in which a GPU ran kernels. nvidia-smi calls it utilization."""
        return self.busy_seconds(gpu) / (self.seconds or 1)

    def communication(self, gpu: int = 0) -> dict[str, Communication]:
        """What collectives cost on a GPU, by kind and group, and for "all" of them: see `timeline.spans`."""
        return communication(self.spans, self._index(gpu))

    def plot(self, axes: "Axes | None" = None) -> "Figure | SubFigure":
        """Draw one row per stream over modelled milliseconds, and return the matplotlib figure.

        Colours separate forward, backward, step, copies and collectives.
        axes: where to draw; None makes a new figure. Raises ImportError if matplotlib is not installed.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError:
            raise ImportError("Drawing a timeline needs matplotlib: pip install 'virtual-gpus[plot]'.") from None

        spans = self.spans
        rows = rows_of(spans)
        if axes is None:
            _, axes = plt.subplots(figsize=(10, 0.8 + 0.4 * max(1, len(rows))), layout="constrained")
        used = [kind for kind in COLOURS if any(s.kind == kind for s in spans)]
        for number, row in enumerate(rows):
            for kind in used:
                pieces = merged([(s.start, s.end) for s in spans if (s.gpu, s.lane) == row and s.kind == kind])
                bars = [(1e3 * start, 1e3 * (end - start)) for start, end in pieces]
                axes.broken_barh(bars, (number - 0.4, 0.8), color=COLOURS[kind], linewidth=0)
        titles = [f"{'host' if gpu is None else f'cuda:{gpu}'}, {lane_name(lane)}" for gpu, lane in rows]
        axes.set_yticks(range(len(rows)), titles)
        axes.invert_yaxis()
        axes.set_xlabel("modelled time in ms")
        axes.set_xlim(0, 1e3 * self.seconds or 1)
        if used:
            keys = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[kind], label=kind) for kind in used]
            axes.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
        return axes.figure

    def save(self, path: str | Path) -> None:
        """Write the timeline as JSON in Chrome's trace format, with times in microseconds. Perfetto opens it."""
        write_whole(Path(path), json.dumps({"traceEvents": list(self._events()), "displayTimeUnit": "ms"}))

    def _events(self):
        rows = rows_of(self.spans)
        for row, (gpu, lane) in enumerate(rows):
            process = -1 if gpu is None else gpu
            name = "host (modelled)" if gpu is None else f"cuda:{gpu} (modelled)"
            yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": lane_name(lane)}}
        for s in self.spans:
            yield {"ph": "X", "name": s.name, "cat": s.kind, "pid": -1 if s.gpu is None else s.gpu,
                   "tid": rows.index((s.gpu, s.lane)), "ts": s.start * 1e6, "dur": (s.end - s.start) * 1e6}  # fmt: skip


@contextmanager
def name_work(name: str) -> Iterator[None]:
    """What is issued in this block has this name behind its own in the timelines that record: "addmm F3"."""
    machine = active()
    timelines = [each for each in machine.clock.timelines if isinstance(each, Timeline)] if machine else []
    for timeline in timelines:
        timeline.work_name = name
    try:
        yield
    finally:
        for timeline in timelines:
            timeline.work_name = None


@contextmanager
def record_timeline(memory: bool = False) -> Iterator[Timeline]:
    """Record what the modelled host and GPUs do: `with record_timeline() as t:`. memory: also what each GPU holds.

    Raises RuntimeError if no virtual GPUs are on. For real GPUs, use torch.profiler.
    """
    timeline = Timeline(recordable(), memory)
    try:
        yield timeline
    finally:
        timeline.stop()
