"""The training loop: what it counts, prints and refuses; on several GPUs the same numbers, and memory in its place."""

import gc
import math
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from virtual_gpus import virtual_gpus

from helpers.models import group_norm, small_resnet
from helpers.parallel import launch
from helpers.train import require_mean, train_epochs

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

LOSS = nn.CrossEntropyLoss()


def images(samples=26, batch=8, ranks=None, **options):
    """Batches of 8, 8, 8 and 2: the last one has fewer samples than there are GPUs. ranks: the sampler's arguments."""
    make = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 3, 16, 16, generator=make), torch.randint(0, 5, (samples,), generator=make)
    data = TensorDataset(x, y)
    return DataLoader(data, batch, sampler=ranks and DistributedSampler(data, *ranks, shuffle=False), **options)


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 16), nn.ReLU(), nn.Linear(16, 5))


def build(gpus=(), make=mlp, optimizer=torch.optim.SGD, lr=0.01, loader=None):
    """A model, and a function that trains it for `epochs` epochs, on the CPU, on one GPU or with DataParallel."""
    torch.manual_seed(0)
    device = torch.device("cuda", gpus[0]) if gpus else torch.device("cpu")
    model = make().to(device)
    network = nn.DataParallel(model, gpus) if len(gpus) > 1 else model
    optimizer = optimizer(model.parameters(), lr=lr)
    return model, partial(train_epochs, network, optimizer, LOSS, images() if loader is None else loader, device)


def test_one_epoch_equals_the_loop_written_by_hand():
    model, train = build()
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
    assert train() == [pytest.approx((losses / 26, right / 26), rel=1e-6)]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), by_hand.parameters(), strict=True))


def said(where, history, rate="0.010", batch=8, steps=4):
    return [
        f"[{where}] epoch {epoch} | batch {batch} | steps {steps} | lr {rate} | loss {loss:.3f} | "
        f"accuracy {100 * accuracy:.2f} %"
        for epoch, (loss, accuracy) in enumerate(history)
    ]


def test_a_line_for_each_epoch(capsys):
    _, train = build(lr=2.5e-5)
    history = train(2)
    assert len(history) == 2 and capsys.readouterr().out.splitlines() == said("cpu", history, "2.5e-05")


class Compiled(nn.Module):
    """Wraps a module as torch.compile does, which would take seconds."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module

    def forward(self, x):
        return self._orig_mod(x)


def in_a_rank(rank, ranks):
    """Two epochs of DDP: (history, lines, the sampler's last epoch, weights)."""
    torch.manual_seed(0)
    network, lines = DistributedDataParallel(mlp()), []
    loader = images(batch=8 // ranks, samples=24, ranks=(ranks, rank))
    if rank:  # the sampler within a batch sampler is told the epoch, too
        loader = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    history = train_epochs(Compiled(network), optimizer, LOSS, loader, "cpu", 2, log=lines.append)
    weights = torch.cat([each.detach().flatten() for each in network.parameters()])
    return history, lines, loader.batch_sampler.sampler.epoch, weights


def test_ranks_of_ddp_train_like_one_device_and_all_know_the_figures_of_all_images():
    model, train = build(loader=images(24))
    expected = train(2)
    found = launch(in_a_rank, 2, ranks=2, gpus=False)
    for history, _, epoch, weights in found:
        assert history == found[0][0] == [pytest.approx(each, rel=1e-5) for each in expected] and epoch == 1
        torch.testing.assert_close(weights, torch.cat([each.detach().flatten() for each in model.parameters()]))
    assert found[0][1] == said("2 ranks", expected, steps=3) and found[1][1] == []


def test_the_outputs_are_gone_when_backward_runs():
    outputs, alive = [], []

    class Watched(nn.Linear):
        def forward(self, x):
            y = super().forward(x.flatten(1))
            outputs.append(weakref.ref(y))
            self.bias.register_hook(lambda grad: alive.append(outputs[-1]() is not None))
            return y

    build(make=lambda: Watched(768, 5), loader=images(samples=8))[1]()
    assert alive == [False]


def test_what_cannot_be_trained_is_refused():
    for empty in (images(samples=5, drop_last=True), []):
        with pytest.raises(ValueError, match="The loader gave no batch"):
            build(loader=empty)[1]()
    model = mlp()
    sgd = torch.optim.SGD(model.parameters())
    require_mean(nn.KLDivLoss(reduction="batchmean"))
    for summed in (nn.CrossEntropyLoss(reduction="sum"), partial(cross_entropy, reduction="sum")):
        with pytest.raises(ValueError, match='reduction="mean", not "sum"'):
            train_epochs(model, sgd, summed, [], "cpu")
    x, y = torch.ones(2, 3), torch.ones(2, 10)
    for batch, found in (((x, y), r"\[2, 3].*\[2, 10]"), ({"images": x}, "dict"), ((x, y[:0, 0]), r"\[0]")):
        with pytest.raises(ValueError, match=f"images and one class index for each, not .*{found}"):
            train_epochs(model, sgd, LOSS, [batch], "cpu")
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        train_epochs(mlp(), sgd, LOSS, [], "cpu")


@pytest.mark.parametrize("gpus", [[2], [1, 3]])
def test_losses_accuracies_and_weights_equal_the_cpu_s(four, gpus, capsys):
    """Without BatchNorm: a net with it is meant to differ when a batch is cut into pieces."""
    resnet, sgd = partial(small_resnet, norm=group_norm), partial(torch.optim.SGD, momentum=0.9)
    (one_cpu, on_cpu), (model, train) = build((), resnet, sgd), build(gpus, resnet, sgd)
    history, expected = train(2), on_cpu(2)
    assert capsys.readouterr().out.splitlines()[:2] == said("cuda:2" if gpus == [2] else "2 GPUs", history)
    for (loss, accuracy), (right, share) in zip(history, expected, strict=True):
        assert loss == pytest.approx(right, abs=1e-5) and accuracy == share
    for one, other in zip(model.parameters(), one_cpu.parameters(), strict=True):
        assert one.device == train.args[1].state[one]["momentum_buffer"].device == torch.device("cuda", gpus[0])
        torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-4)


def test_inputs_never_lie_on_the_first_gpu_as_a_whole(four):
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            seen.append((x.device.index, len(x), torch.cuda.memory_allocated(0)))
            return super().forward(x)

    x, y = torch.randn(8, 2**18), torch.zeros(8, dtype=torch.long)
    build(range(4), lambda: Watched(2**18, 2), loader=DataLoader(TensorDataset(x, y), 8))[1]()
    assert [(gpu, samples) for gpu, samples, _ in seen] == [(0, 2), (1, 2), (2, 2), (3, 2)]
    # 2 MiB of weights and 2 samples of 1 MiB; the whole batch would be 8 MiB.
    assert max(allocated for _, _, allocated in seen) < 6 * 2**20


def test_memory_does_not_grow_from_epoch_to_epoch_and_goes_back(four):
    start = [torch.cuda.memory_allocated(gpu) for gpu in four]
    model, train = build(range(4), optimizer=torch.optim.Adam)
    seen = []
    for _ in range(3):
        train()
        seen.append([torch.cuda.memory_allocated(gpu) for gpu in four])
    assert seen[0] == seen[1] == seen[2] != start
    del model, train
    gc.collect()
    assert [torch.cuda.memory_allocated(gpu) for gpu in four] == start


def test_shapes_only_runs_the_loop_without_values():
    with virtual_gpus(4, shapes_only=True):
        assert math.isnan(build(range(4))[1]()[0][0])
