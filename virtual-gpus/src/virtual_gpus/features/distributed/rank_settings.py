"""What `rank=` and `world_size=` may be, see `one_rank`."""

from __future__ import annotations

from virtual_gpus.settings import Settings


def check_settings(settings: Settings) -> None:
    """See `features`."""
    if settings.rank is None and settings.world_size is None:
        return
    rank, world_size = _integer("rank", settings.rank), _integer("world_size", settings.world_size)
    count, hosts = settings.count, settings.hosts
    if world_size < 1 or world_size % count:
        raise ValueError(
            f"Cannot fill hosts of {count} GPUs with {world_size} ranks, one on each GPU. "
            f"Choose a world_size that is a multiple of {count}, or another number of GPUs per host."
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"There is no rank {rank}. The ranks of {world_size} are 0 to {world_size - 1}.")
    if hosts != 1:
        raise ValueError(
            f"As one rank of {world_size}, {count} is the number of GPUs of each host, so there are "
            f"{world_size // count} hosts. Leave hosts={hosts!r} out."
        )


def _integer(name: str, value: int | None) -> int:
    """An argument of one rank of many, of which both must be there."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"One rank of many needs both rank and world_size as integers, but {name} is {value!r}.")
    return value
