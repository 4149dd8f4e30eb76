"""The course's interactive panels. Each also leaves a still picture and words, for readers without a kernel.

explore_memory(gpus=4, batch=200)     sliders for a training job, the memory of every GPU, what does not fit
with live_memory():                   memory of every GPU while the block runs
    trainer.train(epochs=2)
"""

from helpers.show.widgets.explorer import explore_memory
from helpers.show.widgets.live_panel import live_memory

__all__ = ["explore_memory", "live_memory"]
