"""torch.distributed: NCCL cannot run without GPUs, so under virtual GPUs "nccl" means gloo, and says so once."""

from __future__ import annotations

import functools
import inspect
import time

import torch

_said = False
_GLOO_FINISHES_IN_S = 0.1  # it needs microseconds, once the lock is free and a core too


def _is_nccl(backend) -> bool:
    return "nccl" in str(backend).lower()


def _say_once() -> None:
    """One line, from one of the processes."""
    global _said
    if not _said and torch.distributed.get_rank() == 0:
        print('virtual GPUs: backend "nccl" needs real GPUs; "gloo" answers instead', flush=True)
    _said = True


def _with_gloo(function, choice_is_nccl: bool):
    """`function` with gloo in the place of NCCL, and without what only NCCL takes.

    `choice_is_nccl`: whether PyTorch, left to choose the backend, takes NCCL for GPUs.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        given.pop("device_id", None)  # binds a rank to its GPU for NCCL; gloo refuses it
        asked = given.get("backend")
        if _is_nccl(asked):
            given.pop("pg_options", None)
        if _is_nccl(asked) or (asked is None and choice_is_nccl):
            given["backend"] = "gloo"
        made = function(**given)
        if _is_nccl(asked):
            _say_once()
        return made

    return call


def _barrier(function):
    @functools.wraps(function)
    def barrier(*args, device_ids=None, **kwargs):
        return function(*args, **kwargs)  # NCCL needs to know the GPU, gloo refuses to be told

    return barrier


def _destroy(function):
    """Let gloo's threads finish before the group goes.

    A gloo thread that has just done a collective drops the settings of the thread that asked for it, a dispatch mode
    among them, and needs Python's lock for that. If DDP's reducer holds the last reference to the group and goes at
    that moment, it waits for the thread with the lock in its hand, for ever. Sleeping gives the lock away.
    """

    @functools.wraps(function)
    def destroy_process_group(*args, **kwargs):
        time.sleep(_GLOO_FINISHES_IN_S)
        function(*args, **kwargs)

    return destroy_process_group


def rows():
    """See `stand_ins`."""
    if not torch.distributed.is_available():
        return []
    import torch.distributed.distributed_c10d as c10d

    made = {
        "init_process_group": _with_gloo(c10d.init_process_group, True),
        "new_group": _with_gloo(c10d.new_group, False),
        "barrier": _barrier(c10d.barrier),
        "destroy_process_group": _destroy(c10d.destroy_process_group),
    }
    return [(owner, name, stand_in) for name, stand_in in made.items() for owner in (c10d, torch.distributed)]
