"""What an exercise asks of the GPUs: how many, with or without values, how large. Else "Not yet", and what to run."""

import gc
from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from helpers.exercises.compare import as_number
from helpers.exercises.core import NotYet, require, show
from helpers.measure import GiB, MiB, format_bytes
from helpers.measure.batch_size import fits
from helpers.parallel import RankError, launch

AGAIN = "Run the cell with use_gpus above again."


def need_gpus(least: int, values: bool | None = None) -> list[torch.device]:
    """All GPUs, at least so many; with `values`, True or False, only those that keep values, or those that do not."""
    count = torch.cuda.device_count()
    require(count >= least, f"The exercise needs {least} GPUs, and the number of GPUs is {count}.", AGAIN)
    if values is not None:
        # The value of a tensor without values is nan, even that of a zero.
        keeps = torch.zeros((), device="cuda:0").item() == 0
        require(keeps or not values, "These GPUs keep no values, and the exercise needs them.", AGAIN)
        require(values or not keeps, "These GPUs compute values. A job of this size needs shapes_only=True.", AGAIN)
    return [torch.device("cuda", index) for index in range(count)]


class Copies(TorchFunctionMode):
    """`seen` has the pair (from, to) of every copy between two devices in the block, by `.to`, `.cpu` or `.cuda`."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[torch.device, torch.device]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") in ("to", "cpu", "cuda") and isinstance(result, Tensor):
            start = args[0].device
            if start != result.device:
                self.seen.append((start, result.device))
        return result


def check_largest(answer: object, step: int, most: int, unit: str, train: Callable) -> None:
    """`answer` must be the largest multiple of `step` that fits the article's four GPUs of 12 GB.

    `train(gpus, count)` runs the job with so many and may run out of memory. More than `most` are not tried.
    """
    value = as_number(answer)
    gpus = need_gpus(4, values=False)[:4]
    capacity = torch.cuda.get_device_properties(0).total_memory
    asked = f"These GPUs have {capacity / GiB:.2f} GiB each, and the exercise asks for GPUs of 12 GB."
    require(11 * GiB < capacity < 13 * GiB, asked, AGAIN)
    shown = f"{value:,.10g} {unit}"
    require(value >= step and value % step == 0, f"{shown} is not a multiple of {step:,}.")
    require(value <= most, f"No GPU of 12 GB holds {shown}.")
    gc.collect()  # what ran out of memory may have left its net behind, in cycles
    held = max(torch.cuda.memory_allocated(gpu) for gpu in gpus)
    room = f"Your cells still hold {format_bytes(held)} on a GPU, so that less fits than on empty ones. {AGAIN}"
    require(held < 64 * MiB, room, "Then search again, and keep no model from one try to the next.")
    require(not _fits(train, gpus, int(value) + step), f"{shown} are not the most: {step:,} more still fit.")
    require(_fits(train, gpus, int(value)), f"With {shown}, a GPU runs out of memory.")


def _fits(train: Callable, gpus: list[torch.device], count: int) -> bool:
    gc.collect()
    torch.cuda.empty_cache()
    return fits(train, gpus, count)


def in_ranks(work: Callable, answer: object, ranks: int, timeout: float) -> list:
    """What `work(rank, answer)` returned in each rank."""
    try:
        return launch(work, answer, ranks=ranks, show=False, timeout=timeout)
    except (RankError, TimeoutError) as error:
        if isinstance(error, RankError) and "had returned by then" not in str(error):
            raise
        why = "Every rank must take part in every collective, even a rank without samples."
        raise NotYet("Some ranks waited for a rank that had returned or did something else.", why) from error


def plain(value: object) -> object:
    """What can go from a rank to its parent: a number, what marks a stub, and of all else its words."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return value if value is None or value is ... or type(value) in (int, float) else show(value)
