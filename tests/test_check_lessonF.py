"""The checks of the final task: right and wrong answers of each task."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from notebooks.checks import lessonF as check
from tests.check_answers import STRANGE_RESULTS, Answers, answers_test, stored, then
from tests.ways_to_save import copied, from_a_buffer, in_place, into_an_open_file, renamed

pytestmark = pytest.mark.usefixtures("four_of_16_gib")


@pytest.fixture
def same_numbers(monkeypatch):
    """Each answer gets the same images."""
    monkeypatch.setattr(check.random, "randrange", lambda low, high: low)


ranked = stored("F_final_task", "ranked_solution", dist=dist, fully_shard=fully_shard)
WRAPPER, STEP = "DistributedDataParallel(model, device_ids=[rank])", "optimizer.step()"
SUMMED = f"[dist.all_reduce(each.grad) for each in model.parameters()], {STEP}"


def state_of(model, optimizer):
    return {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}


def saves(write=None, what=state_of):
    """`write(state, path)`, by default in a file of its own that is renamed."""
    return lambda path, model, optimizer: (write or renamed())(what(model, optimizer), path)


def without_a_file_for_a_moment(old, new):
    new.unlink(missing_ok=True)
    os.rename(old, new)


def restored_afterwards(path, *job):
    old = path.read_bytes() if path.exists() else b""
    try:
        saves(in_place)(path, *job)
    except BaseException:
        path.write_bytes(old)
        raise


RIGHT, LOSES = check.FAULTS, "loses the old checkpoint"
TABLE = {
    "budget": Answers(
        check.budget,
        right=[lambda p, r, s: 16 * p // (r if s else 1), lambda p, r, s: 16.0 * p / r**s],
        wrong=[
            (lambda p, r, s: 16 * p, "with `fully_shard`, each gpu holds its share"),
            (lambda p, r, s: 16 * p / r, "with ddp, each gpu holds everything"),
            (lambda p, r, s: 8 * p / r**s, "leaves out the two states"),
            (lambda p, r, s: 12 * p / r**s, "one of the two states of adamw"),
            (lambda p, r, s: 16 * p / r**s / 2**30, "is less than half"),
        ],
    ),
    "ranked": Answers(
        check.ranked,
        right=[
            ranked(".tensor_split(ranks)[rank]", "[rank::ranks]", WRAPPER, "model", "* ranks", "", STEP, SUMMED),
            ranked(WRAPPER, "fully_shard(model)"),  # averages the gradients as DDP does
        ],
        wrong=[
            (ranked("* ranks / len(x)", "/ len(part)"), "is not the mean of the batch if the parts differ"),
            (ranked(".tensor_split(ranks)[rank]", ""), "Divide each batch"),
            (ranked(WRAPPER, "model"), "gradients added up"),
            (ranked(".to(rank)", ".to(0)", "[rank])\n    opt", "[0])\n    opt"), "Duplicate GPU detected"),
            (ranked("torch.manual_seed(0)", "pass"), "Compare seed"),
            (ranked("* ranks", ""), "Multiply the loss by it"),
            (ranked("* ranks", "* ranks**2"), "added up twice"),
            (ranked("len(x)", "len(part)"), "the sum of the ranks' mean losses"),
            (ranked("return model", "model[1].bias.data.add_(rank // 2)\n    return model"), "of the ranks differ"),
            (lambda rank, ranks, images, labels: [1], "Return the model"),
            (lambda rank, ranks, images, labels: ..., "still returns"),
        ],
        strange=STRANGE_RESULTS[:1],
        fixtures="same_numbers",
        ranks=(2, 4),
    ),
    "faults": Answers(
        check.faults,
        right=[dict(RIGHT)],
        wrong=[
            (dict.fromkeys(RIGHT, "other GPU"), "1 of 5 causes are right"),
            (RIGHT | {"a": "a hang"}, "(a) 'a hang' is none of the causes"),
            ({"a": "kept graph"}, "b"),
            (RIGHT | {"c": ["kept graph"]}, "none of the causes"),
        ],
    ),
    "saved": Answers(
        check.saved,
        right=[
            saves(),
            saves(renamed(into_an_open_file)),
            saves(renamed(from_a_buffer, Path.replace)),
            saves(renamed(lambda state, path: torch.save(obj=state, f=path))),
        ],
        wrong=[
            *((saves(write), LOSES) for write in (in_place, into_an_open_file, from_a_buffer)),
            (saves(renamed(rename=copied)), LOSES),
            (saves(renamed(rename=without_a_file_for_a_moment)), LOSES),
            (then(saves(), lambda path, *_: path.unlink(missing_ok=True)), LOSES),
            (restored_afterwards, LOSES),
            (then(lambda path, *_: path.with_name("old.pt").touch(), saves()), "Leave nothing except the checkpoint"),
            (saves(what=lambda m, o: state_of(m, o) | {"model": nn.Linear(3, 2).state_dict()}), "weights in the file"),
            (saves(what=lambda m, o: state_of(m, o) | {"model": m.module}), "cannot read the file"),
            (saves(what=lambda m, o: state_of(m, o) | {"model": m.state_dict()}), "begins with `module.`"),
            (saves(what=lambda m, o: m.module.state_dict()), "keys model and optimizer"),
            (saves(what=lambda m, o: state_of(m, o) | {"optimizer": {}}), "no momentum"),
            (lambda path, model, optimizer: None, "There is no file"),
            (lambda path, model, optimizer: path.write_bytes(b"1"), "cannot read the file"),
        ],
    ),
}
test_answers = answers_test(TABLE)
