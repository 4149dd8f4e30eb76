"""The one switch of the course: real GPUs where the machine has enough, else virtual ones.

The only lesson-facing module that switches `virtual_gpus` on; after `use_gpus` nothing else needs to know of it.
(`helpers.hardware` takes figures from there.)
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from virtual_gpus import active_machine, record_timeline, virtual_gpus
from virtual_gpus.machine import remove
from virtual_gpus.placement.addresses import block_address as virtual_address

# Where the engine lies: errors and stacks leave its frames out, as real GPUs have none.
ENGINE_FOLDER = os.path.join(os.path.dirname(find_spec("virtual_gpus").origin), "")
_CHOICES = ("auto", "virtual", "real")
_ours: tuple | None = None  # the virtual GPUs of the last call and their machine, so that a cell can be run again


def use_gpus(
    count: int, *, memory: int | str | None = None, kind: str = "H200", shapes_only: bool = False
) -> list[torch.device]:
    """`count` GPUs to learn on, as a list of torch.device; one printed line says whether they are real.

    memory, kind, shapes_only: of virtual GPUs (see `virtual_gpus`); real ones, and virtual ones that were switched
    on around this program, are what they are. The environment variable GPUS forces the choice: "virtual", "real" or
    "auto" (default). Calling it again replaces the virtual GPUs of the last call. Raises RuntimeError if there are
    too few, or if they are not what GPUS and shapes_only ask for; ValueError for a bad argument.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"use_gpus(count) needs a whole number of at least 1, not {count!r}")
    choice = _choice()
    # CUDA_VISIBLE_DEVICES speaks of real cards here (a cluster sets it): virtual ones are all visible.
    wanted = virtual_gpus(count, memory=memory, kind=kind, shapes_only=shapes_only, honour_visible_devices=False)
    ours = _ours and _ours[1]
    if active_machine() is not ours:  # somebody else switched them on: python -m virtual_gpus, a test
        return _take_what_is_on(count, choice, shapes_only)
    _switch_off()
    real = torch.cuda.device_count()
    if choice == "real":
        _refuse_too_few(count, real, shapes_only)
    if choice == "real" or (choice == "auto" and real >= count and not shapes_only):
        return _real(count)
    return _virtual(wanted, shapes_only)


def _choice() -> str:
    choice = os.environ.get("GPUS", "auto").strip().lower() or "auto"
    if choice not in _CHOICES:
        raise ValueError(f"GPUS={choice!r} in the environment: it must be one of {', '.join(_CHOICES)}")
    return choice


def _switch_off() -> None:
    global _ours
    if _ours is not None:
        _ours[0].stop()
        _ours = None


def _refuse_too_few(count: int, real: int, shapes_only: bool) -> None:
    if shapes_only:
        raise RuntimeError("shapes_only=True is something that only virtual GPUs have: unset GPUS=real")
    if real < count:
        raise RuntimeError(
            f"GPUS=real, but {count} GPUs are needed and PyTorch sees {real}. Unset GPUS (or set GPUS=virtual) to go "
            "on with virtual GPUs; if the machine has more GPUs, look at CUDA_VISIBLE_DEVICES and nvidia-smi."
        )


def _real(count: int) -> list[torch.device]:
    devices = [torch.device("cuda", i) for i in range(count)]
    print(f"{_number(count, 'real')} ({_cards(devices)})")
    return devices


def _virtual(gpus: virtual_gpus, shapes_only: bool) -> list[torch.device]:
    global _ours
    devices = gpus.start()
    _ours = (gpus, active_machine())
    return _say_virtual(devices, shapes_only)


def _say_virtual(devices: list[torch.device], shapes_only: bool) -> list[torch.device]:
    print(f"{_number(len(devices), 'virtual')} ({_cards(devices)}): {_what_virtual_means(shapes_only)}")
    return devices


def _take_what_is_on(count: int, choice: str, shapes_only: bool) -> list[torch.device]:
    visible = torch.cuda.device_count()
    if choice == "real":
        raise RuntimeError("GPUS=real, but this program runs inside virtual GPUs: unset GPUS, or run it without them")
    if shapes_only and not active_machine().shapes_only:
        raise RuntimeError(
            "shapes_only=True, but the virtual GPUs around this program keep values: start it with --shapes-only"
        )
    if visible < count:
        raise RuntimeError(
            f"{count} GPUs are needed, but only {visible} virtual GPUs are on around this program: "
            f"start it with --gpus {count}"
        )
    return _say_virtual([torch.device("cuda", i) for i in range(count)], active_machine().shapes_only)


def _number(count: int, word: str) -> str:
    return f"{count} {word} GPU{'s' if count > 1 else ''}"


def _what_virtual_means(shapes_only: bool) -> str:
    if shapes_only:
        return "sizes and memory are real, values are not kept"
    return "real numbers, real errors, memory counted per GPU"


def _cards(devices: list[torch.device]) -> str:
    """ "NVIDIA H200, 16.00 GiB each"; several kinds are listed one by one."""
    cards = [torch.cuda.get_device_properties(d) for d in devices]
    said = [f"{card.name}, {card.total_memory / 2**30:.2f} GiB" for card in cards]
    if len(set(said)) == 1:
        return said[0] + (" each" if len(said) > 1 else "")
    return "; ".join(said)


def renew_gpus() -> None:
    """In a new process: its virtual GPUs start empty, as a process's part of real ones does.

    A forked process inherits its parent's with all that is on them. What the parent had there is on the CPU here.
    """
    inherited = active_machine()
    if inherited is not None and inherited.is_inherited:
        virtual_gpus(**inherited.settings()).start()
        remove(inherited)


def is_virtual() -> bool:
    """True if the GPUs that answer now are virtual ones."""
    return active_machine() is not None


def modelled_timeline():
    """A recorder of the virtual GPUs' modelled clock (see `helpers.measure.timeline`); None where real GPUs answer."""
    return record_timeline() if is_virtual() else None


def modelled_gpus(count: int, kind: str, memory: int | str | None = None, links=None) -> virtual_gpus:
    """Virtual GPUs in shapes only for a `with` block, whatever GPUs answer around it: to compare kinds of GPUs."""
    return virtual_gpus(count, kind=kind, memory=memory, links=links, shapes_only=True, honour_visible_devices=False)


def block_address(tensor: torch.Tensor) -> int | None:
    """The address under which memory snapshots know a strided GPU tensor; None if it takes no memory there.

    A virtual GPU's addresses are its own: `data_ptr()` is that of the CPU's memory where the numbers lie.
    """
    return virtual_address(tensor) if is_virtual() else tensor.untyped_storage().data_ptr()


def describe_machine() -> str:
    """The machine as a text: its GPUs, their memory, and the links between them as `nvidia-smi topo -m` draws them."""
    count = torch.cuda.device_count()
    if count == 0:
        return "no GPU: call use_gpus(4) to get virtual ones"
    cards = [torch.cuda.get_device_properties(i) for i in range(count)]
    lines = [
        f"cuda:{i}  {card.name}, {card.total_memory / 2**30:.2f} GiB, {card.multi_processor_count} multiprocessors, "
        f"compute capability {card.major}.{card.minor}"
        for i, card in enumerate(cards)
    ]
    return "\n".join([*lines, "", _links()])


def _links() -> str:
    """Of all cards, those that CUDA_VISIBLE_DEVICES hides as well: nvidia-smi does not ask it."""
    machine = active_machine()
    if machine is not None:
        return machine.topology.drawn()
    import subprocess

    try:
        return subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30).stdout.rstrip()
    except (OSError, subprocess.TimeoutExpired):
        return "nvidia-smi topo -m did not answer: the links between these GPUs are not known"


__all__ = ["describe_machine", "is_virtual", "use_gpus"]
