"""The door to `virtual_gpus`, the package of the virtual GPUs: what the modules of helpers take from it.

Besides this module, only `parallel.launching` imports it.
"""

try:
    import virtual_gpus
except ModuleNotFoundError as error:
    if error.name != "virtual_gpus":
        raise
    raise ModuleNotFoundError(
        "The package virtual_gpus is not installed. In the course's folder, run: pip install ./virtual-gpus",
        name="virtual_gpus",
    ) from None

from virtual_gpus import record_training
from virtual_gpus.timeline import COLOURS as KIND_COLOURS
from virtual_gpus.timeline import (
    MEMORY_KINDS,
    Span,
    animate,
    busy_seconds,
    describe_timeline,
    gpus_of,
    kind_of,
    merged,
    name_work,
    owned,
    seconds_covered,
)
from virtual_gpus.timeline import Timeline as ModelledTimeline

__all__ = ["KIND_COLOURS", "MEMORY_KINDS", "ModelledTimeline", "Span", "animate", "busy_seconds", "describe_timeline",
           "gpus_of", "kind_of", "merged", "name_work", "owned", "record_training", "seconds_covered",
           "virtual_gpus"]  # fmt: skip
