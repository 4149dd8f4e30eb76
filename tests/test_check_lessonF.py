"""The checks of the final task: right and wrong answers of each task."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from virtual_gpus import virtual_gpus

from notebooks.checks import lessonF as check
from tests.check_answers import STRANGE_RESULTS, Answers, answers_test


@pytest.fixture(autouse=True)
def gpus():
    with virtual_gpus(4, memory="16 GiB") as devices:
        yield devices


def trained(
    parts=lambda x, ranks, rank: x.tensor_split(ranks)[rank], weigh=True, seed=0, wrap=True, place=None, loss=None
):
    """A program for the ranks, right unless told."""

    def ranked(rank, ranks, images, labels):
        gpu = rank if place is None else place
        if seed is not None:
            torch.manual_seed(seed)
        model = check.net().to(gpu)
        forward = DistributedDataParallel(model, device_ids=[gpu]) if wrap else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for x, y in zip(images.split(32), labels.split(32), strict=True):
            part, label = parts(x, ranks, rank).to(gpu), parts(y, ranks, rank).to(gpu)
            optimizer.zero_grad()
            found = cross_entropy(forward(part), label, reduction="sum" if weigh else "mean")
            (found * ranks / len(x) if weigh else found * (loss or 1)).backward()
            optimizer.step()
        return model

    return ranked


def by_hand(rank, ranks, images, labels):
    """Right, without DistributedDataParallel."""
    torch.manual_seed(0)
    model = check.net().to(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in zip(images.split(32), labels.split(32), strict=True):
        optimizer.zero_grad()
        cross_entropy(model(x[rank::ranks].to(rank)), y[rank::ranks].to(rank), reduction="sum").div(len(x)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    return model


def save(path, model, optimizer, temporary=".tmp"):
    unfinished = path.with_name(path.name + temporary)
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
    os.replace(unfinished, path)


def with_a_file_object(path, model, optimizer):
    with open(f"{path}.new", "wb") as file:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    os.rename(f"{path}.new", path)


def leaves_a_file(path, model, optimizer):
    save(path, model, optimizer)
    path.with_name("old.pt").write_bytes(b"")


def straight(path, model, optimizer):
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path)


def removes_first(path, model, optimizer):
    path.unlink(missing_ok=True)
    save(path, model, optimizer)


def of(what):
    def saves(path, model, optimizer):
        torch.save(what(model, optimizer), f"{path}.tmp")
        os.replace(f"{path}.tmp", path)

    return saves


RIGHT = check.FAULTS
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
        right=[trained(), by_hand],
        wrong=[
            (trained(weigh=False), "is not the mean of the batch if the parts differ"),
            (trained(weigh=False, parts=lambda x, ranks, rank: x), "Divide each batch"),
            (trained(wrap=False), "gradients added up"),
            (trained(place=0), "Duplicate GPU detected"),
            (trained(seed=1), "Compare seed"),
            (lambda rank, ranks, images, labels: [1], "Return the model"),
            (lambda rank, ranks, images, labels: ..., "still returns"),
        ],
        strange=STRANGE_RESULTS[:1],
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
        right=[save, with_a_file_object],
        wrong=[
            (straight, "loses the old checkpoint"),
            (removes_first, "loses the old checkpoint"),
            (leaves_a_file, "Leave nothing except the checkpoint"),
            (of(lambda m, o: {"model": m.state_dict(), "optimizer": o.state_dict()}), "begins with `module.`"),
            (of(lambda m, o: m.module.state_dict()), "keys model and optimizer"),
            (of(lambda m, o: {"model": m.module.state_dict(), "optimizer": {}}), "no momentum"),
            (lambda path, model, optimizer: None, "There is no file"),
            (lambda path, model, optimizer: path.write_bytes(b"1"), "stopped with"),
        ],
    ),
}
test_answers = answers_test(TABLE)
