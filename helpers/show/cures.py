"""Which cure to try first: the questions to ask, from the cure that costs nothing to the dear ones, as a picture."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from helpers.show.plots import WIDTH
from helpers.show.plots.alt_text import set_alt_text

CURES = (
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


def draw_cures(ax: Axes | None = None) -> Axes:
    """Draw the decision tree: a row per question, its cure beside it. Returns the axes."""
    if ax is None:
        _, ax = plt.subplots(figsize=(WIDTH, 5), layout="constrained")
    for row, (question, cure) in enumerate(CURES):
        _box(ax, _QUESTION, row, question, "#DCEBF7")
        _box(ax, _CURE, row, cure, "#E3F3E6")
        ax.annotate("yes", (0.58, -row), (0.47, -row), va="center", arrowprops={"arrowstyle": "->"})
        if row + 1 < len(CURES):
            ax.annotate(
                "no", (_QUESTION, -row - 0.72), (_QUESTION, -row - 0.32), ha="center", arrowprops={"arrowstyle": "->"}
            )
    ax.text(0.5, -len(CURES) + 0.15, AGAIN, ha="center", va="center", fontsize=10, style="italic")
    ax.set(xlim=(0, 1), ylim=(-len(CURES), 0.5))
    ax.axis("off")
    set_alt_text(ax, describe_cures())
    return ax


def _box(ax: Axes, x: float, row: int, words: str, colour: str) -> None:
    look = {"boxstyle": "round,pad=0.4", "edgecolor": "0.4", "facecolor": colour}
    ax.text(x, -row, words, ha="center", va="center", fontsize=10, bbox=look)
