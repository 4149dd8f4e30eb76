"""Whether all ranks of a group are in the same collective. If not, each of them is told what every rank called.

Before a collective begins, the ranks tell each other the time (`collectives`), and with it a number for what they are
about to do. NCCL compares nothing: it hangs, or it mixes up the bytes. Gloo ends the process, or says that a
connection was closed.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from virtual_gpus.dispatch.call import OpCall

_NOT_THE_PROGRAM = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep)
_WORDS = 400  # bytes of what a rank says of itself
_SAME_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
_counts: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


class CollectiveMismatch(getattr(torch.distributed, "DistBackendError", RuntimeError)):  # type: ignore[misc]
    """Ranks of a group called different collectives, or the same one with other sizes, dtypes or roots."""

    __module__ = "virtual_gpus.testing"  # where programs find it


def purpose(call: OpCall | None, kind: str, nbytes: int) -> str:
    """What all ranks must have in common, in words: the kind, the dtypes, the bytes where NCCL counts them, the root.

    nbytes: of the larger side.
    """
    if call is None:
        return kind
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in call.tensors})
    words = f"{kind} of {' and '.join(dtypes)}"
    if kind in _SAME_SIZE:
        words += f", {nbytes:,} bytes"
    return words + (f", root {call['root_rank']}" if "root_rank" in call.op.names else "")


def number(words: str) -> float:
    """A number for words, the same in every process. A float64 holds it exactly."""
    return float(int.from_bytes(hashlib.blake2b(words.encode(), digest_size=6).digest(), "little"))


def counted(group: object) -> int:
    """How many collectives of GPU tensors this process has begun in a group, this one included."""
    _counts[group] = count = _counts.get(group, 0) + 1
    return count


def mismatch(group: Any, words: str, told: Callable[[torch.Tensor], list[torch.Tensor]]) -> CollectiveMismatch:
    """The error of every rank. told: exchanges tensors of bytes (N,), and returns those of all ranks in order."""
    mine = f"{words}, at {_line()}".encode()[:_WORDS].ljust(_WORDS)
    all_told = told(torch.tensor(list(mine), dtype=torch.uint8, device="cpu"))
    lines = [bytes(each.tolist()).decode(errors="replace").rstrip() for each in all_told]
    ranks = torch.distributed.get_process_group_ranks(group)
    whole = group is torch.distributed.group.WORLD
    name = "the default process group" if whole else f"the process group of ranks {ranks}"
    return CollectiveMismatch(
        f"The ranks do not agree on collective number {_counts[group]} of {name}:\n"
        + "\n".join(f"  rank {rank}: {line}" for rank, line in zip(ranks, lines, strict=True))
        + "\nNCCL would hang here, or mix up the numbers."
    )


def _line() -> str:
    """The program's line: the innermost one outside PyTorch and this package."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    code = linecache.getline(file, line, frame.f_globals).strip()
    return f"{os.path.basename(file)}:{line}" + (f": {code}" if code else "")
