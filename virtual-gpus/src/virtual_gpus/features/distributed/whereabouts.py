"""Where the ranks of a program are: which of them waits in which collective, and which has left.

A rank that has waited for a second says so in the store of torch.distributed, with the number of collectives that it
has begun in each group. If ranks wait for each other, in several groups, none of them will ever go on, and each is
told. If a rank waits in vain for another reason, gloo's error gets a note that says where the others are.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from virtual_gpus.features.distributed.agreement import CollectiveMismatch, begun, location
from virtual_gpus.threads import OWN_THREAD

_ADVICE = (
    "Use the groups in the same order in all ranks. NCCL asks for it, and hangs if a rank needs the numbers of one "
    "collective before it calls the next."
)
_WAITS = "virtual GPUs: where rank {} waits"
_NEVER = "virtual GPUs: why rank {} waits for ever"
_LAST = "virtual GPUs: where rank {} was"
_SAYS_SO_AFTER_S = 1.0  # real time
_LOOKS_AGAIN_AFTER_S = 5.0  # at most
_OTHERS_ANSWER_IN_S = 0.5  # those whose time limit ends a little later, or who hear a little later that a rank is gone
_ASKS_AGAIN_AFTER_S = 0.01
_connections: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by the program's store


class Wait(NamedTuple):
    """A rank that waits for the others of a group, in that group's collective `number`.

    location: the same in words. group: its name. ranks: those of the group. begun: see `agreement.begun`.
    """

    location: str
    group: str
    number: int
    ranks: list[int]
    begun: dict[str, int]

    def lacks(self, others: Mapping[int, Wait]) -> list[int]:
        """Those who have not come to this collective because they wait elsewhere."""
        here = [rank for rank in self.ranks if rank in others]
        return [rank for rank in here if others[rank].begun.get(self.group, 0) < self.number]


def stuck(waits: Mapping[int, Wait]) -> dict[int, Wait]:
    """Of the ranks that wait, those that need one another and so will never go on.

    A rank that does not wait may come to any collective, and so may a rank whose collective all others can reach.
    """
    left = dict(waits)
    while free := [rank for rank, wait in left.items() if not wait.lacks(left)]:
        left = {rank: wait for rank, wait in left.items() if rank not in free}
    return left


def connect(group: Any) -> None:
    """Before each collective: connect to the store while its process is there. Later, connecting would take minutes."""
    if not _is_made_by_hand(group):
        store = torch.distributed.distributed_c10d._get_default_store()
        if store not in _connections:
            _connections[store] = store.clone()


def wait_for_all(work: Any, group: Any, words: str) -> None:
    """Wait for the message with which the ranks of a group begin a collective.

    Raises CollectiveMismatch if ranks wait for each other. Their groups are of no use then: messages are on their way.
    """
    if _is_done(work, _SAYS_SO_AFTER_S):
        return
    if _is_made_by_hand(group) or _may_others_come():
        work.wait()
        return
    ranks = torch.distributed.get_process_group_ranks(group)
    mine = Wait(location(words, group), group.group_name, begun()[group.group_name], ranks, begun())
    _report(_WAITS, json.dumps(mine))
    pause = _SAYS_SO_AFTER_S / 4
    try:
        while not (why := _never(mine)) and not _is_done(work, pause):
            pause = min(2 * pause, _LOOKS_AGAIN_AFTER_S)
    except RuntimeError:  # another rank is gone
        why = _never(mine)
        if not why:
            raise
    finally:
        _report(_WAITS, "")
    if why:
        _report(_NEVER, "")
        raise CollectiveMismatch(why)


def _is_made_by_hand(group: Any) -> bool:
    return group not in torch.distributed.distributed_c10d._world.pg_group_ranks


def _may_others_come() -> bool:
    """Whether another thread of this process might call what other ranks wait for. Then nothing is known of this one.

    Threads of C++ that have run Python are dummies here. They belong to autograd, whose backward pass waits as well.
    Those of DataLoader copy batches into pinned memory.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    others = [thread for thread in others if not isinstance(thread, threading._DummyThread)]
    return any(not thread.name.startswith(OWN_THREAD) and "_pin_memory_loop" not in thread.name for thread in others)


def _is_done(work: Any, seconds: float) -> bool:
    """Wait for at most so long. Raises gloo's error if the work has failed."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:  # that of the time, or gloo's
        if not work.is_completed():
            return False
        work.wait()
    return True


def _never(mine: Wait) -> str:
    """Why this rank waits for ever. Empty if others may still come, or if the process that had the store is gone."""
    here = torch.distributed.get_rank()
    with contextlib.suppress(RuntimeError):
        reason = _reported(_NEVER, here)
        if mine.location in reason:  # another rank saw it first
            return reason
        reports = {rank: _reported(_WAITS, rank) for rank in range(torch.distributed.get_world_size())}
        circle = stuck({rank: Wait(*json.loads(text)) for rank, text in reports.items() if text} | {here: mine})
        if here in circle:
            lines = [f"  rank {rank} waits for {_ranks(wait.lacks(circle))} in {wait.location}"
                     for rank, wait in circle.items()]  # fmt: skip
            reason = "\n".join(["Ranks wait for each other in several process groups:", *lines, _ADVICE])
            for rank in circle:
                _store().set(_NEVER.format(rank), reason)
            return reason
    return ""


def tell_who_is_missing(error: BaseException, group: Any, words: str) -> None:
    """Add to gloo's error in which collective this rank has waited, and where the others say that they are."""
    here, ranks = torch.distributed.get_rank(), torch.distributed.get_process_group_ranks(group)
    mine = f"waited in {location(words, group)}"
    said: dict[int, str] = {}
    ends = time.monotonic() + _OTHERS_ANSWER_IN_S
    with contextlib.suppress(RuntimeError):
        report_location(mine)
        others = [rank for rank in ranks if rank != here]
        while not all(said.get(rank) for rank in others) and time.monotonic() < ends:
            said = {rank: _reported(_LAST, rank) for rank in others}
            time.sleep(_ASKS_AGAIN_AFTER_S)
    unknown = "is not in a collective that waits: it computes, has ended, or waits for something else"
    lines = [f"  rank {rank} {said.get(rank) or unknown}" for rank in ranks if rank != here]
    error.add_note("\n".join([f"Rank {here} {mine}.", *lines]))


def report_location(words: str) -> None:
    """Tell the other ranks where this one was last. Without the process that had the store, nothing happens."""
    _report(_LAST, words)


def _report(key: str, words: str) -> None:
    with contextlib.suppress(RuntimeError):  # DistNetworkError: the process that had the store is gone
        _store().set(key.format(torch.distributed.get_rank()), words)


def _reported(key: str, rank: int) -> str:
    """What a rank has said. Empty if it said nothing."""
    key = key.format(rank)
    return _store().get(key).decode() if _store().check([key]) else ""


def _store() -> Any:
    """The store of torch.distributed, with a connection of its own: another thread may wait in the program's."""
    store = torch.distributed.distributed_c10d._get_default_store()
    return _connections.get(store, store)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
