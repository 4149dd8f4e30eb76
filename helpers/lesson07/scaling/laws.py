"""Speed-up, efficiency and Amdahl's law, from the times of the same or growing work on more and more GPUs."""

from __future__ import annotations

from collections.abc import Mapping


def _checked(seconds: Mapping[int, float]) -> dict[int, float]:
    found = {int(gpus): float(each) for gpus, each in sorted(seconds.items())}
    if not found or min(found) < 1 or min(found.values()) <= 0:
        raise ValueError(f"give {{GPUs: seconds}} with at least one GPU and times above 0, not {dict(seconds)!r}")
    return found


def speedup(seconds: Mapping[int, float]) -> dict[int, float]:
    """{GPUs: seconds} for the same work -> how many times as fast as on the fewest GPUs; that is 1 for one GPU."""
    found = _checked(seconds)
    first = next(iter(found))
    return {gpus: first * found[first] / each for gpus, each in found.items()}


def efficiency(seconds: Mapping[int, float], weak: bool = False) -> dict[int, float]:
    """Speed-up divided by the number of GPUs, 0 to 1. weak: the work grew with the GPUs, so that the same time is 1."""
    found = _checked(seconds)
    if weak:
        first = next(iter(found.values()))
        return {gpus: first / each for gpus, each in found.items()}
    return {gpus: each / gpus for gpus, each in speedup(found).items()}


def amdahl_seconds(one: float, serial: float, gpus: int) -> float:
    """Amdahl's law: the time on `gpus` GPUs if a share `serial` (0 to 1) of one GPU's time does not get shorter."""
    return one * (serial + (1 - serial) / gpus)


def amdahl(seconds: Mapping[int, float]) -> float:
    """The serial share, 0 to 1, of Amdahl's law that fits best: least squares of relative errors, one GPU's time kept.

    Raises ValueError without the time of one GPU, or with nothing else.
    """
    found = _checked(seconds)
    if 1 not in found or len(found) < 2:
        raise ValueError("Amdahl's law needs the time on one GPU and on at least one other number of GPUs")
    top = bottom = 0.0  # t / T1 = s + (1 - s) / n, so that (t / T1 - 1 / n) = s (1 - 1 / n)
    for gpus, each in found.items():
        relative = each / found[1]
        top += (relative - 1 / gpus) * (1 - 1 / gpus) / relative**2
        bottom += (1 - 1 / gpus) ** 2 / relative**2
    return min(1.0, max(0.0, top / bottom))
