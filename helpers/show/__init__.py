"""Readings in, matplotlib axes or panels out."""

import importlib

_HOMES = {
    "compare_bars": "helpers.show.plots",
    "describe": "helpers.show.plots",
    "describe_cures": "helpers.show.cures",
    "describe_memory": "helpers.show.memory_curve",
    "describe_segments": "helpers.show.segments",
    "draw_cures": "helpers.show.cures",
    "draw_segments": "helpers.show.segments",
    "explore_memory": "helpers.show.widgets",
    "live_memory": "helpers.show.widgets",
    "loss_curves": "helpers.show.plots",
    "memory_bars": "helpers.show.plots",
    "pieces_picture": "helpers.show.plots",
    "plot_memory": "helpers.show.memory_curve",
    "timeline_bars": "helpers.show.timelines",
}
__all__ = list(_HOMES)


def __getattr__(name):
    """The names above, imported when they are first asked for."""
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(importlib.import_module(_HOMES[name]), name)
