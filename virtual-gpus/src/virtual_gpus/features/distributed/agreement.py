"""Whether all ranks of a group are in the same collective. If not, each of them is told what every rank called.

Before a collective begins, the ranks tell each other the time (`collectives`), and with it a number for what they are
about to do. NCCL compares nothing: it hangs, or it mixes up the bytes. Gloo ends the process, or says that a
connection was closed. If a rank does not come at all, `whereabouts` says who waits where.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from virtual_gpus.dispatch.operators import OpCall
from virtual_gpus.entrance import program_line, quoted_line
from virtual_gpus.features.distributed.groups import described, state_of, states
from virtual_gpus.features.nccl.traffic import COLLECTIVES

_WORDS = 400  # bytes of what a rank says of itself


class CollectiveMismatch(getattr(torch.distributed, "DistBackendError", RuntimeError)):  # type: ignore[misc]
    """Ranks of a group called different collectives, or the same one with other sizes, dtypes or roots; or ranks wait
    for each other in several groups."""

    __module__ = "virtual_gpus.testing"  # where programs find it


def purpose(call: OpCall, kind: str, nbytes: int, group: Any) -> str:
    """What ranks must share, in words: kind, dtypes, root, bytes if NCCL counts them. nbytes: of the larger side."""
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in call.tensors})
    words = f"{kind} of {' and '.join(dtypes)}"
    row = COLLECTIVES[kind]
    if not row.at_root and row.whole != (0, 1):  # else ranks may have different numbers of bytes
        words += f", {nbytes:,} bytes"
    root = next((call[name] for name in ("root_rank", "src") if name in call.op.positions), None)
    return words if root is None else f"{words}, root {torch.distributed.get_process_group_ranks(group)[root]}"


def number(words: str) -> float:
    """A number for words, the same in every process. A float64 holds it exactly."""
    return float(int.from_bytes(hashlib.blake2b(words.encode(), digest_size=6).digest(), "little"))


def mismatch(group: Any, words: str, exchange: Callable[[torch.Tensor], list[torch.Tensor]]) -> CollectiveMismatch:
    """The error of every rank. exchange: sends tensors of bytes (N,), and returns those of all ranks in order."""
    mine = f"{words}, at {quoted_line(*program_line())}".encode()[:_WORDS].ljust(_WORDS)
    rows = exchange(torch.tensor(list(mine), dtype=torch.uint8, device="cpu"))
    lines = [bytes(row.tolist()).decode(errors="replace").rstrip() for row in rows]
    ranks = torch.distributed.get_process_group_ranks(group)
    return CollectiveMismatch(
        f"The ranks do not agree on collective number {state_of(group).begun} of {_name(group)}:\n"
        + "\n".join(f"  rank {rank}: {line}" for rank, line in zip(ranks, lines, strict=True))
        + "\nNCCL would hang here, or mix up the numbers."
    )


def begun() -> dict[str, int]:
    """By the name of each group that is there, how many collectives of GPU tensors this process has begun in it."""
    there: Any = torch.distributed.distributed_c10d._world.pg_group_ranks
    return {group.group_name: state.begun for group, state in states.items() if state.begun and there.get(group)}


def location(words: str, group: Any) -> str:
    """Where this process is: in which collective of a group, and in which line of the program."""
    return f"{words}, number {state_of(group).begun} of {_name(group)}, at {quoted_line(*program_line())}"


def _name(group: Any) -> str:
    if group is torch.distributed.group.WORLD:
        return "the default process group"
    ranks = torch.distributed.get_process_group_ranks(group)
    return f"process group {described(group) or group.group_name} of ranks {ranks}"
