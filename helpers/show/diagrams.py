"""Diagrams: pieces that travel between ranks, and which cure to try first when memory runs out."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from helpers.show.style import WIDTH, set_alt_text

CURES = (  # from the cure that costs nothing to the dear ones
    ("Does it grow from step to step?", "find_leaks: .item(), del,\nno list of tensors"),
    ("Is it a validation?", "inference_mode()"),
    ("Much reserved, not allocated?", "expandable_segments,\nlong-lived tensors first"),
    ("Do activations fill it?", "fused attention, bfloat16,\nthen checkpoint, then pieces"),
    ("Does the optimizer?", "fused=True, momentum\ninstead of Adam"),
    ("Still too large?", "several GPUs: lessons 02 to 05"),
)
AGAIN = "After each cure: measure again, from the top."
_QUESTION, _CURE = 0.22, 0.78  # where the columns have their middles


def describe_cures() -> str:
    """The picture of `draw_cures` in words, a line for each question."""
    return "\n".join([f"{question} {' '.join(cure.split())}" for question, cure in CURES] + [AGAIN])


def draw_cures() -> Axes:
    """Draw the decision tree: a row per question, its cure beside it. Returns the axes."""
    _, ax = plt.subplots(figsize=(WIDTH, 5), layout="constrained")
    arrow = {"arrowstyle": "->"}
    for row, (question, cure) in enumerate(CURES):
        for x, text, colour in ((_QUESTION, question, "#DCEBF7"), (_CURE, cure, "#E3F3E6")):
            box = {"boxstyle": "round,pad=0.4", "facecolor": colour, "edgecolor": "0.4"}
            ax.text(x, -row, text, ha="center", va="center", fontsize=10, bbox=box)
        ax.annotate("yes", (0.58, -row), (0.47, -row), va="center", arrowprops=arrow)
        if row + 1 < len(CURES):
            ax.annotate("no", (_QUESTION, -row - 0.72), (_QUESTION, -row - 0.32), ha="center", arrowprops=arrow)
    ax.text(0.5, -len(CURES) + 0.15, AGAIN, ha="center", va="center", fontsize=10, style="italic")
    ax.set(xlim=(0, 1), ylim=(-len(CURES), 0.5))
    ax.axis("off")
    set_alt_text(ax.figure, describe_cures())
    return ax


def pieces_picture(states: Sequence) -> Figure:
    """One grid per step: a row per rank, a column per piece, and in it how many ranks have been added up there.

    `states[rank][step][piece]` holds these counts; step 0 is the start. A piece that is complete (as many as there are
    ranks) is outlined. Returns the figure. Raises ValueError for anything but three dimensions, none of them empty.
    """
    states = np.asarray(states)
    if states.ndim != 3 or not states.size:
        raise ValueError(f"Give states[rank][step][piece], three dimensions, not an array of shape {states.shape}.")
    ranks, steps, pieces = states.shape
    size = WIDTH, 0.75 + 0.95 * ranks / pieces
    figure, axes = plt.subplots(1, steps, figsize=size, layout="constrained", squeeze=False)
    for step, ax in enumerate(axes[0]):
        counts = states[:, step]
        ax.imshow(counts, cmap="Blues", vmin=0, vmax=1.5 * ranks)
        for (rank, piece), count in np.ndenumerate(counts):
            done = count == ranks
            ax.text(piece, rank, count, ha="center", va="center", fontsize=9, weight="bold" if done else "normal")
            if done:
                ax.add_patch(plt.Rectangle((piece - 0.44, rank - 0.44), 0.88, 0.88, fill=False, lw=1.2))
        ax.set(title=f"step {step}" if step else "start", yticks=range(ranks) if step == 0 else [])
        ax.set(xticks=range(pieces))
    axes[0, 0].set_ylabel("rank")
    figure.supxlabel("piece", fontsize="medium")
    done = ", ".join(map(str, (states == ranks).sum((0, 2)).tolist()))
    set_alt_text(figure, f"Complete pieces at the start and after each step: {done} of {ranks * pieces}.")
    return figure
