"""What an exercise asks of the GPUs, and of a plan for them. Else "Not yet", and what to run or to change."""

import gc
from collections.abc import Callable, Iterable, Mapping
from numbers import Number

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from helpers.measure import GiB, MiB, format_bytes
from helpers.parallel import RankError, launch
from notebooks.checks.core import NotYet, require, show

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


def need_plan(answer: object, example: Mapping[str, object], choices: Iterable[str]) -> None:
    """`answer` must be a dict with the keys of `example` and no others than `choices`. No process group may be open."""
    require(isinstance(answer, Mapping), f"{show(answer)} is not a dict. Give one like {example}.")
    unknown = [show(key) for key in answer if key not in choices]
    require(not unknown, f"There is no choice {', '.join(unknown)}.", f"The choices are {', '.join(choices)}.")
    missing = [key for key in example if key not in answer]
    require(not missing, f"The plan does not say {', '.join(missing)}.")
    left = dist.is_initialized()
    require(not left, "A process group of an earlier cell is still open. Run `dist.destroy_process_group()` first.")


def need_empty_rtx_4090s(count: int) -> list[torch.device]:
    """So many GPUs of 24 GB that keep no values, and on which earlier cells hold almost nothing."""
    gpus = need_gpus(count, values=False)[:count]
    capacity = torch.cuda.get_device_properties(0).total_memory
    asked = f"The GPUs have {capacity / GiB:.2f} GiB each, and the exercise asks for RTX 4090 with 24 GB."
    require(23 * GiB < capacity < 25 * GiB, asked, AGAIN)
    gc.collect()  # what ran out of memory may have left its net behind, in cycles
    torch.cuda.empty_cache()
    held = max(torch.cuda.memory_allocated(gpu) for gpu in gpus)
    room = f"Your cells still hold {format_bytes(held)} on a GPU, so that less fits than on empty ones. {AGAIN}"
    require(held < 64 * MiB, room, "Keep no model from one try to the next.")
    return gpus


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


def in_ranks(work: Callable, answer: object, ranks: int, timeout: float, who: str = "Every rank") -> list:
    """What `work(rank, answer)` returned in each rank."""
    try:
        return launch(work, answer, ranks=ranks, show=False, timeout=timeout)
    except (RankError, TimeoutError) as error:
        if isinstance(error, RankError) and "had returned by then" not in str(error):
            raise
        why = f"{who} must take part in every collective."
        raise NotYet("Some ranks waited for a rank that had returned or did something else.", why) from error


def plain(value: object) -> object:
    """What can go from a rank to its parent: a number, what marks a stub, and of all else its words."""
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.shape.count(1) == len(value.shape):
        value = value.item()
    return value if value is None or value is ... or isinstance(value, Number) else show(value)
