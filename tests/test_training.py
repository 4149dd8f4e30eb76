"""The training loop on one device: what it counts, prints and refuses."""

import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from helpers.models import bert_small
from helpers.train import DataParallelTrainer, EpochRecord, Trainer

LOSS = nn.CrossEntropyLoss()


def images(samples=20, batch_size=8, shuffle=False, **options):
    make = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 12, generator=make), torch.randint(0, 3, (samples,), generator=make)
    return DataLoader(TensorDataset(x, y), batch_size, shuffle, **options)


def words(samples=10, batch_size=4):
    make = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 30, (samples, 8), generator=make)
    # Uneven on purpose: the first samples have one label each, the last ones have all.
    hidden = torch.rand(samples, 8, generator=make) < torch.linspace(0.9, 0.0, samples)[:, None]
    hidden[:, 0] = False
    return DataLoader(TensorDataset(tokens, tokens.masked_fill(hidden, -100)), batch_size)


def mlp(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def trainer(model=None, loader=None, lr=0.1, **options):
    model = model or mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    options = {"device": "cpu", "log": None, **options}
    return Trainer(model, optimizer, options.pop("loss", LOSS), images() if loader is None else loader, **options)


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
    (record,) = trainer(model).train(1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), by_hand.parameters(), strict=True))
    assert record == EpochRecord("cpu", 0, 8, 3, 0.1, record.loss, right / 20)
    assert record.loss == pytest.approx(losses / 20, rel=1e-6)


def test_masked_words_are_learned():
    torch.manual_seed(0)
    model = bert_small(vocabulary=30, length=8, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = Trainer(model, optimizer, LOSS, words(), "cpu", log=None).train(30)
    assert history[-1].loss < 0.5 * history[0].loss and history[-1].accuracy > 0.5


def test_the_loss_is_the_mean_over_the_labels_that_count():
    """Batches of four and two sentences, each with another number of labels; one label has another weight."""
    torch.manual_seed(0)
    model, loss = bert_small(vocabulary=30, length=8, dropout=0.0), nn.CrossEntropyLoss(torch.linspace(0.1, 3, 30))
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    (record,) = Trainer(model, still, loss, words(), "cpu", log=None).train(1)
    inputs, labels = words().dataset.tensors
    logits = model(inputs)
    assert record.loss == pytest.approx(loss(logits.flatten(0, 1), labels.flatten()).item(), rel=1e-5)
    counted = labels != -100
    assert record.accuracy == pytest.approx((logits.argmax(-1)[counted] == labels[counted]).double().mean().item())


def test_the_log_line():
    record = EpochRecord("cuda:0-3", 0, 128, 32, 0.1, 2.0683, 0.241)
    line = "[cuda:0-3] epoch 0 | batch 128 | steps 32 | lr 0.1000 | loss 2.068 | accuracy 24.10 %"
    assert str(record) == line
    assert "lr 2.5e-05 |" in str(EpochRecord("cpu", 0, 1, 1, 2.5e-5, 0.0, 1.0))


def test_lines_and_history_over_epochs(capsys):
    runner = trainer(log=print)
    records = runner.train(1) + runner.train(2)
    assert records == runner.history and [record.epoch for record in records] == [0, 1, 2]
    assert capsys.readouterr().out == "".join(f"{record}\n" for record in records)


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


# --------------------------------------------------------------------------------------------------- seeds


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


def test_the_seed_decides_shuffling_and_dropout():
    runs = [trainer(mlp(dropout=0.5), images(shuffle=True), seed=seed) for seed in (3, 3, 4)]
    for run in runs:
        torch.rand(100)
        run.train(2)
    assert equal(runs[0], runs[1]) and not equal(runs[0], runs[2])


def test_every_epoch_has_its_own_order_whatever_runs_between_them():
    def orders(disturb):
        seen, model = [], mlp()
        runner = trainer(model, images(shuffle=True, batch_size=20))
        for _ in range(3):
            hook = model.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
            runner.train(1)
            hook.remove()
            disturb(runner)
        return seen

    first, second = orders(lambda runner: None), orders(lambda runner: torch.rand(100))
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])


# ----------------------------------------------------------------------------------------- what is refused


def test_a_nan_loss_names_the_epoch_and_what_to_try():
    runner = trainer(lr=0.1)
    runner.train(1)
    runner.loader = [(torch.full((4, 12), float("inf")), torch.zeros(4, dtype=torch.long))]
    with pytest.raises(FloatingPointError, match=r"epoch 1 on cpu is nan.*ten times smaller than 0\.1"):
        runner.train(3)
    assert len(runner.history) == 1


def test_stop_on_nan_can_be_switched_off():
    unlabelled = [(torch.randn(4, 12), torch.full((4,), -100))]
    (record,) = trainer(loader=unlabelled, stop_on_nan=False).train(1)
    assert math.isnan(record.loss) and record.steps == 1


def test_loaders_and_labels_that_do_not_fit():
    for empty in (images(samples=5, drop_last=True), []):
        with pytest.raises(ValueError, match="The loader gave no batch"):
            trainer(loader=empty).train(1)
    wrong = [(torch.randn(4, 12), torch.zeros(4, 1, dtype=torch.long))]
    with pytest.raises(ValueError, match=r"Logits \(4, 3\) do not fit labels \(4, 1\)"):
        trainer(loader=wrong).train(1)


def test_a_loss_that_is_no_mean():
    with pytest.raises(ValueError, match='reduction="mean", not "sum"'):
        trainer(loss=nn.CrossEntropyLoss(reduction="sum"))


def test_an_optimizer_of_another_model():
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        Trainer(mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1), LOSS, images(), "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has real GPUs")
def test_gpus_that_do_not_exist():
    with pytest.raises(ValueError, match=r"cuda:0 does not exist: this machine has 0 GPUs.*use_gpus"):
        trainer(device="cuda:0")


def test_data_parallel_refuses_what_is_no_list_of_different_gpus():
    model = mlp()
    for devices in ([], ["cpu"]):
        with pytest.raises(ValueError, match="needs a list of different GPUs"):
            DataParallelTrainer(model, torch.optim.SGD(model.parameters()), LOSS, images(), devices)
