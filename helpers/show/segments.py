"""Segments and blocks of PyTorch's allocator, drawn: what is used, what is free, and in how large pieces.

A segment is what PyTorch took from the driver in one go; tensors get blocks of it. A request is served only if some
free piece is large enough: many small holes make "out of memory" with memory left. That is fragmentation.
"""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from helpers.measure import format_bytes, read_memory, unit_of
from helpers.measure.oom.blocks import KINDS, live_blocks, segments_of
from helpers.show.plots import COLOURS, HATCHES, WIDTH
from helpers.show.plots.alt_text import set_alt_text

MOST_ROWS = 24
Piece = tuple[int, int, str]  # offset in the segment and size in bytes; a kind, or "" for free


def draw_segments(gpu=0, ax: Axes | None = None, title: str | None = None) -> Axes:
    """Draw the segments of one GPU, a row each, the largest first: blocks in use by kind, holes white.

    A segment that is expandable shows the part that has memory. Returns the axes. Raises what `read_memory` raises,
    and ValueError for a GPU without segments.
    """
    rows = _rows(gpu)
    if not rows:
        raise ValueError("PyTorch holds no memory on this GPU, so there is no segment to draw.")
    shown = sorted(rows, key=lambda row: -row[0])[:MOST_ROWS]
    if ax is None:
        _, ax = plt.subplots(figsize=(WIDTH, 1.3 + 0.24 * len(shown)), layout="constrained")
    unit, name = unit_of(shown[0][0])
    for place, (size, pieces) in enumerate(shown):
        ax.barh(place, size / unit, 0.8, facecolor="white", edgecolor="0.3", linewidth=1, zorder=3, fill=False)
        for start, length, kind in pieces:
            if kind:
                ax.barh(place, length / unit, 0.8, left=start / unit, **_look(kind))
    _finish(ax, shown, rows, name, title)
    set_alt_text(ax, "\n".join(filter(None, (title, describe_segments(gpu)))))
    return ax


def describe_segments(gpu=0) -> str:
    """The picture in words: segments, what is used, what is free and in how large pieces. Errors: `draw_segments`."""
    rows = _rows(gpu)
    pieces = [piece for _, pieces in rows for piece in pieces]
    used, free = ([size for _, size, kind in pieces if bool(kind) is wanted] for wanted in (True, False))
    said = f"{_count(len(rows), 'segment')}, {format_bytes(sum(size for size, _ in rows))} reserved: "
    said += f"{format_bytes(sum(used))} used in {_count(len(used), 'block')}"
    if not free:
        return said + ", no holes."
    largest = format_bytes(max(free))
    return said + f", {format_bytes(sum(free))} free in {_count(len(free), 'piece')}, the largest {largest}."


def _rows(gpu) -> list[tuple[int, list[Piece]]]:
    """(size, pieces) of each segment, in the order of addresses."""
    index = read_memory(gpu)[0].index
    kinds = {block.address: block.kind for block in live_blocks(index)}
    rows = []
    for segment in segments_of(index):
        start = segment["address"]
        pieces = [(b["address"] - start, b["size"], kinds.get(b["address"], "")) for b in segment["blocks"]]
        rows.append((segment["total_size"], pieces))
    return rows


def _look(kind: str) -> dict:
    place = KINDS.index(kind) if kind in KINDS else len(KINDS)
    return {"facecolor": COLOURS[place % 7], "hatch": HATCHES[place % 7], "edgecolor": "white", "linewidth": 0.6}


def _finish(ax: Axes, shown: Sequence, rows: Sequence, name: str, title: str | None) -> None:
    ax.set_yticks(range(len(shown)), [f"segment {place}" for place in range(1, len(shown) + 1)], fontsize=8)
    ax.set_ylim(len(shown) - 0.4, -0.6)
    more = f" (the largest {len(shown)} of {len(rows)} segments)" if len(shown) < len(rows) else ""
    ax.set_xlabel(f"place in the segment, in {name}{more}")
    ax.spines[["top", "right"]].set_visible(False)
    found = {kind for _, pieces in shown for _, _, kind in pieces if kind}
    handles = [Patch(**_look(kind), label=kind) for kind in KINDS if kind in found]
    handles.append(Patch(facecolor="white", edgecolor="0.3", label="free, kept by PyTorch"))
    ax.figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    if title:
        ax.set_title(title, loc="left", fontsize=11)


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")
