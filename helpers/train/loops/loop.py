"""The training loop on one device, which all forms of training share.

Another form says only where it differs: `network`, the module that is called; `place_inputs`, where its inputs go;
`output_device`, where its outputs meet the labels; and, with several ranks, how they add up and wait (`add_up`,
`steps_to_come`, `gather`, `read`, `gradients_later`). See `helpers.train.loops` for how they are used.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from helpers.train.generators import generator_states, set_generators
from helpers.train.loops.checks import (
    Device,
    adopt,
    check_loss,
    check_options,
    empty_advice,
    existing_device,
    nan_advice,
)
from helpers.train.loops.micro_batches import Batch, Shares, groups, real_batches
from helpers.train.loops.precision import Precision
from helpers.train.loops.progress import bar
from helpers.train.loops.scores import EpochRecord, Score, batch_sums, score_of, values_of
from helpers.train.loops.state import Position, Resumable

__all__ = ["Trainer"]


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """eval() and back, module by module: a part that was frozen with .eval() by hand stays frozen."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class Trainer(Resumable):
    """Trains a model on one device.

    model       is moved to `device` here; an optimizer made before keeps holding its parameters
    loss        a mean over labels, as nn.CrossEntropyLoss(); labels equal to its `ignore_index` do not count
    loader      gives (inputs, labels); its `generator` and its sampler's `set_epoch` are used where it has
                them
    scheduler   one `step()` per epoch, or with schedule="step" per optimizer step
    seed        PyTorch's global generators start every epoch from seed + epoch, so that shuffling and dropout
                in an epoch do not depend on what ran before; None leaves them alone
    accumulate  batches per optimizer step; the step is that of one batch of all their samples
    amp         None, "bf16" or "fp16" (`helpers.train.loops.precision`)
    clip        the largest norm that all gradients together may have
    checkpoint  a path: saved after every epoch, read by `resume()`
    save_every  optimizer steps after which it is saved within an epoch as well
    log         called with each `EpochRecord`; None for silence
    progress    a bar that vanishes after each pass; TQDM_DISABLE=1 in the environment hides every bar
    stop_on_nan False where losses have no values at all, as with shapes only
    """

    rank, world_size = 0, 1

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        loader: Iterable[Any],
        device: Device,
        *,
        scheduler: Any = None,
        schedule: str = "epoch",
        seed: int | None = 0,
        accumulate: int = 1,
        amp: str | None = None,
        clip: float | None = None,
        checkpoint: str | Path | None = None,
        save_every: int | None = None,
        log: Callable[[EpochRecord], None] | None = print,
        progress: bool = True,
        stop_on_nan: bool = True,
    ):
        check_loss(loss)
        check_options(schedule, accumulate, clip, checkpoint, save_every)
        self.device = self.output_device = existing_device(device)
        self.devices, self.name = [self.device], str(self.device)
        self.model = self.network = model.to(self.device)
        self.optimizer, self.loss, self.loader = optimizer, loss, loader
        self.scheduler, self.schedule, self.seed = scheduler, schedule, seed
        self.accumulate, self.clip, self.precision = accumulate, clip, Precision(amp, self.device.type)
        self.checkpoint, self.save_every = checkpoint, save_every
        self.log, self.progress, self.stop_on_nan = log, progress, stop_on_nan
        self.epoch = 0
        self.position: Position | None = None  # within an epoch
        self.history: list[EpochRecord] = []
        adopt(optimizer, model)

    # -------------------------------------------------------------------------------------------- the loop

    def train(self, epochs: int) -> list[EpochRecord]:
        """Train `epochs` more epochs, each with its log line and its checkpoint; returns their records."""
        return [self.train_epoch() for _ in range(epochs)]

    def train_epoch(self) -> EpochRecord:
        """One pass over the loader, or the rest of one after `resume`.

        FloatingPointError, and no checkpoint, if the loss is nan or infinite.
        """
        self.network.train()
        try:
            for batches, shares in self.steps_to_come():
                self._count(batches, self._step(batches, shares))
            return self._end_epoch()
        finally:
            self.position = None

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """One optimizer step on one batch; returns its `batch_sums`, on the output device."""
        batches = [Batch(inputs, labels)]
        return self._step(batches, self.shares(batches))

    def _step(self, batches: list[Batch], shares: Any) -> Tensor:
        # Before the forward pass, so that old gradients and new activations are never in memory together.
        self.optimizer.zero_grad()
        sums = None
        for number, batch in enumerate(batches, 1):
            with self.gradients_later(number < len(batches)):
                loss, found = self.forward(batch.inputs, batch.labels)
                self.precision.backward(loss if shares is None else loss * shares[number - 1])
            found = found if batch.counts else torch.zeros_like(found)
            sums = found if sums is None else sums + found
        self.precision.step(self.optimizer, self.clip)
        return sums

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, with its graph, and its `batch_sums`, without.

        A function of its own so that the outputs have no name left when `backward` runs: for masked words
        they are the largest tensor of all, and a name would keep them in memory.
        """
        with self.precision.autocast():
            outputs = self.network(self.place_inputs(inputs))
            labels = labels.to(self.output_device, non_blocking=True)
            if outputs.shape[:-1] != labels.shape:
                raise ValueError(
                    f"logits {tuple(outputs.shape)} do not fit labels {tuple(labels.shape)}: labels must have "
                    "the shape of the logits without its last dimension"
                )
            # (N, C) stays as it is, (N, T, V) becomes (N T, V): CrossEntropyLoss wants the classes second.
            loss = self.loss(outputs.flatten(0, -2), labels.flatten())
        return loss, batch_sums(loss.detach(), outputs.detach(), labels, self.loss)

    def evaluate(self, loader: Iterable[Any]) -> Score:
        """Loss and accuracy on another loader, without dropout or gradients; the model stays as it is."""
        sums, batches = torch.zeros(4, device=self.output_device), 0
        with _evaluation_mode(self.network), torch.inference_mode():
            for batch in real_batches(loader, self._bar(loader)):
                sums += self.forward(batch.inputs, batch.labels)[1] * batch.counts
                batches += 1
        *totals, batches = self.add_up([*values_of(sums), batches])
        if batches == 0:
            raise ValueError(empty_advice(loader))
        return score_of(totals)

    # --------------------------------------------------------------------- what other forms do in another way

    def place_inputs(self, inputs: Tensor) -> Tensor:
        """Inputs where the network wants them; `non_blocking` lets copies from pinned memory overlap."""
        return inputs.to(self.device, non_blocking=True)

    def steps_to_come(self) -> Iterator[tuple[list[Batch], Any]]:
        """The batches of each step of this epoch, and what their losses are multiplied by (`shares`)."""
        for batches in groups(self._begin_epoch(), self.accumulate):
            self._after_loading()
            yield batches, self.shares(batches)

    def shares(self, batches: list[Batch]) -> Any:
        """What each batch's loss is multiplied by; None where it is the only one."""
        return None if len(batches) == 1 else Shares(batches, self.loss, self.output_device)

    def gradients_later(self, later: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward pass of a batch; `later` for all but the last one of a step."""
        return nullcontext()

    def add_up(self, numbers: list[float]) -> list[float]:
        """Each of them over all ranks."""
        return numbers

    # ------------------------------------------------------------------------------------------- an epoch

    def batches_of(self, loader: Iterable[Any]) -> Iterator[Batch]:
        """The batches to train on, under the bar."""
        return real_batches(loader, self._bar(loader))

    def _begin_epoch(self) -> Iterator[Batch]:
        """The batches that are still to come, with the generators as they were before the first of these was loaded."""
        self._seed_epoch()
        at = self.position
        if at is None:
            rate = self.optimizer.param_groups[0]["lr"]
            at = self.position = Position(rate, torch.zeros(4, device=self.output_device))
        if at.start is not None:
            set_generators(at.start, self.generator, [])
        at.start = generator_states(self.generator, [])
        batches = self.batches_of(self.loader)
        for _ in islice(batches, at.batches):
            pass
        self._draw_on_from(at.loading or at.generators)
        return batches

    def _after_loading(self) -> None:
        """After an interruption: where batches are loaded ahead, steps were made between this batch and the next."""
        at = self.position
        if at.generators is not None:
            if at.loading is not None:
                self._draw_on_from(at.generators)
            at.generators = at.loading = None

    def _draw_on_from(self, states: Any) -> None:
        if states is not None:
            # Not the loader's own: it is drawn from while the loader goes on, and has just been brought there.
            set_generators({**states, "loader": None}, None, self.gpus)

    def _count(self, batches: list[Batch], sums: Tensor) -> None:
        """After each optimizer step."""
        at = self.position
        # Read once, at the end: `.item()` makes the host wait until the GPU has done all that it was given, and a
        # wait in every step would leave the GPU without work in between.
        at.sums += sums
        at.steps, at.batches = at.steps + 1, at.batches + len(batches)
        at.largest = max(at.largest, sum(len(batch.labels) * batch.counts for batch in batches))
        if self.scheduler is not None and self.schedule == "step":
            self.scheduler.step()
        if self.save_every is not None and at.steps % self.save_every == 0:
            self._record()
            self.save()

    def _record(self) -> EpochRecord:
        """The epoch so far; FloatingPointError if its loss is nan or infinite."""
        at = self.position
        *totals, largest = self.add_up([*values_of(at.sums), at.largest])
        score = score_of(totals)
        record = EpochRecord(self.name, self.epoch, int(largest), at.steps, at.rate, score.loss, score.accuracy)
        if self.stop_on_nan and not math.isfinite(score.loss):
            raise FloatingPointError(nan_advice(record))
        return record

    def _end_epoch(self) -> EpochRecord:
        if self.position.steps == 0:
            raise ValueError(empty_advice(self.loader))
        record = self._record()
        if self.scheduler is not None and self.schedule == "epoch":
            self.scheduler.step()
        self.epoch, self.position = self.epoch + 1, None
        if self.checkpoint is not None:
            self.save()
        self.history.append(record)
        if self.log is not None:
            self.log(record)
        return record

    def _bar(self, loader: Iterable[Any]) -> Iterable[Any]:
        return bar(loader, f"[{self.name}] epoch {self.epoch}") if self.progress else loader
