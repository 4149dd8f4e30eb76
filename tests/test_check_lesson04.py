"""The checks of lesson 04: solutions pass, typical mistakes are explained, nothing raises."""

import math
import os
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, SubsetRandomSampler

from notebooks.checks import lesson04 as check
from notebooks.checks.gpus import plain
from tests.check_answers import STRANGE_RESULTS, Answers, Hostile, answers_test, stored

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


@pytest.fixture
def few_counts(monkeypatch):
    """One list of labels in place of six: an answer that asks for ranks starts them for each."""
    monkeypatch.setattr(check, "LABELS", ([3, 1],))


def from_far_to_near(ranks):
    """Half of all ranks away first, then a quarter, ..."""
    powers = [2**step for step in reversed(range(math.ceil(math.log2(ranks))))]
    return tuple(tuple((rank, rank + far) for rank in range(0, ranks - far, 2 * far)) for far in powers)


tree = stored("04_distributed_data_parallel", "tree_solution", math=math)
TREE = [
    (lambda ranks: [[(0, rank)] for rank in range(1, ranks)], "you return 3 steps, and 2 are enough. How many"),
    (lambda ranks: [[(0, rank) for rank in range(1, ranks)]], "can send once in a step"),
    (lambda ranks: [[(0, 1)], []], "you return 2 steps, and 1 is enough"),
    (tree("while have < ranks", "while have < 2"), "With ranks=4, 2 ranks still wait"),
    (tree("return steps", "return [*steps, [(0, 1)]]"), "that does not have the tensor yet"),
    (lambda ranks: [[(0, ranks)]], "Send once to each rank, 0 to 1,"),
    (lambda ranks: [(0, 1)], "a step is a list of pairs"),
    (lambda ranks: [[(Hostile(), 1)]], "do not look"),
    (tree("have < ranks", "have < 2 ** round(math.log2(ranks))"), "With ranks=5, 1 rank still waits"),
    (tree("return steps", "return steps or [[]]"), "With ranks=1 no other rank waits"),
    (tree("(sender, ", "(sender + 0.4, "), "an integer"),
]
validate = stored("04_distributed_data_parallel", "validate_solution", DistributedSampler=DistributedSampler)
MINE, SAMPLES = "    mine = ", "range(rank, count, dist.get_world_size())"
REDUCE, RESULT = "dist.all_reduce(total_and_count)", "return total / all_samples"
GATHERED = (
    "of_ranks = [0] * 4; dist.all_gather_object(of_ranks, total_and_count.tolist()); "
    "total_and_count = torch.tensor(of_ranks).sum(0)"
)
VALIDATE = [
    (validate("mine.sum(), len(mine)", "mine.mean() if len(mine) else 0.0, 1"),
     "the mean of the ranks' means, but the ranks have 3 + 3 + 2"),
    # A mean times its number is a sum, but for a rank that has none: right with 10 samples, not with 3.
    (validate("mine.sum()", "mine.mean() * len(mine)"), "3 samples on 4 ranks, the results are (nan, n"),
    (validate(RESULT, "return mine.mean().item()"), "The samples of the others are missing"),
    (validate(RESULT, "return total"), "is the sum of the losses"),
    (validate(RESULT, "return (total / all_samples, None)[rank > 1]"), "returned None"),
    (validate(RESULT, "return (total / all_samples, 2.0)[rank > 1]"), "rank 2's result of 2 is"),
    (validate(RESULT, "return [total / all_samples]"), "], which is not a number. Return a number"),
    (validate(SAMPLES, "DistributedSampler(range(count))"), "twice. DistributedSampler does"),
    (validate("count, dist", "count - count % 4, dist", ".tolist()", ""), "looks at the samples [8, 9]"),
    (validate(SAMPLES, "range(count)"), "one rank looks at 10 samples"),
    (validate(MINE, "    losses([0])\n    losses([0])\n" + MINE), "the losses of a sample twice"),
    (validate(REDUCE, "dist.reduce(total_and_count, 0)", ".tolist()", ""), "only rank 0 has the mean of all"),
    (validate(", device=mine.device", ""), "got a tensor on the CPU. NCCL takes only tensors on GPUs"),
    (validate("count, dist", "count + 4, dist"), "IndexError"),
    (validate(REDUCE, "dist.all_reduce(mine)"), "or one with tensors of different sizes"),
    (validate("mine.sum(), len(mine)", "mine.mean() if len(mine) else 0, 1"), "sizes or dtypes"),
    (validate(REDUCE, f"{REDUCE} if rank else dist.broadcast(total_and_count, 0)"), "call different collectives"),
    (validate(MINE, '    dist.init_process_group("nccl")\n' + MINE), "Leave out `init_process_group`"),
    (validate("mine.device", '"cuda:0"'), "Several ranks use the same GPU. LOCAL_RANK chooses"),
    (validate("(total_and_count)", "(total_and_count, async_op=True)", ".tolist()", ""), "async_op=True is not"),
    (validate("    return", "    dist.destroy_process_group()\n    return"), "`destroy_process_group`"),
]  # fmt: skip
WAITS = validate(
    "    total_and", "    if len(mine) == 0:\n        return 0.0\n    total_and"
)  # the ranks are of no use after the last two


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
    (lambda counts, rank: 4 * counts[rank] / sum(counts), "[5, 5] labels, every label counts 2 times as much"),
    (lambda counts, rank: max(counts[rank], 1) * len(counts) / sum(counts), "has no labels"),
]
FACTOR_IN_RANKS = [
    (lambda counts, rank: [dist.get_rank()], "returned [0], which is not a number"),
    (lambda counts, rank: None if dist.get_rank() else None, "returned None"),
]


ranked = stored("04_distributed_data_parallel", "ranked_solution", own_half=SubsetRandomSampler)
EPOCH, SAMPLER, DEVICE = "        data.sampler.set_epoch(epoch)\n", "DistributedSampler(samples)", "local_device()"
RANKED = [
    (ranked("set_epoch(epoch)", "set_epoch(epoch % 2)"), "Two epochs have the same order"),
    (ranked("set_epoch(epoch)", "set_epoch(epoch + rank)"), "samples go to both ranks. The ranks divide one order"),
    (ranked(EPOCH, ""), "Every epoch has the same order. How does the sampler know"),
    (ranked(SAMPLER, "own_half(range(rank, 32, 2))", EPOCH, ""), "Rank 0 takes the same half of the samples in every"),
    (ranked(SAMPLER, "DistributedSampler(samples, shuffle=False)"), "in which they are stored. Shuffle them"),
    (ranked(SAMPLER, "None", EPOCH, ""), "took 96 and 96 samples. In each of 3 epochs, half of the 32"),
    (ranked("batch_size=4", "batch_size=4, num_workers=1"), "as in a DataLoader with num_workers=0"),
    (ranked("DistributedDataParallel(", "nn.Sequential("),
     ("ranks' weights differ, and are off by", "Their gradients were never averaged")),
    (ranked("rank == 0", "True"), "Ranks 0 and 1 logged 3 and 3 lines. Rank 0 should log one line per epoch"),
    (ranked("batch_size=4", "batch_size=8"), "A step takes 8 samples on each rank, 16 together, and 8 in `alone`"),
    (ranked("torch.manual_seed(0)", "pass"), "starts from random weights"),
    (ranked("lr=0.1", "lr=0.2"), ("compared with those of one GPU they are off by", "Compare the net, the seed")),
    (ranked(DEVICE, 'torch.device("cuda", 1 - rank)'), "Rank 0 put its tensors on cuda:1. Its LOCAL_RANK is 0"),
    (lambda rank, samples, log: 3, "It returned 3. Return the net."),
    (ranked(DEVICE, '"cpu"'), "on the CPU"),
    (ranked(DEVICE, '"cuda:0"'), "LOCAL_RANK"),  # what one gets by copying `alone`
    (ranked("    return", "    dist.destroy_process_group()\n    return"), "Leave out `destroy_process_group`"),
]  # fmt: skip
RAISES = lambda rank, samples, log: dist.barrier() or samples[32 + rank]  # noqa: E731
ANSWERS = {
    "tree": Answers(
        check.tree, [from_far_to_near, tree("return steps", "return [zip(*zip(*step)) for step in steps]")], TREE
    ),
    "validate": Answers(
        check.validate,
        [
            validate(SAMPLES, f"iter({SAMPLES})", RESULT, "return torch.tensor([total / all_samples])"),
            validate(SAMPLES, "torch.arange(count).tensor_split(4)[rank]"),
            validate(REDUCE, GATHERED),
            validate("(total_and_count)", "(total_and_count, async_op=True).wait()"),
        ],
        VALIDATE,
        fixtures="four",
        strange=STRANGE_RESULTS[-2:],
        ranks=[4],
    ),
    "factor": Answers(
        check.factor, [lambda counts, rank: torch.tensor(counts)[rank] / torch.tensor(counts).float().mean()], FACTOR
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
        [ranked("return net", "return net.module.cpu()")],
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
