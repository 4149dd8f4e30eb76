"""The checks of lesson 08: solutions pass, typical mistakes are explained, nothing raises."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from virtual_gpus import virtual_gpus

from helpers.exercises import lesson08 as check
from helpers.models import Llama
from tests.check_answers import explains, survives_strange_answers

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


@pytest.fixture
def two_gpus():
    with virtual_gpus(2):
        yield


def test_no_answer_makes_a_check_raise(two_gpus):
    assert survives_strange_answers(check.held, check.sent, check.plan)


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
        (lambda parameters, ranks, stage, m: 1.0 + sent(parameters, ranks, stage, m), "nobody to send to"),
    )  # fmt: skip


COLUMNS = {"open": ColwiseParallel(), "content": ColwiseParallel()}


def test_plan(two_gpus):
    assert check.plan({**COLUMNS, "close": RowwiseParallel()})
    assert check.plan({**COLUMNS, "close": RowwiseParallel(use_local_output=False)})
    whole = ColwiseParallel(output_layouts=Replicate())
    explains(
        check.plan,
        ([ColwiseParallel()], "is not a plan"),
        ({"first": ColwiseParallel()}, "has no layer 'first'"),
        ({"open": ColwiseParallel}, "with brackets"),
        (COLUMNS, "has the whole weight of 'close'"),
        ({**COLUMNS, "close": RowwiseParallel(output_layouts=Shard(0))}, "not that of one GPU"),
        ({"open": whole, "content": whole, "close": RowwiseParallel(input_layouts=Replicate())}, "one is enough"),
    )


def training(first=False, wrap=True, mean=True):
    """A solution, or one with a mistake."""

    def sharded(rank, tokens, log):
        torch.manual_seed(0)
        model = Llama(layers=2).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for block in model.blocks if wrap else []:
            fully_shard(block)
        fully_shard(model)
        if not first:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        mine = tokens.chunk(2)[rank].to("cuda")
        for _ in range(3):
            loss = check.one_step(model, optimizer, mine)
            if mean:
                dist.all_reduce(loss, dist.ReduceOp.AVG)
            if rank == 0:
                log(loss.item())
        return model

    return sharded


def test_sharded(two_gpus):
    assert check.sharded(training())
    explains(
        lambda wrong: check.sharded(wrong if callable(wrong) else training(**wrong)),
        ({"first": True}, "have not changed"),
        ({"wrap": False}, "0 of the 2 blocks"),
        ({"mean": False}, "Log the mean over the ranks"),
        (lambda rank, tokens, log: None, "returned None"),
    )
