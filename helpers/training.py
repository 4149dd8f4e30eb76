"""One training loop, on one GPU or with DataParallel on several.

    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), loader, device="cuda:0")
    trainer = DataParallelTrainer(model, optimizer, nn.CrossEntropyLoss(), loader, devices=gpus)
    trainer.train(epochs=2)         # [cuda:0-3] epoch 0 | batch 128 | steps 32 | lr 0.1000 | loss 2.068 | ...
    trainer.evaluate(test_loader)   # Score(loss=..., accuracy=...)

The loop is the same for images (logits (N, C), labels (N)) and for masked words (logits (N, T, V), labels (N,
T), -100 where there is nothing to guess). Another form of training says only three things: `network`, the
module that is called; `place_inputs`, where its inputs go; `output_device`, where its outputs meet the
labels.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from helpers.checkpoints import load_checkpoint, save_checkpoint, unwrap
from helpers.scores import EpochRecord, Score, batch_sums, score_of
from helpers.training_checks import (
    Device,
    adopt,
    check_batch,
    check_loss,
    empty_advice,
    existing_device,
    existing_gpus,
    nan_advice,
)

__all__ = ["DataParallelTrainer", "Trainer"]


Step = Callable[[Tensor, Tensor], Tensor]


class _Bar(tqdm):
    # tqdm's watching thread would outlive the training, and with it whatever was switched on at that time.
    monitor_interval = 0


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


class Trainer:
    """Trains a model on one device.

    model       is moved to `device` here; an optimizer made before keeps holding its parameters
    loss        a mean over labels, as nn.CrossEntropyLoss(); labels equal to its `ignore_index` do not count
    loader      gives (inputs, labels); its `generator` and its sampler's `set_epoch` are used where it has
                them
    scheduler   one `step()` per epoch
    seed        PyTorch's global generators start every epoch from seed + epoch, so that shuffling and dropout
                in an epoch do not depend on what ran before; None leaves them alone
    checkpoint  a path: saved after every epoch, read by `resume()`
    log         called with each `EpochRecord`; None for silence
    progress    a bar that vanishes after each pass; TQDM_DISABLE=1 in the environment hides every bar
    stop_on_nan False where losses have no values at all, as with shapes only
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        loader: Iterable[Any],
        device: Device,
        *,
        scheduler: Any = None,
        seed: int | None = 0,
        checkpoint: str | Path | None = None,
        log: Callable[[EpochRecord], None] | None = print,
        progress: bool = True,
        stop_on_nan: bool = True,
    ):
        self.device = self.output_device = existing_device(device)
        self.name = str(self.device)
        self.model = self.network = model.to(self.device)
        self.optimizer, self.loss, self.loader = optimizer, loss, loader
        self.scheduler, self.seed, self.checkpoint = scheduler, seed, checkpoint
        self.log, self.progress, self.stop_on_nan = log, progress, stop_on_nan
        self.epoch = 0
        self.history: list[EpochRecord] = []
        check_loss(loss)
        adopt(optimizer, model)

    def place_inputs(self, inputs: Tensor) -> Tensor:
        """Inputs where the network wants them; `non_blocking` lets copies from pinned memory overlap."""
        return inputs.to(self.device, non_blocking=True)

    def train(self, epochs: int) -> list[EpochRecord]:
        """Train `epochs` more epochs, each with its log line and its checkpoint; returns their records."""
        return [self.train_epoch() for _ in range(epochs)]

    def train_epoch(self) -> EpochRecord:
        """One pass over the loader. FloatingPointError, and no checkpoint, if the loss is nan or infinite."""
        self._seed_epoch()
        self.network.train()
        rate = self.optimizer.param_groups[0]["lr"]
        score, batch_size, steps = self._pass(self.loader, self.step)
        record = EpochRecord(self.name, self.epoch, batch_size, steps, rate, score.loss, score.accuracy)
        if self.stop_on_nan and not math.isfinite(score.loss):
            raise FloatingPointError(nan_advice(record))
        self._finish_epoch(record)
        return record

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """One optimizer step on one batch; returns its `batch_sums`, on the output device."""
        # Before the forward pass, so that old gradients and new activations are never in memory together.
        self.optimizer.zero_grad()
        loss, sums = self.forward(inputs, labels)
        loss.backward()
        self.optimizer.step()
        return sums

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, with its graph, and its `batch_sums`, without.

        A function of its own so that the outputs have no name left when `backward` runs: for masked words
        they are the largest tensor of all, and a name would keep them in memory.
        """
        outputs = self.network(self.place_inputs(inputs))
        labels = labels.to(self.output_device, non_blocking=True)
        if outputs.shape[:-1] != labels.shape:
            raise ValueError(
                f"logits {tuple(outputs.shape)} do not fit labels {tuple(labels.shape)}: labels must have "
                "the shape of the logits without its last dimension"
            )
        # (N, C) stays as it is, (N, T, V) becomes (N T, V): CrossEntropyLoss wants the classes second.
        loss = self.loss(outputs.flatten(0, -2), labels.flatten())
        ignored = getattr(self.loss, "ignore_index", -100)
        return loss, batch_sums(loss.detach(), outputs.detach(), labels, ignored)

    def evaluate(self, loader: Iterable[Any]) -> Score:
        """Loss and accuracy on another loader, without dropout or gradients; the model stays as it is."""
        with _evaluation_mode(self.network), torch.inference_mode():
            return self._pass(loader, lambda inputs, labels: self.forward(inputs, labels)[1])[0]

    def resume(self, path: str | Path | None = None) -> int:
        """Go on from a checkpoint (`checkpoint` by default); returns the number of the epoch that comes next.

        Training then ends in the same weights as if it had never been interrupted.
        """
        path = path or self.checkpoint
        if path is None:
            raise ValueError("resume from which file? Give resume(path), or checkpoint= to the trainer")
        parts = (self.model, self.optimizer, self.scheduler)
        self.epoch = load_checkpoint(path, *parts, rng=True, generator=self._generator) + 1
        return self.epoch

    def _pass(self, loader: Iterable[Any], work: Step) -> tuple[Score, int, int]:
        """Call `work` on every batch: the score, the largest batch, the number of batches.

        The sums are read once, at the end: `.item()` makes the host wait until the GPU has done all that it
        was given, and a wait in every step would leave the GPU without work in between.
        """
        sums, batch_size, steps = torch.zeros(3, device=self.output_device), 0, 0
        for inputs, labels in self._with_bar(loader):
            sums += work(inputs, labels)
            batch_size, steps = max(batch_size, len(labels)), steps + 1
        if steps == 0:
            raise ValueError(empty_advice(loader))
        return score_of(sums), batch_size, steps

    def _with_bar(self, loader: Iterable[Any]) -> Iterable[Any]:
        if not self.progress:
            return loader
        # No speed and no remaining time in the bar: wall-clock times must not reach a stored notebook.
        layout = "{desc} {bar} {n_fmt}/{total_fmt}"
        return _Bar(loader, desc=f"[{self.name}] epoch {self.epoch}", leave=False, bar_format=layout)

    @property
    def _generator(self) -> torch.Generator | None:
        return getattr(self.loader, "generator", None)

    def _seed_epoch(self) -> None:
        if self.seed is not None:
            torch.manual_seed(self.seed + self.epoch)
            if self._generator is not None:
                self._generator.manual_seed(self.seed + self.epoch)
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)

    def _finish_epoch(self, record: EpochRecord) -> None:
        if self.scheduler is not None:
            self.scheduler.step()
        if self.checkpoint is not None:
            parts = (self.model, self.optimizer, self.epoch, self.scheduler)
            save_checkpoint(self.checkpoint, *parts, generator=self._generator)
        self.history.append(record)
        self.epoch += 1
        if self.log is not None:
            self.log(record)


class DataParallelTrainer(Trainer):
    """The same loop with `nn.DataParallel`: every batch is cut into one piece per GPU.

    devices        the GPUs; the first holds the parameters, the gradients and the optimizer's state
    output_device  the GPU where outputs are gathered and the loss is computed; the first one by default

    A batch of fewer samples than GPUs makes one piece per sample, and DataParallel leaves the other GPUs
    without work. Where even the loader's full batch is that small, the trainer refuses it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        loader: Iterable[Any],
        devices: Sequence[Device],
        output_device: Device | None = None,
        **options: Any,
    ):
        self.devices = existing_gpus(devices)
        check_batch(loader, len(self.devices))
        super().__init__(unwrap(model), optimizer, loss, loader, self.devices[0], **options)
        self.output_device = self.devices[0] if output_device is None else existing_gpus([output_device])[0]
        self.network = nn.DataParallel(self.model, self.devices, self.output_device)
        self.name = _name_of([device.index for device in self.devices])

    def place_inputs(self, inputs: Tensor) -> Tensor:
        """As they are: DataParallel copies each piece straight to its GPU, and no GPU holds all of them."""
        return inputs


def _name_of(numbers: list[int]) -> str:
    """[0, 1, 2, 3] -> "cuda:0-3", [0, 2] -> "cuda:0,2"."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and numbers == list(range(first, last + 1)):
        return f"cuda:{first}-{last}"
    return "cuda:" + ",".join(map(str, numbers))
