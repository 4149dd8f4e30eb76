"""The live panel's pictures: memory per GPU as it is now, and the peaks that remain in the notebook afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from helpers.measure import MiB, Reading, Readings, format_bytes
from helpers.show.plots.palette import style
from helpers.show.plots.words import describe
from helpers.show.widgets.scene import Look, Scene

WIDTH = 700  # pixels: a notebook's output
LEFT, BARS, HISTORY, TOP, ROW = 62, 430, 160, 52, 46  # where bars begin, widths of bars and curves, heights
LONGEST = 96  # characters of a title that fit
CARD = Look("#f2f2f2", edge="#b0b0b0")
NOW, RESERVED = Look(style(0)["color"]), Look(style(5, 1)["color"], style(5, 1)["hatch"])
PEAK = "#D55E00"


def now(readings: Readings, history: Mapping[int, Sequence[int]], line: str = "") -> Scene:
    """Allocated and reserved memory, the peak as a mark, and a curve of what was allocated, per GPU.

    `history`: GPU -> bytes allocated, oldest first. `line`: what the training said last.
    """
    scene = Scene(WIDTH, TOP + ROW * len(readings) + 6, words=describe(readings, "allocated"))
    _title(scene, line or "Memory now")
    _legend(scene, (("allocated now", NOW), ("reserved", RESERVED)), "peak allocated")
    scene.text(WIDTH - 10, 40, "allocated until now", size=11, anchor="end")
    pixels = _scale(scene, readings, BARS)
    highest = max(reading.peak_allocated for reading in readings) or 1
    for row, reading in enumerate(readings):
        y = TOP + ROW * row
        values = (f"{format_bytes(reading.allocated)}, peak {format_bytes(reading.peak_allocated)}, "
                  f"reserved {format_bytes(reading.reserved)} of {format_bytes(reading.capacity)}")  # fmt: skip
        _row(scene, y, reading, values + _driver(reading))
        scene.box(LEFT, y + 20, reading.reserved * pixels, 16, RESERVED)
        scene.box(LEFT, y + 20, reading.allocated * pixels, 16, NOW)
        _mark(scene, LEFT + reading.peak_allocated * pixels, y)
        _curve(scene, y, history.get(reading.index, ()), highest)
    return scene


def peaks(readings: Readings) -> Scene:
    """What remains: the peaks of the run. No figure of it depends on when the panel looked."""
    scene = Scene(WIDTH, TOP + ROW * len(readings) + 6, words=said(readings))
    _title(scene, "Peaks of this run")
    _legend(scene, (("peak allocated", NOW), ("peak reserved", RESERVED)))
    pixels = _scale(scene, readings, BARS + HISTORY)
    for row, reading in enumerate(readings):
        y = TOP + ROW * row
        values = (f"peak {format_bytes(reading.peak_allocated)} allocated, {format_bytes(reading.peak_reserved)} "
                  f"reserved, of {format_bytes(reading.capacity)}")  # fmt: skip
        _row(scene, y, reading, values)
        scene.box(LEFT, y + 20, reading.peak_reserved * pixels, 16, RESERVED)
        scene.box(LEFT, y + 20, reading.peak_allocated * pixels, 16, NOW)
    return scene


def said(readings: Readings) -> str:
    """The peaks in words."""
    return describe(readings)


def _length(readings: Readings) -> float:
    """Bytes that a bar's full width stands for: the capacity, or where all are small beside it a power of two.

    So the bars keep their scale for long while memory grows.
    """
    most = max(max(reading.peak_reserved, reading.reserved) for reading in readings)
    capacity = max(reading.capacity for reading in readings)
    return capacity if 8 * most >= capacity else max(1 << (most - 1).bit_length(), MiB)


def _scale(scene: Scene, readings: Readings, width: float) -> float:
    """Pixels per byte, where the longest frame has `width` pixels; what a frame stands for is said above them."""
    length = _length(readings)
    whole = "the card" if length == max(reading.capacity for reading in readings) else format_bytes(length)
    scene.text(LEFT + width, 40, f"frame: {whole}", size=11, anchor="end")
    for row, reading in enumerate(readings):
        scene.box(LEFT, TOP + ROW * row + 18, min(reading.capacity / length, 1) * width, 20, CARD)
    return width / length


def _title(scene: Scene, text: str) -> None:
    """`text`, smaller where it is long, and cut off where it would still leave the picture."""
    short = len(text) < 50
    text = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    scene.text(8, 18, text, size=13 if short else 12, bold=short)


def _legend(scene: Scene, looks: Sequence[tuple[str, Look]], mark: str = "") -> None:
    x = float(LEFT)
    for name, look in looks:
        scene.box(x, 30, 18, 12, look)
        scene.text(x + 23, 40, name, size=11)
        x += 40 + 6.4 * len(name)
    if mark:
        scene.line((x + 3, x + 3), (28, 44), colour=PEAK, width=3)
        scene.text(x + 10, 40, mark, size=11)


def _row(scene: Scene, y: float, reading: Reading, values: str) -> None:
    scene.text(LEFT - 8, y + 33, f"GPU {reading.index}", anchor="end")
    scene.text(LEFT, y + 14, values, size=11)


def _driver(reading: Reading) -> str:
    if reading.driver_used is None:
        return ""
    return f"; driver {format_bytes(reading.driver_used)}"


def _mark(scene: Scene, x: float, y: float) -> None:
    scene.line((x, x), (y + 17, y + 39), colour=PEAK, width=3)


def _curve(scene: Scene, y: float, values: Sequence[int], highest: int) -> None:
    left, bottom, height = WIDTH - 10 - HISTORY, y + 38, 30
    scene.line((left, left + HISTORY), (bottom, bottom), colour="#b0b0b0")
    if len(values) > 1:
        xs = [left + HISTORY * place / (len(values) - 1) for place in range(len(values))]
        scene.line(xs, [bottom - height * value / highest for value in values], colour=NOW.colour, width=1.5)
