"""Ranks that call different collectives: each is told at once what every rank called, and the group works on."""

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import HANGS_S, in_ranks, ones
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout
from virtual_gpus import virtual_gpus
from virtual_gpus.features.distributed.whereabouts import Wait, stuck
from virtual_gpus.testing import CollectiveMismatch, run_ranks

# What rank 0 calls, and rank 1, by the words for it.
DIFFERENT = {
    "kind": {"all_reduce of float32, 12 bytes": lambda: dist.all_reduce(ones(3)),
             "broadcast of float32, 12 bytes, root 0": lambda: dist.broadcast(ones(3), 0)},
    "size": {"all_reduce of float32, 12 bytes": lambda: dist.all_reduce(ones(3)),
             "all_reduce of float32, 16 bytes": lambda: dist.all_reduce(ones(4))},
    "dtype": {"all_reduce of float32, 8 bytes": lambda: dist.all_reduce(ones(2)),
              "all_reduce of int64, 8 bytes": lambda: dist.all_reduce(ones(1, dtype=torch.int64))},
    "root": {"broadcast of float32, 4 bytes, root 0": lambda: dist.broadcast(ones(1), 0),
             "broadcast of float32, 4 bytes, root 1": lambda: dist.broadcast(ones(1), 1)},
    "barrier": {"barrier": dist.barrier,
                "reduce_scatter of float32, 8 bytes": lambda: dist.reduce_scatter_tensor(ones(1), ones(2))},
    "sent later": {"all_reduce of float32, 8 bytes": lambda: dist.all_reduce(ones(2), async_op=True).wait(),
                   "all_gather of float32, 16 bytes": lambda: all_gather_tensor(ones(2), 0, dist.group.WORLD)},
}  # fmt: skip
# The same in the eyes of NCCL, although the programs' calls differ.
SAME = [
    (lambda: dist.all_reduce(ones(2, 3)), lambda: dist.all_reduce(ones(6))),
    (lambda: dist.all_gather([ones(3), ones(3)], ones(3)), lambda: all_gather_tensor(ones(3), 0, dist.group.WORLD)),
    (
        lambda: dist.reduce_scatter_tensor(ones(1), ones(2)),
        lambda: reduce_scatter_tensor(ones(2), "sum", 0, dist.group.WORLD),
    ),
    (
        lambda: dist.all_to_all_single(ones(3), ones(2), [2, 1], [2, 0]),
        lambda: dist.all_to_all_single(ones(1), ones(2), [0, 1], [1, 1]),
    ),
]


def disagree(rank, names, shapes_only):
    said = {}
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # with which PyTorch's own DDP on gloo kills the process
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1).cuda(), process_group=dist.new_group())
    for name in names:
        try:
            [*DIFFERENT[name].values()][rank]()
        except CollectiveMismatch as error:
            said[name] = str(error)
        x = ones(1)
        dist.all_reduce(x)  # the group is as it was
        assert shapes_only or x.item() == 2
    for calls in SAME:
        calls[rank]()
    return said


@pytest.mark.parametrize("shapes_only", [False, True])
def test_every_rank_hears_what_each_called(shapes_only):
    with virtual_gpus(2, shapes_only=shapes_only):
        first, second = in_ranks(functools.partial(disagree, names=list(DIFFERENT), shapes_only=shapes_only), count=2)
    assert list(first) == list(DIFFERENT)
    for name, (zero, one) in DIFFERENT.items():
        told = first[name].split("\n")
        assert first[name].split("at test")[0] == second[name].split("at test")[0]
        assert told[0].startswith("The ranks do not agree on collective number ") and "default process group" in told[0]
        assert told[1].startswith(f"  rank 0: {zero}, at test_agreement.py:"), told
        assert told[2].startswith(f"  rank 1: {one}, at test_agreement.py:"), told


def test_ranks_that_need_one_another_are_stuck_and_so_is_who_needs_them():
    def at(group, *ranks, **begun):
        return Wait("", group, begun[group], list(ranks), begun)

    circle = {0: at("a", 0, 1, a=1), 1: at("b", 1, 2, b=1), 2: at("c", 0, 2, c=1), 3: at("all", *range(5), all=7)}
    assert stuck(circle) == circle and circle[3].lacks(circle) == [0, 1, 2]
    assert stuck(circle | {2: at("c", 0, 2, b=1, c=1)}) == {}  # 2 has come to "b", so that 1 goes on, and then 0
    assert stuck({rank: circle[rank] for rank in (0, 1, 3)}) == {}  # 2 computes and may come


def in_another_order(rank, threads):
    """With threads, each group has one in each rank, and nobody waits for ever."""
    groups, x, y = [dist.new_group(), dist.new_group()], ones(1), ones(1)
    if threads:
        with ThreadPoolExecutor(2) as pool:
            later = pool.submit(lambda: (time.sleep(2), dist.all_reduce(x, group=groups[rank])))
            return pool.submit(dist.all_reduce, y, group=groups[1 - rank]).result(), later.result()
    with pytest.raises(CollectiveMismatch, match="wait for each other"):
        dist.all_reduce(x, group=groups[rank])
    dist.all_reduce(x)


@pytest.mark.parametrize("threads", [False, True])
def test_groups_in_another_order(threads):
    with virtual_gpus(2):
        in_ranks(in_another_order, threads, count=2)


def in_vain(rank):
    """Rank 0 waits for the three others: 1 waits in another group, 2 computes, 3 has left."""
    other, whole = dist.new_group([1, 2]), dist.new_group()
    store = _get_default_store()
    for group in (other, whole):  # which took its time to connect
        if rank in dist.get_process_group_ranks(group):
            _set_pg_timeout(timedelta(seconds=0.1), group)
    try:
        if rank == 0:
            store.wait(["1 has waited", "3 has left"])
            dist.all_reduce(ones(3), group=whole)
        if rank == 1:
            dist.broadcast(ones(3), 1, group=other)
    except RuntimeError as error:
        return error.__notes__[0].split("\n")
    finally:
        if rank == 3:
            dist.destroy_process_group()
        store.set(f"{rank} has {'left' if rank == 3 else 'waited'}", "")
        store.wait(["0 has waited"])


def test_who_waits_hears_where_the_others_are():
    with virtual_gpus(4):
        first, second, *_ = run_ranks(in_vain, 4, timeout=HANGS_S, show=False)
    assert first[0].startswith(
        "Rank 0 waited in all_reduce of float32, 12 bytes, number 1 of process group 2 of ranks [0, 1, 2, 3], at "
        "test_agreement.py:"
    )
    assert first[1].startswith("  rank 1 waited in broadcast of float32, 12 bytes, root 1, number 1 of process group ")
    assert first[2].startswith("  rank 2 is not in a collective that waits")
    assert first[3].startswith("  rank 3 has left")
    assert second[1:] == first[2:3] and second[0] == "Rank 1" + first[1].removeprefix("  rank 1") + "."
