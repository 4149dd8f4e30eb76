"""What a training job needs and how fast it would be, on the modelled clock: `record_training`.

    with virtual_gpus(8, kind="H100", shapes_only=True, rank=0, world_size=64):
        with record_training() as recorded:
            build()
            for _ in range(2):
                step()
        print(recorded.report(tokens=64 * 8192))

A step ends when the optimizer's `step` does. The report has the memory of all steps and of what was before them, and
the time of the last step, which should not be the first: that one makes the optimizer's state and workspaces.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from virtual_gpus.clock.clock import Span
from virtual_gpus.gpus import format_bytes
from virtual_gpus.machine import VirtualGPU, VirtualMachine, recordable
from virtual_gpus.timeline.peak import AllocatorLog
from virtual_gpus.timeline.spans import ALL, communication


@dataclass(frozen=True, repr=False)
class TrainingReport:
    """One rank's share of a training job. Bytes are as PyTorch's allocator counts them, times are modelled seconds.

    gpu, capacity: the kind of GPU and its memory.
    rank, world_size: of the job; 0 and 1 if there is no process group.
    parameters: numbers that the optimizer changes, of the whole model if they are sharded as DTensors.
    peak_bytes, by_kind: memory at the highest moment, and what it was filled with.
    by_module: the activations in it, by the module that allocated them. The members of a list are one:
        "layers.*.attention". What no module allocated is of the "backward pass", or "outside modules", such as a batch.
    reserved_bytes: the most that PyTorch took from the GPU.
    step_seconds: the last step. None before the second one has ended, as for all that follows.
    communication_seconds: the part of it in which collectives and messages run.
    exposed_seconds: the part of that in which no other kernel runs on this GPU, so that the GPU waits.
    unit, units_per_second: "tokens" or "samples", of the whole job. None if their number in a step is not known.
    mfu: model flops utilization, the flops of the model over what all GPUs could do in this time (Chowdhery et al.,
        "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B). Recomputed activations do not count.
    """

    gpu: str
    capacity: int
    rank: int
    world_size: int
    parameters: int
    peak_bytes: int
    reserved_bytes: int
    by_kind: dict[str, int]
    by_module: dict[str, int]
    step_seconds: float | None = None
    communication_seconds: float | None = None
    exposed_seconds: float | None = None
    unit: str = ""
    units_per_second: float | None = None
    mfu: float | None = None

    @property
    def exposed_share(self) -> float | None:
        """The part of the step, 0 to 1, in which the GPU only waits for communication."""
        if self.step_seconds is None or self.exposed_seconds is None:
            return None
        return self.exposed_seconds / self.step_seconds

    def _rows(self) -> Iterator[tuple[str, str]]:
        if self.parameters:  # an optimizer has taken a step
            yield "parameters of the model", f"{self.parameters:,}"
        yield "peak", f"{format_bytes(self.peak_bytes)} of {format_bytes(self.capacity)}"
        for kind, size in self.by_kind.items():
            if size:
                yield f"    {kind}", format_bytes(size)
        yield "reserved", format_bytes(self.reserved_bytes)
        if self.step_seconds is not None:
            yield "step, modelled", _seconds(self.step_seconds)
            yield "    communication", _seconds(self.communication_seconds or 0.0)
            exposed = f"{_seconds(self.exposed_seconds or 0.0)}, {self.exposed_share:.1%} of the step"
            yield "    of it not hidden", exposed
        if self.units_per_second is not None:
            per_gpu = self.units_per_second / self.world_size
            yield f"{self.unit} per second", f"{self.units_per_second:,.0f}, {per_gpu:,.0f} per GPU"
        if self.mfu is not None:
            yield "model flops utilization", f"{self.mfu:.1%}"

    def __repr__(self) -> str:
        rows = list(self._rows())
        width = max(len(name) for name, _ in rows) + 2
        lines = (f"{name:<{width}}{value}" for name, value in rows)
        return "\n".join([f"Rank {self.rank} of {self.world_size}, {self.gpu}", *lines])


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


class TrainingRecorder:
    """Listens to the allocator and the clock of one GPU, and to optimizers. `report` says what it heard."""

    def __init__(self, machine: VirtualMachine, gpu: VirtualGPU):
        self._machine, self._gpu = machine, gpu
        self._spans: list[Span] = []  # of the step that runs
        self._last: list[Span] = []  # of the last step that ended
        self._ends: tuple[float, ...] = ()  # of the last two steps
        self._optimizer: weakref.ref[Any] | None = None  # the one whose steps are the job's
        self._parameters = 0
        self._reserved = 0
        self._rank = int(machine.variables.get("RANK", 0))
        self._world_size = int(machine.variables.get("WORLD_SIZE", 1))
        self._memory = AllocatorLog(gpu)
        machine.clock.timelines.append(self)
        self._hooks = [register_optimizer_step_pre_hook(self._before_step),
                       register_optimizer_step_post_hook(self._after_step)]  # fmt: skip

    def stop(self) -> None:
        self._machine.clock.timelines.remove(self)
        for hook in self._hooks:
            hook.remove()
        self._memory.stop()
        self._reserved = self._gpu.allocator.peak_reserved
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._rank, self._world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def add(self, span: Span) -> None:
        """The clock calls this for every span."""
        if span.gpu == self._gpu.slot:
            self._spans.append(span)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._memory.mark_owned([optimizer])
        if self._optimizer is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            self._parameters = sum(p.numel() for group in optimizer.param_groups for p in group["params"])

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._memory.mark_owned([optimizer])
        if self._optimizer is None or self._optimizer() is not optimizer:
            return
        with self._gpu.allocator.exclusive():
            self._memory.fold()
        self._last, self._spans = self._spans, list[Span]()
        clock = self._machine.clock
        self._ends = (*self._ends[-1:], max(clock.now, clock.done(self._gpu.slot)))

    def report(
        self, *, tokens: int | None = None, samples: int | None = None, flops_per_unit: float | None = None
    ) -> TrainingReport:
        """What was recorded.

        tokens, samples: how many the whole job trains on in one step; give one of them.
        flops_per_unit: flops of the model for each of them, forward and backward. None: for tokens 6 per parameter,
            without those of attention (see `transformer_flops`); for samples nothing, and there is no MFU.

        Raises RuntimeError while it still records, and ValueError if both tokens and samples are given.
        """
        if self in self._machine.clock.timelines:
            raise RuntimeError("The recorder is still recording. Ask for the report after the `with` block.")
        if tokens is not None and samples is not None:
            raise ValueError("Give the number of tokens or of samples in a step, not both.")
        report = TrainingReport(
            self._gpu.spec.name, self._gpu.memory, self._rank, self._world_size, self._parameters,
            self._memory.peak, self._reserved, self._memory.by_kind, dict(self._memory.by_module.most_common()),
        )  # fmt: skip
        if len(self._ends) < 2:
            return report
        step = self._ends[1] - self._ends[0]
        sent = communication(self._last, self._gpu.slot)[ALL]
        report = replace(report, step_seconds=step, communication_seconds=sent.seconds, exposed_seconds=sent.exposed)
        units = samples if tokens is None else tokens
        if units is None:
            return report
        report = replace(report, unit="samples" if tokens is None else "tokens", units_per_second=units / step)
        if flops_per_unit is None and samples is not None:
            return report
        flops = units * (6 * self._parameters if flops_per_unit is None else flops_per_unit)
        return replace(report, mfu=flops / (step * self._gpu.spec.flops.bf16 * self._world_size))


def transformer_flops(parameters: int, layers: int, width: int, length: int) -> int:
    """Flops of a Transformer per token, forward and backward: 6 per parameter and 12 · layers · width · length for
    attention (PaLM, appendix B, which counts a causal mask as if there were none)."""
    return 6 * parameters + 12 * layers * width * length


@contextmanager
def record_training() -> Iterator[TrainingRecorder]:
    """Record a training job: `with record_training() as recorded:`, then `recorded.report()`.

    As one rank of many, the GPU is that of the rank; else the current one. Raises RuntimeError if none are on.
    """
    machine = recordable()
    own = machine.variables.get("LOCAL_RANK")
    gpu = machine.gpus[machine.current] if own is None else machine.slots[int(own)]
    recorder = TrainingRecorder(machine, gpu)
    try:
        yield recorder
    finally:
        recorder.stop()
