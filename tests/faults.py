"""What can go wrong in a training on several ranks, done on purpose: `FAULTS[name](folder)`.

Each either ends with the weights of the undisturbed training (returns "survived"), or with an error that says what to
do, on every rank, within its time, and with no process left ("told"). Anything else is an AssertionError: lost.
"""

import os
import signal
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from helpers.parallel.launching import RankError, launch
from helpers.parallel.ranks import connect, disconnect, rank_loader
from helpers.train.loops import DistributedTrainer
from tests.ddp_jobs import LOSS, in_ranks, largest_difference, mlp, numbers, run, same, summary, trainer
from tests.programs import descendants, free_port, held_port

FAULTS = {}
ADAM = partial(torch.optim.Adam, lr=0.02)


def fault(name):
    def note(function):
        FAULTS[name] = lambda folder: and_nobody_left(function, folder)
        return function

    return note


def and_nobody_left(function, folder):
    before = set(descendants(os.getpid()))
    outcome = function(folder)
    assert set(descendants(os.getpid())) <= before, "a process was left"
    return outcome


def told(error, *parts):
    """ "told", if the error's text has these parts."""
    for part in parts:
        assert part in str(error), f"{part!r} is not in: {error}"
    return "told"


def fails(function, ranks=2, timeout=60):
    """The RankError of a launch that must fail."""
    try:
        launch(lambda rank: function(rank), ranks=ranks, show=False, timeout=timeout)
    except RankError as error:
        return error
    raise AssertionError("nothing failed")


# ----------------------------------------------------------------------------------------------- the network


class Tied(nn.Module):
    """The first and the last layer share their weights."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False)
        self.out.weight = self.into.weight

    def forward(self, inputs):
        return self.out(torch.relu(self.into(inputs)))


def frozen():
    model = mlp()
    model[0].requires_grad_(False)
    return model


class Changing(nn.Module):
    """Uses one branch or the other, depending on the batch."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(12, 3) for _ in range(2))
        self.calls = 0

    def forward(self, inputs):
        self.calls += self.training
        return self.branches[self.calls % 2](inputs)


def as_one_device(build, **options):
    job = (build, numbers, 8)
    one, ranks = run(job=job, watch=True), in_ranks(2, job=job, watch=True, **options)
    assert same(ranks[0]["weights"], ranks[1]["weights"])
    assert max(map(largest_difference, ranks[0]["steps"], one["steps"])) < 1e-6
    return "survived"


@fault("tied weights")
def _(folder):
    return as_one_device(Tied)


@fault("frozen parameters")
def _(folder):
    return as_one_device(frozen)


@fault("another seed on every rank")
def _(folder):
    def act(rank):
        torch.manual_seed(rank)
        return run(model=mlp(), watch=True)

    ranks = launch(act, ranks=2, show=False)
    torch.manual_seed(0)
    one = run(model=mlp(), watch=True)
    assert same(ranks[0]["weights"], ranks[1]["weights"])
    assert max(map(largest_difference, ranks[0]["steps"], one["steps"])) < 1e-6
    return "survived"


@fault("a model that changes its graph")
def _(folder):
    error = fails(lambda rank: run(job=(Changing, numbers, 8)))
    return told(error, "Expected to have finished reduction in the prior iteration", "find_unused_parameters=True")


@fault("a model that changes its graph, with find_unused_parameters")
def _(folder):
    return as_one_device(Changing, ddp={"find_unused_parameters": True})


@fault("another model on rank 1")
def _(folder):
    error = fails(lambda rank: run(model=mlp() if rank == 0 else nn.Linear(12, 3)))
    return told(error, "DDP expects same model across all ranks, but Rank 0 has 4 params")


# --------------------------------------------------------------------------------------------- the samples


@fault("lengths that do not divide")
def _(folder):
    for samples in (5, 7, 13):
        job = (mlp, partial(numbers, samples), 6)
        one, ranks = run(job=job, watch=True), in_ranks(3, job=job, watch=True)
        assert max(map(largest_difference, ranks[0]["steps"], one["steps"])) < 1e-6
        assert abs(ranks[2]["score"].loss - one["score"].loss) < 1e-5
    return "survived"


@fault("a loader that is not shared out")
def _(folder):
    def act(rank):
        made = mlp()
        loader = torch.utils.data.DataLoader(numbers(), 4, shuffle=True)
        DistributedTrainer(made, SGD(made.parameters()), LOSS, loader)

    return told(fails(act), "RandomSampler is not for 2 ranks", "rank_loader(dataset, batch_size)")


@fault("one rank has fewer batches")
def _(folder):
    def act(rank):
        made = mlp()
        DistributedTrainer(made, SGD(made.parameters()), LOSS, [(None, None)] * (3 - rank))

    return told(fails(act), "the ranks must agree", "batches in the loader: 3, 2")


@fault("fewer samples in a batch than ranks")
def _(folder):
    return told(fails(lambda rank: rank_loader(numbers(), 1)), "a batch of 1 cannot be shared equally by 2 ranks")


@fault("nan on one rank")
def _(folder):
    def act(rank):
        made = trainer(checkpoint=folder / "last.pt", save_every=1)
        inputs, labels = (tensor[:4] for tensor in numbers().tensors)
        made.loader = [(inputs * (float("nan") if rank else 1.0), labels)]
        made.train(1)

    error = fails(act)
    assert not list(folder.iterdir())
    return told(error, "the loss of epoch 0 on 2 x cpu is nan", "No checkpoint was written")


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


# ------------------------------------------------------------------------------------------------- the ranks


class Failing(nn.CrossEntropyLoss):
    """A loss that does something else at the `at`-th batch of rank 1."""

    def __init__(self, at, act):
        super().__init__()
        self.left, self.act = at, act

    def forward(self, outputs, labels):
        self.left -= dist.get_rank()
        if self.left == 0:
            self.act()
        return super().forward(outputs, labels)


def no_memory():
    raise MemoryError("no memory left")


def go_on_from(folder, act):
    """Rank 1 fails in the middle of the second epoch; another launch goes on; the error, if all is well."""

    def make(**options):
        return trainer((partial(mlp, 0.5), partial(numbers, 42), 8), optimizer=ADAM, **options)

    def second():
        made = make(checkpoint=folder / "last.pt", save_every=2)
        assert made.resume() == 1 and made.steps_done == 2
        made.train(2)
        return summary(made)

    def undisturbed():
        made = make()
        made.train(3)
        return summary(made)

    options = {"checkpoint": folder / "last.pt", "save_every": 2, "loss": Failing(10, act)}
    error = fails(lambda rank: make(**options).train(3))
    for one, other in zip(in_ranks(2, undisturbed), in_ranks(2, second), strict=True):
        assert same(one["weights"], other["weights"]) and one["losses"][1:] == other["losses"]
    assert [path.name for path in folder.iterdir()] == ["last.pt"]
    return error


@fault("a rank that raises, then a new start")
def _(folder):
    told(go_on_from(folder, no_memory), "rank 1 of 2 raised MemoryError: no memory left")
    return "survived"


@fault("a rank that dies (os._exit), then a new start")
def _(folder):
    told(go_on_from(folder, lambda: os._exit(3)), "rank 1 of 2 died", "exit code 3")
    return "survived"


@fault("a rank that is killed (SIGKILL), then a new start")
def _(folder):
    told(go_on_from(folder, lambda: os.kill(os.getpid(), signal.SIGKILL)), "rank 1 of 2", "SIGKILL")
    return "survived"


@fault("two ranks on one GPU")
def _(folder):
    from virtual_gpus import virtual_gpus

    def act(rank):
        made = mlp()
        DistributedTrainer(made, SGD(made.parameters()), LOSS, [], device="cuda:1")

    with virtual_gpus(2):
        return told(fails(act), "ranks 0 and 1 train on the same GPU", "give each its own")


@fault("no process group")
def _(folder):
    try:
        DistributedTrainer(mlp(), None, LOSS, [])
    except RuntimeError as error:
        return told(error, "launch(...)", "torchrun")


# ------------------------------------------------------------------------------------------- coming together


def connecting(settings, timeout_s=3.0):
    """The error of `connect` with these environment variables, in a process of its own."""

    def act(rank):
        disconnect()
        for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
            del os.environ[name]
        os.environ.update(settings)
        connect(timeout_s)

    return fails(act, ranks=1)


def one_of_two(rank, port):
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}


@fault("a port that is in use")
def _(folder):
    with held_port(answers=True) as port:
        return told(connecting(one_of_two(0, port)), "is in use: another training", "--master-port")


@fault("a master that never comes")
def _(folder):
    with held_port(answers=False) as port:
        error = connecting(one_of_two(1, port))
    return told(error, "rank 1 of 2 waited 3 s for the others at 127.0.0.1:", "does rank 0 run")


@fault("a rank that never comes")
def _(folder):
    error = connecting(one_of_two(0, free_port()))
    return told(error, "rank 0 of 2 waited 3 s for the others", "were all ranks started")


@fault("started without torchrun")
def _(folder):
    def act(rank):
        disconnect()
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
        connect()

    return told(fails(act, ranks=1), "RANK, WORLD_SIZE not set", "start it with torchrun")


# ------------------------------------------------------------------------------------------------ snapshots


def saved(folder, ranks=2, save_every=None):
    """A snapshot of the end of the first epoch, or with `save_every` of the middle of the second."""

    def act():
        made = trainer(optimizer=ADAM, checkpoint=folder / "last.pt", save_every=save_every)
        made.train(1)
        if save_every:
            made.loss = Failing(1, no_memory)
            made.loss.left = 3 if dist.get_rank() == 1 else -1
            made.train(1)

    if save_every is None:
        in_ranks(ranks, act)
    else:
        fails(lambda rank: act(), ranks)
    return folder / "last.pt"


def resumed(path, ranks, epochs=2, **options):
    def act():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = trainer(optimizer=ADAM, **options)
            made.resume(path)
        made.train(epochs - made.epoch)
        return summary(made)

    return in_ranks(ranks, act)


def undisturbed(ranks):
    return in_ranks(ranks, lambda: run(2, optimizer=ADAM))


@fault("a snapshot cut in half")
def _(folder):
    path = saved(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return told(fails(lambda rank: trainer(optimizer=ADAM).resume(path)), "damaged, cut off", "take an older one")


@fault("a snapshot of another model")
def _(folder):
    path = saved(folder)
    job = (partial(nn.Linear, 12, 3), numbers, 8)
    return told(fails(lambda rank: trainer(job, optimizer=ADAM).resume(path)), "was not made by this Linear")


@fault("a snapshot of another optimizer")
def _(folder):
    path = saved(folder)
    return told(fails(lambda rank: trainer().resume(path)), "holds the state of Adam, not of SGD")


@fault("a snapshot from another world size, end of an epoch")
def _(folder):
    answers, one = resumed(saved(folder), 4), undisturbed(1)[0]
    assert max(largest_difference(answer["weights"], one["weights"]) for answer in answers) < 1e-5
    return "survived"


@fault("a snapshot from another world size, middle of an epoch")
def _(folder):
    path = saved(folder, save_every=1)
    assert torch.load(path, weights_only=True)["training"]["ranks"][0]["position"]["steps"] == 2
    answers, one = resumed(path, 4), undisturbed(1)[0]
    assert max(largest_difference(answer["weights"], one["weights"]) for answer in answers) < 1e-5
    return "survived"


@fault("the same, with another batch")
def _(folder):
    path = saved(folder, save_every=1)
    error = fails(lambda rank: trainer(optimizer=ADAM, batch=12).resume(path), ranks=4)
    return told(error, "in the middle of an epoch of another job", "2 ranks, batches of 4", "4 ranks, batches of 3")


@fault("no snapshot where one is expected")
def _(folder):
    error = fails(lambda rank: trainer().resume(folder / "nothing.pt"))
    return told(error, "no checkpoint at", "nothing.pt")


@fault("an unfinished file of a process that was killed")
def _(folder):
    path = saved(folder)
    (folder / ".last.pt.4711.tmp").write_bytes(b"half")
    for one, other in zip(undisturbed(2), resumed(path, 2), strict=True):
        assert same(one["weights"], other["weights"])
    assert [entry.name for entry in Path(folder).iterdir()] == ["last.pt"]
    return "survived"
