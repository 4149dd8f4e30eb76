"""Draws the segments and blocks of PyTorch's allocator, which show how fragmented the memory of a GPU is.

PyTorch takes a segment from the driver in one request and divides it into blocks for tensors. A tensor needs a free
piece that is large enough. With many small gaps, memory can run out although enough of it is free (fragmentation).
"""

from textwrap import fill

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from helpers.gpus import Device, gpu_index
from helpers.measure.memory import in_use, segments_of
from helpers.show.style import WIDTH, bar_style, open_frame, set_alt_text
from helpers.sizes import format_bytes, number_of, unit_of

_MOST_ROWS = 40


def draw_segments(gpu: Device = 0, title: str | None = None) -> Figure:
    """Draw one row for each segment of a GPU, the largest first, and 40 at most. Blocks in use are coloured, and gaps
    are white.

    For an expandable segment, the row shows the part that has memory. gpu: an index, "cuda:1", or a device. Returns the
    figure. Raises RuntimeError if there is no GPU, and ValueError for one without segments or that does not exist.
    """
    index = gpu_index(gpu)
    every = segments_of(index)
    segments = every[:_MOST_ROWS]
    if not segments:
        raise ValueError(f"PyTorch has not reserved any memory on GPU {index}, so there is no segment to draw.")
    figure, ax = plt.subplots(figsize=(WIDTH, 1.3 + 0.24 * len(segments)), layout="constrained")
    unit, unit_name = unit_of(segments[0]["total_size"])
    style = bar_style(0) | {"linewidth": 0.6}
    for row, segment in enumerate(segments):
        ax.barh(row, segment["total_size"] / unit, 0.8, edgecolor="0.3", linewidth=1, zorder=3, fill=False)
        for block in segment["blocks"]:
            if in_use(block):
                ax.barh(row, block["size"] / unit, 0.8, left=(block["address"] - segment["address"]) / unit, **style)
    ax.set_yticks(range(len(segments)), [f"segment {row}" for row in range(1, len(segments) + 1)], fontsize=8)
    ax.set_ylim(len(segments) - 0.4, -0.6)
    rest = f" (the {_MOST_ROWS} largest of {len(every)} segments)" if len(every) > _MOST_ROWS else ""
    ax.set_xlabel(f"place in the segment, in {unit_name}{rest}")
    open_frame(ax)
    ax.set_title(fill(title or "", 66), loc="left", fontsize=11)
    free = Patch(facecolor="white", edgecolor="0.3", label="free, kept by PyTorch")
    keys = [Patch(**style, label="in use"), free]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    set_alt_text(figure, title, describe_segments(gpu))
    return figure


def describe_segments(gpu: Device = 0) -> str:
    """Describe segments and pieces. Raises RuntimeError if there is no GPU, and ValueError unless `gpu` is a GPU."""
    segments = segments_of(gpu_index(gpu))
    blocks = [block for segment in segments for block in segment["blocks"]]
    used = [block["size"] for block in blocks if in_use(block)]
    free = [block["size"] for block in blocks if not in_use(block)]
    reserved = format_bytes(sum(segment["total_size"] for segment in segments))
    parts = f"{format_bytes(sum(used))} used in {number_of(len(used), 'blocks')}, "
    if free:
        parts += f"{format_bytes(sum(free))} free in {number_of(len(free), 'pieces')}, "
    parts += f"the largest {format_bytes(max(free))}" if free else "no gaps"
    return f"{number_of(len(segments), 'segments')}, {reserved} reserved: {parts}."
