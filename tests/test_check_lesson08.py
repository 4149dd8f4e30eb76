"""The checks of lesson 08."""

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel

from notebooks.checks import lesson08 as check
from tests.check_answers import Answers, answers_test, stored

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


def held(parameters, ranks, stage, kept=(4, 4, 8)):
    return parameters * sum(each / ranks if place >= 3 - stage else each for place, each in enumerate(kept))


HELD = Answers(
    check.held,
    right=[held, lambda *job: torch.tensor(held(*job), dtype=torch.double)],
    wrong=[
        (lambda *job: held(*job, kept=(4, 4, 4)), "one number of Adam"),
        (lambda *job: held(*job, kept=(4, 0, 8)), "lacks the gradients"),
        (lambda parameters, ranks, stage: 16 * parameters, "is what DDP holds"),
        (lambda parameters, ranks, stage: held(parameters, ranks, 3 * (stage > 0)), "That is stage 3"),
        (lambda parameters, ranks, stage: held(parameters, ranks, min(3, stage + 1)), "is what ZeRO-2 holds"),
        (lambda parameters, ranks, stage: held(parameters, ranks, min(1, stage)), "is what ZeRO-1 holds"),
        (lambda parameters, ranks, stage: held(parameters, ranks, stage) + 4 * parameters * (stage == 0), "buckets"),
        (lambda *job: held(*job) * job[1], "is what all ranks hold together"),
        (lambda *job: held(*job) / 4, "a byte for each number"),
        (lambda *job: held(*job) / 2**30, "is in GiB"),
    ],
)


def sent(parameters, ranks, stage, micro_batches):
    times = (2, 2, micro_batches + 1, 3 * micro_batches)[stage]
    return 4 * parameters * times * (ranks - 1) / ranks


SENT = Answers(
    check.sent,
    right=[sent],
    wrong=[
        (lambda parameters, ranks, *job: sent(parameters, ranks, *job) * ranks / max(1, ranks - 1), "lacks the factor"),
        (lambda *job: sent(*job) / 4, "a byte for each number"),
        (lambda *job: sent(*job[:3], 1), "What is repeated"),
        (lambda *job: sent(*job[:3], 1) * job[3], "once in a step"),
        (lambda parameters, ranks, stage, m: sent(parameters, ranks, 0, m), "is what DDP sends"),
        (lambda *job: sent(*job) / 1e9, "is in GB"),
        (lambda *job: sent(*job) * job[1], "all ranks send together"),
        (lambda *job: sent(*job) / (2 - (job[2] > 0)), "one half"),
        (lambda *job: sent(*job) if job[2] < 3 else sent(*job) * (2 + 1 / job[3]) / 3, "reduces the gradients only"),
        (lambda *job: sent(*job) if job[2] < 3 or job[3] == 1 else sent(*job) * 2 / 3, "gathers only once"),
        (lambda *job: 1.0 + sent(*job), "nobody to send to"),
    ],
)

COLUMNS = {"open": ColwiseParallel(), "content": ColwiseParallel()}
DIVIDED, WHOLE = ColwiseParallel(use_local_output=False), ColwiseParallel(output_layouts=Replicate())
PARTIAL = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
PLAN = Answers(
    check.plan,
    right=[
        {**COLUMNS, "close": RowwiseParallel()},
        {**COLUMNS, "close": RowwiseParallel(use_local_output=False)},
        {"open": DIVIDED, "content": DIVIDED, "close": RowwiseParallel()},
        {"o*": ColwiseParallel(), "con*": ColwiseParallel(), "c[!o]*": RowwiseParallel()},
    ],
    wrong=[
        (COLUMNS, "has the whole weight of 'close'"),
        ({**COLUMNS, "close": ColwiseParallel()}, "does not fit its weight"),
        ({**COLUMNS, "close": RowwiseParallel(output_layouts=Shard(0), use_local_output=False)}, "the shape (4, 16)"),
        ({**COLUMNS, "close": PARTIAL}, "not that of one GPU"),
        ({"open": WHOLE, "content": WHOLE, "close": RowwiseParallel(input_layouts=Replicate())}, "one is enough"),
        ([ColwiseParallel()], "is not a plan"),
        ({"close.weight": RowwiseParallel()}, "has no layer 'close.weight'"),
        ({"open": ColwiseParallel}, "with brackets"),
        ({"*": ColwiseParallel(), "close": RowwiseParallel()}, "both match 'close'"),
    ],
    fixtures="two",
    ranks=[2],
)


sharded = stored("08_sharding", "sharded_solution", np=np, DDP=DistributedDataParallel, FSDP1=FullyShardedDataParallel)
BLOCKS, MODEL = "    for block in model.blocks:\n        fully_shard(block)\n", "    fully_shard(model)\n"
OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
SHARDED = Answers(
    check.sharded,
    right=[sharded("loss.item()", "np.float64(loss.item())")],
    wrong=[
        (sharded(OPTIMIZER, "", BLOCKS, OPTIMIZER + BLOCKS), "have not changed"),
        (sharded(BLOCKS + MODEL, ""), "Rank 0 holds 100% of all parameters"),
        (sharded(BLOCKS, ""), "0 of the 2 blocks"),
        (sharded(MODEL, ""), "Did you forget `fully_shard(model)`?"),
        (sharded(BLOCKS + MODEL, MODEL + BLOCKS), "before its blocks"),
        (sharded(BLOCKS, "    fully_shard(list(model.blocks))\n"), "wrapped in one call"),
        (sharded(BLOCKS, "    fully_shard(model.blocks)\n"), "has no forward pass"),
        (sharded("layers=2", "layers=3"), "other shapes than in `alone`"),
        (
            sharded("check.one_step(model, optimizer, mine)", "mine.new_zeros(()).float()"),
            "did not call `check.one_step`",
        ),
        (sharded("dist.all_reduce(loss)", "loss *= ranks"), "Log the mean over the ranks"),
        (sharded("loss.item()", "loss"), "Log a number"),
        (sharded("loss.item()", "(6.382, 5.149, 3.990)[_]"), "The loss of step 0 is 6.3820"),  # that the lesson prints
        (sharded(BLOCKS + MODEL, "    model = DDP(model)\n"), "returned a DistributedDataParallel"),
        (sharded(BLOCKS + MODEL, "    model = FSDP1(model)\n"), "returned a FullyShardedDataParallel"),
        (lambda rank, tokens, log: None, "returned None"),
    ],
    strange=[],
    fixtures="two",
    ranks=[2],
)


def micro_batch(tensor, sequences, recomputing, keeping):
    """About what rank 0 needs in reality, which takes seconds to find out. Lesson 08 runs the real one."""
    per_block = 2.65 * sequences / tensor * 2**30
    peak = 10 * 2**30 + (0.07 * recomputing + keeping) * per_block
    return peak, sequences / tensor * (0.11 * recomputing + 0.085 * keeping + 0.05 * tensor**1.5)


@pytest.fixture
def modelled(monkeypatch):
    monkeypatch.setenv("COURSE_PROGRESS", "off")
    monkeypatch.setattr(check, "_micro_batch", micro_batch)


GOOD = {"tensor": 2, "sequences": 1, "recompute": 48}
JOB = Answers(
    check.job,
    scored=[
        (GOOD, "reach par"),
        ({key: np.int64(value) for key, value in GOOD.items()}, "reach par"),
        (GOOD | {"recompute": 40}, "beat par"),
        ({"tensor": 8, "sequences": 4, "recompute": 80}, "over par"),
    ],
    wrong=[
        (GOOD | {"tensors": 2}, "There is no choice 'tensors'. The choices are tensor, sequences, recompute"),
        (GOOD | {"tensor": 3}, "1, 2, 4 or 8"),
        (GOOD | {"recompute": True}, "an integer from 0 to 80"),
        (GOOD | {"recompute": 81}, "an integer from 0 to 80"),
        (GOOD | {"recompute": 0.5}, "an integer from 0 to 80"),
        (GOOD | {"sequences": 0}, "an integer from 1 to 128"),
        (GOOD | {"tensor": 1}, "256 groups with 1 each train on 256 sequences at once, and a step has only 128"),
        (GOOD | {"tensor": 8, "sequences": 3}, "does not divide the 128"),
        (GOOD | {"recompute": 0}, "and 72 GiB are allowed"),
    ],
    fixtures="modelled",
)

test_answers = answers_test({"held": HELD, "sent": SENT, "plan": PLAN, "sharded": SHARDED, "job": JOB})
