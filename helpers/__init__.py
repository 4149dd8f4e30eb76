"""Helpers of the multi-GPU course. The map:

    gpus        `use_gpus` gives real GPUs where there are enough of them, and virtual ones otherwise. Only this module,
                `parallel.launching` and `parallel.hosts` import the engine.
    data        The images and texts to train on, and random batches.
    models      The networks of the lessons.
    train       One training loop, on one GPU or with DataParallel.
    parallel    Several ranks or GPUs at one job: `launch`, pipelines.
    measure     What GPUs hold and do: memory, the largest batch, timelines, reports of out-of-memory errors.
    show        Pictures, words and panels of what was measured.

Importing has no side effect; `use_gpus` switches GPUs on.
"""

from helpers.gpus import use_gpus

__all__ = ["use_gpus"]
