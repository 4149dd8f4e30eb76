"""The checks of lesson 08: solutions pass, typical mistakes are explained, nothing raises."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn.parallel import DistributedDataParallel
from virtual_gpus import virtual_gpus

from helpers.models import Llama
from notebooks.checks import lesson08 as check
from tests.check_answers import explains, survives_strange_answers

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


@pytest.fixture
def two_gpus():
    with virtual_gpus(2):
        yield


def test_no_answer_makes_a_check_raise(two_gpus):
    assert survives_strange_answers(check.held, check.sent, check.plan, check.job)


def held(parameters, ranks, stage, kept=(4, 4, 8)):
    return parameters * sum(each / ranks if place >= 3 - stage else each for place, each in enumerate(kept))


def test_held():
    assert check.held(held)
    assert check.held(lambda parameters, ranks, stage: torch.tensor(held(parameters, ranks, stage), dtype=torch.double))
    explains(
        check.held,
        (lambda parameters, ranks, stage: held(parameters, ranks, stage, (4, 4, 4)), "one number of Adam"),
        (lambda parameters, ranks, stage: held(parameters, ranks, stage, (4, 0, 8)), "lacks the gradients"),
        (lambda parameters, ranks, stage: 16 * parameters, "is what DDP holds"),
        (lambda parameters, ranks, stage: held(parameters, ranks, 3 * (stage > 0)), "That is stage 3"),
        (lambda parameters, ranks, stage: held(parameters, ranks, stage) / 4, "a byte for each number"),
        (lambda parameters, ranks, stage: held(parameters, ranks, stage) / 2**30, "is in GiB"),
        (lambda parameters, ranks, stage: held(parameters, ranks, stage) / 1e9, "is in GB"),
        (lambda parameters, ranks, stage: held(parameters, ranks, stage) / 2**20, "is in MiB"),
        (lambda parameters, ranks, stage: held(parameters, ranks, stage) * ranks, "is what all ranks hold together"),
        (lambda parameters, ranks, stage: held(parameters, ranks, min(3, stage + 1)), "is what ZeRO-2 holds"),
        (lambda parameters, ranks, stage: held(parameters, ranks, min(1, stage)), "is what ZeRO-1 holds"),
        (lambda parameters, ranks, stage: held(parameters, ranks, stage) + 4 * parameters * (stage == 0), "buckets"),
    )


def sent(parameters, ranks, stage, micro_batches):
    times = (2, 2, micro_batches + 1, 3 * micro_batches)[stage]
    return 4 * parameters * times * (ranks - 1) / ranks


def test_sent():
    assert check.sent(sent)
    explains(
        check.sent,
        (lambda parameters, ranks, stage, m: sent(parameters, ranks, stage, m) * ranks / max(1, ranks - 1),
         "lacks the factor"),
        (lambda parameters, ranks, stage, m: sent(parameters, ranks, stage, m) / 4, "a byte for each number"),
        (lambda parameters, ranks, stage, m: sent(parameters, ranks, stage, 1), "What is repeated"),
        (lambda parameters, ranks, stage, m: sent(parameters, ranks, stage, 1) * m, "once in a step"),
        (lambda parameters, ranks, stage, m: sent(parameters, ranks, 0, m), "is what DDP sends"),
        (lambda parameters, ranks, stage, m: sent(parameters, ranks, stage, m) / 2**30, "is in GiB"),
        (lambda parameters, ranks, stage, m: sent(parameters, ranks, stage, m) / 1e6, "is in MB"),
        (lambda parameters, ranks, stage, m: sent(parameters, ranks, stage, m) * ranks, "all ranks send together"),
        (lambda parameters, ranks, stage, m: sent(parameters, ranks, stage, m) / (2 - (stage > 0)), "one half"),
        (lambda *job: sent(*job) if job[2] < 3 else sent(*job) * (2 + 1 / job[3]) / 3, "reduces the gradients only"),
        (lambda *job: sent(*job) if job[2] < 3 or job[3] == 1 else sent(*job) * 2 / 3, "gathers only once"),
        (lambda parameters, ranks, stage, m: 1.0 + sent(parameters, ranks, stage, m), "nobody to send to"),
    )  # fmt: skip


COLUMNS = {"open": ColwiseParallel(), "content": ColwiseParallel()}


def test_plan(two_gpus):
    assert check.plan({**COLUMNS, "close": RowwiseParallel()})
    assert check.plan({**COLUMNS, "close": RowwiseParallel(use_local_output=False)})
    divided = ColwiseParallel(use_local_output=False)
    assert check.plan({"open": divided, "content": divided, "close": RowwiseParallel()})
    assert check.plan({"o*": ColwiseParallel(), "con*": ColwiseParallel(), "c[!o]*": RowwiseParallel()})
    whole = ColwiseParallel(output_layouts=Replicate())
    explains(
        check.plan,
        ([ColwiseParallel()], "is not a plan"),
        ({"first": ColwiseParallel()}, "has no layer 'first'"),
        ({"close.weight": RowwiseParallel()}, "has no layer 'close.weight'"),
        ({"open": ColwiseParallel}, "with brackets"),
        ({"*": ColwiseParallel(), "close": RowwiseParallel()}, "both match 'close'"),
        (COLUMNS, "has the whole weight of 'close'"),
        ({**COLUMNS, "close": ColwiseParallel()}, "does not fit its weight"),
        ({"*": RowwiseParallel()}, "does not fit its weight"),
        ({"open": ColwiseParallel(), "content": RowwiseParallel(), "close": ColwiseParallel()}, "does not fit"),
        ({**COLUMNS, "close": SequenceParallel()}, "has the whole weight of 'close'"),
        ({**COLUMNS, "close": RowwiseParallel(output_layouts=Shard(0))}, "the shape (4, 16), and one GPU (8, 16)"),
        ({**COLUMNS, "close": RowwiseParallel(output_layouts=Shard(0), use_local_output=False)}, "the shape (4, 16)"),
        (
            {**COLUMNS, "close": RowwiseParallel(output_layouts=Partial(), use_local_output=False)},
            "not that of one GPU",
        ),
        ({"open": whole, "content": whole, "close": RowwiseParallel(input_layouts=Replicate())}, "one is enough"),
    )


def training(
    first=False, parts=lambda model: [*model.blocks, model], outer=None, step=check.one_step, mean=True,
    log_as=torch.Tensor.item, shown=None, **shape,
):  # fmt: skip
    """A solution, or one with a mistake. outer: a class around the model. shown: losses that the lesson prints."""

    def sharded(rank, tokens, log):
        torch.manual_seed(0)
        model = Llama(**shape).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for part in parts(model):
            fully_shard(part)
        if not first:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trained = outer(model) if outer else model
        mine = tokens.chunk(2)[rank].to("cuda")
        for number in range(3):
            loss = step(trained, optimizer, mine)
            if mean:
                dist.all_reduce(loss, dist.ReduceOp.AVG)
            if rank == 0:
                log(shown[number] if shown else log_as(loss))
        return trained

    return sharded


def own_step(model, optimizer, tokens):
    return tokens.new_zeros((), dtype=torch.float32)


def test_sharded(two_gpus):
    assert check.sharded(training())
    assert check.sharded(training(log_as=lambda loss: np.float64(loss.item())))
    explains(
        lambda wrong: check.sharded(wrong if callable(wrong) else training(**wrong)),
        ({"first": True}, "have not changed"),
        ({"parts": lambda model: [model]}, "0 of the 2 blocks"),
        ({"parts": lambda model: [*model.blocks]}, "Did you forget `fully_shard(model)`?"),
        ({"parts": lambda model: [model, *model.blocks]}, "before its blocks"),
        ({"parts": lambda model: [list(model.blocks), model]}, "wrapped in one call"),
        ({"parts": lambda model: [model.blocks, model]}, "has no forward pass"),
        ({"layers": 3}, "other shapes than in `alone`"),
        ({"width": 128}, "other shapes than in `alone`"),
        ({"step": own_step}, "did not call `check.one_step`"),
        ({"mean": False}, "Log the mean over the ranks"),
        ({"log_as": torch.Tensor.detach}, "Log a number"),
        ({"log_as": lambda loss: f"{loss:.3f}"}, "Log a number"),
        ({"shown": (6.382, 5.149, 3.990)}, "The loss of step 0 is 6.3820"),
        ({"parts": lambda model: [], "outer": DistributedDataParallel}, "returned a DistributedDataParallel"),
        ({"parts": lambda model: [], "outer": FullyShardedDataParallel}, "is the class of FSDP1"),
        (lambda rank, tokens, log: None, "returned None"),
    )


def micro_batch(tensor, sequences, recomputing, keeping):
    """About what rank 0 needs in reality, which takes seconds to find out. Lesson 08 runs the real one."""
    per_block = 2.65 * sequences / tensor * 2**30
    peak = 10 * 2**30 + (0.07 * recomputing + keeping) * per_block
    return peak, sequences / tensor * (0.11 * recomputing + 0.085 * keeping + 0.05 * tensor**1.5)


def test_job(monkeypatch):
    monkeypatch.setattr(check, "_micro_batch", micro_batch)
    good = {"tensor": 2, "sequences": 1, "recompute": 48}
    assert check.job(good) and "reach par" in check.job(good).text
    assert "reach par" in check.job({key: np.int64(value) for key, value in good.items()}).text
    assert "beat par" in check.job(good | {"recompute": 40}).text
    assert "over par" in check.job({"tensor": 8, "sequences": 4, "recompute": 80}).text
    explains(
        check.job,
        ([2, 1, 48], "is not a dict"),
        (good | {"tensors": 2}, "There is no choice 'tensors'"),
        ({"tensor": 2, "sequences": 1}, "does not say recompute"),
        (good | {"tensor": 3}, "1, 2, 4 or 8"),
        (good | {"tensor": 16}, "1, 2, 4 or 8"),
        (good | {"recompute": True}, "an integer from 0 to 80"),
        (good | {"recompute": 81}, "an integer from 0 to 80"),
        (good | {"recompute": 0.5}, "an integer from 0 to 80"),
        (good | {"sequences": 0}, "an integer from 1 to 128"),
        (good | {"sequences": 200}, "an integer from 1 to 128"),
        (good | {"tensor": 1}, "256 groups with 1 each train on 256 sequences at once, and a step has only 128"),
        (good | {"sequences": 2}, "a step has only 128"),
        (good | {"tensor": 8, "sequences": 3}, "does not divide the 128"),
        (good | {"recompute": 0}, "and 72 GiB are allowed"),
    )
