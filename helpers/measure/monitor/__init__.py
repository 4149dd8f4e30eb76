"""Records a run's memory, event by event: how high it went on every GPU, when, and what held it.

    with MemoryMonitor() as monitor:
        monitor.watch(model, optimizer)       # marks forward, backward and step, counts parameters and the rest
        train()
    print(monitor.peak(0))                    # GPU 0: 812 MiB at event 1,204, in backward
    monitor.at_peak(0)                        # {"parameters": 44700000, "gradients": ..., ...}, in bytes
    plot_memory(monitor)                      # of helpers.show, as is describe_memory: the same in words

Real and virtual GPUs are recorded by the same means: PyTorch's own memory history, without stacks. It has every
allocation and every free, which a thread that samples would miss (a temporary lives for microseconds), and gives the
same curve every time. A thread samples, every `every` seconds, what the history cannot see: what the driver says is
taken on the card, by other programs and libraries too.

Cost on virtual GPUs: 1.01 to 1.05 times a step of ResNet-18 or of a small GPT, 1.1 times one of ResNet-18 in shapes
only, 1.2 times one of a tiny net, where 0.4 ms per step show; to enter and leave, and the kinds at the peak, make that
1.25 and 1.3, shared among the steps of a run (`python -m tests.benchmarks.monitor_cost`). On real ones about a
microsecond per event and a reading of the counters at five moments of a step, per GPU: not measured yet.

How each kind in `at_peak` is known:

    parameters, gradients, optimizer state   counted from the tensors themselves, see `helpers.measure.monitor.watch`; a
                                             gradient counts from when its memory is taken, a new state from its
                                             step on, DataParallel's copy of a parameter until its memory is freed
    activations   blocks made in a forward phase that outlive it, less DataParallel's copies of parameters; not those
                  that outlive the next forward phase too. A workspace that one single step keeps counts here.
    other         the rest: temporaries, workspaces, gradients of activations, the batch, what was there before, and
                  what a block has beyond its tensor (up to 1 MiB, where the allocator does not split it)
"""

import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from helpers.gpus import is_virtual
from helpers.measure.memory import gpu_indices
from helpers.measure.monitor.counters import Sampler, count, driver_used, memory_history
from helpers.measure.monitor.run import KINDS, Mark, Peak, Run
from helpers.measure.monitor.sent import results
from helpers.measure.monitor.trace import timeline
from helpers.measure.monitor.watch import Holdings, Storages, Watch

__all__ = ["KINDS", "MemoryMonitor", "Peak"]

MOST_EVENTS = 1_000_000  # per GPU, a few hundred bytes each on the host; of a longer run the end is kept


class MemoryMonitor:
    """Records the memory of `gpus` (a device, an index, or a list of them; None for all) while its block runs.

    every: seconds between two looks at what the driver says (real GPUs only: a virtual one's is known exactly).
    Entering raises RuntimeError without any GPU, for a second time, or where PyTorch's memory does not come from its
    own allocator; ValueError for a GPU that does not exist, or for a time that is not positive. Results are there
    after the block, also when it failed; before, they raise RuntimeError.
    """

    def __init__(self, gpus=None, every: float = 0.005):
        if isinstance(every, str) or every is None or not 0 < every < float("inf"):
            raise ValueError(f"every={every}: give the seconds between two looks at the driver, more than 0.")
        self._gpus, self._every = gpus, every
        self._started = self._ended = False
        self._watches: list[Watch] = []
        self._hand: list[str] = []  # phases by hand that are open; inside one the hooks mark nothing
        self._passes = 0  # backward() calls at work: a checkpoint may call it in one
        self.indices: list[int] = []
        self.holdings, self.lock = Holdings(()), threading.RLock()
        self._runs: dict[int, Run] = {}

    # ---- recording

    def __enter__(self) -> "MemoryMonitor":
        if self._started:
            raise RuntimeError("A MemoryMonitor records one run: make a new one for the next.")
        self.indices = gpu_indices(self._gpus)
        torch.cuda.init()
        if torch.cuda.get_allocator_backend() != "native":
            raise RuntimeError("PYTORCH_ALLOC_CONF chose another allocator, which keeps no history: unset its backend.")
        self._started = True
        self.holdings = Holdings(self.indices)
        with ExitStack() as undo:  # kept for the end; if anything fails here, undone at once
            undo.enter_context(memory_history(MOST_EVENTS))
            self._begin(undo)
            self._undo = undo.pop_all()
        return self

    def _begin(self, undo: ExitStack) -> None:
        segments = torch.cuda.memory._snapshot()["segments"]
        self._segments = {index: [s for s in segments if s["device"] == index] for index in self.indices}
        self._driver_before = {index: driver_used(index) for index in self.indices}
        self._before = {index: count(index) for index in self.indices}
        self._marks = {index: [] for index in self.indices}
        self.mark(None)
        self._engine, torch.autograd.backward = torch.autograd.backward, self._backward
        undo.callback(self._restore_backward)
        for watch in self._watches:
            undo.callback(watch.stop)
            watch.start()
        self.mark(None)
        self._sampler = None if is_virtual() else Sampler(self.indices, self._every)
        if self._sampler is not None:
            self._sampler.start()
            undo.callback(self._sampler.stop)

    def __exit__(self, *error) -> None:
        with self._undo:  # whatever fails here, threads, hooks and the history are put back
            self._ended = True
            self.mark(None)
            after = {index: count(index) for index in self.indices}
            traces = torch.cuda.memory._snapshot()["device_traces"]
            for index in self.indices:
                line = timeline(self._segments[index], traces[index], self._before[index], after[index])
                self._runs[index] = Run(index, line, self._marks[index])

    @property
    def in_backward(self) -> bool:
        """Whether backward() is at work."""
        return self._passes > 0

    def _backward(self, *args, **kwargs):
        """torch.autograd.backward while the monitor is on: no hook of PyTorch's runs before a pass's first node."""
        if self._ended:  # one that began in the run still calls this
            return self._engine(*args, **kwargs)
        with self.lock:
            if not self.in_backward:
                self._count_gradients()  # zero_grad() may have let some go since the forward pass began
                self.mark("backward")
            self._passes += 1
        try:
            return self._engine(*args, **kwargs)
        finally:
            with self.lock:
                self._passes -= 1
                if not self.in_backward:
                    made = self._count_gradients()
                    for watch in self._watches:
                        watch.backward_ended()
                    self.mark(None, made=made)

    def _count_gradients(self) -> Storages:
        return {key: place for watch in self._watches for key, place in watch.count_gradients().items()}

    def _restore_backward(self) -> None:
        found = getattr(torch.autograd.backward, "__self__", None)
        while found is self or (isinstance(found, MemoryMonitor) and found._ended):
            torch.autograd.backward = found._engine
            found = getattr(torch.autograd.backward, "__self__", None)

    def mark(self, phase, gpus: Collection[int] | None = None, same_phase=False, **new: Storages) -> None:
        """From here on it is `phase`, or still the same one, on `gpus` (all if None). Called by the hooks.

        new: what a part of the step, which ends here, has made: see the last fields of `Mark`.
        """
        for index in self.indices:
            if gpus is None or index in gpus:
                marks, now = self._marks[index], count(index)
                kept = marks[-1].phase if marks and (same_phase or self._hand) else phase
                sizes = {name: tuple(size for gpu, size in new[name].values() if gpu == index) for name in new}
                event = now.events - self._before[index].events
                marks.append(Mark(event, now.allocated, kept, self.holdings.known[index], **sizes))

    # ---- phases

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark what happens inside as `name` ("forward", "backward", "step", or any other); hooks do not mark there."""
        if not self._started or self._ended:
            raise RuntimeError("A phase is part of a run: use it inside `with MemoryMonitor() as monitor:`.")
        outer, self._hand = self._hand, []
        before = self._marks[self.indices[0]][-1].phase
        self.mark(name)
        self._hand = [*outer, name]
        try:
            yield
        finally:
            self._hand = []
            self.mark(before)
            self._hand = outer

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> "MemoryMonitor":
        """Mark phases by themselves, and count what `model` and `optimizer` hold; before the run or in it.

        forward is from the model's call to backward(), the loss included; backward is backward() itself; step the
        optimizer's. Under nn.DataParallel watch the wrapped model. Raises TypeError for other things.
        """
        if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer | None):
            raise TypeError("watch(model, optimizer) takes an nn.Module and a torch.optim.Optimizer (or None).")
        if self._ended:
            raise RuntimeError("The run is over: call watch before it or in it.")
        watch = Watch(self, model, optimizer)
        self._watches.append(watch)
        if self._started:
            self._undo.callback(watch.stop)
            watch.start()
            self.mark(None, same_phase=True)
        return self

    # ---- results
    __getstate__ = results  # can be pickled when it is over, so a rank can return it

    def run(self, gpu: int = 0) -> Run:
        """All that was recorded on one GPU. Raises RuntimeError for a run that is not over or in which nothing happened
        on any GPU, ValueError for a GPU that was not recorded."""
        if not self._runs:
            raise RuntimeError("The run is not over: results are there after the `with MemoryMonitor()` block.")
        if gpu not in self._runs:
            raise ValueError(f"GPU {gpu!r} was not recorded: recorded were {self.indices}.")
        if not any(run.timeline.last or run.timeline.ooms for run in self._runs.values()):
            raise RuntimeError("Nothing was recorded: no GPU memory was allocated or freed in the monitor's block.")
        return self._runs[gpu]

    @property
    def watched(self) -> bool:
        """Whether `watch` was told a model."""
        return bool(self._watches)

    def peak(self, gpu: int = 0) -> Peak:
        """The most that was allocated, and when: the first time. Errors: `run`."""
        return self.run(gpu).peak()

    def at_peak(self, gpu: int = 0) -> dict[str, int]:
        """Bytes by kind (`KINDS`) at the peak; they add up to it. Errors: `run`, and RuntimeError without `watch`."""
        if not self._watches:
            raise RuntimeError("Whose bytes these are is not known: call monitor.watch(model, optimizer) in the run.")
        return self.run(gpu).at_peak()

    def driver_peak(self, gpu: int = 0) -> int:
        """The most bytes that were taken on the card, by the driver's count: PyTorch's reserved memory at its highest
        and what else was there at the beginning, or what the thread saw, if that is more. Errors: `run`."""
        reserved = self.run(gpu).timeline.peak_reserved
        seen = self._sampler.most[gpu] if self._sampler is not None else 0
        return max(seen, self._driver_before[gpu] - self._before[gpu].reserved + reserved)

    def note(self, gpu: int = 0) -> str:
        """What is not exact about this GPU's curve, or "". Errors: `run`."""
        return self.run(gpu).note()
