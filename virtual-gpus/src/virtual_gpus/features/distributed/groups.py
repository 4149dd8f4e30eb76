"""Process groups: which backend a program asked for, whether other processes answer, and which links they use."""

import builtins
import os
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch

from virtual_gpus import figures
from virtual_gpus.features.nccl.traffic import GroupLinks, links_of_group
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.settings import Settings

_REFUSALS = figures.beside(__file__)["refusals"]
states: weakref.WeakKeyDictionary[Any, "GroupState"] = weakref.WeakKeyDictionary()


class GroupState:
    """What this process knows of a group. begun: collectives so far. coalescing: the works of an open block."""

    backends: dict[str, str] | None = None  # as asked for, {"cuda": "nccl"}; gloo carries the messages of all of them
    gloo_group: torch.distributed.ProcessGroup | None = None  # for GPU tensors, where gloo carries CPU tensors too
    first_gpu: VirtualGPU | None = None  # that this process used in the group: NCCL's barriers go there
    links: tuple[VirtualGPU, GroupLinks] | None = None
    begun: int = 0
    coalescing: list[Any] | None = None


def state_of(group: object) -> GroupState:
    """The state of a group, which begins when it is first asked for and goes with the group."""
    return states.get(group) or states.setdefault(group, GroupState())


def is_boxed(value: Any, kind: str) -> bool:
    """True for an argument of a c10d operator that is a "ProcessGroup" or a "ReduceOp"."""
    return isinstance(value, torch.ScriptObject) and cast(Any, value)._type().name() == kind


def is_nccl(group: object) -> bool:
    """True for a process group whose backend for GPUs is to be NCCL."""
    return (state_of(group).backends or {}).get("cuda", "").startswith("nccl")


def require_backend(group: object, kind: str) -> None:
    """Raises PyTorch's error if a group has no backend for tensors on "cpu" or "cuda": NCCL takes no CPU tensors."""
    devices = state_of(group).backends
    refuse(devices is not None and kind not in devices, "backend", kind=kind)


def refuse(wrong: bool, what: str, **shown: object) -> None:
    """Raises the error `what` of the figures, with what it shows, if something is wrong."""
    if wrong:
        kind, _, words = _REFUSALS[what].partition(": ")
        raise getattr(builtins, kind)(words.format(**shown))


def nccl_error(file: str, kind: str, meaning: str, last: str) -> Exception:
    """NCCL's error in PyTorch's words (NCCLUtils.cpp). kind: "usage" or "argument", what is invalid. last: its own."""
    return torch.distributed.DistBackendError(
        f"NCCL error in: torch/csrc/distributed/c10d/{file}, invalid {kind} (run with NCCL_DEBUG=WARN for details), "
        f"NCCL version {'.'.join(map(str, torch.cuda.nccl.version()))}\n"
        f"ncclInvalid{kind.capitalize()}: {meaning}\nLast error:\n{last}"
    )


def gloo_group(group: torch.distributed.ProcessGroup) -> torch.distributed.ProcessGroup:
    """The group that gloo has for a group's GPU tensors.

    Collectives of GPU tensors and of CPU tensors have different backends on a real machine, so different threads may
    issue them, as a checkpoint does that is saved while training goes on. One group of gloo would mix them up.
    """
    return state_of(group).gloo_group or group


def is_fake_group(group: torch.distributed.ProcessGroup) -> bool:
    """True if no other process answers in a group: that of PyTorch's backend "fake", whose ranks are not there."""
    fake = torch._C._distributed_c10d.FakeProcessGroup
    return any(isinstance(group._get_backend(device), fake) for device in group._device_types[:1])


def fake_links(gpu: VirtualGPU, group: torch.distributed.ProcessGroup) -> GroupLinks:
    """The links of a group in which this process is alone. Its members are counted once, not at every collective."""
    known = state_of(group).links
    if known is None or known[0].machine is not gpu.machine:
        ranks = torch.distributed.get_process_group_ranks(group)
        members = [place_of_rank(gpu.machine.settings, rank) for rank in ranks]
        known = state_of(group).links = gpu, links_between(gpu, group, members)
    return known[1]


def links_between(gpu: VirtualGPU, group: Any, members: Sequence[tuple[int, int]]) -> GroupLinks:
    """The links of a group of these members, (host, slot) of each in the order of ranks."""
    settings = gpu.machine.settings
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", _world_size(group)))  # those that torchrun started
    return links_of_group(gpu.machine.topology, members, max(1, min(settings.count, ranks) // settings.hosts))


def _world_size(group: torch.distributed.ProcessGroup) -> int:
    """The ranks of the program. A group that was made without `init_process_group` has them all."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else group.size()


def place_of_rank(settings: Settings, rank: int) -> tuple[int, int]:
    """(host, slot) of a rank of a job of many: ranks fill the hosts in order, as torchrun does it."""
    return divmod(rank, settings.count // settings.hosts)


def host_and_slot(gpu: VirtualGPU) -> tuple[int, int]:
    """(host, slot): torchrun numbers the hosts; a described topology may have several as well."""
    host = int(os.environ.get("GROUP_RANK", 0)) * gpu.machine.settings.hosts + gpu.machine.topology.hosts[gpu.slot]
    return host, gpu.slot


def row_of(group: torch.distributed.ProcessGroup, kind: str) -> str:
    """The row of a timeline for one kind of collective: "all-gather", or "all-gather, tp" in a dimension of a mesh."""
    kind = kind.replace("_", "-")
    if group.size() == _world_size(group):
        return kind
    return f"{kind}, {described(group) or f'group {group.group_name}'}"


def described(group: torch.distributed.ProcessGroup) -> str:
    """What a program calls a group: the name of a mesh's dimension, or `group_desc`. Empty if it has no such name."""
    return group.group_desc.removeprefix("mesh_").removeprefix("undefined")
