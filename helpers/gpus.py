"""Provides the GPUs of the course, which are real if the machine has enough, and otherwise virtual.

    gpus = use_gpus(4, memory="16 GiB")           # the code that follows is the same for both

Lessons and the other modules call torch.cuda and GPUtil on both. Of the other modules, only `measure.timeline` differs:
on real GPUs, torch.profiler records what they do.
"""

import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch

from helpers.engine import active_machine, virtual_block_address, virtual_gpus
from helpers.sizes import GiB, number_of, require_integer

__all__ = ["Device", "block_address", "gpu_index", "gpu_indices", "is_virtual", "modelled_gpus", "require_gpu",
           "same_gpus", "topology", "use_gpus"]  # fmt: skip

Device = int | str | torch.device  # mostly a GPU: 1, "cuda:1", or torch.device("cuda", 1)

_MOST_GPUS = 128  # PyTorch counts devices in 8 bits
_CHOICES = ("auto", "virtual", "real")
# The virtual GPUs of the last call and their machine, to replace them in the next.
_ours: tuple[virtual_gpus, Any] | None = None


# ---- the switch ------------------------------------------------------------------------------------------------------


def use_gpus(
    count: int,
    *,
    memory: int | str | None = None,
    kind: str = "H200",
    links: str | None = None,
    shapes_only: bool = False,
) -> list[torch.device]:
    """Return `count` GPUs as a list of torch.device, and print a line that says whether they are real or virtual.

    memory: of each virtual GPU, as text such as "16 GiB", or in bytes; None for that of the kind. kind: "H200", "H100",
    "A100", "RTX 4090" and others (`virtual_gpus.gpus.kinds()`). links: between them, by default those of the kind's
    usual machines (`virtual_gpus.clock.links.arrange`). They do not affect real GPUs, or virtual GPUs that were started
    around this program. shapes_only: sizes without values, which only virtual GPUs have, so real ones are not chosen
    then. The environment variable GPUS overrides the choice with "virtual", "real" or "auto" (the default). A new call
    ends the virtual GPUs of the last call, even if real GPUs are then refused.

    Raises RuntimeError if there are too few GPUs, or if they do not match GPUS and shapes_only, and ValueError or
    TypeError for an invalid argument.
    """
    global _ours
    choice = os.environ.get("GPUS", "auto").strip().lower() or "auto"
    if choice not in _CHOICES:
        raise ValueError(f"The environment variable GPUS is {choice!r}. It must be one of {', '.join(_CHOICES)}.")
    wanted = modelled_gpus(count, kind, memory, links=links, shapes_only=shapes_only)
    active = active_machine()
    if active is not None and (_ours is None or active is not _ours[1]):  # from python -m virtual_gpus or a test
        _refuse_what_is_on(count, choice, shapes_only)
        devices = _devices(count)
        print(_virtual_line(devices))
        return devices
    _switch_off()
    real = torch.cuda.device_count()
    if choice == "real":
        _refuse_real(count, real, shapes_only)
    if choice == "real" or (choice == "auto" and real >= count and not shapes_only):
        devices = _devices(count)
        print(f"{number_of(count, 'real GPUs')} ({_names(devices)})")
        return devices
    devices = wanted.start()
    _ours = wanted, active_machine()
    print(_virtual_line(devices))
    return devices


def _switch_off() -> None:
    global _ours
    if _ours is not None:
        _ours[0].stop()
        _ours = None


def _refuse_real(count: int, real: int, shapes_only: bool) -> None:
    if shapes_only:
        raise RuntimeError("shapes_only=True needs virtual GPUs, but the environment says GPUS=real. Unset GPUS.")
    if real < count:
        raise RuntimeError(
            f"GPUS=real, but PyTorch sees {real} of {number_of(count, 'GPUs')}. Unset GPUS, or set GPUS=virtual, for "
            "virtual GPUs. If the machine has more GPUs, check CUDA_VISIBLE_DEVICES and nvidia-smi."
        )


def _refuse_what_is_on(count: int, choice: str, shapes_only: bool) -> None:
    visible = torch.cuda.device_count()
    if choice == "real":
        raise RuntimeError("GPUS=real, but this program runs inside virtual GPUs. Unset GPUS, or run it without them.")
    if shapes_only and not _keeps_no_values():
        raise RuntimeError(
            "shapes_only=True, but the virtual GPUs that are on keep values. Start the program with --shapes-only, or "
            "call use_gpus outside the `with` block of other GPUs."
        )
    if visible < count:
        raise RuntimeError(
            f"PyTorch sees only {visible} of the {number_of(count, 'GPUs')}. Start the program "
            f"with --gpus {count}, or call use_gpus before `launch` and outside the `with` block of other GPUs."
        )


def _virtual_line(devices: list[torch.device]) -> str:
    meaning = "real numbers, real errors, memory counted per GPU"
    if _keeps_no_values():
        meaning = "sizes and memory are real, values are not kept"
    return f"{number_of(len(devices), 'virtual GPUs')} ({_names(devices)}): {meaning}"


def _keeps_no_values() -> bool:
    machine = active_machine()
    return machine is not None and machine.shapes_only


def _devices(count: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(count)]


def _names(devices: list[torch.device]) -> str:
    """Describe GPUs of one kind as "NVIDIA H200, 16.00 GiB each". List GPUs of several kinds one by one."""
    gpus = [torch.cuda.get_device_properties(device) for device in devices]
    names = [f"{gpu.name}, {gpu.total_memory / GiB:.2f} GiB" for gpu in gpus]
    if len(set(names)) == 1:
        return names[0] + (" each" if len(names) > 1 else "")
    return "; ".join(names)


# ---- the active GPUs -------------------------------------------------------------------------------------------------


def require_gpu() -> None:
    """Raise RuntimeError if PyTorch sees no GPU."""
    if torch.cuda.device_count() == 0:
        raise RuntimeError("There is no GPU. Call use_gpus(4) to get virtual GPUs.")


@contextmanager
def same_gpus() -> Iterator[None]:
    """Raise RuntimeError if the block switches to other virtual GPUs, of which nothing would be measured."""
    machine = active_machine()
    yield
    if active_machine() is not machine:
        raise RuntimeError("The block switched to other GPUs. Call use_gpus before it.")


def gpu_index(gpu: Device, must_exist: bool = True) -> int:
    """Return the index of a GPU. That of "cuda" is the current GPU's. must_exist: refuse a GPU that PyTorch does not
    see. Timelines set it to False, because they may come from another process.

    Raises RuntimeError if there is no GPU, and ValueError for a device that is not a GPU or does not exist.
    """
    try:
        device = torch.device("cuda", int(gpu)) if isinstance(gpu, Integral) else torch.device(gpu)
    except (RuntimeError, TypeError, ValueError):  # a negative index, an unknown name, or no device at all
        device = torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"{gpu!r} is not a GPU. Pass a device such as 'cuda:0'.")
    if must_exist or device.index is None:
        require_gpu()
    count, name = torch.cuda.device_count() if must_exist else _MOST_GPUS, str(gpu).removeprefix("cuda:")
    if name not in ("cuda", *map(str, range(count))):  # asked of the text, because PyTorch takes 256 for 0
        raise ValueError(f"There is no cuda:{name}. Pass one of cuda:0 to cuda:{count - 1}.")
    return torch.cuda.current_device() if device.index is None else device.index


def gpu_indices(devices: Device | Iterable[Device] | None = None) -> list[int]:
    """Return the indices of `devices` (a device, an index, or a list of them; None means all visible GPUs), each once.

    Raises the same as `gpu_index`.
    """
    require_gpu()
    if devices is None:
        return list(range(torch.cuda.device_count()))
    several = devices if isinstance(devices, Iterable) and not isinstance(devices, str) else [devices]
    return list(dict.fromkeys(map(gpu_index, several)))


def is_virtual() -> bool:
    """Return True if virtual GPUs are active."""
    return active_machine() is not None


def block_address(tensor: torch.Tensor) -> int | None:
    """Return the address of a strided GPU tensor in memory snapshots, or None if it takes no memory on the GPU.

    Of a DTensor, it is that of this rank's part. For a tensor on a virtual GPU, `data_ptr()` is a different address,
    that of its values in the CPU's memory.
    """
    if is_virtual():
        return virtual_block_address(tensor)
    tensor = getattr(tensor, "_local_tensor", tensor)
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, ValueError):  # a tensor that wraps others, and a parameter of a lazy module, have no memory
        return None


def topology() -> str:
    """Return the links between all GPUs of the machine, as `nvidia-smi topo -m` draws them.

    CUDA_VISIBLE_DEVICES hides no GPU in it. If nvidia-smi does not answer, the text says so. Raises RuntimeError if
    there is no GPU.
    """
    require_gpu()
    machine = active_machine()
    if machine is not None:
        return machine.topology.drawn()
    command = ["nvidia-smi", "topo", "-m"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.rstrip()
    except (OSError, subprocess.SubprocessError):
        return "The links between these GPUs are not known, because nvidia-smi topo -m did not answer."


# ---- other kinds of GPUs ---------------------------------------------------------------------------------------------


def modelled_gpus(
    count: int, kind: str = "H200", memory: int | str | None = None, *, shapes_only: bool = True, **settings: Any
) -> virtual_gpus:
    """Return virtual GPUs for a `with` block, to compare kinds of GPUs or settings. Other GPUs may be active.

    They keep sizes without values, unless `shapes_only=False`. kind, memory: as for `use_gpus`. settings: those of
    `virtual_gpus.virtual_gpus`. With `rank=0, world_size=64`, this process is one rank of 64: the other ranks do not
    exist, process groups work and send nothing, and collectives take modelled time. Raises ValueError or TypeError for
    an invalid argument.
    """
    count = require_integer("count", count, most=_MOST_GPUS)
    # CUDA_VISIBLE_DEVICES refers to real GPUs here, for example on a cluster. All virtual GPUs are visible.
    settings.setdefault("honour_visible_devices", False)
    return virtual_gpus(count, kind=kind, memory=memory, shapes_only=shapes_only, **settings)
