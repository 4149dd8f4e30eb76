"""Memory readings in words: what a picture of them shows, for those who cannot see it."""

from collections.abc import Mapping, Sequence

from helpers.measure import Reading, Readings, format_bytes
from helpers.measure.readings import with_capacity

FIELDS = ("peak_allocated", "peak_reserved", "allocated", "reserved", "driver_used")


def describe(
    readings: Readings | Mapping[str, Readings], field: str = "peak_allocated", capacity: int | str | None = None
) -> str:
    """A picture in words: per situation the fullest GPU, the others, and how far they are apart, or what does not fit.

    `field` is the figure that counts; `capacity` ("12 GiB", or bytes): as if the cards had so much. Raises ValueError
    for a field that is not known, and for what `with_capacity` refuses.
    """
    if isinstance(readings, Mapping):
        return "\n".join(f"{name}: {describe(each, field, capacity)}" for name, each in readings.items())
    readings = with_capacity(readings, capacity)
    check_field(readings, field)
    if not readings:
        return "No readings yet."
    if any(reading.refused for reading in readings):
        return _stopped(readings, field)
    over = [reading for reading in readings if getattr(reading, field) > reading.edge(field)]
    said = _does_not_fit(over, readings, field) if over else _fits(readings, field)
    return said + (_cached(readings) if field == "peak_allocated" else "")


def check_field(readings: Sequence[Reading], field: str) -> None:
    """Raises ValueError where `field` is none of `FIELDS`, or one of the readings does not know it."""
    if field not in FIELDS:
        raise ValueError(f"There is no field {field!r}: give one of {', '.join(FIELDS)}.")
    unknown = [reading.index for reading in readings if getattr(reading, field) is None]
    if unknown:
        raise ValueError(
            f"GPU {unknown[0]} has no {word(field)}, since GPUtil does not know it: give field='peak_reserved' instead."
        )


def word(field: str) -> str:
    """A field's name as it stands in sentences and below axes."""
    return field.replace("_", " ")


def _fits(readings: Sequence[Reading], field: str) -> str:
    values = [getattr(reading, field) for reading in readings]
    full = values.index(max(values))
    of = f"{format_bytes(values[full])} ({word(field)}) of {format_bytes(readings[full].edge(field))}"
    others = values[:full] + values[full + 1 :]
    if not others:
        return f"GPU {readings[full].index} holds {of}."
    if {format_bytes(value) for value in others} == {format_bytes(values[full])}:
        return f"All {len(values)} GPUs hold {of} each."
    times = f", {values[full] / min(others):.1f} times the emptiest" if min(others) else ""
    return f"GPU {readings[full].index} holds {of}{times}; {_others(others, 'holds', 'hold')}."


def _others(values: Sequence[int], singular: str, plural: str, measure: str = "") -> str:
    low, high = format_bytes(min(values)), format_bytes(max(values))
    span = (low if low == high else f"{low} to {high}") + measure
    return (
        f"the other GPU {singular} {span}" if len(values) == 1 else f"the other {len(values)} GPUs {plural} {span} each"
    )


def _does_not_fit(over: Sequence[Reading], readings: Sequence[Reading], field: str) -> str:
    """GPUs that lack the same are named together."""
    parts, together = [], {}
    for reading in over:
        together.setdefault(_lack(reading, field), []).append(reading.index)
    for (need, lack, card), gpus in together.items():
        measure = "" if parts else f" ({word(field)})"
        whose, each = ("its", "") if len(gpus) == 1 else ("their", " each")
        parts.append(f"{_names(gpus, len(readings))} would need {need}{measure}{each}: {lack} over {whose} {card}")
    rest = [getattr(reading, field) for reading in readings if reading not in over]
    return "; ".join([*parts, *([_others(rest, "needs", "need")] if rest else [])]) + "."


def _lack(reading: Reading, field: str) -> tuple[str, str, str]:
    need, card = getattr(reading, field), reading.edge(field)
    return format_bytes(need), format_bytes(need - card), format_bytes(card)


def _names(gpus: Sequence[int], count: int) -> str:
    if len(gpus) == 1:
        return f"GPU {gpus[0]}"
    if len(gpus) == count:
        return f"All {count} GPUs"
    return f"GPUs {', '.join(map(str, gpus[:-1]))} and {gpus[-1]}"


def _cached(readings: Sequence[Reading]) -> str:
    """What is reserved beyond the card while what is allocated would fit."""
    tight = [each for each in readings if each.peak_allocated <= each.capacity < each.peak_reserved]
    if not tight:
        return ""
    most = format_bytes(max(each.peak_reserved - each.capacity for each in tight))
    who, up_to = _names([each.index for each in tight], 0), "" if len(tight) == 1 else "up to "
    return f" Peak reserved is {up_to}{most} over on {who}: that fits only if PyTorch can give cached memory back."


def _stopped(readings: Sequence[Reading], field: str) -> str:
    said = " ".join(f"{reading.refused}." for reading in readings if reading.refused)
    rest = [getattr(reading, field) for reading in readings if not reading.refused]
    return f"{said} The run stopped there" + (
        f"; until then {_others(rest, 'held', 'held', f' ({word(field)})')}." if rest else "."
    )
