"""A diagram of pieces that travel between ranks."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from helpers.show.style import WIDTH, set_alt_text


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
