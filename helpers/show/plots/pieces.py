"""A picture of pieces that travel between ranks, step by step, as in a ring all-reduce."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from helpers.show.plots.alt_text import set_alt_text

__all__ = ["pieces_picture"]

_WIDTH = 7.0  # inches, as in helpers.show.plots


def pieces_picture(states: Sequence) -> Figure:
    """One grid per step: a row per rank, a column per piece, and in it how many ranks have been added up there.

    `states[rank][step][piece]` holds these counts; step 0 is the start. A piece that is complete (as many as there are
    ranks) is outlined. Returns the figure. Raises ValueError for anything but three dimensions, none of them empty.
    """
    states = np.asarray(states)
    if states.ndim != 3 or not states.size:
        raise ValueError(f"states[rank][step][piece] is asked for, not an array of shape {states.shape}")
    ranks, steps, pieces = states.shape
    height = 0.75 + 0.95 * ranks / pieces
    figure, axes = plt.subplots(1, steps, figsize=(_WIDTH, height), layout="constrained", squeeze=False)
    for step, ax in enumerate(axes[0]):
        _grid(ax, states[:, step], ranks)
        ax.set(title=f"step {step}" if step else "start", yticks=range(ranks) if step == 0 else [])
    axes[0, 0].set_ylabel("rank")
    figure.supxlabel("piece", fontsize="medium")
    set_alt_text(axes[0, 0], _words(states))
    return figure


def _grid(ax, counts: np.ndarray, complete: int) -> None:
    ax.imshow(counts, cmap="Blues", vmin=0, vmax=1.5 * complete)
    ax.set(xticks=range(counts.shape[1]))
    for (rank, piece), count in np.ndenumerate(counts):
        done = count == complete
        ax.text(piece, rank, count, ha="center", va="center", fontsize=9, weight="bold" if done else "normal")
        if done:
            ax.add_patch(plt.Rectangle((piece - 0.44, rank - 0.44), 0.88, 0.88, fill=False, lw=1.2))


def _words(states: np.ndarray) -> str:
    complete = (states == len(states)).sum((0, 2)).tolist()
    return f"Complete pieces at the start and after each step: {', '.join(map(str, complete))} of {states[:, 0].size}."
