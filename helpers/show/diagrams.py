"""Diagrams that explain concepts, without measurements."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from helpers.show.style import WIDTH, bar_style, set_alt_text


def copy_paths_picture() -> Figure:
    """Draw the paths of copies between host memory, a pinned buffer and two GPUs. Returns the figure."""
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


def data_parallel_picture() -> Figure:
    """Draw one forward pass of DataParallel on four GPUs. Returns the figure."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3.5), layout="constrained")
    ax.set(xlim=(0, 10), ylim=(0, 5.4))
    ax.axis("off")

    def box(left, bottom, width, words, colour):
        ax.add_patch(plt.Rectangle((left, bottom), width, 0.7, facecolor=colour, edgecolor="0.3"))
        ax.text(left + width / 2, bottom + 0.35, words, ha="center", va="center")

    def arrow(start, end, style="-"):
        ax.annotate("", end, start, arrowprops={"arrowstyle": "->", "lw": 1.5, "linestyle": style})

    box(3.6, 4.6, 4.4, "64 images, in host memory", "0.94")
    box(3.6, 0.1, 4.4, "64 rows of logits, on GPU 0", bar_style(1)["facecolor"])
    for number in range(4):
        left = 1.7 + 2.15 * number
        middle = left + 0.85
        box(left, 2.6, 1.7, f"model, GPU {number}", bar_style(5)["facecolor"])
        ax.text(middle, 1.9, "16 rows", ha="center", va="center", fontsize=9, bbox={"fc": "white", "ec": "none"})
        gathered = 4.5 + 0.87 * number
        arrow((gathered, 4.6), (middle, 3.3))
        arrow((middle, 1.7), (gathered, 0.8))
        ax.plot((middle, middle), (2.6, 2.1), color="black", lw=1.5)
        if number > 0:
            arrow((left + 0.2, 3.65), (left + 0.2, 3.3))
    # The dashed line goes up from the model on GPU 0 and along the other models.
    ax.plot((1.9, 1.9, left + 0.2), (3.3, 3.65, 3.65), color="black", lw=1.5, linestyle="--")
    for height, words in ((4.2, "scatter"), (3.65, "replicate"), (2.95, "parallel_apply"), (1.2, "gather")):
        ax.text(0, height, words, va="center", family="monospace")
    set_alt_text(
        figure,
        "scatter divides 64 images in host memory into pieces of 16, one for each of four GPUs. replicate copies the "
        "model from GPU 0 to GPUs 1 to 3. parallel_apply calls the model on each GPU, which gives 16 rows of logits. "
        "gather copies all 64 rows to GPU 0.",
    )
    return figure
