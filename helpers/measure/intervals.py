"""Intervals of time: those that overlap or nearly touch as one, and how long something lasted in all. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["merged", "seconds_covered"]
_ROUNDING = 1e-12  # seconds between an end and the next beginning that are the same moment


def merged(intervals: Iterable[tuple[float, float]], gap: float = 0.0) -> list[tuple[float, float]]:
    """(start, end) pairs that are within `gap` seconds of each other as one, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1] + gap + _ROUNDING:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def seconds_covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of the intervals; where two overlap they count once."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
