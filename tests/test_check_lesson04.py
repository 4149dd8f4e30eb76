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
from virtual_gpus import virtual_gpus

from notebooks.checks import lesson04 as check
from notebooks.checks.gpus import plain
from tests.check_answers import STRANGE_RESULTS, Hostile, explains, survives_strange_answers, told

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


def test_no_answer_makes_a_check_raise(two_gpus):
    assert survives_strange_answers(check.tree, check.factor)
    # These two start ranks for each answer.
    assert survives_strange_answers(check.validate, check.ranked, answers=STRANGE_RESULTS)
    assert told(check.tree(lambda ranks: [[(Hostile(), 1)]]))


def tree(ranks):
    steps, have = [], 1
    while have < ranks:
        steps.append([(rank, rank + have) for rank in range(min(have, ranks - have))])
        have *= 2
    return steps


def from_far_to_near(ranks):
    """Half of all ranks away first, then a quarter, ..."""
    steps, distance = [], 1
    while distance < ranks:
        distance *= 2
    while distance > 1:
        senders = range(0, ranks, distance)
        distance //= 2
        steps.append(tuple((sender, sender + distance) for sender in senders if sender + distance < ranks))
    return tuple(steps)


def zipped(ranks):
    """Steps that can be read once."""
    return [zip(*zip(*step, strict=True), strict=True) for step in tree(ranks)]


def rounded(ranks):
    steps = range(round(math.log2(ranks)))
    return [[(rank, rank + 2**step) for rank in range(2**step) if rank + 2**step < ranks] for step in steps]


def test_tree():
    assert check.tree(tree)
    assert check.tree(from_far_to_near) and check.tree(zipped)
    explains(
        check.tree,
        (
            lambda ranks: [[(0, rank)] for rank in range(1, ranks)],
            "you return 3 steps, and 2 are enough. How many ranks",
        ),
        (lambda ranks: [[(0, rank) for rank in range(1, ranks)]], "can send once in a step"),
        (lambda ranks: [[(rank, rank + 1) for rank in range(ranks - 1)]], "if it had the tensor before the step"),
        (lambda ranks: tree(ranks)[:-1], "With ranks=2, 1 rank still waits"),
        (lambda ranks: [[(0, 1)], []], "you return 2 steps, and 1 is enough"),
        (lambda ranks: tree(min(ranks, 2)), "With ranks=4, 2 ranks still wait"),
        (lambda ranks: [*tree(ranks), [(0, 1)]], "that does not have the tensor yet"),
        (lambda ranks: [[(0, ranks)]], "Send once to each rank, 0 to 1,"),
        (lambda ranks: [(0, 1)], "a step is a list of pairs"),
        (lambda ranks: 2, "2 is not a list"),
        (rounded, "With ranks=5, 1 rank still waits"),
        (lambda ranks: tree(ranks) or [[]], "With ranks=1 no other rank waits"),
        (lambda ranks: [[(source + 0.4, target) for source, target in step] for step in tree(ranks)], "an integer"),
    )


def dealt(rank, count):
    return range(rank, count, 4)


def in_blocks(rank, count):
    each = -(-count // 4)
    return range(rank * each, min(count, (rank + 1) * each))


def filled_up(rank, count):
    return DistributedSampler(range(count), shuffle=False)


def by_sums(losses):
    sums = torch.tensor([losses.sum(), len(losses)], device=losses.device)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def on_the_cpu(losses):
    sums = torch.tensor([losses.sum().item(), len(losses)])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def gathered(losses):
    """Right in another form: objects may come from the CPU."""
    found = [None] * 4
    dist.all_gather_object(found, losses.tolist())
    together = sum(found, [])
    return sum(together) / len(together)


def of_means(losses):
    mean = losses.mean() if len(losses) else losses.sum()
    dist.all_reduce(mean)
    return mean.item() / 4


def asking_twice(rank, count, losses):
    numbers = dealt(rank, count)
    return by_sums(losses(numbers)[: len(losses(numbers))])


def with_a_constant(rank, count, losses):
    losses(dealt(rank, count))
    return {10: 3.85, 3: 3.5 / 3}[count]


def not_waiting(rank, count, losses):
    total = losses(dealt(rank, count)).sum()
    dist.all_reduce(total, async_op=True)
    return total / count


def waiting(rank, count, losses):
    """Right in another form."""
    total = losses(dealt(rank, count)).sum()
    dist.all_reduce(total, async_op=True).wait()
    return total / count


def of_different_lengths(rank, count, losses):
    mine = losses(dealt(rank, count))
    dist.all_reduce(mine)
    return mine.sum() / count


def gathering_different_lengths(rank, count, losses):
    mine = losses(dealt(rank, count))
    found = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(found, mine)
    return torch.cat(found).mean()


def different_collectives(rank, count, losses):
    total = losses(dealt(rank, count)).sum()
    if rank == 0:
        dist.all_reduce(total)
    else:
        dist.broadcast(total, 0)
    return total / count


def reducing(rank, count, losses):
    total = losses(dealt(rank, count)).sum()
    dist.reduce(total, 0)
    return total / count


def on_gpu_0(rank, count, losses):
    return by_sums(losses(dealt(rank, count)).to("cuda:0"))


def ending_the_group(rank, count, losses):
    mean = by_sums(losses(dealt(rank, count)))
    if count == check.COUNTS[-1]:
        dist.destroy_process_group()
    return mean


def forming_a_group(rank, count, losses):
    dist.init_process_group("nccl")
    return by_sums(losses(dealt(rank, count)))


def validation(numbers=dealt, mean=by_sums):
    return lambda rank, count, losses: mean(losses(numbers(rank, count)))


def test_plain():
    """Numbers of NumPy arrive as numbers, and only what is not a number as words."""
    numbers = (2, 2.0, np.float32(2), np.array(2.0), np.array([2]), torch.tensor([[2.0]]), Fraction(2))
    assert all(plain(each) == 2 for each in numbers)
    assert plain(np.bool_(True)) is True and plain(...) is ... and plain(None) is None
    assert plain("2") == "'2'" and plain([2.0]) == "[2.0]" and plain(np.zeros(2)) == "array([0., 0.])"


def test_validate(four):
    assert check.validate(validation(lambda rank, count: iter(dealt(rank, count))))
    assert check.validate(validation(mean=gathered)) and check.validate(waiting)
    assert check.validate(validation(in_blocks, lambda losses: torch.tensor([by_sums(losses)])))
    assert check.validate(validation(mean=lambda losses: np.float64(by_sums(losses))))
    explains(
        lambda wrong: check.validate(validation(**wrong)),
        ({"mean": on_the_cpu}, "got a tensor on the CPU. NCCL takes only tensors on GPUs"),
        ({"mean": of_means}, "is the mean of the ranks' means, but the ranks have 3 + 3 + 2 + 2 samples"),
        ({"mean": lambda losses: losses.mean().item()}, "The samples of the others are missing"),
        ({"mean": lambda losses: 10 * by_sums(losses)}, "is the sum of the losses"),
        ({"mean": lambda losses: (by_sums(losses), None)[dist.get_rank() > 1]}, "returned None"),
        ({"mean": lambda losses: (by_sums(losses), 2.0)[dist.get_rank() > 1]}, "rank 2's result of 2 is"),
        ({"mean": lambda losses: by_sums(losses) / 4}, "less than half the right value"),
        ({"mean": lambda losses: [by_sums(losses)]}, "], which is not a number. Return a number"),
        ({"numbers": filled_up}, "the samples [0, 1] are looked at twice. DistributedSampler does this"),
        ({"numbers": lambda rank, count: range(rank, count - count % 4, 4)}, "no rank looks at the samples [8, 9]"),
        ({"numbers": lambda rank, count: range(count)}, "one rank looks at 10 samples"),
        ({"numbers": lambda rank, count: range(rank, count + 4, 4)}, "IndexError"),
    )


def test_validate_explains_what_is_not_in_the_losses(four):
    explains(
        check.validate,
        (not_waiting, "with async_op=True is not awaited"),
        (of_different_lengths, "one collective with tensors of different sizes"),
        (gathering_different_lengths, "one collective with tensors of different sizes"),
        (different_collectives, "The ranks call different collectives"),
        (asking_twice, "a rank asks for the losses of a sample twice"),
        (with_a_constant, "too small"),
        (reducing, "only rank 0 has the mean of all samples. `dist.reduce` gives one rank"),
        (on_gpu_0, "Several ranks use the same GPU. LOCAL_RANK chooses"),
        (ending_the_group, "Leave out `destroy_process_group`"),
        (forming_a_group, "Leave out `init_process_group`"),
    )


def test_validate_notices_ranks_without_samples(four):
    """A mean times its number is a sum, but for a rank that has none: right with 10 samples, not with 3."""

    def by_weighted_means(losses):
        sums = torch.stack([losses.mean() * len(losses), torch.tensor(float(len(losses)), device=losses.device)])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    assert told(check.validate(validation(mean=by_weighted_means)), "3 samples on 4 ranks, the results are (nan, nan")


def test_a_rank_without_samples_must_not_return_early(four):
    def returns_early(losses):
        return by_sums(losses) if len(losses) else 0.0

    why = "Every rank, even one without samples, must take part in every collective."
    assert told(check.validate(validation(mean=returns_early)), why)


def test_factor():
    assert check.factor(lambda counts, rank: counts[rank] * len(counts) / sum(counts))
    assert check.factor(lambda counts, rank: torch.tensor(counts)[rank] / torch.tensor(counts).float().mean())
    assert check.factor(lambda counts, rank: dist.get_world_size() * counts[dist.get_rank()] / sum(counts))
    explains(
        check.factor,
        (lambda counts, rank: counts[rank] / dist.get_world_size(), "counts"),
        (lambda counts, rank: counts[rank] / sum(counts), "every label counts 0.25 times as much"),
        (lambda counts, rank: counts[rank] / sum(counts), "DDP divides by the number of ranks, here 4"),
        (lambda counts, rank: 1, "a label of rank 3 counts 1.17 times as much"),
        (lambda counts, rank: sum(counts) / counts[rank], "Every label must count the same"),
        (lambda counts, rank: 4 * counts[rank] / sum(counts), "[5, 5] labels, every label counts 2 times as much"),
        (lambda counts, rank: 4 * counts[rank] / sum(counts), "DDP divides by the number of ranks, here 2"),
        (lambda counts, rank: max(counts[rank], 1) * len(counts) / sum(counts), "has no labels"),
        (lambda counts, rank: "1", "is text"),
    )


def local_device():
    """As the lesson writes it."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def counted_together(device):
    """A factor that needs no `counts` of other ranks."""

    def factor(counts, rank):
        together = torch.tensor(counts[rank], device=device())
        dist.all_reduce(together)
        return counts[rank] * dist.get_world_size() / together

    return factor


def test_factor_in_ranks(four):
    assert check.factor(lambda counts, rank: counts[rank] * int(os.environ["WORLD_SIZE"]) / sum(counts))
    assert check.factor(lambda counts, rank: np.float64(counts[local_device().index] * len(counts) / sum(counts)))
    assert check.factor(counted_together(local_device))
    explains(
        check.factor,
        (counted_together(lambda: "cpu"), "A collective got a tensor on the CPU"),
        (lambda counts, rank: dist.barrier() if dist.get_rank() else 1.0, "take part in every collective."),
        (lambda counts, rank: [dist.get_rank()], "returned [0], which is not a number"),
        (lambda counts, rank: None if dist.get_rank() else None, "returned None"),
        (lambda counts, rank: counts[dist.get_rank() + 1], "Your code stopped: Rank 3 of 4 raised IndexError"),
        (lambda counts, rank: {}["rank"], "KeyError: 'rank'"),
    )


def loop(
    set_epoch=lambda epoch: epoch,
    workers=0,
    end=lambda: None,
    through_ddp=True,
    logs=lambda rank: rank == 0,
    sampler_of=DistributedSampler,
    seed=0,
    rate=0.1,
    batch=4,
    device=lambda rank: f"cuda:{rank}",
):
    """A function as the learner writes it, with the traps that are asked for."""

    def train(rank, samples, log):
        if seed is not None:
            torch.manual_seed(seed + rank)  # DDP takes rank 0's
        net = DistributedDataParallel(nn.Linear(4, 1).to(device(rank)))
        sgd = torch.optim.SGD(net.parameters(), rate)
        sampler = sampler_of(samples)
        for epoch in range(3):
            if set_epoch:
                sampler.set_epoch(set_epoch(epoch))
            for x, y in DataLoader(samples, batch_size=batch, sampler=sampler, num_workers=workers):
                sgd.zero_grad()
                loss = mse_loss((net if through_ddp else net.module)(x.to(device(rank))), y.to(device(rank)))
                loss.backward()
                sgd.step()
            if logs(rank):
                log(f"epoch {epoch}")
        end()
        return net.module

    return train


def own_half(samples):
    return SubsetRandomSampler(range(dist.get_rank(), len(samples), 2))


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


def dealt_by_hand(rank, samples, log):
    """Right in another form: no sampler, no DataLoader, and the inner net is returned, on the CPU."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1).to(rank)
    ddp, sgd = DistributedDataParallel(net, device_ids=[rank]), torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(3):
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(epoch)).tolist()
        for numbers in torch.tensor(order[rank::2]).split(4):
            x, y = (torch.stack(each) for each in zip(*(samples[number] for number in numbers), strict=True))
            sgd.zero_grad()
            mse_loss(ddp(x.to(rank)), y.to(rank)).backward()
            sgd.step()
        if rank == 0:
            log(epoch)
    return net.cpu()


def test_ranked_dealt_by_hand(two_gpus):
    assert check.ranked(dealt_by_hand)


def test_the_exercise_s_samples():
    data = check.Samples()
    assert len(data) == 32 and data[0][0].shape == (4,) and data[0][1].shape == (1,)


def test_ranked_explains(two_gpus):
    explains(
        lambda wrong: check.ranked(loop(**wrong)),
        ({"set_epoch": lambda epoch: epoch % 2}, "Two epochs have the same order"),
        ({"set_epoch": lambda epoch: epoch + dist.get_rank()}, "samples go to both ranks. The ranks divide one order"),
        ({"sampler_of": own_half, "set_epoch": None}, "Rank 0 takes the same half of the samples in every epoch"),
        ({"workers": 1}, "as in a DataLoader with num_workers=0"),
        ({"end": dist.destroy_process_group}, "Leave out `destroy_process_group`"),
        ({"end": lambda: dist.get_rank() or dist.barrier()}, "Every rank must take part in every collective."),
        ({"set_epoch": None}, "Every epoch has the same order. How does the sampler know"),
        (
            {"sampler_of": partial(DistributedSampler, shuffle=False)},
            "in the order in which they are stored. Shuffle them",
        ),
        ({"through_ddp": False}, "Their gradients were never averaged"),
        ({"logs": lambda rank: True}, "Ranks 0 and 1 logged 3 and 3 lines. Rank 0 should log one line per epoch"),
        ({"logs": lambda rank: False}, "Ranks 0 and 1 logged 0 and 0 lines"),
        ({"batch": 8}, "A step takes 8 samples on each rank, 16 together, and 8 in `alone`"),
        (
            {"sampler_of": lambda samples: None, "set_epoch": None},
            "Ranks 0 and 1 took 96 and 96 samples. In each of 3 epochs, half of the 32",
        ),
        ({"seed": None}, "starts from random weights"),
        ({"device": lambda rank: "cuda:0"}, "LOCAL_RANK"),  # what one gets by copying `alone`
        ({"device": lambda rank: f"cuda:{1 - rank}"}, "Rank 0 put its tensors on"),
        ({"device": lambda rank: "cpu"}, "on the CPU"),
        ({"rate": 0.2}, "Compare the net, the seed, the learning rate"),
    )


def test_ranked_wants_the_net(two_gpus):
    assert told(check.ranked(lambda rank, samples, log: 3), "It returned 3. Return the net.")


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
