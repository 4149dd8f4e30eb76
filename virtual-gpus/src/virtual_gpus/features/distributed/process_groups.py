"""Process groups under the name "nccl": NCCL cannot run without GPUs, so gloo carries their messages.

A group whose backend for GPUs is "nccl" is made with gloo, and remembers what was asked for. To a program it is a group
of NCCL: `get_backend` and the devices of the group say so. `nccl` has the rules for its collectives.

As one rank of many (`one_rank`), every group is PyTorch's "fake" one, and remembers what was asked for.
"""

import atexit
import contextlib
import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from virtual_gpus.features.cuda.devices import gpu_at
from virtual_gpus.features.distributed.collectives import charge_barrier
from virtual_gpus.features.distributed.groups import gloo_group, is_nccl, require_backend, state_of, states
from virtual_gpus.features.distributed.messages import until_times_have_arrived
from virtual_gpus.features.distributed.one_rank import require_its_rank, runs_alone
from virtual_gpus.features.distributed.whereabouts import report_location
from virtual_gpus.machine import VirtualGPU, active, get_machine
from virtual_gpus.patches.table import Patch, around, wrapped
from virtual_gpus.settings import INSTALLED
from virtual_gpus.versions import Version

_GLOO_FINISHES_IN_S = 1.0  # it needs microseconds, once the lock is free and a core too
_LOOK_AGAIN_AFTER_S = 0.01
_GLOO_SPLITS: Version = (2, 14)  # torch/csrc/distributed/c10d/ProcessGroupGloo.cpp


@functools.cache
def _say_once() -> None:
    print('virtual GPUs: backend "nccl" needs real GPUs; "gloo" answers instead', flush=True)


def _new_process_group_helper(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """PyTorch's function that makes every group, with gloo in the place of NCCL.

    init_process_group and new_group call it. They are not replaced themselves, since other modules import them by name.
    """
    c10d = torch.distributed.distributed_c10d
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    asked, config = given["backend"], c10d.BackendConfig(c10d.Backend(given["backend"]))
    devices, gpu = dict(config.get_device_backend_map()), given.pop("device_id", None)  # NCCL's; gloo refuses it
    is_nccl, is_alone = any(str(name).startswith("nccl") for name in devices.values()), runs_alone(active())
    if is_nccl or is_alone:
        given.pop("backend_options", None)
        given["backend"] = "fake" if is_alone else "gloo"
    if is_alone and not given["global_ranks_in_group"]:
        require_its_rank(given["group_rank"], given["group_size"])
    # In DETAIL, PyTorch wraps gloo's group to compare the ranks' collectives, as `agreement` does in any case. DDP's
    # logger takes the wrapper for gloo's group itself: the process dies (2.15; without this package, too).
    if is_nccl and torch.distributed.get_debug_level() == torch.distributed.DebugLevel.DETAIL:
        torch.distributed.set_debug_level(torch.distributed.DebugLevel.INFO)
    group, store = function(**given)
    if not isinstance(group, c10d.ProcessGroup):  # this rank is not in it
        return group, store
    state_of(group).backends = devices
    if is_nccl or is_alone:  # to a program, the group is what it asked for
        c10d._world.pg_map[group], c10d._world.pg_backend_config[group] = (c10d.Backend(asked), store), str(config)
        group.bound_device_id = gpu
    if not is_alone:
        _rest_at_exit()
    if is_nccl and not is_alone:
        _complete(group, function, given, "cpu" in devices)
    return group, store


def _complete(group: Any, function: Callable[..., Any], given: dict[str, Any], has_both: bool) -> None:
    """A group of gloo's that stands for NCCL's gets another one if it has CPU tensors as well; one process says so."""
    if has_both:
        hidden = function(**given | {"group_name": f"{given['group_name']} of GPUs"})
        state_of(group).gloo_group = _hidden(torch.distributed.distributed_c10d, *hidden)
    if (torch.distributed.get_rank() if given["global_ranks_in_group"] else given["group_rank"]) == 0:
        _say_once()


def _hidden(c10d: Any, group: Any, store: Any) -> Any:
    """A group that is found by its name only, in C++: not among the program's groups."""
    for groups in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_backend_config):
        del groups[group]
    tag = c10d._world.pg_to_tag.pop(group)
    for name in {tag, ""}:
        if group in c10d._world.tags_to_pg.get(name, ()):
            c10d._world.tags_to_pg[name].remove(group)
    return group


def _destroy(function: Callable[..., Any], group: Any = None) -> None:
    """Ends the hidden groups as well, once gloo's threads rest.

    If DDP's reducer, which has Python's lock, drops the last reference to the group while a thread needs it, it hangs.
    """
    all_of_them = group in (None, torch.distributed.group.WORLD)
    if not runs_alone(active()):
        _until_threads_rest()
        if all_of_them and torch.distributed.is_initialized():
            report_location("has left: it ended its process group")
    ended = [state for other, state in states.items() if all_of_them or other is group]
    function(group)
    for state in ended:
        hidden, state.gloo_group = state.gloo_group, None
        if hidden is not None:
            hidden.shutdown()
            torch._C._distributed_c10d._unregister_process_group(hidden.group_name)


def _until_threads_rest() -> None:
    """Let the times of messages arrive. Then sleep until, at two looks in a row, no other thread is runnable.

    A gloo thread that has just done a collective drops the settings of the thread that asked for it, a dispatch mode
    among them, and needs Python's lock for that. Sleeping gives the lock away.
    """
    until_times_have_arrived()
    threads, end, quiet = Path("/proc/self/task"), time.monotonic() + _GLOO_FINISHES_IN_S, 0
    if not threads.is_dir():  # not on Linux
        time.sleep(0.1)
        return
    me = str(threading.get_native_id())
    while quiet < 2 and time.monotonic() < end:
        time.sleep(_LOOK_AGAIN_AFTER_S)
        quiet += 1
        for thread in threads.iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                if thread.name != me and (thread / "stat").read_text().rpartition(")")[2].split()[0] in "RD":
                    quiet = 0


@functools.cache
def _rest_at_exit() -> None:
    """Let gloo's threads rest before Python ends. A thread that then asks for its lock is ended by Python in the midst
    of C++, which aborts the process ("terminate called without an active exception")."""
    atexit.register(_until_threads_rest)


def _splitting(function: Callable[..., Any], *, split_ranks: Any, timeout: Any, group_desc: Any, **_: Any) -> Any:
    """DeviceMesh splits groups that are bound to a GPU. Gloo and "fake" can be split since `_GLOO_SPLITS`."""
    groups = [torch.distributed.new_group(ranks, timeout=timeout, group_desc=group_desc) for ranks in split_ranks]
    return next((group for group in groups if isinstance(group, torch.distributed.ProcessGroup)), None)


def _device_types(function: Callable[..., Any], group: torch.distributed.ProcessGroup) -> list[torch.device]:
    """`group._device_types`: object collectives and barriers choose their device by it."""
    devices = state_of(group).backends
    return function(group) if devices is None else [torch.device(name) for name in devices]


def _get_object_coll_device(function: Callable[..., Any], group: Any = None) -> str:
    """The device on which objects travel: the computer's memory if GPU tensors keep no values (shapes_only)."""
    return "cpu" if get_machine().shapes_only else function(group)


def _get_backend(function: Callable[..., Any], group: torch.distributed.ProcessGroup, device: torch.device) -> Any:
    require_backend(group, torch.device(device).type)
    return function(group, device)


def _get_backend_name(function: Callable[..., Any], group: torch.distributed.ProcessGroup) -> str:
    """By which SyncBatchNorm chooses its collective."""
    return "nccl" if is_nccl(group) else function(group)


def _split_group(function: Callable[..., Any], group: torch.distributed.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
    part = function(group, *args, **kwargs)
    state, devices = state_of(group), state_of(group).backends
    if part is not None and devices is not None:
        chosen = kwargs.get("device_types")
        types = set(devices) if chosen is None else {device.type for device in chosen}
        state_of(part).backends = {device: name for device, name in devices.items() if device in types}
    if state.gloo_group is not None:
        other = function(state.gloo_group, *args, **kwargs)
        if part is not None and len(state_of(part).backends or ()) > 1:
            other._set_group_name(f"{part.group_name} of GPUs")
            torch._C._distributed_c10d._register_process_group(other.group_name, other)
            state_of(part).gloo_group = other
    return part


def _barrier(function: Callable[..., Any], group: torch.distributed.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
    """NCCL needs to know the GPU of a barrier; gloo refuses to be told."""
    opts: Any = next((value for value in (*args, *kwargs.values()) if hasattr(value, "device_ids")), None)
    gpu = _gpu_of_barrier(group, opts) if get_machine().gpus else None
    if opts is not None:
        opts.device_ids = list[int]()
        if opts.device is not None and opts.device.type == "cuda" and gpu is not None:
            opts.device = torch.device("cuda", gpu.index)
    if gpu is not None:
        charge_barrier(gpu, group)
    return function(group if gpu is None else gloo_group(group), *args, **kwargs)


def _with_one_thread(raw: Any) -> type:
    """Gloo's groups with one thread for collectives instead of two.

    As a thread ends a collective, it notes the operator's name in a string that both write without a lock
    (`pgStatus_` in ProcessGroupGloo.cpp). A name of 16 characters or more is on the heap, such as those of FSDP's
    operators, and then the process crashes: once in some 30,000 collectives, without virtual GPUs too. One thread is
    enough, since a rank issues the collectives of a group one after the other.
    """

    kind: Any = type(raw)

    class OneThread(kind):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, raw)

        def __call__(cls, store: Any, rank: int, size: int, *options: Any, timeout: Any = None, **others: Any) -> Any:
            if options or timeout is None:
                return raw(store, rank, size, *options, **others)
            given = raw._Options()
            interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
            named = [raw.create_device(interface=name) for name in interfaces if name]
            given._devices, given._threads, given._timeout = named or [raw.create_default_device()], 1, timeout
            for name, value in others.items():
                setattr(given, name, value)
            return raw(store, rank, size, given)

    return OneThread("ProcessGroupGloo", (raw,), {"__module__": raw.__module__, "__doc__": raw.__doc__})


def _gpu_of_barrier(group: Any, opts: Any) -> VirtualGPU:
    """The GPU that was named; else the group's own, the first that it used, or that of the rank, as NCCL chooses."""
    named = getattr(opts, "device", None) or group.bound_device_id
    if named is not None and named.type == "cuda" and named.index is not None:
        return gpu_at(named)
    return state_of(group).first_gpu or gpu_at(torch.distributed.get_rank() % len(get_machine().gpus))


def patches() -> list[Patch]:
    if not torch.distributed.is_available():
        return []
    import torch.distributed.distributed_c10d as c10d

    group = c10d.ProcessGroup
    destroy = around(c10d.destroy_process_group, _destroy)
    rows = wrapped(c10d, _new_process_group_helper, _get_object_coll_device)
    rows += wrapped(group, _get_backend, _get_backend_name, barrier=_barrier, split_group=_split_group)
    # Only NCCL makes a group's communicator out of another's.
    rows.append((c10d, "_get_split_source", lambda *args: None))
    device_types = functools.partial(_device_types, vars(group)["_device_types"].__get__)
    rows.append((group, "_device_types", property(device_types)))
    rows += [(owner, "destroy_process_group", destroy) for owner in (c10d, torch.distributed)]
    rows += [(owner, "is_nccl_available", lambda: True) for owner in (c10d, torch.distributed)]
    if hasattr(c10d, "ProcessGroupGloo"):
        rows.append((c10d, "ProcessGroupGloo", _with_one_thread(c10d.ProcessGroupGloo)))
    if hasattr(torch._C._distributed_c10d, "_hash_tensors"):
        # Object collectives log it if TORCH_DISTRIBUTED_DEBUG is DETAIL. PyTorch's own asks CUDA's driver.
        rows.append((torch._C._distributed_c10d, "_hash_tensors", lambda tensors: 0))
    device_mesh = sys.modules.get("torch.distributed.device_mesh")
    return rows + (wrapped(device_mesh, split_group=_splitting) if INSTALLED < _GLOO_SPLITS else [])
