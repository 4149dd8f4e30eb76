"""The checks of the final task: right and wrong answers of each task."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from notebooks.checks import lessonF as check
from tests.check_answers import STRANGE_RESULTS, Answers, answers_test, then
from tests.ways_to_save import copied, from_a_buffer, in_place, into_an_open_file, renamed

pytestmark = pytest.mark.usefixtures("four_of_16_gib")


@pytest.fixture
def same_numbers(monkeypatch):
    """Each answer gets the same images."""
    monkeypatch.setattr(check.random, "randrange", lambda low, high: low)


def no_wrapper(model):
    return model


def summed(model):
    """The ranks' gradients, without DistributedDataParallel."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def trained(
    parts=torch.tensor_split, wrap=DistributedDataParallel, weigh=True, scale=int, seed=0, place=None, end=no_wrapper
):
    """A program for the ranks, right unless told. scale: of the loss. end: done with the gradients."""

    def ranked(rank, ranks, images, labels):
        gpu = rank if place is None else place
        if seed is not None:
            torch.manual_seed(seed)
        model = check.net().to(gpu)
        forward = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for x, y in zip(images.split(32), labels.split(32), strict=True):
            part, label = (parts(each, ranks)[rank].to(gpu) for each in (x, y))
            optimizer.zero_grad()
            loss = cross_entropy(forward(part), label, reduction="sum") / (len(x) if weigh else len(part))
            (loss * scale(ranks)).backward()
            end(model)
            optimizer.step()
        return model

    return ranked


def differs_on_later_ranks(rank, *job):
    model = trained()(rank, *job)
    model[1].bias.data.add_(rank // 2)
    return model


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
            trained(),
            trained(
                lambda x, ranks: [x[rank::ranks] for rank in range(ranks)],
                no_wrapper,
                scale=lambda ranks: 1,
                end=summed,
            ),
            trained(wrap=fully_shard),  # averages the gradients as DDP does
        ],
        wrong=[
            (trained(weigh=False, scale=lambda ranks: 1), "is not the mean of the batch if the parts differ"),
            (trained(lambda x, ranks: [x] * ranks), "Divide each batch"),
            (trained(wrap=no_wrapper), "gradients added up"),
            (trained(place=0), "Duplicate GPU detected"),
            (trained(seed=1), "Compare seed"),
            (trained(seed=None), "Compare seed"),
            (trained(scale=lambda ranks: 1), "Multiply the loss by it"),
            (trained(scale=lambda ranks: ranks**2), "added up twice"),
            (trained(weigh=False), "the sum of the ranks' mean losses"),
            (differs_on_later_ranks, "The weights of the ranks differ"),
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
