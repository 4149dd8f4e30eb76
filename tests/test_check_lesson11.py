"""The checks of lesson 11: right and wrong answers of each exercise."""

import pytest
import torch

from notebooks.checks import lesson11 as check
from tests.check_answers import STRANGE_RESULTS, Answers, answers_test, stored

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

LESSON = "11_long_sequences_and_experts"
WORK, COMBINE, SENT, TOP_TWO = (stored(LESSON, f"{name}_solution") for name in ("work", "combine", "sent", "top_two"))

pytestmark = pytest.mark.usefixtures("four")


def by_pairs(rank, ranks, balanced):
    """Counted one by one in chunks of 50 tokens."""
    pieces = torch.arange(2 * ranks * 50) // 50
    mine = (pieces == rank) | (pieces == 2 * ranks - 1 - rank) if balanced else pieces // 2 == rank
    pairs = torch.ones(len(pieces), len(pieces)).tril() - torch.eye(len(pieces)) / 2
    return pairs[mine].sum() / pairs.sum()


def naive(outputs, log_sums):
    sums = torch.stack(log_sums).exp()
    return (sums * torch.stack(outputs)).sum(dim=0) / sums.sum(dim=0)


def shifted(outputs, log_sums):
    largest = torch.stack(log_sums).amax(dim=0)
    return naive(outputs, [each - largest for each in log_sums])


TABLE = {
    "work": Answers(
        check.work,
        right=[WORK(), by_pairs, lambda *case: round(WORK()(*case), 2)],
        wrong=[
            (lambda rank, ranks, balanced: 1 / ranks, "is an equal share"),
            (WORK("if balanced", "if False"), "without balancing"),
            (WORK("(rank + 0.5) / (ranks**2 / 2)", "(rank + 1) / (ranks * (ranks + 1) / 2)"), "Count half"),
            (lambda *case: 100 * WORK()(*case), "is in percent"),
            (lambda rank, ranks, balanced: WORK()(ranks - 1 - rank, ranks, balanced), "at the other end"),
        ],
    ),
    "combine": Answers(
        check.combine,
        right=[COMBINE(), shifted],
        wrong=[
            (lambda outputs, log_sums: torch.stack(outputs).mean(dim=0), "mean of the blocks"),
            (COMBINE("torch.stack(log_sums).softmax(dim=0)", "torch.stack(log_sums) / sum(log_sums)"), "logarithms"),
            (naive, ("not finite", "each query's largest")),
            (lambda *blocks: naive(*blocks).nan_to_num(), "All values are 0"),
            (lambda outputs, log_sums: outputs[0].zero_(), "changes its arguments"),
            (lambda outputs, log_sums: shifted(outputs, log_sums).T, "shape"),
        ],
    ),
    "sent": Answers(
        check.sent,
        right=[SENT()],
        wrong=[
            (SENT("(ranks - 1) * block", "ranks * block"), "a step too many"),
            (SENT("(ranks - 1) * block", "(ranks > 1) * block * 7 / 7"), "is one step"),
            (SENT("block = 2 *", "block = 1 *"), "one of keys and values"),
            (SENT("head_width * 2", "head_width * 4"), "four bytes"), (SENT("(tokens / ranks)", "tokens"), "whole"),
            (lambda *job: 1.0 + SENT()(*job), "nobody to send to"), (lambda *job: SENT()(*job) / 1e9, "right in GB"),
        ],
    ),
    "top_two": Answers(
        check.top_two,
        right=[TOP_TWO()],
        wrong=[
            (TOP_TWO("out[order] = returned", "out = returned"), "back to its token"),
            (TOP_TWO("probability[:, :, None] * ", ""), "differs from one GPU"),
            (TOP_TWO("return x + ", "return "), "Add x"),
            (TOP_TWO("probability[:, :, None]", "(probability / probability.sum(1, True))[:, :, None]"), "their sum"),
            (TOP_TWO("rows = x.", "rows = x.detach()."), "gradient of the tokens"),
            (TOP_TWO(".unflatten(0, (-1, 2))).sum(dim=1)", ".unflatten(0, (-1, 2)))[:, 0]"), "one expert only"),
            (TOP_TWO("probability, chosen = router(x)", "probability, chosen = router(x).detach()"), "AllToAll"),
            (TOP_TWO("return x +", "return 2, x +"), "Return the tensor"),
            (TOP_TWO("expert(", "(lambda rows: expert(rows.repeat(2, 1))[: len(rows)])("), "Send it no others"),
            (lambda *given: TOP_TWO()(*given)[:3], "instead of (24, 16)"),
            (lambda *job: TOP_TWO()(*job).double(), "64 on cuda:"), (lambda *job: TOP_TWO()(*job).cpu(), "32 on cpu"),
        ],
        strange=STRANGE_RESULTS,
        ranks=[4],
    ),
    "an expert without tokens": Answers(
        check.top_two, wrong=[(TOP_TWO("minlength=dist.get_world_size()", ""), "RankError")], strange=[]
    ),
}  # fmt: skip
test_answers = answers_test(TABLE)
