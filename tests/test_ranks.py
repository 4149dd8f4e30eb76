"""One rank among others: agreeing, sharing the data, and what works without others."""

import math

import pytest
import torch
from virtual_gpus import virtual_gpus

from helpers.parallel import ranks
from helpers.parallel.launching import launch
from helpers.parallel.ranks import (
    agree,
    from_all,
    local_device,
    rank_loader,
    sums_of_all,
)

# ------------------------------------------------------------------------------------------ the only rank


def test_the_only_rank():
    assert (ranks.rank(), ranks.world_size()) == (0, 1)
    assert from_all("a") == ["a"] and sums_of_all([3]) == [3]
    agree({"batch": 3})
    loader = rank_loader(list(range(10)), 4, shuffle=False)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_batches_of_all_ranks_together_are_those_of_one():
    data = list(range(24))

    def act(rank):
        loader = rank_loader(data, 8, seed=5)
        loader.sampler.set_epoch(2)
        return [batch.tolist() for batch in loader]

    (alone,), several = launch(act, ranks=1, show=False), launch(act, ranks=4, show=False)
    for number, batch in enumerate(alone):
        assert sorted(batch) == sorted(sum((shares[number] for shares in several), []))
    assert alone != sorted(alone)


# ------------------------------------------------------------------------------------------------- several


def test_values_reach_every_rank_and_differences_are_told_on_all():
    def act(rank):
        with pytest.raises(ValueError, match=r"have \(batch: 4, 5, 6\) in rank order"):
            agree({"batch": 4 + rank, "model": "same"})
        return from_all(rank)

    assert launch(act, ranks=3, show=False) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("gpus", [False, True])
def test_numbers_are_added_up_exactly(gpus):
    with virtual_gpus(3, shapes_only=True):
        found = launch(lambda rank: sums_of_all([2**50 + rank, 0.5, math.nan]), ranks=3, gpus=gpus, show=False)
    assert [sums[:2] for sums in found] == [[3 * 2**50 + 3, 1.5]] * 3 and all(math.isnan(sums[2]) for sums in found)


def test_the_gpu_of_a_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    if not torch.cuda.is_available():
        assert local_device() == torch.device("cpu")
    with virtual_gpus(2):
        assert local_device() == torch.device("cuda", 1)
        monkeypatch.delenv("LOCAL_RANK")
        torch.cuda.set_device(1)
        assert local_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with virtual_gpus(1):  # SLURM may show each rank only its own GPU
        assert local_device() == torch.device("cuda", 0)
