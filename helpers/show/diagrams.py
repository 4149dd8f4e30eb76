"""Diagrams that explain an idea and show no measurement."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from helpers.show.style import WIDTH, bar_style, set_alt_text


def copy_paths_picture() -> Figure:
    """The paths that a copy takes between host memory, a pinned buffer and two GPUs. Returns the figure."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.7), layout="constrained")
    ax.set(xlim=(0, 10), ylim=(0, 4))
    ax.axis("off")
    for left, bottom, width, height, name, colour in (
        (0.1, 0.1, 5.2, 3.8, "host memory", "0.94"),
        (0.3, 1.1, 1.9, 1.5, "ordinary\n(pageable)\nmemory", "white"),
        (3.4, 1.1, 1.7, 1.5, "pinned\nmemory", bar_style(5)["facecolor"]),
        (8.0, 2.5, 1.9, 1.3, "memory of\nGPU 0", bar_style(1)["facecolor"]),
        (8.0, 0.2, 1.9, 1.3, "memory of\nGPU 1", bar_style(1)["facecolor"]),
    ):
        ax.add_patch(plt.Rectangle((left, bottom), width, height, facecolor=colour, edgecolor="0.3"))
        outer = name == "host memory"
        ax.text(left + width / 2, bottom + (height - 0.35 if outer else height / 2), name, ha="center", va="center")
    for start, end, words, place in (
        ((2.2, 1.85), (3.4, 1.85), "extra\ncopy", (2.8, 2.4)),
        ((5.1, 2.1), (8.0, 3.15), "PCIe", (6.5, 3.0)),
        ((5.1, 1.6), (8.0, 0.85), "PCIe", (6.5, 0.75)),
        ((8.95, 1.5), (8.95, 2.5), "NVLink", (8.2, 2.0)),
    ):
        both_ways = "<->" if words == "NVLink" else "->"
        ax.annotate("", end, start, arrowprops={"arrowstyle": both_ways, "lw": 4 if words == "NVLink" else 1.5})
        ax.text(*place, words, ha="center", va="center", fontsize=9)
    set_alt_text(
        figure,
        "Two boxes lie in host memory, ordinary memory and pinned memory. A copy to a GPU goes from ordinary memory to "
        "pinned memory, and from there over PCIe to the GPU. Between GPU 0 and GPU 1 it takes NVLink, not host memory.",
    )
    return figure
