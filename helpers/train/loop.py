"""The training loop in one process: on one device, or on several GPUs with `nn.DataParallel`.

`DistributedTrainer` (`helpers.train.ddp`) runs the same loop in each of many processes. Each trainer defines only what
it does in its own way: `network`, the module that is called; `place_inputs`, where its inputs go; `output_device`,
where its outputs meet the labels; and, with several ranks, how a loss is weighted and how sums are added up.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from helpers.gpus import keeps_values
from helpers.parallel.loss import ignored_label
from helpers.train.checkpoints import unwrap
from helpers.train.scores import Batch, EpochRecord, batch_sums, score_of, without_padding

__all__ = ["DataParallelTrainer", "Device", "Loss", "Trainer", "existing_device"]

Device = torch.device | str | int
Loss = Callable[[Tensor, Tensor], Tensor]
NO_BATCH = (
    "The loader gave no batch: its data set is empty, or smaller than one batch with drop_last=True, or it is a "
    "generator that is used up."
)


class Trainer:
    """Trains a model on one device.

    model       is moved to `device`; an optimizer built before still holds its parameters, but must have no state yet
    loss        a mean over labels, such as nn.CrossEntropyLoss(); labels equal to its `ignore_index` do not count
    loader      gives (inputs, labels); its `generator`, and its sampler's `set_epoch`, are used if it has them
    scheduler   makes one `step()` per optimizer step
    seed        PyTorch's generators start every epoch from seed + epoch, so that shuffling and dropout of an epoch do
                not depend on what ran before it; None leaves the generators alone
    log         called with each `EpochRecord`; None for silence
    stop_on_nan False where losses have no values, as with shapes only
    """

    rank = 0
    exact_mean = True  # see DistributedTrainer

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        loader: Iterable[Batch],
        device: Device,
        *,
        scheduler: Any = None,
        seed: int | None = 0,
        log: Callable[[EpochRecord], None] | None = print,
        stop_on_nan: bool = True,
    ):
        if getattr(loss, "reduction", "mean") != "mean":
            raise ValueError(f'The loss must be a mean. Build it with reduction="mean", not "{loss.reduction}".')
        self.device = self.output_device = existing_device(device)
        self.name = str(self.device)
        self.model = self.network = model.to(self.device)
        self.optimizer, self.loss, self.loader = optimizer, loss, loader
        self.scheduler, self.seed, self.log, self.stop_on_nan = scheduler, seed, log, stop_on_nan
        self.epoch = 0
        self.history: list[EpochRecord] = []
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in held for parameter in model.parameters()):
            raise ValueError(
                f"This {type(optimizer).__name__} holds none of the model's parameters and would train nothing. Build "
                "the optimizer from model.parameters(), after the model."
            )

    # ------------------------------------------------------------------------------------------------- the loop

    def train(self, epochs: int) -> list[EpochRecord]:
        """Train `epochs` more epochs, each with its log line. Returns their records."""
        return [self.train_epoch() for _ in range(epochs)]

    def train_epoch(self) -> EpochRecord:
        """One pass over the loader. Raises FloatingPointError if the loss is nan or infinite."""
        self._seed_epoch()
        self.network.train()
        rate = self.optimizer.param_groups[0]["lr"]
        sums, steps, largest = torch.zeros(4, device=self.output_device), 0, 0
        batches = without_padding(self.loader, ignored_label(self.loss)) if self.exact_mean else self.loader
        for inputs, labels in batches:
            sums += self.step(inputs, labels)
            steps += 1
            largest = max(largest, len(labels))
            if self.scheduler is not None:
                self.scheduler.step()
        if steps == 0:
            raise ValueError(NO_BATCH)
        # The sums are read only here: `.item()` makes the host wait until the GPU has done all its work, and a wait in
        # every step would leave the GPU idle.
        *totals, largest = self.add_up([total.item() for total in sums] + [largest])
        score = score_of(totals)
        record = EpochRecord(self.name, self.epoch, int(largest), steps, rate, score.loss, score.accuracy)
        if self.stop_on_nan and not keeps_values():
            raise FloatingPointError(
                f"The loss of epoch {self.epoch} on {self.name} is not known: these virtual GPUs keep sizes and no "
                "values. To train, call use_gpus(...) without shapes_only=True and build the model again. To measure "
                "the memory of an epoch, give stop_on_nan=False."
            )
        if self.stop_on_nan and not math.isfinite(score.loss):
            raise FloatingPointError(
                f"The loss of epoch {self.epoch} on {self.name} is {score.loss}: the weights are useless now. Build "
                f"the model again. Try a learning rate ten times smaller than {rate:g}, and look for nan in the data. "
                "If one GPU trains well and several do not, test the copies between each pair of GPUs."
            )
        self.epoch += 1
        self.history.append(record)
        if self.log is not None:
            self.log(record)
        return record

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """One optimizer step on one batch. Returns its `batch_sums`, on the output device."""
        # Before the forward pass, so that old gradients and new activations are never in memory together.
        self.optimizer.zero_grad()
        loss, sums = self.forward(self.network, inputs, labels)
        loss.backward()
        self.optimizer.step()
        return sums

    def forward(self, network: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, with its graph, and its `batch_sums`, without.

        A function of its own, so that the outputs have no name left when `backward` runs: for masked words they are
        the largest tensor of all, and a name would keep them in memory.
        """
        outputs = network(self.place_inputs(inputs))
        labels = labels.to(self.output_device, non_blocking=True)
        if outputs.shape[:-1] != labels.shape:
            raise ValueError(
                f"Logits {tuple(outputs.shape)} do not fit labels {tuple(labels.shape)}: labels must have the shape of "
                "the logits without its last dimension."
            )
        # (N, C) stays as it is, (N, T, V) becomes (N T, V), because CrossEntropyLoss wants the classes second.
        loss = self.loss(outputs.flatten(0, -2), labels.flatten())
        return loss, batch_sums(self.loss, loss.detach(), outputs.detach(), labels)

    # ------------------------------------------------------------------- what other trainers do in their own way

    def place_inputs(self, inputs: Tensor) -> Tensor:
        """Inputs where the network wants them; `non_blocking` lets copies from pinned memory overlap."""
        return inputs.to(self.device, non_blocking=True)

    def add_up(self, numbers: list[float]) -> list[float]:
        """Each of the numbers, summed over all ranks."""
        return numbers

    def _seed_epoch(self) -> None:
        if self.seed is not None:
            # Ranks far apart, so that no rank's epoch draws what another rank drew in another epoch.
            seed = self.seed + self.epoch + 1_000_003 * self.rank
            torch.manual_seed(seed)
            if getattr(self.loader, "generator", None) is not None:
                self.loader.generator.manual_seed(seed)
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)


class DataParallelTrainer(Trainer):
    """The same loop with `nn.DataParallel`: every batch is cut into one piece per GPU.

    devices        the GPUs; the first one holds the parameters, the gradients and the optimizer's state
    output_device  the GPU where outputs are gathered and the loss is computed; the first one by default
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        loader: Iterable[Batch],
        devices: Sequence[Device],
        output_device: Device | None = None,
        **options: Any,
    ):
        gpus = [existing_device(device) for device in devices]
        if not gpus or any(gpu.type != "cuda" for gpu in gpus) or len(set(gpus)) < len(gpus):
            raise ValueError(f"DataParallel needs a list of different GPUs, such as use_gpus(4), not {list(devices)}.")
        super().__init__(unwrap(model), optimizer, loss, loader, gpus[0], **options)
        self.output_device = gpus[0] if output_device is None else existing_device(output_device)
        self.network = nn.DataParallel(self.model, gpus, self.output_device)
        self.name = _name_of([gpu.index for gpu in gpus])

    def place_inputs(self, inputs: Tensor) -> Tensor:
        """As they are: DataParallel copies each piece straight to its GPU, and no GPU holds all of them."""
        return inputs


def _name_of(numbers: list[int]) -> str:
    """[0, 1, 2, 3] -> "cuda:0-3", [0, 2] -> "cuda:0,2"."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and numbers == list(range(first, last + 1)):
        return f"cuda:{first}-{last}"
    return "cuda:" + ",".join(map(str, numbers))


def existing_device(device: Device) -> torch.device:
    """The device with its number ("cuda" is the current GPU); ValueError if this machine has no such GPU."""
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
