"""The training loop: what it counts, prints and refuses; on several GPUs the same numbers, and memory in its place."""

import gc
import math
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual_gpus import virtual_gpus

from helpers.models import group_norm, small_resnet
from helpers.train import Trainer

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

LOSS = nn.CrossEntropyLoss()
GPUS = {"cuda:0-3": [torch.device("cuda", gpu) for gpu in range(4)], "cuda:1,3": ["cuda:1", "cuda:3"]}


def images(samples=26, **options):
    """Batches of 8, 8, 8 and 2: the last one has fewer samples than there are GPUs."""
    make = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 3, 16, 16, generator=make), torch.randint(0, 5, (samples,), generator=make)
    return DataLoader(TensorDataset(x, y), 8, **options)


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 16), nn.ReLU(), nn.Linear(16, 5))


def build(name="cpu", make=mlp, optimizer=torch.optim.SGD, lr=0.01, loader=None):
    """A trainer, by what its log line calls it."""
    torch.manual_seed(0)
    model = make()
    loader = images() if loader is None else loader
    runner = Trainer(model, optimizer(model.parameters(), lr=lr), LOSS, loader, GPUS.get(name, name))
    assert runner.name == name
    return runner


def test_one_epoch_equals_the_loop_written_by_hand():
    runner = build()
    torch.manual_seed(0)
    by_hand = mlp()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.01)
    losses = right = 0.0
    for x, y in images():
        logits = by_hand(x)
        loss = LOSS(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += loss.item() * len(y)
        right += (logits.argmax(1) == y).sum().item()
    runner.train(1)
    assert all(torch.equal(a, b) for a, b in zip(runner.model.parameters(), by_hand.parameters(), strict=True))
    assert runner.history == [pytest.approx((losses / 26, right / 26), rel=1e-6)]


def test_a_line_for_each_epoch(capsys):
    runner = build(lr=2.5e-5)
    runner.train(1)
    runner.optimizer.param_groups[0]["lr"] = 0.001
    runner.train(2)
    rates = ["2.5e-05", "0.0010", "0.0010"]
    assert capsys.readouterr().out.splitlines() == [
        f"[cpu] epoch {epoch} | batch 8 | steps 4 | lr {rate} | loss {loss:.3f} | accuracy {100 * accuracy:.2f} %"
        for epoch, (rate, (loss, accuracy)) in enumerate(zip(rates, runner.history, strict=True))
    ]


def test_the_outputs_are_gone_when_backward_runs():
    outputs, alive = [], []

    class Watched(nn.Linear):
        def forward(self, x):
            y = super().forward(x.flatten(1))
            outputs.append(weakref.ref(y))
            self.bias.register_hook(lambda grad: alive.append(outputs[-1]() is not None))
            return y

    build(make=lambda: Watched(768, 5), loader=images(samples=8)).train(1)
    assert alive == [False]


def test_what_cannot_be_trained_is_refused():
    for empty in (images(samples=5, drop_last=True), []):
        with pytest.raises(ValueError, match="The loader gave no batch"):
            build(loader=empty).train(1)
    model = mlp()
    sgd = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match='reduction="mean", not "sum"'):
        Trainer(model, sgd, nn.CrossEntropyLoss(reduction="sum"), [], "cpu")
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        Trainer(mlp(), sgd, LOSS, [], "cpu")


@pytest.mark.parametrize("name", ["cuda:2", "cuda:1,3"])
def test_losses_accuracies_and_weights_equal_the_cpu_s(four, name):
    """Without BatchNorm: a net with it is meant to differ when a batch is cut into pieces."""
    resnet, sgd = partial(small_resnet, norm=group_norm), partial(torch.optim.SGD, momentum=0.9)
    expected, runner = build("cpu", resnet, sgd), build(name, resnet, sgd)
    runner.train(2), expected.train(2)
    for (loss, accuracy), (right, share) in zip(runner.history, expected.history, strict=True):
        assert loss == pytest.approx(right, abs=1e-5) and accuracy == share
    for one, other in zip(runner.model.parameters(), expected.model.parameters(), strict=True):
        assert one.device == runner.optimizer.state[one]["momentum_buffer"].device == torch.device(name[:6])
        torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-4)


def test_inputs_never_lie_on_the_first_gpu_as_a_whole(four):
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            seen.append((x.device.index, len(x), torch.cuda.memory_allocated(0)))
            return super().forward(x)

    x, y = torch.randn(8, 2**18), torch.zeros(8, dtype=torch.long)
    build("cuda:0-3", lambda: Watched(2**18, 2), loader=DataLoader(TensorDataset(x, y), 8)).train(1)
    assert [(gpu, samples) for gpu, samples, _ in seen] == [(0, 2), (1, 2), (2, 2), (3, 2)]
    # 2 MiB of weights and 2 samples of 1 MiB; the whole batch would be 8 MiB.
    assert max(allocated for _, _, allocated in seen) < 6 * 2**20


def test_memory_does_not_grow_from_epoch_to_epoch_and_goes_back(four):
    start = [torch.cuda.memory_allocated(gpu) for gpu in four]
    runner = build("cuda:0-3", optimizer=torch.optim.Adam)
    seen = []
    for _ in range(3):
        runner.train(1)
        seen.append([torch.cuda.memory_allocated(gpu) for gpu in four])
    assert seen[0] == seen[1] == seen[2] != start
    del runner
    gc.collect()
    assert [torch.cuda.memory_allocated(gpu) for gpu in four] == start


def test_shapes_only_runs_the_loop_without_values():
    with virtual_gpus(4, shapes_only=True):
        runner = build("cuda:0-3")
        runner.train(1)
        assert math.isnan(runner.history[0][0])
