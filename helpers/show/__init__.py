"""Readings in, pictures, words and panels out.

bars       memory per GPU, alone (`memory_bars`) or side by side (`compare_bars`); `describe` says the same in words
curves     the memory of a run (`plot_memory` of a MemoryMonitor)
timelines  what each GPU did and when
segments   how PyTorch's allocator has cut the memory of a GPU
diagrams   the paths of a copy, a forward pass of DataParallel
programs   what differs between two programs of notebooks/scripts
explore    sliders for any training job, and the memory that it takes
panel      sliders for anything that gives words and a figure
live       memory of every GPU while a training runs

Every picture has its words as a text alternative. Colours are those that colour-blind readers tell apart.
"""

from helpers.show.bars import compare_bars, memory_bars
from helpers.show.curves import describe_memory, plot_memory
from helpers.show.diagrams import copy_paths_picture, data_parallel_picture
from helpers.show.explore import explore
from helpers.show.live import live_memory
from helpers.show.panel import Panel, control
from helpers.show.programs import show_diff
from helpers.show.segments import describe_segments, draw_segments
from helpers.show.timelines import timeline_bars
from helpers.show.words import describe

__all__ = [
    "Panel",
    "compare_bars",
    "control",
    "copy_paths_picture",
    "data_parallel_picture",
    "describe",
    "describe_memory",
    "describe_segments",
    "draw_segments",
    "explore",
    "live_memory",
    "memory_bars",
    "plot_memory",
    "show_diff",
    "timeline_bars",
]
