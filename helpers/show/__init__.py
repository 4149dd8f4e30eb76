"""Shows measurements as pictures, text, and panels with controls.

bars       memory per GPU, for one situation (`memory_bars`) or several (`compare_bars`); `describe` gives the text
timelines  what each GPU did, and when
segments   how PyTorch's allocator divides the memory of a GPU
programs   the differences between two programs of notebooks/scripts
explore    sliders for any training job, and the memory that the job takes
panel      sliders for any function that returns text and a figure
live       the memory of every GPU during training
animate    a recorded timeline as a picture that moves

Every picture has a text alternative. Colour-blind readers can tell the colours apart.
"""

from helpers.show.animate import animate
from helpers.show.bars import compare_bars, memory_bars
from helpers.show.explore import explore
from helpers.show.live import live_memory
from helpers.show.panel import Panel, control
from helpers.show.programs import show_diff
from helpers.show.segments import describe_segments, draw_segments
from helpers.show.timelines import timeline_bars
from helpers.show.words import describe
