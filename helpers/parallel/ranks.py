"""One rank among others: its GPU, its share of the data, and the values of all ranks.

    loader = rank_loader(dataset, batch_size=32)    # this rank's share of 32 samples
    names = from_all(gpu_name(local_device()))      # every rank's GPU, on every rank

Every function here also works in a plain program, as the only rank.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

__all__ = [
    "agree",
    "from_all",
    "local_device",
    "rank",
    "rank_loader",
    "sums_of_all",
    "world_size",
]


def rank() -> int:
    """The rank of this process; 0 if there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 if there is no process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_device() -> torch.device:
    """This rank's GPU: number LOCAL_RANK of this machine, or the current GPU if LOCAL_RANK is not set, or the CPU.

    A machine can show each rank only its own GPU, as SLURM does. Then every rank uses cuda:0.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() == 1 or "LOCAL_RANK" not in os.environ:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def rank_loader(
    dataset: Dataset, batch_size: int, *, shuffle: bool = True, seed: int = 0, **options: Any
) -> DataLoader:
    """A DataLoader with this rank's share of every batch of `batch_size` samples: DistributedSampler.

    Batch k of all ranks together holds the samples of batch k of a single rank with the same seed, so that trainings on
    one GPU and on several can be compared. `options` are those of DataLoader. Raises ValueError if the ranks cannot
    share a batch equally.
    """
    ranks = world_size()
    if batch_size % ranks or batch_size < 1:
        raise ValueError(
            f"The batch size is {batch_size}, but {ranks} ranks can only share a multiple of {ranks} equally. Change "
            "the batch size or the number of ranks."
        )
    sampler = DistributedSampler(dataset, ranks, rank(), shuffle=shuffle, seed=seed)
    return DataLoader(dataset, batch_size // ranks, sampler=sampler, **options)


def from_all(value: Any) -> list[Any]:
    """A list of the values of all ranks, in rank order, on every rank."""
    values = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def sums_of_all(numbers: Sequence[float]) -> list[float]:
    """Each number added up over all ranks, on every rank. In float64, so that integers up to 2**53 are exact."""
    if world_size() == 1:
        return list(numbers)
    device = "cpu" if "cpu:" in dist.get_backend_config() else "cuda"  # NCCL only sends what is on a GPU
    sums = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


def agree(values: dict[str, Any]) -> None:
    """Raises ValueError on all ranks if a value is not the same on all of them."""
    everyone = from_all(values)
    differ = [name for name in values if any(other[name] != values[name] for other in everyone)]
    if differ:
        listed = "; ".join(f"{name}: {', '.join(str(other[name]) for other in everyone)}" for name in differ)
        raise ValueError(
            f"All ranks need the same values, but they have ({listed}) in rank order. With different values they would "
            "wait for each other forever."
        )
