"""The training loop on one device: what it counts, prints, saves, resumes and refuses."""

import math
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from helpers.models import bert_small, small_resnet
from helpers.train.loops import DataParallelTrainer, Trainer
from helpers.train.loops.checks import existing_device
from helpers.train.loops.scores import EpochRecord, Score, batch_sums, score_of, values_of

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
    options = {"device": "cpu", "log": None, "progress": False, **options}
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


@pytest.mark.parametrize("batch_size", [3, 7, 20])
def test_evaluation_does_not_depend_on_how_the_samples_are_batched(batch_size):
    score = trainer().evaluate(images(batch_size=batch_size))
    x, y = images().dataset.tensors
    logits = mlp()(x)
    assert score.loss == pytest.approx(LOSS(logits, y).item(), rel=1e-5)
    assert score.accuracy == pytest.approx((logits.argmax(1) == y).float().mean().item())


@pytest.mark.parametrize("batch_size", [1, 4, 10])
def test_masked_words_are_weighted_by_their_labels(batch_size):
    torch.manual_seed(0)
    model = bert_small(vocabulary=30, length=8)
    score = trainer(model, words()).evaluate(words(batch_size=batch_size))
    tokens, labels = words().dataset.tensors
    logits = model.eval()(tokens)[labels != -100]
    labels = labels[labels != -100]
    assert 10 < len(labels) < 80
    assert score.loss == pytest.approx(LOSS(logits, labels).item(), rel=1e-5)
    assert score.accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())


def test_masked_words_are_learned():
    torch.manual_seed(0)
    model = bert_small(vocabulary=30, length=8, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = Trainer(model, optimizer, LOSS, words(), "cpu", log=None, progress=False).train(30)
    assert history[-1].loss < 0.5 * history[0].loss and history[-1].accuracy > 0.5


def test_the_loss_s_own_ignore_index_is_used():
    labels = torch.tensor([0, 1, 2, 2])
    logits = torch.eye(3)[[0, 0, 2, 2]]
    data = DataLoader(TensorDataset(logits, labels), 4)
    runner = trainer(nn.Linear(3, 3), data, loss=nn.CrossEntropyLoss(ignore_index=2))
    runner.network = nn.Identity()
    assert runner.evaluate(data).accuracy == 0.5


def test_sums_of_a_batch():
    logits = torch.tensor([[[2.0, 1.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]])
    labels = torch.tensor([[0, -100], [0, 1]])
    sums = batch_sums(torch.tensor(1.5), logits, labels)
    assert sums.tolist() == [4.5, 2.0, 3.0, 3.0] and score_of(values_of(sums)) == Score(1.5, 2 / 3)
    assert math.isnan(score_of([0.0] * 4).loss)


def test_the_log_line():
    record = EpochRecord("cuda:0-3", 0, 128, 32, 0.1, 2.0683, 0.241)
    line = "[cuda:0-3] epoch 0 | batch 128 | steps 32 | lr 0.1000 | loss 2.068 | accuracy 24.10 %"
    assert str(record) == line
    assert "lr 2.5e-05 |" in str(EpochRecord("cpu", 0, 1, 1, 2.5e-5, 0.0, 1.0))


def test_lines_rates_and_history_over_epochs(capsys):
    runner = trainer(log=print)
    runner.scheduler = torch.optim.lr_scheduler.StepLR(runner.optimizer, 1, gamma=0.1)
    records = runner.train(1) + runner.train(2)
    assert records == runner.history and [record.epoch for record in records] == [0, 1, 2]
    assert [record.learning_rate for record in records] == pytest.approx([0.1, 0.01, 0.001])
    assert capsys.readouterr().out == "".join(f"{record}\n" for record in records)


def test_the_bar_shows_no_time_leaves_nothing_and_starts_no_thread(capsys):
    before = threading.active_count()
    trainer(progress=True).train(1)
    shown = capsys.readouterr().err
    assert "[cpu] epoch 0" in shown and "0/3" in shown and "it/s" not in shown and "00:" not in shown
    assert shown.endswith("\r") and shown.split("\r")[-2].strip() == ""
    assert threading.active_count() == before


def test_tqdm_disable_hides_the_bar():
    code = "from tests.test_training import trainer; trainer(progress=True).train(1)"
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0 and "epoch" not in done.stdout + done.stderr, done.stderr


def test_evaluation_changes_nothing_and_restores_every_mode():
    model = nn.Sequential(nn.Linear(12, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    runner = trainer(model)
    model.train()
    model[1].eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first, second = runner.evaluate(images()), runner.evaluate(images())
    assert first == second and runner.history == []
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    runner.network = nn.Sequential(model, nn.Linear(1, 1))
    with pytest.raises(RuntimeError):
        runner.evaluate(images())
    assert model.training and not model[1].training


def test_the_outputs_are_gone_when_backward_runs():
    import weakref

    outputs, alive = [], []

    class Watched(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            outputs.append(weakref.ref(y))
            self.bias.register_hook(lambda grad: alive.append(outputs[-1]() is not None))
            return y

    trainer(Watched(12, 3), images(samples=8)).train(1)
    assert alive == [False]


# ---------------------------------------------------------------------------------------- seeds and resuming


def state_of(runner):
    return [parameter.detach().clone() for parameter in runner.model.parameters()]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def make(path=None, seed=3, own_generator=False, optimizer=torch.optim.Adam):
    generator = torch.Generator().manual_seed(9) if own_generator else None
    model = mlp(dropout=0.5)
    optimizer = optimizer(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = images(shuffle=True, generator=generator)
    options = {"scheduler": scheduler, "seed": seed, "checkpoint": path, "log": None, "progress": False}
    return Trainer(model, optimizer, LOSS, loader, "cpu", **options)


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("own_generator", [False, True])
def test_a_resumed_run_ends_in_the_weights_of_an_undisturbed_one(tmp_path, seed, own_generator):
    undisturbed = make(tmp_path / "other.pt", seed, own_generator)
    expected = undisturbed.train(4)
    make(tmp_path / "last.pt", seed, own_generator).train(2)
    torch.rand(100)  # another process has other generators
    resumed = make(tmp_path / "last.pt", seed, own_generator)
    torch.rand(7)
    assert resumed.resume() == 2
    assert resumed.train(2) == expected[2:]
    assert equal(state_of(undisturbed), state_of(resumed))


def test_the_test_above_would_notice_another_shuffle_or_dropout():
    seeds = [make(seed=seed) for seed in (3, 4)]
    for runner in seeds:
        runner.train(1)
    assert not equal(*map(state_of, seeds))


def test_every_epoch_has_its_own_order_and_a_second_run_the_same_ones():
    def orders():
        seen = []
        model = mlp()
        model.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
        trainer(model, images(shuffle=True, batch_size=20)).train(3)
        return seen

    first, second = orders(), orders()
    assert equal(first, second)
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])


def test_what_runs_between_two_epochs_does_not_matter_with_a_seed():
    plain, disturbed = make(), make()
    plain.train(2)
    disturbed.train(1)
    disturbed.evaluate(images(shuffle=True))
    disturbed.train(1)
    assert equal(state_of(plain), state_of(disturbed))


def test_resume_needs_a_file(tmp_path):
    with pytest.raises(ValueError, match="resume from which file"):
        make().resume()
    with pytest.raises(FileNotFoundError):
        make(tmp_path / "nothing.pt").resume()


def test_a_sampler_s_set_epoch_is_called():
    seen = []

    class Sampler(torch.utils.data.SequentialSampler):
        set_epoch = staticmethod(seen.append)

    data = images().dataset
    trainer(loader=DataLoader(data, 8, sampler=Sampler(data))).train(3)
    assert seen == [0, 1, 2]


# ----------------------------------------------------------------------------------------- what is refused


def test_a_nan_loss_names_the_epoch_and_what_to_try_and_is_not_saved(tmp_path):
    runner = trainer(lr=0.1, checkpoint=tmp_path / "last.pt")
    runner.train(1)
    saved = (tmp_path / "last.pt").read_bytes()
    runner.loader = [(torch.full((4, 12), float("inf")), torch.zeros(4, dtype=torch.long))]
    with pytest.raises(FloatingPointError, match=r"epoch 1 on cpu is nan.*ten times smaller than 0\.1"):
        runner.train(3)
    assert (tmp_path / "last.pt").read_bytes() == saved and len(runner.history) == 1


def test_stop_on_nan_can_be_switched_off():
    unlabelled = [(torch.randn(4, 12), torch.full((4,), -100))]
    (record,) = trainer(loader=unlabelled, stop_on_nan=False).train(1)
    assert math.isnan(record.loss) and record.steps == 1


def test_empty_loaders():
    with pytest.raises(ValueError, match="drop_last=True .* batch of 8, and the data set has 5 samples"):
        trainer(loader=images(samples=5, drop_last=True)).train(1)
    with pytest.raises(ValueError, match="its data set is empty"):
        trainer(loader=[]).train(1)
    with pytest.raises(ValueError, match="its data set is empty"):
        trainer().evaluate(iter(()))


def test_an_optimizer_of_another_model():
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        Trainer(mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1), LOSS, images(), "cpu")


def test_a_loss_that_is_no_mean():
    with pytest.raises(ValueError, match='reduction="mean", not "sum"'):
        trainer(loss=nn.CrossEntropyLoss(reduction="sum"))


def test_labels_of_another_shape():
    wrong = [(torch.randn(4, 12), torch.zeros(4, 1, dtype=torch.long))]
    with pytest.raises(ValueError, match=r"logits \(4, 3\) do not fit labels \(4, 1\)"):
        trainer(loader=wrong).train(1)


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has real GPUs")


@no_gpu
def test_gpus_that_do_not_exist():
    with pytest.raises(ValueError, match=r"cuda:0 does not exist: this machine has 0 GPUs.*use_gpus"):
        trainer(device="cuda:0")
    with pytest.raises(ValueError, match="cuda:1 does not exist"):
        existing_device(1)


def test_data_parallel_refuses_what_is_no_list_of_different_gpus():
    model = mlp()
    for devices in ([], ["cpu"], ["cpu", "cpu"]):
        with pytest.raises(ValueError, match="needs a list of different GPUs"):
            DataParallelTrainer(model, torch.optim.SGD(model.parameters()), LOSS, images(), devices)


def test_a_convolutional_net_through_the_same_loop():
    make = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 3, 16, 16, generator=make), torch.randint(0, 10, (12,), generator=make)
    torch.manual_seed(0)
    model = small_resnet()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = trainer(model, DataLoader(TensorDataset(x, y), 6), lr=0.01).train(3)
    assert records[-1].loss < records[0].loss
