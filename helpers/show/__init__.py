"""Shows measurements as pictures, text, and panels with controls; `animate` makes a timeline move.

Every picture has a text alternative. Colour-blind readers can tell the colours apart.
"""

from helpers.gpus import animate
from helpers.show.bars import describe_memory, memory_bars
from helpers.show.explore import explore, explore_pipeline
from helpers.show.live import live_memory
from helpers.show.panel import Panel, control
from helpers.show.programs import show_diff
from helpers.show.segments import describe_segments, draw_segments
from helpers.show.timelines import timeline_bars
