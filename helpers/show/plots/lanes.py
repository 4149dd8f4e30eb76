"""One reading as the bars of one lane: what is held and, where memory ran out, what was asked for on top."""

from helpers.measure import Reading, format_bytes
from helpers.show.plots.bars import Bar
from helpers.show.plots.palette import ASKED, TAKEN


def lane(reading: Reading, field: str, **look) -> list[Bar]:
    """The figure `field` of a reading as a bar; `look`: y, height, style, name and marker of `Bar`.

    Where memory ran out: three bars, one after the other, of what was held then, what was taken otherwise (PyTorch's
    cache, CUDA's context, other programs), and what was asked for.
    """
    value, edge = getattr(reading, field), reading.edge(field)
    if reading.refused:
        return [held(reading, field, text="", **look), *_asked(reading, field, look["y"], look["height"])]
    over = f": {format_bytes(value - edge)} over" if value > edge else ""
    return [Bar(value=value, capacity=edge, text=format_bytes(value) + over, **look)]


def held(reading: Reading, field: str, text: str | None = None, **look) -> Bar:
    """What `field` was as memory ran out, not at its peak; `text`: the size in words."""
    value, _, limit = _moment(reading, field)
    text = format_bytes(value) if text is None else text
    return Bar(value=value, capacity=reading.edge(field), text=text, limit=limit, **look)


def _asked(reading: Reading, field: str, y: float, height: float) -> list[Bar]:
    (value, taken, limit), refused, card = _moment(reading, field), reading.refused, reading.edge(field)
    over = f": {format_bytes(refused.over)} over" if refused.over else " refused"
    text = f"{format_bytes(value)} + {format_bytes(refused.requested)}{over}"
    asked = Bar(y, height, taken + refused.requested, card, text, ASKED, "asked for", start=taken, limit=limit)
    between = Bar(y, height, taken, card, "", TAKEN, "taken otherwise", start=value)
    return [between, asked] if taken > value else [asked]


def _moment(reading: Reading, field: str) -> tuple[int, int, int | None]:
    """As memory ran out: what `field` was, where what was asked for would have begun, the edge if not the card's."""
    refused = reading.refused
    on_card = reading.capacity - refused.free
    known = {"allocated": refused.allocated, "reserved": refused.reserved, "driver_used": on_card}
    value = known[field.removeprefix("peak_")]
    if not refused.limited:
        return value, max(value, on_card), None
    taken = max(value, refused.reserved)
    return value, taken, taken + refused.room
