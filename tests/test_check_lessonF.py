"""The checks of the final task: right and wrong answers of each task."""

import io
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from virtual_gpus import virtual_gpus

from notebooks.checks import lessonF as check
from tests.check_answers import STRANGE_RESULTS, Answers, answers_test


@pytest.fixture(autouse=True)
def gpus():
    with virtual_gpus(4, memory="16 GiB") as devices:
        yield devices


def part_of(x, ranks, rank):
    return x.tensor_split(ranks)[rank]


def one(ranks):
    return 1


def trained(parts=part_of, weigh=True, seed=0, wrap=True, place=None, loss=one, scale=one):
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
            factor = ranks / len(x) * scale(ranks) if weigh else loss(ranks)
            (found * factor).backward()
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


def sharded(rank, ranks, images, labels):
    """Right, with fully_shard, which averages the gradients as DDP does."""
    torch.manual_seed(0)
    model = fully_shard(check.net().to(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in zip(images.split(32), labels.split(32), strict=True):
        optimizer.zero_grad()
        part, label = part_of(x, ranks, rank).to(rank), part_of(y, ranks, rank).to(rank)
        (cross_entropy(model(part), label, reduction="sum") * ranks / len(x)).backward()
        optimizer.step()
    return model


def differs_on_later_ranks(rank, ranks, images, labels):
    model = trained()(rank, ranks, images, labels)
    if rank > 1:
        with torch.no_grad():
            model[1].weight.add_(1)
    return model


def save(path, model, optimizer, temporary=".tmp"):
    unfinished = path.with_name(path.name + temporary)
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
    os.replace(unfinished, path)


def with_a_file_object(path, model, optimizer):
    with open(f"{path}.new", "wb") as file:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    os.rename(f"{path}.new", path)


def in_memory_first(path, model, optimizer):
    buffer = io.BytesIO()
    torch.save(obj={"optimizer": optimizer.state_dict(), "model": model.module.state_dict(), "epoch": 1}, f=buffer)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(buffer.getvalue())
    Path(file.name).replace(path)


def straight_into_an_open_file(path, model, optimizer):
    with open(path, "wb") as file:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)


def bytes_at_once(path, model, optimizer):
    buffer = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    path.write_bytes(buffer.getvalue())


def copied(path, model, optimizer):
    save(path.with_name("new"), model, optimizer)
    shutil.copyfile(path.with_name("new"), path)
    path.with_name("new").unlink()


def without_a_file_for_a_moment(path, model, optimizer):
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, f"{path}.tmp")
    path.unlink(missing_ok=True)
    os.rename(f"{path}.tmp", path)


def restored_afterwards(path, model, optimizer):
    old = path.read_bytes() if path.exists() else b""
    try:
        straight(path, model, optimizer)
    except BaseException:
        path.write_bytes(old)
        raise


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
        right=[trained(), by_hand, sharded],
        wrong=[
            (trained(weigh=False), "is not the mean of the batch if the parts differ"),
            (trained(weigh=False, parts=lambda x, ranks, rank: x), "Divide each batch"),
            (trained(wrap=False), "gradients added up"),
            (trained(place=0), "Duplicate GPU detected"),
            (trained(seed=1), "Compare seed"),
            (trained(seed=None), "Compare seed"),
            (trained(scale=lambda ranks: 1 / ranks), "Multiply the loss by it"),
            (trained(scale=lambda ranks: ranks), "added up twice"),
            (trained(weigh=False, loss=lambda ranks: ranks), "the sum of the ranks' mean losses"),
            (differs_on_later_ranks, "The weights of the ranks differ"),
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
        right=[save, with_a_file_object, in_memory_first],
        wrong=[
            (straight, "loses the old checkpoint"),
            (removes_first, "loses the old checkpoint"),
            (straight_into_an_open_file, "loses the old checkpoint"),
            (bytes_at_once, "loses the old checkpoint"),
            (copied, "loses the old checkpoint"),
            (without_a_file_for_a_moment, "loses the old checkpoint"),
            (restored_afterwards, "loses the old checkpoint"),
            (
                of(lambda m, o: {"model": nn.Linear(3, 2).state_dict(), "optimizer": o.state_dict()}),
                "weights in the file",
            ),
            (of(lambda m, o: {"model": m.module, "optimizer": o.state_dict()}), "cannot read the file"),
            (leaves_a_file, "Leave nothing except the checkpoint"),
            (of(lambda m, o: {"model": m.state_dict(), "optimizer": o.state_dict()}), "begins with `module.`"),
            (of(lambda m, o: m.module.state_dict()), "keys model and optimizer"),
            (of(lambda m, o: {"model": m.module.state_dict(), "optimizer": {}}), "no momentum"),
            (lambda path, model, optimizer: None, "There is no file"),
            (lambda path, model, optimizer: path.write_bytes(b"1"), "cannot read the file"),
        ],
    ),
}
test_answers = answers_test(TABLE)
