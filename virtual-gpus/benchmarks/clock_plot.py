"""The picture of `python -m benchmarks.clock --plot`: modelled against measured times of training steps."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.reference.timing import BUSY_EACH

WIDTH, BLUE = 7.0, "#0072B2"  # inches; a colour of Okabe and Ito's palette
_TICKS_MS = (2, 3, 5, 10, 20)


def steps(measured: dict, modelled: dict, meta: dict) -> Figure:
    """Across what the real GPU measured, up what the clock says, in ms on log scales: kernels, and wall time."""
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    for axes, key, title in zip(figure.subplots(1, 2), ("kernels", "wall"), ("GPU kernels", "wall time"), strict=True):
        real, said = ([1e3 * source[name][key] for name in modelled] for source in (measured, modelled))
        low, high = min(*real, *said) / 1.3, max(*real, *said) * 1.3
        axes.plot([low, high], [low, high], color="0.3", linewidth=0.8, label="as measured")
        band = ([low * (1 + s * BUSY_EACH), high * (1 + s * BUSY_EACH)] for s in (-1, 1))
        axes.fill_between([low, high], *band, color="0.85", label=f"within {100 * BUSY_EACH:.0f} %")
        axes.plot(real, said, "o", color=BLUE, label="training step")
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), title=f"{title} per step")
        axes.set(xlabel=f"measured on {meta['gpu']}, ms", ylabel="modelled, ms")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks([tick for tick in _TICKS_MS if low < tick < high])
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, loc="lower right")
    return figure
