"""The checks of lesson 04: solutions pass, typical mistakes are explained, nothing raises."""

import math
import os
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler

from notebooks.checks import lesson04 as check
from notebooks.checks.gpus import plain
from tests.check_answers import STRANGE_RESULTS, Answers, Hostile, answers_test

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


@pytest.fixture
def few_counts(monkeypatch):
    """One list of labels in place of six: an answer that asks for ranks starts them for each."""
    monkeypatch.setattr(check, "LABELS", ([3, 1],))


def tree(ranks, enough=math.ceil):
    powers = [2**step for step in range(enough(math.log2(ranks)))]
    return [[(rank, rank + have) for rank in range(min(have, ranks - have))] for have in powers]


def from_far_to_near(ranks):
    """Half of all ranks away first, then a quarter, ..."""
    powers = [2**step for step in reversed(range(math.ceil(math.log2(ranks))))]
    return tuple(tuple((rank, rank + far) for rank in range(0, ranks - far, 2 * far)) for far in powers)


TREE = [
    (lambda ranks: [[(0, rank)] for rank in range(1, ranks)], "you return 3 steps, and 2 are enough. How many"),
    (lambda ranks: [[(0, rank) for rank in range(1, ranks)]], "can send once in a step"),
    (lambda ranks: [[(0, 1)], []], "you return 2 steps, and 1 is enough"),
    (lambda ranks: tree(min(ranks, 2)), "With ranks=4, 2 ranks still wait"),
    (lambda ranks: [*tree(ranks), [(0, 1)]], "that does not have the tensor yet"),
    (lambda ranks: [[(0, ranks)]], "Send once to each rank, 0 to 1,"),
    (lambda ranks: [(0, 1)], "a step is a list of pairs"),
    (lambda ranks: [[(Hostile(), 1)]], "do not look"),
    (partial(tree, enough=round), "With ranks=5, 1 rank still waits"),
    (lambda ranks: tree(ranks) or [[]], "With ranks=1 no other rank waits"),
    (lambda ranks: [[(source + 0.4, target) for source, target in step] for step in tree(ranks)], "an integer"),
]


def dealt(rank, count):
    return range(rank, count, 4)


def by_sums(losses, total=torch.sum, count=len, collective=lambda sums: dist.all_reduce(sums)):
    sums = torch.tensor([total(losses), count(losses)], device=losses.device)
    collective(sums)
    return (sums[0] / sums[1]).item()


def gathered(losses):
    """Right in another form: objects may come from the CPU."""
    found = [None] * 4
    dist.all_gather_object(found, losses.tolist())
    together = sum(found, [])
    return sum(together) / len(together)


def mean_or_0(losses, none=0.0):
    return losses.mean() if len(losses) else none


def of_another_kind(losses):
    return dist.all_reduce(losses.sum()) if dist.get_rank() else dist.broadcast(losses.sum(), 0)


def validation(mean=by_sums, numbers=dealt, **options):
    return lambda rank, count, losses: mean(losses(numbers(rank, count)), **options)


VALIDATE = [
    (validation(total=mean_or_0, count=lambda _: 1), "the mean of the ranks' means, but the ranks have 3 + 3 + 2"),
    # A mean times its number is a sum, but for a rank that has none: right with 10 samples, not with 3.
    (validation(total=lambda losses: losses.mean() * len(losses)), "3 samples on 4 ranks, the results are (nan, n"),
    (validation(lambda losses: losses.mean().item()), "The samples of the others are missing"),
    (validation(lambda losses: 10 * by_sums(losses)), "is the sum of the losses"),
    (validation(lambda losses: (by_sums(losses), None)[dist.get_rank() > 1]), "returned None"),
    (validation(lambda losses: (by_sums(losses), 2.0)[dist.get_rank() > 1]), "rank 2's result of 2 is"),
    (validation(lambda losses: [by_sums(losses)]), "], which is not a number. Return a number"),
    (validation(numbers=lambda rank, count: DistributedSampler(range(count))), "twice. DistributedSampler does"),
    (validation(numbers=lambda rank, count: range(rank, count - count % 4, 4)), "looks at the samples [8, 9]"),
    (validation(numbers=lambda rank, count: range(count)), "one rank looks at 10 samples"),
    (lambda rank, n, losses: by_sums([losses(dealt(rank, n)) for _ in range(2)][0]), "the losses of a sample twice"),
    (validation(collective=lambda sums: dist.reduce(sums, 0)), "only rank 0 has the mean of all samples. `dist.re"),
    (validation(lambda losses: by_sums(losses.cpu())), "got a tensor on the CPU. NCCL takes only tensors on GPUs"),
    (validation(numbers=lambda rank, count: range(rank, count + 4, 4)), "IndexError"),
    (validation(lambda losses: dist.all_reduce(losses)), "or one with tensors of different sizes"),
    (validation(total=partial(mean_or_0, none=0), count=lambda _: 1), "sizes or dtypes"),
    (validation(of_another_kind), "The ranks call different collectives"),
    (validation(lambda losses: dist.init_process_group("nccl")), "Leave out `init_process_group`"),
    (validation(lambda losses: by_sums(losses.to("cuda:0"))), "Several ranks use the same GPU. LOCAL_RANK chooses"),
    (validation(collective=lambda sums: dist.all_reduce(sums, async_op=True)), "async_op=True is not awaited"),
    (validation(lambda losses: by_sums(losses) and dist.destroy_process_group()), "`destroy_process_group`"),
]  # the ranks are of no use after the last two
WAITS = validation(lambda losses: by_sums(losses) if len(losses) else 0.0)


def test_plain():
    """Numbers of NumPy arrive as numbers, and only what is not a number as words."""
    numbers = (2, 2.0, np.float32(2), np.array(2.0), np.array([2]), torch.tensor([[2.0]]), Fraction(2))
    assert all(plain(each) == 2 for each in numbers)
    assert plain(np.bool_(True)) is True and plain(...) is ... and plain(None) is None
    assert plain("2") == "'2'" and plain([2.0]) == "[2.0]" and plain(np.zeros(2)) == "array([0., 0.])"


def counted_together(counts, rank):
    """A factor that needs no `counts` of other ranks."""
    together = torch.tensor(counts[rank], device=f"cuda:{os.environ['RANK']}")
    dist.all_reduce(together)
    return counts[rank] * dist.get_world_size() / together


FACTOR = [
    (lambda counts, rank: counts[rank] / sum(counts), ("every label counts 0.25 times as much", "here 4")),
    (lambda counts, rank: 1, "a label of rank 3 counts 1.17 times as much"),
    (lambda counts, rank: sum(counts) / counts[rank], "Every label must count the same"),
    (lambda counts, rank: 4 * counts[rank] / sum(counts), "[5, 5] labels, every label counts 2 times as much"),
    (lambda counts, rank: max(counts[rank], 1) * len(counts) / sum(counts), "has no labels"),
]
FACTOR_IN_RANKS = [
    (lambda counts, rank: [dist.get_rank()], "returned [0], which is not a number"),
    (lambda counts, rank: None if dist.get_rank() else None, "returned None"),
]


def loop(
    sampler=DistributedSampler, wrap=DistributedDataParallel, epochs=int, on="cuda:{0}", rate=0.1, end=int, **more
):
    """A function as the learner writes it, with the traps that are asked for. `int` leaves an epoch as it is."""
    more = {"seed": 0, "batch": 4, "workers": 0, "logs": (0,)} | more

    def train(rank, samples, log):
        if more["seed"] is not None:
            torch.manual_seed(more["seed"] + rank)  # DDP takes rank 0's
        device = on.format(rank, 1 - rank)
        net = wrap(nn.Linear(4, 1).to(device))
        sgd = torch.optim.SGD(net.parameters(), rate)
        chosen = sampler(samples)
        for epoch in range(3):
            if hasattr(chosen, "set_epoch"):
                chosen.set_epoch(epochs(epoch))
            for x, y in DataLoader(samples, more["batch"], sampler=chosen, num_workers=more["workers"]):
                sgd.zero_grad()
                mse_loss(net(x.to(device)), y.to(device)).backward()
                sgd.step()
            if rank in more["logs"]:
                log(f"epoch {epoch}")
        end()
        return next(net.children()).to("cpu" if wrap is inner_returned else device)

    return train


def inner_returned(net):
    return DistributedDataParallel(net, device_ids=[net.weight.device])


def own_half(samples):
    return SubsetRandomSampler(range(dist.get_rank(), len(samples), 2))


RANKED = [
    (loop(epochs=lambda epoch: epoch % 2), "Two epochs have the same order"),
    (loop(epochs=lambda epoch: epoch + dist.get_rank()), "samples go to both ranks. The ranks divide one order"),
    (loop(epochs=lambda epoch: 0), "Every epoch has the same order. How does the sampler know"),
    (loop(sampler=own_half), "Rank 0 takes the same half of the samples in every epoch"),
    (loop(sampler=partial(DistributedSampler, shuffle=False)), "in which they are stored. Shuffle them"),
    (loop(sampler=lambda samples: None), "took 96 and 96 samples. In each of 3 epochs, half of the 32"),
    (loop(workers=1), "as in a DataLoader with num_workers=0"),
    (loop(wrap=nn.Sequential), ("ranks' weights differ, and are off by", "Their gradients were never averaged")),
    (loop(logs=(0, 1)), "Ranks 0 and 1 logged 3 and 3 lines. Rank 0 should log one line per epoch"),
    (loop(batch=8), "A step takes 8 samples on each rank, 16 together, and 8 in `alone`"),
    (loop(seed=None), "starts from random weights"),
    (loop(rate=0.2), ("compared with those of one GPU they are off by", "Compare the net, the seed")),
    (loop(on="cuda:{1}"), "Rank 0 put its tensors on cuda:1. Its LOCAL_RANK is 0"),
    (lambda rank, samples, log: 3, "It returned 3. Return the net."),
    (loop(on="cpu"), "on the CPU"),
    (loop(on="cuda:0"), "LOCAL_RANK"),  # what one gets by copying `alone`
    (loop(end=dist.destroy_process_group), "Leave out `destroy_process_group`"),
]
RAISES = lambda rank, samples, log: dist.barrier() or samples[32 + rank]  # noqa: E731
ANSWERS = {
    "tree": Answers(
        check.tree,
        [tree, from_far_to_near, lambda ranks: [zip(*zip(*step, strict=True), strict=True) for step in tree(ranks)]],
        TREE,
    ),
    "validate": Answers(
        check.validate,
        [
            validation(numbers=lambda rank, count: iter(dealt(rank, count))),
            validation(gathered),
            validation(numbers=lambda rank, count: torch.arange(count).tensor_split(4)[rank]),
            validation(lambda losses: torch.tensor([by_sums(losses)])),
            validation(collective=lambda sums: dist.all_reduce(sums, async_op=True).wait()),
        ],
        VALIDATE,
        fixtures="four",
        strange=STRANGE_RESULTS[-2:],
        ranks=[4],
    ),
    "factor": Answers(
        check.factor,
        [
            lambda counts, rank: counts[rank] * len(counts) / sum(counts),
            lambda counts, rank: torch.tensor(counts)[rank] / torch.tensor(counts).float().mean(),
        ],
        FACTOR,
    ),
    "factor in ranks": Answers(
        check.factor,
        [
            counted_together,
            lambda counts, rank: counts[dist.get_rank()] * int(os.environ["WORLD_SIZE"]) / sum(counts),
            lambda counts, rank: np.float64(counts[int(os.environ["LOCAL_RANK"])] * int(os.environ["WORLD_SIZE"]) / 4),
            lambda counts, rank: counts[rank] * int(os.environ["WORLD_SIZE"]) / sum(counts),
        ],
        FACTOR_IN_RANKS,
        fixtures="two few_counts",
        strange=[],
        ranks=[2],
    ),
    "ranked": Answers(
        check.ranked,
        [loop(), loop(wrap=inner_returned)],
        RANKED,
        fixtures="two",
        strange=STRANGE_RESULTS[-2:],
        ranks=[2],
    ),
    # These two end the ranks, so each starts its own.
    "a rank waits": Answers(
        check.validate, wrong=[(WAITS, "one without samples, must take part")], fixtures="four", strange=[]
    ),
    "a rank raises": Answers(
        check.ranked, wrong=[(RAISES, "of 2 raised IndexError: index 3")], fixtures="two", strange=[]
    ),
}
test_answers = answers_test(ANSWERS)
