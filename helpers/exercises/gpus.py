"""What an exercise asks of the GPUs: how many, with or without values, how large. Else "Not yet", and what to run."""

import gc
from collections.abc import Callable

import torch

from helpers.exercises.compare import as_number
from helpers.exercises.core import require
from helpers.measure import GiB

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


def check_largest(answer: object, step: int, most: int, unit: str, make_fits: Callable) -> None:
    """`answer` must be the largest multiple of `step` that fits the article's four GPUs of 12 GB.

    `make_fits(gpus)` gives a function that runs the job with so many and may run out of memory. More than `most` are
    not tried.
    """
    value = as_number(answer)
    gpus = need_gpus(4, values=False)[:4]
    capacity = torch.cuda.get_device_properties(0).total_memory
    asked = f"These GPUs have {capacity / GiB:.2f} GiB each, and the exercise asks for GPUs of 12 GB."
    require(11 * GiB < capacity < 13 * GiB, asked, AGAIN)
    shown = f"{value:,.10g} {unit}"
    require(value >= step and value % step == 0, f"{shown} is not a multiple of {step:,}.")
    require(value <= most, f"No GPU of 12 GB holds {shown}.")
    run = make_fits(gpus)
    require(_fits(run, int(value)), f"With {shown}, a GPU runs out of memory.")
    require(not _fits(run, int(value) + step), f"{shown} fit, and {step:,} more still fit.")


def _fits(run: Callable[[int], object], count: int) -> bool:
    gc.collect()  # what ran out of memory before may have left its net behind, in cycles
    torch.cuda.empty_cache()
    try:
        run(count)
    except torch.OutOfMemoryError:
        return False
    return True
