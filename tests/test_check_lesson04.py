"""The checks of lesson 04: solutions pass, typical mistakes are explained, nothing raises."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from virtual_gpus import virtual_gpus

from helpers.exercises import lesson04 as check
from tests.check_answers import Hostile, told

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


# --- 1: a broadcast as a tree -----------------------------------------------------------------------------


def tree(ranks):
    steps, have = [], 1
    while have < ranks:
        steps.append([(rank, rank + have) for rank in range(min(have, ranks - have))])
        have *= 2
    return steps


def halves(ranks):
    """Another right answer: rank 0 first reaches the far half."""
    steps, distance = [], 1 << max((ranks - 1).bit_length() - 1, 0)
    while distance and ranks > 1:
        pairs = [(rank, rank + distance) for rank in range(0, ranks, 2 * distance)]
        steps.append([pair for pair in pairs if pair[1] < ranks])
        distance //= 2
    return steps


def test_tree():
    assert check.tree(tree)
    assert check.tree(halves)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda ranks: [[(0, rank)] for rank in range(1, ranks)], "2 are enough"),
        (lambda ranks: [[(rank, rank + 1)] for rank in range(ranks - 1)], "2 are enough"),
        (lambda ranks: [[(0, rank) for rank in range(1, ranks)]], "sends twice"),
        (lambda ranks: [[(rank, rank + 1) for rank in range(ranks - 1)]], "does not have the tensor before"),
        (lambda ranks: tree(ranks)[:-1], "still wait"),
        (lambda ranks: [*tree(ranks), [(0, 1)]], "has it already"),
        (lambda ranks: [[(0, ranks)]], "ranks run from 0"),
        (lambda ranks: [(0, 1)], "a step is a list of pairs"),
        (lambda ranks: tuple(tree(ranks)), "a list of steps"),
        (lambda ranks: ..., "still returns ..."),
    ],
)
def test_tree_explains(wrong, words):
    assert told(check.tree(wrong), words)


# --- 2: a validation --------------------------------------------------------------------------------------


@pytest.fixture
def four_gpus():
    with virtual_gpus(4) as gpus:
        yield gpus


def dealt(rank, count):
    return range(rank, count, 4)


def side_by_side(rank, count):
    each = -(-count // 4)
    return range(count)[rank * each : (rank + 1) * each]


def filled_up(rank, count):
    return DistributedSampler(range(count), shuffle=False)


def cut_off(rank, count):
    return DistributedSampler(range(count), shuffle=False, drop_last=True)


def by_sums(losses):
    sums = torch.tensor([losses.sum(), len(losses)], device=losses.device)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def of_means(losses):
    mean = losses.mean() if len(losses) else losses.sum()
    dist.all_reduce(mean)
    return mean.item() / 4


def sum_over_all(losses):
    dist.all_reduce(total := losses.sum())
    return total


def sum_by_own_count(losses):
    mean = sum_over_all(losses) / 2.5
    return mean.item()


def validation(numbers=dealt, mean=by_sums):
    return lambda rank, count, losses: mean(losses(numbers(rank, count)))


def test_validate(four_gpus):
    assert check.validate(validation())
    assert check.validate(validation(side_by_side))
    assert check.validate(validation(mean=lambda losses: torch.tensor([by_sums(losses)])))


@pytest.mark.parametrize(
    ("numbers", "mean", "words"),
    [
        (dealt, of_means, "the mean of the ranks' means, which have 3 + 3 + 2 + 2 samples"),
        (dealt, lambda losses: losses.mean().item(), "their sums must meet"),
        (dealt, lambda losses: [by_sums(losses), None][min(dist.get_rank(), 1)], "rank 1, 2, 3 returned None"),
        (dealt, lambda losses: None, "no `return`"),
        (dealt, sum_over_all, "that is the sum"),
        (dealt, lambda losses: by_sums(losses) / 4, "divided by the number of ranks"),
        (dealt, sum_by_own_count, "the numbers of samples were not"),
        (dealt, lambda losses: by_sums(losses) * 1.7, "too large"),
        (dealt, lambda losses: [by_sums(losses)], "a number is asked for"),
        (dealt, lambda losses: ..., "your answer is missing"),
        (filled_up, by_sums, "[0, 1] were asked for twice, because DistributedSampler fills up"),
        (cut_off, by_sums, "nobody asked for [8, 9]"),
        (lambda rank, count: range(count), by_sums, "a rank asked for 10 of them"),
        (lambda rank, count: range(0 if rank else count), by_sums, "a rank asked for 10 of them"),
        (lambda rank, count: range(rank, count + 4, 4), by_sums, "IndexError"),
    ],
)
def test_validate_explains(four_gpus, numbers, mean, words):
    assert told(check.validate(validation(numbers, mean)), words)


def test_validate_notices_ranks_without_samples(four_gpus):
    """A mean times its number is a sum, but for a rank that has none: right with 10 samples, not with 3."""

    def by_weighted_means(losses):
        sums = torch.stack([losses.mean() * len(losses), torch.tensor(float(len(losses)), device=losses.device)])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    assert told(check.validate(validation(mean=by_weighted_means)), "3 samples, 4 ranks: nan, nan, nan, nan")


def test_validate_needs_gpus():
    assert told(check.validate(validation()), "there are 0 GPUs")


# --- 3: a weighted mean -----------------------------------------------------------------------------------


def test_factor():
    assert check.factor(lambda counts, rank: counts[rank] * len(counts) / sum(counts))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda counts, rank: counts[rank] / sum(counts), "DDP divides by the number of ranks, 4"),
        (lambda counts, rank: 1, "the same factor"),
        (lambda counts, rank: counts[rank], "numbers of labels"),
        (lambda counts, rank: sum(counts) / counts[rank], "a rank's share is its labels by all labels"),
        (lambda counts, rank: "1", "is text"),
    ],
)
def test_factor_explains(wrong, words):
    assert told(check.factor(wrong), words)


# --- 4: a loop with traps ---------------------------------------------------------------------------------


def loop(set_epoch=True, through_ddp=True, logs=lambda rank: rank == 0, sampled=True, epochs=3, seed=0, rate=0.1):
    """A function as the learner writes it, with the traps that are asked for."""

    def train(rank, samples, log):
        torch.manual_seed(seed + rank)  # DDP takes rank 0's
        net = DistributedDataParallel(nn.Linear(4, 1).to(rank), device_ids=[rank])
        sgd = torch.optim.SGD(net.parameters(), rate)
        sampler = DistributedSampler(samples) if sampled else None
        for epoch in range(epochs):
            if set_epoch and sampled:
                sampler.set_epoch(epoch)
            for x, y in DataLoader(samples, batch_size=4, sampler=sampler):
                sgd.zero_grad()
                loss = mse_loss((net if through_ddp else net.module)(x.to(rank)), y.to(rank))
                loss.backward()
                sgd.step()
            if logs(rank):
                log(f"epoch {epoch}")
        return net.module

    return train


@pytest.fixture
def two_gpus():
    with virtual_gpus(2) as gpus:
        yield gpus


def ranked(rank, samples, log, batch=4, set_epoch=True):
    """The lesson's solution."""
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(4, 1).to(rank), device_ids=[rank])
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    data = DataLoader(samples, batch_size=batch, sampler=DistributedSampler(samples))
    for epoch in range(3):
        if set_epoch:
            data.sampler.set_epoch(epoch)
        for x, y in data:
            sgd.zero_grad()
            mse_loss(net(x.to(rank)), y.to(rank)).backward()
            sgd.step()
        if rank == 0:
            log(f"epoch {epoch}")
    return net


def test_ranked(two_gpus):
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert check.ranked(loop())
    assert torch.rand(1) == drawn  # the check leaves the generator alone
    assert check.ranked(ranked)
    assert told(check.ranked(partial(ranked, set_epoch=False)), "which epoch it is")
    assert told(check.ranked(partial(ranked, batch=8)), "8 samples per step are 4 on each rank")


def test_the_exercise_s_samples():
    data = check.samples()
    assert len(data) == 32 and data[0][0].shape == (4,) and data[0][1].shape == (1,)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"set_epoch": False}, "which epoch it is"),
        ({"through_ddp": False}, "their gradients never met"),
        ({"logs": lambda rank: True}, "let rank 0"),
        ({"logs": lambda rank: False}, "rank 0 logged 0 lines"),
        ({"sampled": False}, "3 epochs of 16"),
        ({"epochs": 2}, "3 epochs of 16"),
        ({"seed": 1}, "net, seed, rate and loss"),
        ({"rate": 0.2}, "net, seed, rate and loss"),
    ],
)
def test_ranked_explains(two_gpus, wrong, words):
    assert told(check.ranked(loop(**wrong)), words)


def test_ranked_wants_the_net(two_gpus):
    assert told(check.ranked(lambda rank, samples, log: 3), "it returned 3, because the net is asked for")
    assert told(check.ranked(lambda rank, samples, log: ...), "your answer is missing")


def fails(rank, samples, log):
    if rank == 1:
        raise KeyError("my mistake")
    dist.barrier()


def test_ranked_names_the_rank_that_fails(two_gpus):
    assert told(check.ranked(fails), "rank 1 of 2 raised KeyError: 'my mistake'")


def test_ranked_needs_gpus():
    assert told(check.ranked(loop()), "there are 0 GPUs")
    with virtual_gpus(2, shapes_only=True):
        assert told(check.ranked(loop()), "without shapes_only")


# --- whatever is passed -----------------------------------------------------------------------------------


STRANGE = [
    None, ..., "", "24000", True, -1, 10**400, float("nan"), [], {}, [...], object, int, torch.ones(3), nn.Identity(),
    lambda: 1, lambda *_: 1 / 0, lambda *_: [...], lambda *_: [[(Hostile(), 1)]], lambda *_: [Hostile()] * 4,
    lambda *_: Hostile(), Hostile(), Hostile, exit,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(STRANGE)))
def test_no_answer_makes_a_check_raise(two_gpus, number):
    for each in (check.tree, check.validate, check.factor, check.ranked):
        assert told(each(STRANGE[number]))
