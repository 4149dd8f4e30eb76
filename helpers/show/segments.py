"""Segments and blocks of PyTorch's allocator: what is used, what is free, and in how large pieces.

A segment is what PyTorch took from the driver in one go; tensors get blocks of it. A request is served only if some
free piece is large enough: many small gaps make "out of memory" with memory left. That is fragmentation.
"""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from helpers.measure import format_bytes, read_memory, unit_of
from helpers.measure.oom.blocks import KINDS, live_blocks, segments_of
from helpers.show.style import WIDTH, bar_style, legend_below, set_alt_text

MOST_ROWS = 24


def draw_segments(gpu=0, title: str | None = None) -> Axes:
    """Draw the segments of one GPU, a row each, the largest first: blocks in use by kind, gaps white.

    A segment that is expandable shows the part that has memory. Returns the axes. Raises what `read_memory` raises,
    and ValueError for a GPU without segments.
    """
    segments, kinds = _segments(gpu)
    if not segments:
        raise ValueError("PyTorch holds no memory on this GPU, so there is no segment to draw.")
    shown = sorted(segments, key=lambda segment: -segment["total_size"])[:MOST_ROWS]
    styles = {kind: bar_style(place, place) | {"linewidth": 0.6} for place, kind in enumerate(KINDS)}
    _, ax = plt.subplots(figsize=(WIDTH, 1.3 + 0.24 * len(shown)), layout="constrained")
    unit, unit_name = unit_of(shown[0]["total_size"])
    for row, segment in enumerate(shown):
        ax.barh(row, segment["total_size"] / unit, 0.8, edgecolor="0.3", linewidth=1, zorder=3, fill=False)
        for block in segment["blocks"]:
            if kind := kinds.get(block["address"]):
                start = (block["address"] - segment["address"]) / unit
                ax.barh(row, block["size"] / unit, 0.8, left=start, **styles[kind])
    ax.set_yticks(range(len(shown)), [f"segment {row}" for row in range(1, len(shown) + 1)], fontsize=8)
    ax.set_ylim(len(shown) - 0.4, -0.6)
    more = f" (the largest {len(shown)} of {len(segments)} segments)" if len(shown) < len(segments) else ""
    ax.set_xlabel(f"place in the segment, in {unit_name}{more}")
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(title or "", loc="left", fontsize=11)
    handles = [Patch(**style, label=kind) for kind, style in styles.items() if kind in kinds.values()]
    legend_below(ax.figure, [*handles, Patch(facecolor="white", edgecolor="0.3", label="free, kept by PyTorch")])
    set_alt_text(ax.figure, title, describe_segments(gpu))
    return ax


def describe_segments(gpu=0) -> str:
    """The picture in words: segments, what is used, what is free and in how large pieces. Errors: `read_memory`."""
    segments, kinds = _segments(gpu)
    blocks = [block for segment in segments for block in segment["blocks"]]
    used = [block["size"] for block in blocks if block["address"] in kinds]
    free = [block["size"] for block in blocks if block["address"] not in kinds]
    reserved = format_bytes(sum(segment["total_size"] for segment in segments))
    said = f"{_count(segments, 'segment')}, {reserved} reserved: {format_bytes(sum(used))} used in "
    said += _count(used, "block")
    if not free:
        return f"{said}, no gaps."
    return f"{said}, {format_bytes(sum(free))} free in {_count(free, 'piece')}, the largest {format_bytes(max(free))}."


def _segments(gpu) -> tuple[list[dict], dict[int, str]]:
    """The segments as PyTorch describes them, and the kinds of the blocks in use by their addresses."""
    index = read_memory(gpu)[0].index
    return segments_of(index), {block.address: block.kind for block in live_blocks(index)}


def _count(items: list, word: str) -> str:
    return f"{len(items):,} {word}" + ("" if len(items) == 1 else "s")
