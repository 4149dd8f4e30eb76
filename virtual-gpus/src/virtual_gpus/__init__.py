"""Virtual GPUs: run multi-GPU programs of PyTorch on a machine without GPUs.

    with virtual_gpus(4, memory="16 GiB"):
        x = torch.randn(1000, 1000, device="cuda:3")
        torch.cuda.memory_allocated(3)  # 4 MB, counted by a model of PyTorch's caching allocator

Numbers, shapes, gradients and errors are real, because every operator runs on the CPU. The package models which GPU
holds a tensor, how much memory each GPU has left, and which allocations fail. To run a whole program on virtual GPUs,
use `python -m virtual_gpus --gpus 4 script.py`. With `shapes_only=True`, tensors keep their sizes but no values, so you
can measure a job of 100 GiB on a laptop.

A modelled clock predicts how long the program would take and where it would wait. `torch.cuda.Event.elapsed_time`,
`torch.cuda.utilization`, torch.profiler and the load in GPUtil use this clock. You can also record a timeline:

    with record_timeline() as t:
        step()
    t.seconds, t.utilisation(0)  # modelled
    t.plot(), t.save("step.json")

A job of a thousand GPUs can be asked whether it fits, and how long a step would be, by running one of its ranks: see
`help("virtual_gpus.features.distributed.one_rank")` and `record_training`.

Numbers of the models are fitted to a real H200, or estimates: docs/accuracy.md of the source says how close they come.

Known limits
------------
Of the folders of this package, and of its features:
"""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from virtual_gpus.errors import NotModelled
    from virtual_gpus.features.races import RaceError
    from virtual_gpus.placement.storages import block_address
    from virtual_gpus.switch import active_machine, renew_inherited, virtual_gpus
    from virtual_gpus.timeline.record import record_timeline
    from virtual_gpus.timeline.training import record_training, transformer_flops

__all__ = ["NotModelled", "RaceError", "active_machine", "block_address", "record_timeline", "record_training",
           "renew_inherited", "transformer_flops", "virtual_gpus"]  # fmt: skip
__version__ = "0.2.0"

_FOLDER = Path(__file__).parent
_WHERE = "*/", "features/*/", "features/*."  # limits of layers, of features in a folder, of those in a module
for _path in [path for where in _WHERE for path in sorted(_FOLDER.glob(f"{where}limits.md"))]:
    _of = _path.name.removesuffix("limits.md").removesuffix(".") or _path.parent.name
    __doc__ = f"{__doc__}\n{_of}:\n\n{_path.read_text(encoding='utf-8')}"

_MODULES = {name: f"virtual_gpus.{module}" for module, names in {
    "errors": ("NotModelled",), "features.races": ("RaceError",), "placement.storages": ("block_address",),
    "switch": ("active_machine", "renew_inherited", "virtual_gpus"), "timeline.record": ("record_timeline",),
    "timeline.training": ("record_training", "transformer_flops"),
}.items() for name in names}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name or a module when it is first used: programs such as nvidia-smi need no torch."""
    if name in _MODULES:
        if _MODULES[name] != "virtual_gpus.switch":
            importlib.import_module("torch")  # inherited GPUs go on with it, see processes.children
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value
    whole = f"{__name__}.{name}"
    if name.startswith("_") or importlib.util.find_spec(whole) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(whole)
