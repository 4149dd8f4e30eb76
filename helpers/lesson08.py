"""Pictures of lesson 08: what is gathered when, and one rank of many."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from helpers.measure.timeline import Timeline, merged
from helpers.show.style import WIDTH, bar_style, legend_below, open_frame, set_alt_text

__all__ = ["exchange_picture"]

_ROWS = {
    "computing": {"forward": bar_style(0), "backward": bar_style(5, 1), "step": bar_style(2, 2)},
    "all-gather": {"all_gather": bar_style(1)},
    "reduce-scatter": {"reduce_scatter": bar_style(3)},
}


def exchange_picture(timeline: Timeline) -> Figure:
    """Draw one GPU's step in three rows: what it computes, its all-gathers, and its reduce-scatters."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.1), layout="constrained")
    for row, looks in enumerate(_ROWS.values()):
        for name, look in looks.items():
            spans = [(w.start, w.end) for w in timeline.work if name in (w.kind, w.name)]
            for start, end in merged(spans, 0.0 if row else 1e-4):  # separate bars for neighbouring collectives
                ax.barh(row, 1e3 * (end - start), 0.8, 1e3 * start, **look | {"linewidth": 0.8})
    ax.set(xlim=(0, 1e3 * timeline.seconds), ylim=(2.5, -0.5), xlabel="modelled time in ms")
    ax.set_yticks(range(3), _ROWS)
    open_frame(ax, "x")
    legend_below(figure, [Patch(label=name, **look) for name, look in _ROWS["computing"].items()])
    set_alt_text(
        figure,
        "Three rows over the time of one step. The GPU computes nearly all the time. Each block's all-gather runs while "
        "the block before it computes, and its reduce-scatter while the next block of the backward pass computes.",
    )
    return figure
