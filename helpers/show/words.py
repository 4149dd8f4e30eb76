"""Describes memory readings as text, for readers who cannot see the picture."""

from collections.abc import Mapping

from helpers.measure import Reading, Readings, format_bytes


def describe(readings: Readings | Mapping[str, Readings]) -> str:
    """Describe each GPU's peaks of allocated and reserved memory and what the driver counts, equal GPUs in one line.

    readings: of one situation, or of several by name. A GPU that ran out of memory has the request that failed.
    """
    if isinstance(readings, Mapping):
        return "\n".join(f"{name}: {line}" for name, each in readings.items() for line in describe(each).splitlines())
    lines: dict[str, list[str]] = {}
    for reading in readings:
        lines.setdefault(_figures(reading), []).append(str(reading.index))
    return "\n".join(f"{_names(gpus)} {figures}." for figures, gpus in lines.items()) or "No readings yet."


def _figures(reading: Reading) -> str:
    if reading.refused:
        return str(reading.refused).removeprefix(f"GPU {reading.index} ")
    capacity = format_bytes(reading.capacity)
    peaks = f"{format_bytes(reading.peak_allocated)} allocated and {format_bytes(reading.peak_reserved)} reserved"
    if reading.peak_allocated > reading.capacity:
        return f"would need {peaks}, {format_bytes(reading.peak_allocated - reading.capacity)} more than its {capacity}"
    if reading.driver_used is None:
        return f"peaked at {peaks} of {capacity}"
    return f"peaked at {peaks}; the driver counts {format_bytes(reading.driver_used)} of {capacity}"


def _names(gpus: list[str]) -> str:
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {', '.join(gpus[:-1])} and {gpus[-1]} each"
