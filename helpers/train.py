"""One training loop: on one device, or with `nn.DataParallel` on several GPUs.

    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), loader, device="cuda:0")
    trainer = DataParallelTrainer(model, optimizer, nn.CrossEntropyLoss(), loader, devices=gpus)
    trainer.train(epochs=2)         # [cuda:0-3] epoch 0 | batch 128 | steps 32 | lr 0.1000 | loss 2.068 | ...

The loop takes images (logits (N, C), labels (N)) and masked words (logits (N, T, V), labels (N, T), with -100 where
there is nothing to guess). The programs in notebooks/scripts contain the same loop in full, with validation and
checkpoints, and the loop of DistributedDataParallel.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from helpers.gpus import keeps_values
from helpers.parallel.loss import ignored_label, label_weight

Device = torch.device | str | int
Batch = Sequence[Tensor]  # inputs, labels


@dataclass(frozen=True)
class EpochRecord:
    """One epoch of training. Printed, it is the log line.

    `loss` is the mean over all labels that count, and `accuracy` the share of correct answers, from 0 to 1. The line is
    stored in notebooks, so it has few digits and no time, which would differ from run to run.
    """

    device: str
    epoch: int
    batch_size: int
    steps: int
    learning_rate: float
    loss: float
    accuracy: float

    def __str__(self) -> str:
        rate = f"{self.learning_rate:.4f}" if self.learning_rate >= 1e-3 else f"{self.learning_rate:.1e}"
        return (
            f"[{self.device}] epoch {self.epoch} | batch {self.batch_size} | steps {self.steps} | "
            f"lr {rate} | loss {self.loss:.3f} | accuracy {100 * self.accuracy:.2f} %"
        )


class Trainer:
    """Trains a model on one device.

    model       is moved to `device`. An optimizer built before still holds its parameters, but must have no state yet
    loss        a mean over labels, such as nn.CrossEntropyLoss(). Labels equal to its `ignore_index` do not count
    loader      gives (inputs, labels). The trainer seeds its `generator` if it has one
    seed        PyTorch's generators start every epoch from seed + epoch, so that the shuffling and the dropout of an
                epoch do not depend on what ran before it
    log         called with each `EpochRecord`; None for silence
    stop_on_nan False where losses have no values, as with shapes only

    Raises ValueError for a loss that is not a mean, for a device that does not exist, and for an optimizer that holds
    none of the model's parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        loader: Iterable[Batch],
        device: Device,
        *,
        seed: int = 0,
        log: Callable[[EpochRecord], None] | None = print,
        stop_on_nan: bool = True,
    ):
        if getattr(loss, "reduction", "mean") != "mean":
            raise ValueError(f'The loss must be a mean. Build it with reduction="mean", not "{loss.reduction}".')
        self.device = _existing(device)
        self.name = str(self.device)
        self.model = self.network = model.to(self.device)
        self.optimizer, self.loss, self.loader = optimizer, loss, loader
        self.seed, self.log, self.stop_on_nan = seed, log, stop_on_nan
        self.history: list[EpochRecord] = []
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in held for parameter in model.parameters()):
            raise ValueError(
                f"This {type(optimizer).__name__} holds none of the model's parameters and would train nothing. Build "
                "the optimizer from model.parameters(), after the model."
            )

    def train(self, epochs: int) -> list[EpochRecord]:
        """Train `epochs` more epochs, each with its log line. Returns their records."""
        return [self.train_epoch() for _ in range(epochs)]

    def train_epoch(self) -> EpochRecord:
        """One pass over the loader. Raises FloatingPointError if the loss is nan or infinite."""
        epoch = len(self.history)
        torch.manual_seed(self.seed + epoch)
        if getattr(self.loader, "generator", None) is not None:
            self.loader.generator.manual_seed(self.seed + epoch)
        self.network.train()
        rate = self.optimizer.param_groups[0]["lr"]
        sums, steps, largest = torch.zeros(4, device=self.device), 0, 0
        for inputs, labels in self.loader:
            sums += self.step(inputs, labels)
            steps += 1
            largest = max(largest, len(labels))
        if steps == 0:
            raise ValueError(
                "The loader gave no batch. Its data set is empty or smaller than one batch with drop_last=True, or it "
                "is a generator that is used up."
            )
        # The sums are read only here: `.item()` makes the host wait until the GPU has done all its work, and a wait in
        # every step would leave the GPU idle.
        total, correct, count, weight = (each.item() for each in sums)
        mean = total / weight if weight else math.nan
        accuracy = correct / count if count else math.nan
        if self.stop_on_nan:
            self._check(mean, epoch, rate)
        record = EpochRecord(self.name, epoch, largest, steps, rate, mean, accuracy)
        self.history.append(record)
        if self.log is not None:
            self.log(record)
        return record

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """One optimizer step on one batch.

        Returns [loss x weight, correct answers, labels, weight], (4,), on the trainer's device. The weight is what the
        mean is divided by, see `label_weight`. The last batch can be smaller, and sentences have different numbers of
        hidden words, so the mean of the batches' means would not be the mean over all labels.
        """
        # Before the forward pass, so that old gradients and new activations are never in memory together.
        self.optimizer.zero_grad()
        loss, sums = self.forward(inputs, labels)
        loss.backward()
        self.optimizer.step()
        return sums

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, with its graph, and the sums that `step` returns, without.

        A function of its own, so that the outputs have no name left when `backward` runs. For masked words they are the
        largest tensor of all, and a name would keep them in memory.
        """
        outputs = self.network(self.place_inputs(inputs))
        labels = labels.to(self.device, non_blocking=True)
        if outputs.shape[:-1] != labels.shape:
            raise ValueError(
                f"Logits {tuple(outputs.shape)} do not fit labels {tuple(labels.shape)}: labels must have the shape of "
                "the logits without its last dimension."
            )
        # (N, C) stays as it is, (N, T, V) becomes (N T, V), because CrossEntropyLoss wants the classes second.
        loss = self.loss(outputs.flatten(0, -2), labels.flatten())
        counted = labels != ignored_label(self.loss)
        correct = (outputs.detach().argmax(-1) == labels) & counted
        weight = label_weight(self.loss, labels)
        total = torch.where(weight > 0, loss.detach().float() * weight, 0.0)  # without a label the mean is 0 / 0 = nan
        return loss, torch.stack([total, correct.sum().float(), counted.sum().float(), weight])

    def place_inputs(self, inputs: Tensor) -> Tensor:
        """Inputs where the network wants them. With `non_blocking`, copies from pinned memory overlap other work."""
        return inputs.to(self.device, non_blocking=True)

    def _check(self, loss: float, epoch: int, rate: float) -> None:
        if not keeps_values():
            raise FloatingPointError(
                f"The loss of epoch {epoch} on {self.name} is not known: these virtual GPUs keep sizes and no values. "
                "To train, call use_gpus(...) without shapes_only=True and build the model again. To measure the "
                "memory of an epoch, give stop_on_nan=False."
            )
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"The loss of epoch {epoch} on {self.name} is {loss}: the weights are useless now. Build the model "
                f"again. Try a learning rate ten times smaller than {rate:g}, and look for nan in the data. If one GPU "
                "trains well and several do not, test the copies between each pair of GPUs."
            )


class DataParallelTrainer(Trainer):
    """The same loop with `nn.DataParallel`: every batch is divided into one piece per GPU.

    devices  the GPUs. The first one holds the parameters, the gradients and the optimizer's state, gathers the outputs
             and computes the loss

    Raises ValueError for devices that are not a list of different GPUs, and what `Trainer` raises.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        loader: Iterable[Batch],
        devices: Sequence[Device],
        **options,
    ):
        gpus = [_existing(device) for device in devices]
        if not gpus or any(gpu.type != "cuda" for gpu in gpus) or len(set(gpus)) < len(gpus):
            raise ValueError(f"DataParallel needs a list of different GPUs, such as use_gpus(4), not {list(devices)}.")
        super().__init__(model, optimizer, loss, loader, gpus[0], **options)
        self.network = nn.DataParallel(self.model, gpus)
        numbers = [gpu.index for gpu in gpus]
        consecutive = len(gpus) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1))
        self.name = f"cuda:{numbers[0]}-{numbers[-1]}" if consecutive else "cuda:" + ",".join(map(str, numbers))

    def place_inputs(self, inputs: Tensor) -> Tensor:
        """As they are: DataParallel copies each piece straight to its GPU, and no GPU holds all of them."""
        return inputs


def _existing(device: Device) -> torch.device:
    """The device with its number ("cuda" is the current GPU). ValueError if this machine has no such GPU."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ValueError(
            f"{device} does not exist: this machine has {count} GPUs, numbered from 0. Call use_gpus(...) first, or "
            'train on device="cpu".'
        )
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
