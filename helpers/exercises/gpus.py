"""What an exercise asks of the GPUs: how many, with or without values, how large. Else "not yet", and what to run."""

import torch

from helpers.exercises.core import require
from helpers.measure import GiB


def with_values(least: int, fewer: str, without: str) -> list[torch.device]:
    """All GPUs: `least` of them at least, or "not yet, because `fewer`"; none that keeps no values (`without`)."""
    found = _all(least, fewer)
    require(keeps_values("cuda:0"), "these GPUs keep no values", without)
    return found


def four_without_values() -> list[torch.device]:
    """The first four GPUs; "not yet" where there are fewer, or where they would really compute the job."""
    found = _all(4, "four are asked for: run the cell above again")
    why = "a job of this size needs shapes_only=True: run the cell above again"
    require(not keeps_values("cuda:0"), "these GPUs keep values", why)
    return found[:4]


def four_cards_of_12_gb() -> list[torch.device]:
    """`four_without_values`; "not yet" where GPU 0 is larger or smaller than the article's cards."""
    found = four_without_values()
    capacity = torch.cuda.get_device_properties(0).total_memory
    what = f"these GPUs have {capacity / GiB:.2f} GiB each"
    require(11 * GiB < capacity < 13 * GiB, what, "cards of 12 GB are asked for: run the cell above again")
    return found


def _all(least: int, fewer: str) -> list[torch.device]:
    count = torch.cuda.device_count()
    require(count >= least, f"there are {count} GPUs", fewer)
    return [torch.device("cuda", index) for index in range(count)]


def keeps_values(gpu: torch.device | str) -> bool:
    """False for a GPU with shapes only."""
    # The value of a tensor without values is nan, even that of a zero.
    return torch.zeros((), device=gpu).item() == 0
