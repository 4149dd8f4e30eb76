"""Helpers of the multi-GPU course. The map:

    gpus        `use_gpus` gives real GPUs where there are enough of them, and virtual ones otherwise. Only this module
                imports the engine.
    data        The images and texts to train on, and random batches.
    models      The networks of the lessons.
    train       One training loop, on one GPU or with DataParallel.
    parallel    Several ranks or GPUs at one job: `launch`, the parallel loss, pipelines.
    measure     What GPUs hold and do: memory, the largest batch, timelines, reports of out-of-memory errors.
    show        Pictures, words and panels of what was measured.
    lesson04    The peak memory of the article's BERT under any of PyTorch's wrappers.
    lesson05    The panel of lesson 05.

Importing has no side effect; `use_gpus` switches GPUs on.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helpers.gpus import use_gpus

__all__ = ["use_gpus"]


def __getattr__(name: str) -> Any:
    """Import `use_gpus` when it is first used. Until then nothing needs PyTorch: the doctor must work without it."""
    if name != "use_gpus":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from helpers.gpus import use_gpus

    return use_gpus
