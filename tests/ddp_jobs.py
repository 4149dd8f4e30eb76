"""Small trainings for the tests of DistributedTrainer: the same job on one device and in each of several ranks."""

from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

from helpers.models import bert_small, group_norm, small_resnet
from helpers.parallel.launching import launch
from helpers.parallel.ranks import rank_loader
from helpers.train import DistributedTrainer, Trainer

LOSS = nn.CrossEntropyLoss()


def numbers(samples=22):
    """22 samples in batches of 8: the last one has 6, which 4 ranks share as 2, 2, 1 and 1."""
    make = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 12, generator=make), torch.randint(0, 3, (samples,), generator=make))


def images(samples=12):
    make = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 3, 8, 8, generator=make), torch.randint(0, 5, (samples,), generator=make))


def words(samples=18):
    """Uneven on purpose: the first samples have few labels that count, the last ones have all, two have none."""
    make = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 30, (samples, 8), generator=make)
    hidden = torch.rand(samples, 8, generator=make) < torch.linspace(0.9, 0.0, samples)[:, None]
    hidden[:2] = True
    return TensorDataset(tokens, tokens.masked_fill(hidden, -100))


def mlp(dropout=0.0, norm=nn.Identity):
    return nn.Sequential(nn.Linear(12, 16), norm(), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


class Watch:
    """Stands where a scheduler stands, and keeps the weights after every step."""

    def __init__(self, model):
        self.model, self.seen = model, []

    def step(self):
        self.seen.append([parameter.detach().cpu().clone() for parameter in self.model.parameters()])


# name -> (model, samples, batch)
JOBS = {
    "numbers": (mlp, numbers, 8),
    "numbers, one sample for four ranks": (mlp, partial(numbers, 9), 4),
    "images": (lambda: small_resnet(5, norm=group_norm), images, 8),
    "words": (lambda: bert_small(30, 8, dropout=0.0), words, 8),
}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def trainer(job="numbers", *, model=None, batch=None, optimizer=SGD, watch=False, loss=LOSS, **options):
    """A trainer of the job: DistributedTrainer inside `launch`, Trainer on the CPU outside of it."""
    build, data, size = JOBS[job] if isinstance(job, str) else job
    torch.manual_seed(0)
    model = build() if model is None else model
    optimizer = optimizer(model.parameters())
    if watch:
        options["scheduler"] = Watch(model)
    options = {"log": None, **options}
    loader = rank_loader(data(), batch or size)
    if torch.distributed.is_initialized():
        return DistributedTrainer(model, optimizer, loss, loader, **options)
    return Trainer(model, optimizer, loss, loader, "cpu", **options)


def run(epochs=2, job="numbers", **options):
    """Train, and return what is worth comparing."""
    made = trainer(job, **options)
    made.train(epochs)
    return {
        "weights": [value.detach().cpu().clone() for value in made.model.state_dict().values()],
        "history": [(record.epoch, record.batch_size, record.steps, record.accuracy) for record in made.history],
        "losses": [record.loss for record in made.history],
        "steps": made.scheduler.seen if isinstance(made.scheduler, Watch) else None,
    }


def in_ranks(ranks, function=run, **options):
    """`function(**options)` in each of `ranks` ranks; their answers."""
    return launch(lambda rank: function(**options), ranks=ranks, show=False, timeout=60)


def run_in_rank(rank, options):
    """`run` for ranks that are spawned, as on real GPUs: they must be able to import what they call."""
    return run(**options)


def largest_difference(one, other):
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(one, other, strict=True))


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
