"""One rank among others: joining them, a share of the data, agreeing, and doing things once.

    connect()                                    # in a program that torchrun started
    loader = rank_loader(dataset, batch_size=32) # this rank's share: 32 samples are the batch of all ranks together
    disconnect()

Every function here but `connect` also works in a plain program, as the only rank.
"""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

__all__ = [
    "agree",
    "connect",
    "disconnect",
    "from_all",
    "gpu_name",
    "local_device",
    "rank",
    "rank_loader",
    "sums_of_all",
    "world_size",
]

_kept: list[dist.ProcessGroup] = []


def rank() -> int:
    """This process's number, from 0; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many ranks there are; 1 where there is no process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


# ------------------------------------------------------------------------------------------- coming and going


def connect(timeout_s: float = 120.0) -> int:
    """Join the other ranks, as the environment says that torchrun sets up; returns this rank's number.

    timeout_s: how long to wait for the others, here and in every collective later on. The backend is nccl where there
    are GPUs, and otherwise gloo. On one machine torchrun can start the ranks again after a failure; on several it needs
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for that, as in train_many_nodes.slurm. Raises RuntimeError where the
    environment says nothing, where the address of rank 0 is taken, and where it never answers.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)} not set, so this process does not know the other ranks. Start it with torchrun "
            "--nproc-per-node 2 program.py."
        )
    gpu = local_device() if torch.cuda.is_available() else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    timeout = timedelta(seconds=timeout_s)
    try:
        store, number, ranks = next(dist.rendezvous("env://", timeout=timeout))
    except dist.DistError as error:
        raise RuntimeError(_connection_advice(error, timeout_s)) from None  # it is quoted there
    if os.environ.get("LOCAL_WORLD_SIZE") == str(ranks):
        # torchrun keeps one store for all attempts: here the address of a rank that has died would be found in it.
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group(
        "gloo" if gpu is None else "nccl", store=store, rank=number, world_size=ranks, timeout=timeout
    )
    return number


def _connection_advice(error: Exception, timeout_s: float) -> str:
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if "EADDRINUSE" in str(error):
        return (
            f"Port {port} is in use: another training, or one that was not ended, has it. Take another one, "
            "torchrun --master-port 29501 or MASTER_PORT=29501, on all machines."
        )
    return (
        f"Rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} waited {timeout_s:.0f} s for the others at "
        f"{address}:{port}. Check that rank 0 runs there, that all ranks were started, that a firewall lets the port "
        f"through, and that MASTER_ADDR is the right name. PyTorch says: {str(error).splitlines()[0]}"
    )


def disconnect() -> None:
    """Leave the process group, if there is one: at the end of a program, when all ranks are done."""
    if dist.is_initialized():
        # DistributedDataParallel must not be its last owner: when that goes, its C++ waits for gloo's thread with
        # Python's lock in its hand, and the thread may be waiting for the lock. Python lets go of the lock before.
        _kept.append(dist.group.WORLD)
        dist.destroy_process_group()


def local_device() -> torch.device:
    """This rank's GPU: number LOCAL_RANK of this machine, the current one if that is not set; else the CPU.

    A machine that shows each rank only its own GPU, as SLURM can, has one GPU in every rank, cuda:0.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() == 1 or "LOCAL_RANK" not in os.environ:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def gpu_name(device: torch.device) -> str:
    """A name of the device that no other one has, on this machine or another. The CPU is named by its process."""
    if device.type != "cuda":
        return f"{device} of process {os.getpid()} on {socket.gethostname()}"
    return f"{torch.cuda.get_device_properties(device).uuid} on {socket.gethostname()}"


# --------------------------------------------------------------------------------------------------- the data


def rank_loader(
    dataset: Dataset, batch_size: int, *, shuffle: bool = True, seed: int = 0, **options: Any
) -> DataLoader:
    """A DataLoader with this rank's share of every batch of `batch_size` samples: DistributedSampler.

    Batch k of all ranks together holds the samples of batch k of a single rank, for the same seed, so that trainings on
    one GPU and on several can be compared. `options` are DataLoader's. ValueError for a batch that the ranks cannot
    share equally.
    """
    ranks = world_size()
    if batch_size % ranks or batch_size < 1:
        below = batch_size // ranks * ranks
        raise ValueError(
            f"A batch of {batch_size} cannot be shared equally by {ranks} ranks, with at least one sample each. Take "
            + (f"{below} or {below + ranks}." if below > 0 else f"{ranks}, or start fewer ranks.")
        )
    sampler = DistributedSampler(dataset, ranks, rank(), shuffle=shuffle, seed=seed)
    return DataLoader(dataset, batch_size // ranks, sampler=sampler, **options)


# ---------------------------------------------------------------------------------------------------- objects


def from_all(value: Any) -> list[Any]:
    """The values of all ranks, in order, on every rank."""
    values = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def sums_of_all(numbers: Sequence[float]) -> list[float]:
    """Each of the numbers added up over all ranks, in float64, on every rank: whole numbers are exact up to 2**53."""
    if world_size() == 1:
        return list(numbers)
    device = "cpu" if "cpu:" in dist.get_backend_config() else "cuda"  # NCCL sends nothing that is not on a GPU
    sums = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


def agree(values: dict[str, Any]) -> None:
    """ValueError, on all ranks, if any of these values is not the same on all of them."""
    everyone = from_all(values)
    differ = [name for name in values if any(other[name] != values[name] for other in everyone)]
    if differ:
        told = "; ".join(f"{name}: {', '.join(str(other[name]) for other in everyone)}" for name in differ)
        raise ValueError(f"The ranks must agree, and do not ({told}, in rank order). Each would wait for the others.")
