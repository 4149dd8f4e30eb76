"""The training loop on one device: what it counts, prints and refuses."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from helpers.train import Trainer

LOSS = nn.CrossEntropyLoss()


def images(samples=20, batch_size=8, **options):
    make = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 12, generator=make), torch.randint(0, 3, (samples,), generator=make)
    return DataLoader(TensorDataset(x, y), batch_size, **options)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))


def trainer(model=None, loader=None, lr=0.1):
    model = model or mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return Trainer(model, optimizer, LOSS, images() if loader is None else loader, "cpu")


def test_one_epoch_equals_the_loop_written_by_hand():
    model, by_hand = mlp(), mlp()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    losses = right = 0.0
    for x, y in images():
        logits = by_hand(x)
        loss = LOSS(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += loss.item() * len(y)
        right += (logits.argmax(1) == y).sum().item()
    runner = trainer(model)
    runner.train(1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), by_hand.parameters(), strict=True))
    assert runner.history == [pytest.approx((losses / 20, right / 20), rel=1e-6)]


def test_a_line_for_each_epoch(capsys):
    runner = trainer(lr=2.5e-5)
    runner.train(1)
    runner.optimizer.param_groups[0]["lr"] = 0.001
    runner.train(2)
    rates = ["2.5e-05", "0.0010", "0.0010"]
    assert capsys.readouterr().out.splitlines() == [
        f"[cpu] epoch {epoch} | batch 8 | steps 3 | lr {rate} | loss {loss:.3f} | accuracy {100 * accuracy:.2f} %"
        for epoch, (rate, (loss, accuracy)) in enumerate(zip(rates, runner.history, strict=True))
    ]


def test_the_outputs_are_gone_when_backward_runs():
    outputs, alive = [], []

    class Watched(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            outputs.append(weakref.ref(y))
            self.bias.register_hook(lambda grad: alive.append(outputs[-1]() is not None))
            return y

    trainer(Watched(12, 3), images(samples=8)).train(1)
    assert alive == [False]


def test_a_loader_without_a_batch():
    for empty in (images(samples=5, drop_last=True), []):
        with pytest.raises(ValueError, match="The loader gave no batch"):
            trainer(loader=empty).train(1)


def test_a_loss_that_is_no_mean():
    with pytest.raises(ValueError, match='reduction="mean", not "sum"'):
        Trainer(model := mlp(), torch.optim.SGD(model.parameters()), nn.CrossEntropyLoss(reduction="sum"), [], "cpu")


def test_an_optimizer_of_another_model():
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        Trainer(mlp(), torch.optim.SGD(mlp().parameters()), LOSS, [], "cpu")
