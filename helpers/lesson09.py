"""Lesson 09: the pictures."""

from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from helpers.show.style import COLOURS, WIDTH, open_frame, set_alt_text


def failures_picture(first: Mapping[int, float], attempts: Sequence[Mapping[int, float]]) -> Figure:
    """Draw the losses of a run without failures, and below it the steps that each attempt did. {step: loss}"""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(WIDTH, 3.6), sharex=True, layout="constrained", height_ratios=(2, 1)
    )
    above.plot(list(first), list(first.values()), color="black", label="without failures")
    for number, losses in enumerate(attempts):
        look = {"color": COLOURS[number % len(COLOURS)], "marker": "os^Dv"[number % 5], "markersize": 5}
        above.plot(list(losses), list(losses.values()), linestyle="", label=f"attempt {number}", **look)
        below.plot(list(losses), [number] * len(losses), **look)
    above.set(ylabel="loss")
    above.legend(frameon=False, ncols=2)
    below.set(xlabel="step", ylabel="attempt", yticks=range(len(attempts)), ylim=(len(attempts) - 0.5, -0.5))
    open_frame(above, "both")
    open_frame(below, "x")
    set_alt_text(figure, "All attempts lie on the curve of the run without failures. Each begins at the last snapshot.")
    return figure


def waste_picture(
    waste: Callable[[float], float], intervals: Sequence[float], best: float, simulated: Mapping[float, float]
) -> Figure:
    """Draw the share of the time that is lost against the interval in minutes, from a formula and from simulations."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3.0), layout="constrained")
    ax.plot(intervals, [100 * waste(each) for each in intervals], color=COLOURS[0], label="formula")
    ax.plot(list(simulated), 100 * np.array(list(simulated.values())), "o", color=COLOURS[4], label="simulation")
    ax.axvline(best, color="black", linestyle=":", label=f"the best interval, {best:.0f} minutes")
    ax.set(xscale="log", xlabel="minutes between two snapshots", ylabel="lost, % of the time", ylim=(0, None))
    ticks = [2, 5, 10, 20, 50, 100, 200]
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()
    ax.legend(frameon=False)
    open_frame(ax, "both")
    set_alt_text(
        figure, "A curve that falls steeply to a flat minimum and then rises slowly. The simulations lie on it."
    )
    return figure
