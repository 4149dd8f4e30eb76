"""The checks of lesson 04: solutions pass, typical mistakes are explained, nothing raises."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from virtual_gpus import virtual_gpus

from helpers.exercises import lesson04 as check
from tests.check_answers import Hostile, explains, survives_strange_answers, told

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


def test_no_answer_makes_a_check_raise(two_gpus):
    assert survives_strange_answers(check.tree, check.factor, check.validate, check.ranked)
    assert told(check.tree(lambda ranks: [[(Hostile(), 1)]]))


def tree(ranks):
    steps, have = [], 1
    while have < ranks:
        steps.append([(rank, rank + have) for rank in range(min(have, ranks - have))])
        have *= 2
    return steps


def test_tree():
    assert check.tree(tree)
    assert check.tree(lambda ranks: [step[::-1] for step in tree(ranks)])
    explains(
        check.tree,
        (lambda ranks: [[(0, rank)] for rank in range(1, ranks)], "2 are enough"),
        (lambda ranks: [[(0, rank) for rank in range(1, ranks)]], "sends twice"),
        (lambda ranks: [[(rank, rank + 1) for rank in range(ranks - 1)]], "do not have the tensor before"),
        (lambda ranks: tree(ranks)[:-1], "still wait"),
        (lambda ranks: [*tree(ranks), [(0, 1)]], "have it already"),
        (lambda ranks: [[(0, ranks)]], "ranks run from 0 to 1"),
        (lambda ranks: [(0, 1)], "a step is a list of pairs"),
    )


def dealt(rank, count):
    return range(rank, count, 4)


def filled_up(rank, count):
    return DistributedSampler(range(count), shuffle=False)


def by_sums(losses):
    sums = torch.tensor([losses.sum(), len(losses)], device=losses.device)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def of_means(losses):
    mean = losses.mean() if len(losses) else losses.sum()
    dist.all_reduce(mean)
    return mean.item() / 4


def validation(numbers=dealt, mean=by_sums):
    return lambda rank, count, losses: mean(losses(numbers(rank, count)))


def test_validate(four):
    assert check.validate(validation())
    assert check.validate(validation(mean=lambda losses: torch.tensor([by_sums(losses)])))
    explains(
        lambda wrong: check.validate(validation(**wrong)),
        ({"mean": of_means}, "the mean of the ranks' means, which have 3 + 3 + 2 + 2 samples"),
        ({"mean": lambda losses: losses.mean().item()}, "the ranks' sums must meet"),
        ({"mean": lambda losses: (by_sums(losses), None)[dist.get_rank() > 1]}, "returned None"),
        ({"mean": lambda losses: by_sums(losses) / 4}, "too small"),
        ({"mean": lambda losses: [by_sums(losses)]}, "Give a number"),
        ({"numbers": filled_up}, "[0, 1] were asked for twice. DistributedSampler fills up"),
        ({"numbers": lambda rank, count: range(rank, count - count % 4, 4)}, "nobody asked for [8, 9]"),
        ({"numbers": lambda rank, count: range(count)}, "a rank asked for 10 of them"),
        ({"numbers": lambda rank, count: range(rank, count + 4, 4)}, "IndexError"),
    )


def test_validate_notices_ranks_without_samples(four):
    """A mean times its number is a sum, but for a rank that has none: right with 10 samples, not with 3."""

    def by_weighted_means(losses):
        sums = torch.stack([losses.mean() * len(losses), torch.tensor(float(len(losses)), device=losses.device)])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    assert told(check.validate(validation(mean=by_weighted_means)), "3 samples, 4 ranks: nan, nan, nan, nan")


def test_factor():
    assert check.factor(lambda counts, rank: counts[rank] * len(counts) / sum(counts))
    explains(
        check.factor,
        (lambda counts, rank: counts[rank] / sum(counts), "DDP divides by the number of ranks, 4"),
        (lambda counts, rank: 1, "a rank's share is its labels by all labels"),
        (lambda counts, rank: 4 * counts[rank] / sum(counts), "[5, 5] labels: the loss becomes 2 times the mean"),
        (lambda counts, rank: "1", "is text"),
    )


def loop(
    set_epoch=True, through_ddp=True, logs=lambda rank: rank == 0, sampled=True, epochs=3, seed=0, rate=0.1, batch=4
):
    """A function as the learner writes it, with the traps that are asked for."""

    def train(rank, samples, log):
        torch.manual_seed(seed + rank)  # DDP takes rank 0's
        net = DistributedDataParallel(nn.Linear(4, 1).to(rank), device_ids=[rank])
        sgd = torch.optim.SGD(net.parameters(), rate)
        sampler = DistributedSampler(samples) if sampled else None
        for epoch in range(epochs):
            if set_epoch and sampled:
                sampler.set_epoch(epoch)
            for x, y in DataLoader(samples, batch_size=batch, sampler=sampler):
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


def test_ranked(two_gpus):
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert check.ranked(loop())
    assert torch.rand(1) == drawn  # the check leaves the generator alone


def test_the_exercise_s_samples():
    data = check.samples()
    assert len(data) == 32 and data[0][0].shape == (4,) and data[0][1].shape == (1,)


def test_ranked_explains(two_gpus):
    explains(
        lambda wrong: check.ranked(loop(**wrong)),
        ({"set_epoch": False}, "which epoch it is"),
        ({"through_ddp": False}, "their gradients never met"),
        ({"logs": lambda rank: True}, "ranks 0 and 1 logged 3 and 3 lines"),
        ({"logs": lambda rank: False}, "ranks 0 and 1 logged 0 and 0 lines"),
        ({"batch": 8}, "8 samples per step are 4 on each rank"),
        ({"sampled": False}, "3 epochs of 16"),
        ({"rate": 0.2}, "net, seed, rate and loss"),
    )


def test_ranked_wants_the_net(two_gpus):
    assert told(check.ranked(lambda rank, samples, log: 3), "It returned 3. The net is asked for.")


def fails(rank, samples, log):
    if rank == 1:
        raise KeyError("my mistake")
    dist.barrier()


def test_ranked_names_the_rank_that_fails(two_gpus):
    assert told(check.ranked(fails), "Rank 1 of 2 raised KeyError: 'my mistake'")


def test_ranked_needs_gpus():
    assert told(check.ranked(loop()), "the number of GPUs is 0")
    with virtual_gpus(2, shapes_only=True):
        assert told(check.ranked(loop()), "these GPUs keep no values")
