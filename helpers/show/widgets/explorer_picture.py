"""The explorer's picture: what a step takes on every GPU, what is over the edge, and what is held at the peak.

A row per GPU: the peak that PyTorch allocates against the room that the card has for it, beyond the edge in another
colour and hatch; below it a narrow strip of what is held at that moment, kind by kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from helpers.measure import MiB, format_bytes, unit_of
from helpers.show.plots.palette import OVER, styles
from helpers.show.widgets.bert_fits import Verdict
from helpers.show.widgets.bert_memory import KINDS, GPUMemory, Job
from helpers.show.widgets.explorer_words import headline, words
from helpers.show.widgets.scene import Look, Scene

WIDTH = 700  # pixels: a notebook's output
LEFT, RIGHT, ROW, TOP, BOTTOM = 62, 18, 46, 66, 44  # beside the bars; a GPU's row; above and below the rows
ROOM, PEAK = Look("#f2f2f2", edge="#b0b0b0"), Look("#404040")
BEYOND = Look(OVER["color"], OVER["hatch"])
PIECES = Look("#f6cfb5", OVER["hatch"])  # free, and of no use
LOOKS = {kind: Look(style["color"], style["hatch"])
         for kind, style in zip(KINDS, styles(len(KINDS), with_alarm=True), strict=True)}  # fmt: skip


def draw(job: Job, gpus: Sequence[GPUMemory], verdicts: Sequence[Verdict]) -> Scene:
    """The picture of `step_memory(job)` and `judge(job, gpus)`."""
    scene = Scene(WIDTH, TOP + ROW * len(gpus) + BOTTOM, words(job, gpus, verdicts))
    scene.text(8, 20, headline(job, verdicts), size=14, bold=True)
    _legend(scene)
    room, length = job.card.room, _length(gpus, job.card.room, Verdict.PIECES in verdicts)
    pixels = (WIDTH - LEFT - RIGHT) / length
    _axis(scene, length, pixels, len(gpus), _key(verdicts, room <= length))
    for row, (gpu, verdict) in enumerate(zip(gpus, verdicts, strict=True)):
        y = TOP + ROW * row
        scene.text(LEFT - 8, y + 20, f"GPU {gpu.index}", anchor="end")
        scene.box(LEFT, y + 3, min(room, length) * pixels, ROW - 6, ROOM)
        _bars(scene, y, gpu, verdict, room, pixels)
    if room <= length:
        edge = LEFT + room * pixels
        scene.line((edge, edge), (TOP - 4, TOP + ROW * len(gpus)), width=1.6, dotted=True)
    return scene


def _length(gpus: Sequence[GPUMemory], room: int, to_the_edge: bool) -> float:
    """Bytes that the axis reaches to: the room and all bars with their texts; less of a room that is mostly empty."""
    top = room if to_the_edge else max(gpu.peak for gpu in gpus)
    if 8 * top < room:
        return max(2 * top, MiB)
    return max(1.04 * room, 1.4 * top if top > 0.6 * room else 0)


def _legend(scene: Scene) -> None:
    scene.text(8, 44, "held at the peak:", size=11)
    x = 114.0
    for kind, look in LOOKS.items():
        scene.box(x, 34, 18, 12, look)
        scene.text(x + 23, 44, kind, size=11)
        x += 35 + 6.3 * len(kind)


def _axis(scene: Scene, length: float, pixels: float, rows: int, key: str) -> None:
    """Grid and numbers, at round steps of GiB or MiB, and `key`: what the colours mean."""
    bottom = TOP + ROW * rows
    unit, name = unit_of(length)
    step = round_step(length / unit)
    for number in range(int(length / unit / step) + 1):
        x = LEFT + number * step * unit * pixels
        scene.line((x, x), (TOP, bottom), colour="#e0e0e0")
        scene.text(x, bottom + 15, f"{number * step:,g}", size=11, anchor="middle")
    scene.text((LEFT + WIDTH - RIGHT) / 2, bottom + 34, f"memory in {name}. {key}", size=11, anchor="middle")


def _key(verdicts: Sequence[Verdict], whole: bool) -> str:
    """What is what, of what is there: in words that need no name of a colour."""
    if not whole:
        return "Dark: peak allocated; the card has far more room than shown"
    over = "; past the dots: over" if Verdict.OVER in verdicts else ""
    pieces = "; pale: in pieces" if Verdict.PIECES in verdicts else ""
    return f"Dark: peak allocated; box: the room for it{over}{pieces}"


def round_step(length: float) -> float:
    """1, 2 or 5 times a power of ten, so that an axis of `length` has at most nine numbers."""
    power = 10.0 ** math.floor(math.log10(length / 8))
    return next(factor * power for factor in (1, 2, 5, 10) if length <= 8.0001 * factor * power)


def _bars(scene: Scene, y: float, gpu: GPUMemory, verdict: Verdict, room: int, pixels: float) -> None:
    peak, edge = LEFT + gpu.peak * pixels, LEFT + room * pixels
    if verdict is Verdict.PIECES:
        scene.box(peak, y + 6, edge - peak, 20, PIECES)
    scene.box(LEFT, y + 6, min(peak, edge) - LEFT, 20, PEAK)
    scene.box(edge, y + 6, peak - edge, 20, BEYOND)
    start = float(LEFT)
    for kind, look in LOOKS.items():
        scene.box(start, y + 27, gpu.at_peak[kind] * pixels, 13, look)
        start += gpu.at_peak[kind] * pixels
    said = format_bytes(gpu.peak) if gpu.peak else "nothing to do"
    said += f": {format_bytes(gpu.peak - room)} over" if verdict is Verdict.OVER else ""
    said += ": fragmented" if verdict is Verdict.PIECES else ""
    end = edge if verdict is Verdict.PIECES else peak
    scene.text(end + 6, y + 20, said, bold=verdict is not Verdict.FITS, halo=True)
