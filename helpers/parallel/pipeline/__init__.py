"""A net cut into stages, each on a GPU of its own, and pipelines of micro-batches through them.

    net = split(layers_of(resnet18()), gpus)        # nn.Sequential: each part on a GPU, a copy between them
    pipeline = Pipeline([part_0, part_1], gpus, schedule=one_f_one_b)
    loss = pipeline.step(images, labels, nn.CrossEntropyLoss(), micro_batches=8)      # gradients, as of one batch
    optimizer.step()

One process feeds all GPUs, which works since it does not wait for any of them. `torch.distributed.pipelining` does the
same with one process per GPU. Lesson 05 builds these by hand.

    stages     a net's layers, and parts of them on GPUs
    schedules  who works when: GPipe, 1F1B, their bubble and what they keep; no GPU needed
    run        the pipeline
    explorer   `explore_pipeline`: sliders of stages and micro-batches, the schedule and its bubble
"""

from helpers.parallel.pipeline.explorer import explore_pipeline
from helpers.parallel.pipeline.run import Pipeline
from helpers.parallel.pipeline.schedules import Slot, Task, bubble, gpipe, idle_share, most_kept, one_f_one_b, simulate
from helpers.parallel.pipeline.stages import OnGPU, layers_of, split

__all__ = [
    "OnGPU",
    "Pipeline",
    "Slot",
    "Task",
    "bubble",
    "explore_pipeline",
    "gpipe",
    "idle_share",
    "layers_of",
    "most_kept",
    "one_f_one_b",
    "simulate",
    "split",
]
