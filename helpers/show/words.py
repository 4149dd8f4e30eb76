"""Describes memory readings as text, for readers who cannot see the picture."""

from collections.abc import Mapping, Sequence

from helpers.measure import Reading, Readings, format_bytes

FIELDS = ("peak_allocated", "peak_reserved", "allocated", "reserved", "driver_used")


def describe(readings: Readings | Mapping[str, Readings], field: str = "peak_allocated") -> str:
    """Describe each situation: the fullest GPU, the others, the ratio between them, and what does not fit.

    `field` is the figure to describe, as in `compare_bars`. Raises ValueError for an unknown field.
    """
    if isinstance(readings, Mapping):
        return "\n".join(f"{name}: {describe(each, field)}" for name, each in readings.items())
    check_field(readings, field)
    if not readings:
        return "No readings yet."
    if any(reading.refused for reading in readings):
        return _stopped(readings, field)
    full = max(readings, key=lambda reading: getattr(reading, field))
    most, edge = getattr(full, field), full.edge(field)
    size, over = f"{format_bytes(most)} ({word(field)})", format_bytes(most - edge)
    held = f"{format_bytes(most)} {_kind(field)}"
    holds, hold = ("peaked at", "peaked at") if field.startswith("peak_") else ("holds", "hold")
    others = [getattr(reading, field) for reading in readings if reading is not full]
    if others and {format_bytes(value) for value in others} == {format_bytes(most)}:
        if most > edge:
            return f"All {len(readings)} GPUs would need {size} each: {over} over their {format_bytes(edge)}."
        return f"All {len(readings)} GPUs {hold} {held} of {format_bytes(edge)} each."
    if most > edge:
        rest = f"; {_others(others, 'needs', 'need')}" if others else ""
        return f"GPU {full.index} would need {size}: {over} over its {format_bytes(edge)}{rest}."
    times = f"{most / min(others):.1f}" if others and min(others) else "1.0"
    more = f", {times} times as much as the emptiest" if times != "1.0" else ""
    rest = f"; {_others(others, holds, hold)}" if others else ""
    return f"GPU {full.index} {holds} {held} of {format_bytes(edge)}{more}{rest}."


def check_field(readings: Sequence[Reading], field: str) -> None:
    """Raise ValueError if `field` is not in `FIELDS`, or if one of the readings has no value for it."""
    if field not in FIELDS:
        raise ValueError(f"There is no field {field!r}. Choose one of {', '.join(FIELDS)}.")
    unknown = [reading.index for reading in readings if getattr(reading, field) is None]
    if unknown:
        raise ValueError(
            f"GPU {unknown[0]} has no {word(field)}, because GPUtil has no figure. Pass field='peak_reserved' instead."
        )


def word(field: str) -> str:
    """Return a field's name for sentences and axis labels."""
    return field.replace("_", " ")


def _others(values: Sequence[int], singular: str, plural: str, measure: str = "") -> str:
    low, high = format_bytes(min(values)), format_bytes(max(values))
    span = (low if low == high else f"{low} to {high}") + measure
    if len(values) == 1:
        return f"the other GPU {singular} {span}"
    return f"the other {len(values)} GPUs {plural} {span} each"


def _stopped(readings: Sequence[Reading], field: str) -> str:
    said = " ".join(f"{reading.refused}." for reading in readings if reading.refused) + " The run stopped there"
    rest = [getattr(reading, field) for reading in readings if not reading.refused]
    if not rest:
        return f"{said}."
    held = "peaked at" if field.startswith("peak_") else "held"
    return f"{said}; until then {_others(rest, held, held, f' {_kind(field)}')}."


def _kind(field: str) -> str:
    """Return the kind of memory without "peak", for sentences whose verb already says it."""
    return f"({word(field.removeprefix('peak_'))})"
