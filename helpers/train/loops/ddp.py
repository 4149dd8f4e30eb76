"""The training loop in one rank of many: `DistributedDataParallel`.

Each rank is a process with a GPU of its own, a whole copy of the model, and its share of every batch. During
`backward` the ranks average their gradients; from then on all compute the same step, so that the copies stay equal.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from helpers.parallel.ranks import agree, from_all, from_first, gather_to_first, gpu_name, local_device, sums_of_all
from helpers.train.checkpoints import unwrap
from helpers.train.generators import generator_states
from helpers.train.loops.checks import Device, check_group, check_own_gpus, check_sharded, existing_device
from helpers.train.loops.loop import Trainer
from helpers.train.loops.micro_batches import Batch, Shares
from helpers.train.loops.scores import Score

__all__ = ["DistributedTrainer"]


class DistributedTrainer(Trainer):
    """The same loop in each rank; the process group must be there: `launch(...)`, or `connect()` under torchrun.

    loader          gives this rank's share of the samples: `rank_loader`, or a DataLoader with a DistributedSampler
    device          this rank's; its own GPU (`helpers.parallel.ranks.local_device`), or the CPU, by default
    sync_batchnorm  every nn.BatchNorm computes mean and variance over all ranks' samples; on GPUs only
    exact_mean      the loss is the mean over all labels of all ranks, as on one GPU, also where ranks have unequally
                    many labels: an uneven last batch, labels that are left out. The sampler's padding does not count.
                    Costs an all-reduce of one number per step; batches are loaded a step ahead, so that no rank waits
                    for it. False: what DistributedDataParallel does alone, the mean of the ranks' means, padding
                    included
    ddp             further arguments of DistributedDataParallel, such as {"find_unused_parameters": True}

    Every rank starts from rank 0's weights. All ranks have the same history and scores, summed over all of them; only
    rank 0 logs, shows a bar, and writes checkpoints. Only rank 0 needs to see the checkpoint's file, also to resume.
    With n ranks, each with a batch of b / n, every step is the step of one GPU with a batch of b, to rounding; not
    for BatchNorm (unless synchronised) and dropout (each rank draws its own).

    RuntimeError without a process group; ValueError, on every rank, where the ranks do not fit together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        loader: Iterable[Any],
        device: Device | None = None,
        *,
        sync_batchnorm: bool = False,
        exact_mean: bool = True,
        ddp: dict[str, Any] | None = None,
        **options: Any,
    ):
        check_group()
        self.rank, self.world_size, self.exact_mean = dist.get_rank(), dist.get_world_size(), exact_mean
        device = existing_device(local_device() if device is None else device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL sends objects by way of the current GPU
        model = unwrap(model)
        if sync_batchnorm:
            model = _synchronised(model, device)
        super().__init__(model, optimizer, loss, loader, device, **options)
        self._check_ranks()
        self.name = f"{self.world_size} x {device.type}"
        if self.rank > 0:
            self.log, self.progress = None, False
        gpus = [device] if device.type == "cuda" else None
        self.network = DistributedDataParallel(self.model, gpus, **(ddp or {}))

    def _check_ranks(self) -> None:
        """A rank that waits for one that does something else waits for ever: compare before the first step."""
        check_own_gpus(from_all(gpu_name(self.device)))
        batches = len(self.loader) if hasattr(self.loader, "__len__") else None
        options = ("accumulate", "exact_mean", "clip", "schedule", "seed", "save_every")
        agree(
            {"batches in the loader": batches, "checkpoint": self.checkpoint is not None, "amp": self.precision.dtype}
            | self._job()
            | {name: getattr(self, name) for name in options}
        )
        check_sharded(self.loader, self.world_size)

    def batches_of(self, loader: Iterable[Any]) -> Iterator[Batch]:
        if self.exact_mean:
            return super().batches_of(loader)
        return (Batch(*batch) for batch in self._bar(loader))

    def steps_to_come(self) -> Iterator[tuple[list[Batch], Any]]:
        """A step ahead, where the ranks add up their weights: they have long done so when `backward` wants to know."""
        found = super().steps_to_come()
        if not self.exact_mean or self.world_size == 1:
            yield from found
            return
        step = next(found, None)
        while step is not None:
            if self.save_every is not None:
                self.position.loading = generator_states(None, self.gpus)
            following = next(found, None)
            yield step
            step = following

    def shares(self, batches: list[Batch]) -> Any:
        if self.exact_mean and self.world_size > 1:
            return Shares(batches, self.loss, self.output_device, self.world_size)
        if self.exact_mean:
            return super().shares(batches)
        return [1 / len(batches)] * len(batches)

    def gradients_later(self, later: bool) -> AbstractContextManager[Any]:
        """`no_sync` around all batches of a step but the last, forward pass included, and one all-reduce in all."""
        return self.network.no_sync() if later else nullcontext()

    def evaluate(self, loader: Iterable[Any]) -> Score:
        """The score over all ranks' samples, each counted once, the same on every rank; all must call it.

        Each rank passes its own share through the model inside DistributedDataParallel, whose own forward pass would
        make the ranks wait for each other, which need not have equally many batches.
        """
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)  # BatchNorm's running means are each rank's own since the last step
        network, self.network = self.network, self.model
        try:
            return super().evaluate(loader)
        finally:
            self.network = network

    def add_up(self, numbers: list[float]) -> list[float]:
        return sums_of_all(numbers)

    def gather(self, state: Any) -> list[Any]:
        return gather_to_first(state)

    def read(self, path: str | Path, missing_ok: bool = False) -> dict[str, Any] | None:
        return from_first(lambda: super(DistributedTrainer, self).read(path, missing_ok))


def _synchronised(model: nn.Module, device: torch.device) -> nn.Module:
    if device.type != "cuda":
        raise ValueError("SyncBatchNorm works on GPUs only: leave sync_batchnorm out, or take GroupNorm on the CPU")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)
