"""What can be wrong with a training before or after it ran, and sentences that say what to do about it.

Used by `helpers.train.loops`. PyTorch's own answer to most of these is silence: an optimizer of another model
trains nothing, `nn.DataParallel` on a machine without GPUs runs on the CPU, an empty loader does no step.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from helpers.train.loops.scores import EpochRecord

__all__ = [
    "adopt",
    "check_batch",
    "check_group",
    "check_loss",
    "check_options",
    "check_own_gpus",
    "check_sharded",
    "empty_advice",
    "existing_device",
    "existing_gpus",
    "nan_advice",
]

Device = torch.device | str | int


def existing_device(device: Device) -> torch.device:
    """The device with its number ("cuda" is the current GPU); ValueError if this machine has no such GPU."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ValueError(
            f"{device} does not exist: this machine has {count} GPUs, numbered from 0. "
            'Call use_gpus(...) before, or train on device="cpu"'
        )
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def existing_gpus(devices: Sequence[Device]) -> list[torch.device]:
    """The same for a list, which must hold GPUs only, each once."""
    gpus = [existing_device(device) for device in devices]
    if not gpus or any(gpu.type != "cuda" for gpu in gpus) or len(set(gpus)) < len(gpus):
        raise ValueError(f"DataParallel needs a list of different GPUs, as use_gpus(4) returns it, not {list(devices)}")
    return gpus


def check_batch(loader: Iterable[Any], gpus: int) -> None:
    """ValueError if the loader's full batch has fewer samples than there are GPUs."""
    batch_size = getattr(loader, "batch_size", None)
    if batch_size is not None and batch_size < gpus:
        raise ValueError(
            f"a batch of {batch_size} for {gpus} GPUs: DataParallel makes at most one piece per sample, so "
            f"{gpus - batch_size} GPUs would never get work. Use a batch of at least {gpus}, or fewer devices"
        )


def check_loss(loss: Any) -> None:
    """ValueError for a loss that is no mean: the loop weights the mean of a batch by its labels."""
    reduction = getattr(loss, "reduction", "mean")
    if reduction != "mean":
        raise ValueError(f'the loss must be a mean: build it with reduction="mean", not "{reduction}"')


def check_group() -> None:
    """RuntimeError where there is no process group."""
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group, so that this process is no rank among others: start this with launch(...) of "
            "helpers.parallel.launching, or with torchrun and connect() of helpers.parallel.ranks in its first lines"
        )


def check_own_gpus(names: Sequence[str]) -> None:
    """ValueError if two ranks train on one GPU; `names` are the ranks' devices."""
    for rank, name in enumerate(names):
        if name in names[:rank]:
            raise ValueError(
                f"ranks {names.index(name)} and {rank} train on the same GPU ({name}): give each its own, "
                'device=f"cuda:{local_rank}", or leave device out; with fewer GPUs, start fewer ranks'
            )


def check_sharded(loader: Iterable[Any], ranks: int) -> None:
    """ValueError if a DataLoader would give every one of several ranks the same samples."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or ranks == 1:
        return
    shares = getattr(loader.sampler, "num_replicas", None)
    if shares != ranks and loader.batch_size is not None:
        raise ValueError(
            f"the loader's {type(loader.sampler).__name__} is not for {ranks} ranks, and all would train on the same "
            "samples: make it with rank_loader(dataset, batch_size), or with sampler=DistributedSampler(dataset)"
        )


def check_options(schedule: str, accumulate: int, clip: float | None, checkpoint: Any, save_every: int | None) -> None:
    """ValueError for options of a trainer that make no sense."""
    if schedule not in ("epoch", "step"):
        raise ValueError(f'schedule must be "epoch" or "step", when the scheduler steps, not {schedule!r}')
    for name, value in (("accumulate", accumulate), ("save_every", 1 if save_every is None else save_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is the largest norm that the gradients may have, above 0, not {clip!r}")
    if save_every is not None and checkpoint is None:
        raise ValueError("save_every needs a file to save to: give checkpoint= as well")


def adopt(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Bring the optimizer's state to the device of its parameters; ValueError if they are not the model's.

    `Module.to` moves parameters in place, so the optimizer still holds them, but momenta from an earlier
    training stay where they were. `load_state_dict` puts every state where its parameter is.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in model.parameters()):
        raise ValueError(
            f"this {type(optimizer).__name__} holds none of the model's parameters and would train nothing: "
            "was the model built again after it? Build the optimizer from model.parameters() once more"
        )
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def empty_advice(loader: Iterable[Any]) -> str:
    """Why a loader gave no batch."""
    samples, batch_size = getattr(loader, "dataset", ()), getattr(loader, "batch_size", None)
    if getattr(loader, "drop_last", False) and batch_size and hasattr(samples, "__len__"):
        return (
            f"the loader gave no batch: drop_last=True leaves out what does not fill a batch of {batch_size},"
            f" and the data set has {len(samples)} samples. Take a smaller batch"
        )
    return "the loader gave no batch: its data set is empty, or it was a generator that is used up"


def nan_advice(record: EpochRecord) -> str:
    """What to try when an epoch's loss is nan or infinite."""
    return (
        f"the loss of epoch {record.epoch} on {record.device} is {record.loss}: the weights are useless now. "
        "No checkpoint was written. Build the model again, or resume() from the last one, and try: "
        f"(1) a learning rate ten times smaller than {record.learning_rate:g}; (2) nan in the "
        "data, or a batch without a single label that counts; (3) torch.autograd.set_detect_anomaly("
        "True), which names the operator; (4) if one GPU trains well and several do not, test the copies "
        "between each pair of GPUs"
    )
