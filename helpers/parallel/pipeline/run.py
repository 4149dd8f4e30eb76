"""A pipeline: micro-batches through stages on several GPUs, in the order of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from helpers.parallel.pipeline.schedules import gpipe, simulate

__all__ = ["Pipeline"]


class Pipeline:
    """Stages on GPUs, and the steps of a schedule through them.

    stages: modules, each is moved to its GPU. schedule: `gpipe`, `one_f_one_b`, or any function of (stages,
    micro-batches) that gives their orders. Raises ValueError for other than one stage per GPU.
    """

    def __init__(self, stages: Sequence[nn.Module], gpus: Sequence, schedule: Callable = gpipe):
        if not stages or len(stages) != len(gpus):
            raise ValueError(f"{len(stages)} stages on {len(gpus)} GPUs: a pipeline needs one stage per GPU")
        self.stages = [stage.to(gpu) for stage, gpu in zip(stages, gpus, strict=True)]
        self.gpus, self.schedule = list(gpus), schedule
        self.copies = [torch.cuda.Stream(gpu) for gpu in gpus]

    def parameters(self) -> list[nn.Parameter]:
        """Those of all stages, for an optimizer."""
        return [parameter for stage in self.stages for parameter in stage.parameters()]

    def step(self, inputs: Tensor, targets: Tensor, criterion: Callable, micro_batches: int) -> Tensor:
        """Forward and backward pass of a batch. Adds to the gradients; returns the loss, on the last GPU.

        criterion(outputs, targets) must be a mean over samples: micro-batches count by their size, so that loss and
        gradients are those of the whole batch. Raises ValueError if the batch has fewer samples than micro_batches,
        and for orders in which the stages wait for each other for ever.
        """
        if not 1 <= micro_batches <= len(inputs):
            raise ValueError(f"{len(inputs)} samples cannot be cut into {micro_batches} micro-batches")
        orders = self.schedule(len(self.stages), micro_batches)
        # All at once: a copy from pageable memory later would let the host, and so all other GPUs, wait for GPU 0.
        inputs, targets = inputs.to(self.gpus[0]), targets.to(self.gpus[-1])
        run = _Step(self, inputs.tensor_split(micro_batches), targets.tensor_split(micro_batches), criterion)
        # Issued in the order of time: a GPU does what it is given in the order in which it was given.
        for slot in simulate(orders):
            (run.forward if slot.task.kind == "F" else run.backward)(slot.stage, slot.task.micro_batch)
        return torch.stack(run.losses).sum()


class _Step:
    """What has arrived where, and what is kept for the backward pass. Keys are (stage, micro-batch)."""

    def __init__(self, pipeline: Pipeline, inputs, targets, criterion):
        self.stages, self.gpus, self.copies = pipeline.stages, pipeline.gpus, pipeline.copies
        self.inputs, self.targets, self.criterion = inputs, targets, criterion
        self.samples = sum(map(len, targets))
        self.sent: dict = {}  # to a stage: activations and gradients, each with the event of its arrival
        self.kept: dict = {}  # input and output, with the graph between them
        self.losses: list[Tensor] = []

    def forward(self, stage: int, number: int) -> None:
        # What comes from another stage is a leaf: each stage has a graph of its own.
        x = self._receive("F", stage, number).requires_grad_() if stage else self.inputs[number]
        y = self.stages[stage](x)
        if stage + 1 < len(self.stages):
            self._send("F", y.detach(), stage, stage + 1, number)
        else:
            targets = self.targets[number]
            y = self.criterion(y, targets) * (len(targets) / self.samples)
            self.losses.append(y.detach())
        self.kept[stage, number] = x, y

    def backward(self, stage: int, number: int) -> None:
        x, y = self.kept.pop((stage, number))
        y.backward(self._receive("B", stage, number) if stage + 1 < len(self.stages) else None)
        if stage:
            self._send("B", x.grad, stage, stage - 1, number)

    def _send(self, kind: str, tensor: Tensor, source: int, target: int, number: int) -> None:
        """Copy to a neighbour on streams beside the GPUs' own, where a copy would make both wait for each other."""
        here, there = self.copies[source], self.copies[target]
        here.wait_stream(torch.cuda.current_stream(self.gpus[source]))
        with torch.cuda.stream(here), torch.cuda.stream(there):
            copy = tensor.to(self.gpus[target], non_blocking=True)
            self.sent[kind, target, number] = copy, there.record_event()
        tensor.record_stream(here)  # its memory is not used again before it has been sent

    def _receive(self, kind: str, stage: int, number: int) -> Tensor:
        copy, arrival = self.sent.pop((kind, stage, number))
        stream = torch.cuda.current_stream(self.gpus[stage])
        stream.wait_event(arrival)
        copy.record_stream(stream)
        return copy
