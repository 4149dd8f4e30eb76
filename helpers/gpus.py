"""The GPUs of the course: real ones where the machine has enough, otherwise virtual ones. The one door to the engine.

    gpus = use_gpus(4, memory="16 GiB")           # afterwards nothing else needs to know which they are
    data_sheet("TITAN Xp").memory                 # bytes; figures of GPU kinds need no GPU

No other module of the course imports `virtual_gpus`. What the others need from it is offered here.
"""

from __future__ import annotations

import os
import subprocess

import torch

try:
    import virtual_gpus as engine
except ModuleNotFoundError as error:
    if error.name != "virtual_gpus":
        raise
    raise ModuleNotFoundError(
        "The package virtual_gpus is not installed. In the course's folder, run: pip install ./virtual-gpus",
        name="virtual_gpus",
    ) from None
from virtual_gpus.clock.estimates import NETWORKS, OPERATOR_SECONDS, Rates, all_reduce_seconds, copy_seconds, rates
from virtual_gpus.gpus import GPUSpec, kinds
from virtual_gpus.gpus import spec as data_sheet
from virtual_gpus.memory_model import replay

__all__ = [
    "ENGINE_FOLDER",
    "GPUSpec",
    "GPU_KINDS",
    "NETWORKS",
    "OPERATOR_SECONDS",
    "Rates",
    "all_reduce_seconds",
    "block_address",
    "copy_seconds",
    "data_sheet",
    "describe_machine",
    "is_virtual",
    "keeps_values",
    "modelled_gpus",
    "modelled_timeline",
    "rates",
    "renew_gpus",
    "replay",
    "use_gpus",
]

# Where the engine lies: errors and stacks leave its frames out, as real GPUs have none.
ENGINE_FOLDER = os.path.join(os.path.dirname(engine.__file__), "")
GPU_KINDS = tuple(kinds())
_CHOICES = ("auto", "virtual", "real")
_ours: tuple | None = None  # the virtual GPUs of the last call and their machine, so that a cell can be run again


# ---- the switch ------------------------------------------------------------------------------------------------------


def use_gpus(
    count: int,
    *,
    memory: int | str | None = None,
    kind: str = "H200",
    links: str | None = None,
    shapes_only: bool = False,
) -> list[torch.device]:
    """`count` GPUs to learn on, as a list of torch.device; one printed line says whether they are real.

    memory, kind, links, shapes_only: of virtual GPUs (see `virtual_gpus.virtual_gpus`). Real GPUs, and virtual ones
    that were switched on around this program, are what they are. The environment variable GPUS forces the choice:
    "virtual", "real" or "auto" (the default). Another call replaces the virtual GPUs of the last one. Raises
    RuntimeError if there are too few GPUs, or if they are not what GPUS and shapes_only ask for; ValueError for a bad
    argument.
    """
    global _ours
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"use_gpus(count) needs an integer of at least 1, not {count!r}.")
    choice = os.environ.get("GPUS", "auto").strip().lower() or "auto"
    if choice not in _CHOICES:
        raise ValueError(f"GPUS={choice!r} in the environment: it must be one of {', '.join(_CHOICES)}.")
    wanted = _virtual_gpus(count, kind, memory, links=links, shapes_only=shapes_only)
    if engine.active_machine() is not (_ours and _ours[1]):  # on around this program: python -m virtual_gpus, a test
        _refuse_what_is_on(count, choice, shapes_only)
        return _say_virtual(_devices(count))
    _switch_off()
    real = torch.cuda.device_count()
    if choice == "real":
        _refuse_real(count, real, shapes_only)
    if choice == "real" or (choice == "auto" and real >= count and not shapes_only):
        devices = _devices(count)
        print(f"{_number(count, 'real')} ({_names(devices)})")
        return devices
    devices = wanted.start()
    _ours = wanted, engine.active_machine()
    return _say_virtual(devices)


def _switch_off() -> None:
    global _ours
    if _ours is not None:
        _ours[0].stop()
        _ours = None


def _virtual_gpus(count: int, kind: str, memory: int | str | None, **settings) -> engine.virtual_gpus:
    # CUDA_VISIBLE_DEVICES speaks of real GPUs here, for example on a cluster. Virtual GPUs are all visible.
    return engine.virtual_gpus(count, kind=kind, memory=memory, honour_visible_devices=False, **settings)


def _refuse_real(count: int, real: int, shapes_only: bool) -> None:
    if shapes_only:
        raise RuntimeError("shapes_only=True is something that only virtual GPUs have. Unset GPUS=real.")
    if real < count:
        raise RuntimeError(
            f"GPUS=real, but {count} GPUs are needed and PyTorch sees {real}. Unset GPUS (or set GPUS=virtual) to go "
            "on with virtual GPUs. If the machine has more GPUs, look at CUDA_VISIBLE_DEVICES and nvidia-smi."
        )


def _refuse_what_is_on(count: int, choice: str, shapes_only: bool) -> None:
    visible = torch.cuda.device_count()
    if choice == "real":
        raise RuntimeError("GPUS=real, but this program runs inside virtual GPUs. Unset GPUS, or run it without them.")
    if shapes_only and not engine.active_machine().shapes_only:
        raise RuntimeError(
            "shapes_only=True, but the virtual GPUs around this program keep values. Start it with --shapes-only."
        )
    if visible < count:
        raise RuntimeError(
            f"{count} GPUs are needed, but only {visible} virtual GPUs are on around this program. "
            f"Start it with --gpus {count}."
        )


def _say_virtual(devices: list[torch.device]) -> list[torch.device]:
    meaning = "real numbers, real errors, memory counted per GPU"
    if engine.active_machine().shapes_only:
        meaning = "sizes and memory are real, values are not kept"
    print(f"{_number(len(devices), 'virtual')} ({_names(devices)}): {meaning}")
    return devices


def _devices(count: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(count)]


def _number(count: int, word: str) -> str:
    return f"{count} {word} GPU{'s' if count > 1 else ''}"


def _names(devices: list[torch.device]) -> str:
    """ "NVIDIA H200, 16.00 GiB each"; several kinds are listed one by one."""
    found = [torch.cuda.get_device_properties(device) for device in devices]
    names = [f"{gpu.name}, {gpu.total_memory / 2**30:.2f} GiB" for gpu in found]
    if len(set(names)) == 1:
        return names[0] + (" each" if len(names) > 1 else "")
    return "; ".join(names)


# ---- the GPUs that are on --------------------------------------------------------------------------------------------


def is_virtual() -> bool:
    """True if the GPUs that answer now are virtual ones."""
    return engine.active_machine() is not None


def keeps_values() -> bool:
    """False where the GPUs that answer keep sizes only (`shapes_only=True`): a loss read from them is nan."""
    machine = engine.active_machine()
    return machine is None or not machine.shapes_only


def renew_gpus() -> None:
    """In a new process: its virtual GPUs start empty, as a process's part of real GPUs does.

    A forked process inherits its parent's GPUs with everything on them. Those tensors are on the CPU afterwards.
    """
    engine.renew_inherited()


def modelled_timeline():
    """A recorder of the virtual GPUs' modelled clock (see `helpers.measure.timeline`); None where real GPUs answer."""
    return engine.record_timeline() if is_virtual() else None


def block_address(tensor: torch.Tensor) -> int | None:
    """The address under which memory snapshots know a strided GPU tensor; None if it takes no memory there.

    A virtual GPU's addresses are its own: `data_ptr()` is that of the CPU's memory where the numbers lie.
    """
    return engine.block_address(tensor) if is_virtual() else tensor.untyped_storage().data_ptr()


def describe_machine() -> str:
    """The machine as a text: its GPUs, their memory, and the links between them as `nvidia-smi topo -m` draws them."""
    count = torch.cuda.device_count()
    if count == 0:
        return "no GPU: call use_gpus(4) to get virtual ones"
    found = [torch.cuda.get_device_properties(i) for i in range(count)]
    lines = [
        f"cuda:{i}  {gpu.name}, {gpu.total_memory / 2**30:.2f} GiB, {gpu.multi_processor_count} multiprocessors, "
        f"compute capability {gpu.major}.{gpu.minor}"
        for i, gpu in enumerate(found)
    ]
    return "\n".join([*lines, "", _links()])


def _links() -> str:
    """The links between all GPUs, also those that CUDA_VISIBLE_DEVICES hides: nvidia-smi does not look at it."""
    machine = engine.active_machine()
    if machine is not None:
        return machine.topology.drawn()
    try:
        return subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30).stdout.rstrip()
    except (OSError, subprocess.TimeoutExpired):
        return "nvidia-smi topo -m did not answer: the links between these GPUs are not known"


# ---- kinds of GPUs, whatever GPUs are on -----------------------------------------------------------------------------


def modelled_gpus(
    count: int, kind: str, memory: int | str | None = None, links: str | None = None
) -> engine.virtual_gpus:
    """Virtual GPUs in shapes only for a `with` block, whatever GPUs answer around it: to compare kinds of GPUs."""
    return _virtual_gpus(count, kind, memory, links=links, shapes_only=True)
