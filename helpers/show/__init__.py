"""Shows measurements as pictures, text, and panels with controls; `animate` makes a timeline move.

Every picture has a text alternative. Colour-blind readers can tell the colours apart.
"""

from helpers.engine import animate
from helpers.show.bars import describe_memory, memory_bars
from helpers.show.explore import explore
from helpers.show.live import LivePanel, live_memory
from helpers.show.panel import Panel, control
from helpers.show.programs import Difference, show_diff
from helpers.show.segments import describe_segments, draw_segments
from helpers.show.timelines import timeline_bars

__all__ = ["Difference", "LivePanel", "Panel", "animate", "control", "describe_memory", "describe_segments",
           "draw_segments", "explore", "live_memory", "memory_bars", "show_diff",
           "timeline_bars"]  # fmt: skip
