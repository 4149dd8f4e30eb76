"""Draws the segments and blocks of PyTorch's allocator, which show how fragmented the memory of a GPU is.

PyTorch takes a segment from the driver in one request and divides it into blocks for tensors. A tensor needs a free
piece that is large enough. With many small gaps, memory can run out although enough of it is free (fragmentation).
"""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from helpers.measure import format_bytes, read_memory, unit_of
from helpers.measure.oom.blocks import KINDS, in_use, live_blocks, segments_of
from helpers.show.style import WIDTH, bar_style, legend_below, set_alt_text

MOST_ROWS = 24


def draw_segments(gpu=0, title: str | None = None) -> Axes:
    """Draw one row per segment of a GPU, the largest first. Blocks in use are coloured by kind, and gaps are white.

    For an expandable segment, the row shows the part that has memory. gpu: an index, "cuda:1", or a device. Returns the
    axes. Raises what `read_memory` raises, and ValueError for a GPU without segments.
    """
    index = read_memory(gpu)[0].index
    segments = segments_of(index)
    if not segments:
        raise ValueError("PyTorch has not reserved any memory on this GPU, so there is no segment to draw.")
    kinds = {block.address: block.kind for block in live_blocks(index)}
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
    """Describe the segments, the memory in use, and the free pieces. Raises what `read_memory` raises."""
    segments = segments_of(read_memory(gpu)[0].index)
    blocks = [block for segment in segments for block in segment["blocks"]]
    used = [block["size"] for block in blocks if in_use(block)]
    free = [block["size"] for block in blocks if not in_use(block)]
    reserved = format_bytes(sum(segment["total_size"] for segment in segments))
    said = f"{_count(segments, 'segment')}, {reserved} reserved: {format_bytes(sum(used))} used in "
    said += _count(used, "block")
    if not free:
        return f"{said}, no gaps."
    return f"{said}, {format_bytes(sum(free))} free in {_count(free, 'piece')}, the largest {format_bytes(max(free))}."


def _count(items: list, word: str) -> str:
    return f"{len(items):,} {word}" + ("" if len(items) == 1 else "s")
