"""Scaling curves as a picture: part of `helpers.lesson07.scaling`."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt

from helpers.lesson07.scaling.laws import amdahl, amdahl_seconds, efficiency
from helpers.show.style import COLOURS, WIDTH, set_alt_text

_MARKERS = "osD^vPX"


def scaling_picture(
    curves: Mapping[str, Mapping[int, float]],
    weak: bool = False,
    law: bool = True,
    title: str = "",
    how: str = "modelled",
):
    """Speed-up (strong) or time (weak), and efficiency, against GPUs. curves: name -> {GPUs: seconds of a step}.

    law: draw Amdahl's law as fitted to each strong curve, dotted. how: the times are "modelled", or "measured". Returns
    the figure; its words: `describe_scaling`.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.0), layout="constrained")
    for place, (name, seconds) in enumerate(curves.items()):
        look = {"color": COLOURS[place], "marker": _MARKERS[place], "label": name}
        gpus, one = sorted(seconds), seconds[min(seconds)]
        left.plot(gpus, [_height(n, seconds, weak) for n in gpus], **look)
        right.plot(gpus, [100 * efficiency(seconds, weak)[n] for n in gpus], **look)
        if law and not weak:
            serial = amdahl(seconds)
            left.plot(gpus, [one / amdahl_seconds(one, serial, n) for n in gpus], ":", color=COLOURS[place])
    ticks = sorted({n for seconds in curves.values() for n in seconds})
    if not weak:
        left.plot(ticks, ticks, color="0.6", linewidth=0.8, label="ideal")
        left.set_yscale("log", base=2)
        left.set_yticks(ticks, ticks)
    left.set_ylabel(f"ms per step, {how}" if weak else f"times as fast, {how}")
    right.set_ylabel("efficiency in %")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, ticks)
        axes.set(xlabel="GPUs")
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylim(*((0, None) if weak else (0.9, None)))
    right.set_ylim(0, 105)
    left.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    set_alt_text(figure, describe_scaling(curves, weak))
    return figure


def _height(gpus: int, seconds: Mapping[int, float], weak: bool) -> float:
    return 1e3 * seconds[gpus] if weak else seconds[min(seconds)] * min(seconds) / seconds[gpus]


def describe_scaling(curves: Mapping[str, Mapping[int, float]], weak: bool = False) -> str:
    """The picture in words: per curve the efficiency at each number of GPUs, and Amdahl's serial share."""
    lines = []
    for name, seconds in curves.items():
        shares = ", ".join(f"{n}: {100 * each:.0f} %" for n, each in efficiency(seconds, weak).items())
        law = "" if weak else f"; Amdahl's serial share {100 * amdahl(seconds):.1f} %"
        lines.append(f"{name}: efficiency by GPUs {shares}{law}")
    return "\n".join(lines)
