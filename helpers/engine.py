"""The door to `virtual_gpus`, the package of the virtual GPUs: what the modules of helpers take from it.

No other module of helpers imports it.
"""

try:
    from virtual_gpus import active_machine, record_training, virtual_gpus
except ModuleNotFoundError as error:
    if error.name != "virtual_gpus":
        raise
    raise ModuleNotFoundError(
        "The package virtual_gpus is not installed. In the course's folder, run: pip install ./virtual-gpus",
        name="virtual_gpus",
    ) from None

from virtual_gpus import block_address as virtual_block_address
from virtual_gpus import record_timeline as record_modelled_timeline
from virtual_gpus.testing import RankError, run_hosts, run_ranks
from virtual_gpus.timeline import COLOURS as KIND_COLOURS
from virtual_gpus.timeline import (
    MEMORY_KINDS,
    Recording,
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

__all__ = ["KIND_COLOURS", "MEMORY_KINDS", "RankError", "Recording", "Span", "active_machine", "animate",
           "busy_seconds", "describe_timeline", "gpus_of", "kind_of", "merged", "name_work",
           "owned", "record_modelled_timeline", "record_training", "run_hosts", "run_ranks", "seconds_covered",
           "virtual_block_address", "virtual_gpus"]  # fmt: skip
