"""One rank of many: this process is one rank of a job whose other ranks do not exist.

    with virtual_gpus(8, kind="H100", shapes_only=True, rank=3, world_size=1024):
        train()  # a program for torchrun, as it is: rank 3 of 1,024, on cuda:3 of the first of 128 hosts

    python -m virtual_gpus --gpus 8 --kind H100 --shapes-only --as-rank 3 --of 1024 train.py

The environment has the variables of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR,
MASTER_PORT and some more. They are as they were when the GPUs go off. `torch.distributed.init_process_group`, with any
backend and any way to meet, makes PyTorch's "fake" process group of that size (torch/testing/_internal/distributed/
fake_pg.py), which sends nothing. The program uses the GPU of its LOCAL_RANK. The others of its host stay empty.

Memory and modelled time are those of this rank. All ranks are taken to reach each collective at the same moment.

Without `shapes_only`, every other rank is taken to hold the values that this rank holds: see the known limits.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from virtual_gpus.dispatch.operators import OpCall
from virtual_gpus.errors import NotModelled
from virtual_gpus.features.distributed.groups import is_boxed, place_of_rank, refuse
from virtual_gpus.features.nccl.traffic import TRAFFIC, Collective, kind_of
from virtual_gpus.machine import VirtualMachine, active, get_machine
from virtual_gpus.patches.table import Patch, around, wrapped
from virtual_gpus.settings import Settings
from virtual_gpus.threads import OfEachThread, below

# The operation of a process group's method that runs; C++ before PyTorch 2.14 does not tell
_running: OfEachThread[Any] = OfEachThread(None)


def runs_alone(machine: VirtualMachine | None) -> bool:
    """True if this process is one rank of many: no other process answers, whatever group the program makes."""
    return machine is not None and machine.settings.rank is not None


def check_settings(settings: Settings) -> None:
    if settings.rank is None and settings.world_size is None:
        return
    for name, value in (("rank", settings.rank), ("world_size", settings.world_size)):
        refuse(isinstance(value, bool) or not isinstance(value, int), "integers", name=name, value=value)
    rank, world_size = cast(int, settings.rank), cast(int, settings.world_size)
    count, hosts = settings.count, settings.hosts
    shown = {"rank": rank, "ranks": world_size, "last": world_size - 1, "count": count, "hosts": world_size // count}
    refuse(world_size < 1 or world_size % count != 0, "world_size", **shown)
    refuse(not 0 <= rank < world_size, "rank", **shown)
    refuse(hosts != 1, "hosts", given=hosts, **shown)


def start(machine: VirtualMachine) -> None:
    """One rank of many has the environment of torchrun, and says what its numbers are not, if it has any."""
    if runs_alone(machine):
        settings = machine.settings
        machine.variables |= _variables(settings)
        if not settings.shapes_only:
            print(
                f"virtual GPUs: rank {settings.rank} of {settings.world_size} runs alone. "
                "Its numbers are not those of the job, because the others are taken to hold what it holds.",
                flush=True,
            )


def stop(machine: VirtualMachine) -> None:
    """End the groups of one rank of many: its machine goes off, and no other process waits for them."""
    if not runs_alone(machine) or machine is not active() or not torch.distributed.is_available():
        return
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if "torch.distributed.tensor._api" not in sys.modules:
        return
    # DTensor keeps answers by the mesh, which compares equal for the next rank, whose answers are others.
    importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
    sys.modules["torch.distributed.tensor._redistribute"]._gen_transform_infos.cache_clear()
    vars(sys.modules["torch.distributed.tensor._random"])["_rng_tracker"] = None


def _variables(settings: Settings) -> dict[str, str]:
    """The environment that torchrun gives to the rank of `settings`."""
    assert settings.rank is not None and settings.world_size is not None
    host, slot = place_of_rank(settings, settings.rank)
    return {
        "RANK": str(settings.rank), "WORLD_SIZE": str(settings.world_size),
        "LOCAL_RANK": str(slot), "LOCAL_WORLD_SIZE": str(settings.count),
        "GROUP_RANK": str(host), "GROUP_WORLD_SIZE": str(settings.world_size // settings.count),
        "ROLE_NAME": "default", "ROLE_RANK": str(settings.rank), "ROLE_WORLD_SIZE": str(settings.world_size),
        "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip


# ---- groups that exist only here, and what they refuse ---------------------------------------------------------------


def require_its_rank(rank: int, ranks: int) -> None:
    """Refuses the whole program's group for another rank, or for another number of them."""
    settings = get_machine().settings
    own = settings.rank, settings.world_size
    refuse((rank, ranks) != own, "another rank", rank=rank, ranks=ranks, own=own)


def _rendezvous(function: Callable[..., Any], url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Any:
    """How the ranks meet. One rank of many meets no other, wherever it was told to."""
    if not runs_alone(active()):
        yield from function(url, rank, world_size, **kwargs)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    settings = get_machine().settings
    yield FakeStore(), settings.rank if rank < 0 else rank, settings.world_size if world_size < 0 else world_size


def _asker() -> str:
    """The module that called the patch (`around`) that calls this function."""
    return sys._getframe(3).f_globals.get("__name__", "")


def _get_backend(function: Callable[..., Any], group: Any = None) -> str:
    """`get_backend`. torch.distributed.pipelining leaves out what needs another rank's answer if it is "fake".

    It does so for a rank that is alone, and where tensors have no values, because it asks for the answer's value.
    """
    machine = get_machine()
    has_no_answer = runs_alone(machine) or machine.shapes_only
    return "fake" if has_no_answer and _asker().startswith("torch.distributed.pipelining") else function(group)


def _gather_object(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """One rank of many gets its own object from everyone. A checkpoint is planned with what every rank holds."""
    if runs_alone(active()) and _asker().startswith("torch.distributed.checkpoint"):
        settings = get_machine().settings
        raise NotModelled(
            "torch.distributed.checkpoint needs to know what every rank holds, but only rank "
            f"{settings.rank} of {settings.world_size} exists. Leave the checkpoint out of this run."
        )
    return function(*args, **kwargs)


def _objects_from_another(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function that receives objects from the rank `src`. One rank of many cannot know what they would be."""
    if runs_alone(active()):
        settings, given = get_machine().settings, inspect.signature(function).bind(*args, **kwargs)
        given.apply_defaults()
        group, source, in_group = (given.arguments[name] for name in ("group", "src", "group_src"))
        if in_group is not None:
            source = torch.distributed.get_process_group_ranks(group)[in_group]
        elif source is None and function.__name__ != "recv_object_list":
            source = 0
        if source != settings.rank:
            whose = "another rank" if source is None else f"rank {source}"
            raise NotModelled(
                f"torch.distributed.{function.__name__} would receive objects from {whose}, but only rank "
                f"{settings.rank} of {settings.world_size} exists, so they are not known. "
                + (f"Run as that rank (rank={source}), or give" if source is not None else "Give")
                + " the program these objects in another way. "
                "A stage of a pipeline needs its input_args and output_args."
            )
    return function(*args, **kwargs)


# ---- what arrives from ranks that do not exist: the operators of torch/csrc/distributed/c10d/Ops.cpp ----------------


def fill(call: OpCall) -> bool:
    """Give the tensors of a collective the values that follow from this rank's own. False if other ranks send them."""
    name = call.op.base
    if not runs_alone(active()) or call.func.namespace != "c10d" or not kind_of(name):
        return False
    group = next(torch.distributed.ProcessGroup.unbox(v) for v in call.args if is_boxed(v, "ProcessGroup"))
    with below(), torch.no_grad():
        _fill(TRAFFIC[kind_of(name)], call.args, group.rank(), group.size())
    return True


@contextmanager
def reducing(operation: Any) -> Iterator[None]:
    """While a method of a process group runs: the operation that it was given, a ReduceOp or None."""
    before, _running.value = _running.value, operation
    try:
        yield
    finally:
        _running.value = before


def _fill(row: Collective, args: Sequence[Any], rank: int, ranks: int) -> None:
    """row: that of a message, which leaves tensors as they are, has nothing of what is asked here."""
    if row.whole == (0, 1):
        outputs, inputs = (_parts(args, side, ranks) for side in row.whole)
        for output in outputs:
            _copy(output, inputs[rank])
        return
    for output, own in zip(_list(args[0]), _list(args[1]), strict=False) if row.whole else ():  # empty beside the root
        if row.whole == (0,):
            for part in output.view(-1).chunk(ranks) if isinstance(output, torch.Tensor) else output:
                _copy(part, own)
        else:
            _copy(output, (own.view(-1).chunk(ranks) if isinstance(own, torch.Tensor) else own)[rank])
    for tensor in _list(args[0]) if row.reduces else ():
        _reduce(tensor, args, ranks)


def _reduce(tensor: torch.Tensor, args: Sequence[Any], ranks: int) -> None:
    kinds = torch.distributed.ReduceOp
    boxed = next(value for value in args if is_boxed(value, "ReduceOp"))
    operation: Any = kinds.unbox(boxed) if hasattr(kinds, "unbox") else _running.value
    if operation is None or operation == kinds.SUM:
        tensor.mul_(True if tensor.dtype is torch.bool else ranks)  # of booleans, NCCL finds the largest
    elif operation == kinds.PREMUL_SUM:
        tensor.mul_(operation.__getstate__()[1] * ranks)


def _parts(args: Sequence[Any], side: int, ranks: int) -> Sequence[torch.Tensor]:
    """What goes to each rank, or comes from it: a list, or parts of one tensor, whose sizes are arguments too."""
    if not isinstance(args[side], torch.Tensor):
        return args[side]
    return args[side].split(list(args[side + 3])) if args[side + 3] else args[side].chunk(ranks)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """As many of the elements as both have: the ranks may send parts of different sizes."""
    count = min(target.numel(), source.numel())
    flat = target.detach().as_strided((target.numel(),), (1,), target.storage_offset())
    flat[:count].copy_(source.detach().reshape(-1)[:count])


def _list(value: Any) -> Iterable[Any]:
    return [value] if isinstance(value, torch.Tensor) else value


def patches() -> list[Patch]:
    if not torch.distributed.is_available():
        return []
    c10d = torch.distributed.distributed_c10d
    rows = wrapped(c10d, rendezvous=_rendezvous)
    rows += wrapped(torch.distributed, get_backend=_get_backend, gather_object=_gather_object)
    for name in ("broadcast_object_list", "scatter_object_list", "recv_object_list"):
        receiving = around(getattr(c10d, name), _objects_from_another)
        rows += [(owner, name, receiving) for owner in (c10d, torch.distributed)]
    return rows
