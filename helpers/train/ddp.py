"""The training loop in one rank of many, with `DistributedDataParallel`.

Each rank is a process with a GPU of its own, a whole copy of the model, and its share of every batch. During `backward`
the ranks average their gradients, so that all of them make the same step and their copies stay equal.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from helpers.parallel.loss import label_weight
from helpers.parallel.ranks import agree, local_device, sums_of_all
from helpers.train.checkpoints import unwrap
from helpers.train.loop import Device, Loss, Trainer, existing_device
from helpers.train.scores import Batch

__all__ = ["DistributedTrainer"]


class DistributedTrainer(Trainer):
    """The same loop in each rank. It needs a process group: `launch(...)`, or torchrun and `init_process_group`.

    loader      gives this rank's share of the samples: `rank_loader`, or a DataLoader with a DistributedSampler
    device      this rank's; by default its own GPU, or the CPU
    exact_mean  True: the loss is the mean over the labels of all ranks, as on one GPU, also where ranks have different
                numbers of labels, and the sampler's padding does not count. This costs an all-reduce of one number per
                step. False: the mean of the ranks' means with the padding, as DistributedDataParallel computes it

    Every rank starts from rank 0's weights. All ranks have the same history and scores, which are sums over all ranks.
    Only rank 0 logs. With n ranks, each with a batch of b / n, every step
    equals the step of one GPU with a batch of b, up to rounding error. BatchNorm (use SyncBatchNorm) and dropout (each
    rank draws its own) are exceptions.

    Raises RuntimeError without a process group, and ValueError on every rank where the ranks do not fit together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        loader: Iterable[Batch],
        device: Device | None = None,
        *,
        exact_mean: bool = True,
        **options: Any,
    ):
        if not dist.is_initialized():
            raise RuntimeError(
                "There is no process group. Start this function with launch(...) of helpers.parallel, or start the "
                "program with torchrun and call torch.distributed.init_process_group() first."
            )
        self.rank, self.world_size, self.exact_mean = dist.get_rank(), dist.get_world_size(), exact_mean
        device = existing_device(local_device() if device is None else device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL sends objects by way of the current GPU
        super().__init__(unwrap(model), optimizer, loss, loader, device, **options)
        self._check_ranks()
        self.name = f"{self.world_size} x {device.type}"
        if self.rank > 0:
            self.log = None
        gpus = [device] if device.type == "cuda" else None
        self.network = DistributedDataParallel(self.model, gpus)

    def _check_ranks(self) -> None:
        """Compare before the first step, because a rank that waits for one that does something else waits forever."""
        batches = len(self.loader) if hasattr(self.loader, "__len__") else None
        agree({"batches in the loader": batches, "exact_mean": self.exact_mean})
        loader, ranks = self.loader, self.world_size
        plain = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if plain and ranks > 1 and getattr(loader.sampler, "num_replicas", None) != ranks:
            raise ValueError(
                f"All {ranks} ranks would train on the same samples, because the loader has a "
                f"{type(loader.sampler).__name__}. Make the loader with rank_loader(dataset, batch_size), or with "
                "sampler=DistributedSampler(dataset)."
            )

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """As in one process. With `exact_mean` each rank's mean loss is weighted by its share of the labels."""
        if not self.exact_mean:
            return super().step(inputs, labels)
        self.optimizer.zero_grad()
        mine = label_weight(self.loss, labels).to(self.output_device, non_blocking=True)
        everyone = mine.clone()
        added_up = dist.all_reduce(everyone, async_op=True)  # while the forward pass runs
        loss, sums = self.forward(self.network, inputs, labels)
        added_up.wait()
        # DistributedDataParallel divides by the number of ranks. Where no rank has a label, the weight is 0.
        weight = self.world_size * mine / everyone.clamp(min=torch.finfo(torch.float32).tiny)
        (loss * weight).backward()
        self.optimizer.step()
        return sums

    def add_up(self, numbers: list[float]) -> list[float]:
        return sums_of_all(numbers)
