"""A training that is interrupted and goes on ends where the undisturbed one ends, bit for bit, or says why not."""

import os
import signal
import time
import warnings
from functools import partial

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Dataset
from virtual_gpus import virtual_gpus

from helpers.parallel.launching import launch
from helpers.parallel.ranks import rank_loader
from helpers.train.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from helpers.train.loops import Trainer
from tests.ddp_jobs import in_ranks, largest_difference, mlp, numbers, same, summary, trainer

ADAM = partial(torch.optim.Adam, lr=0.02)
DROPOUT = (partial(mlp, 0.5), partial(numbers, 42), 8)  # 6 steps an epoch, the last with 2 samples


class Interruption(Exception):
    pass


class Interrupting(nn.CrossEntropyLoss):
    """A loss that fails at its `at`-th batch."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def forward(self, outputs, labels):
        self.left -= 1
        if self.left == 0:
            raise Interruption
        return super().forward(outputs, labels)


def with_schedule(**options):
    """Everything that has a state: Adam, dropout, a scheduler that steps with the optimizer."""
    made = trainer(options.pop("job", DROPOUT), optimizer=ADAM, schedule="step", **options)
    made.scheduler = torch.optim.lr_scheduler.OneCycleLR(made.optimizer, 0.05, total_steps=200)
    return made


def train(make, epochs=3, **options):
    """Undisturbed."""
    made = make(**options)
    made.train(epochs)
    return summary(made, DROPOUT)


def interrupted(make, path, at, epochs=3, resumed=None, **options):
    """Interrupted in the `at`-th batch, then another trainer that goes on; what it ends with, and where it began."""
    first = make(checkpoint=path, save_every=2, loss=Interrupting(at), **options)
    with pytest.raises(Interruption):
        first.train(epochs)
    torch.rand(7)  # another process has other generators
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    second = make(checkpoint=path, save_every=2, **(options if resumed is None else resumed))
    epoch, steps = second.resume(), second.position.steps if second.position else 0
    torch.rand(3)
    second.train(epochs - epoch)
    return summary(second, DROPOUT) | {"from": (epoch, steps)}


def check_same(one, other):
    assert same(one["weights"], other["weights"])
    assert one["history"][-len(other["history"]) :] == other["history"]
    assert one["losses"][-len(other["losses"]) :] == other["losses"] and one["score"] == other["score"]


# ------------------------------------------------------------------------------------------------ one device


def plain(shuffled_by=None, workers=0, data=None, **options):
    """A Trainer whose loader is shuffled by PyTorch's RandomSampler."""
    made = with_schedule(**options)
    generator = torch.Generator().manual_seed(9) if shuffled_by == "generator" else None
    data = data or numbers(42)
    made.loader = DataLoader(data, 4 if made.accumulate == 2 else 8, True, generator=generator, num_workers=workers)
    return made


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("shuffled_by", ["generator", "global generator"])
def test_one_device_in_the_middle_of_an_epoch(tmp_path, shuffled_by, seed, accumulate):
    make = partial(plain, shuffled_by, seed=seed, accumulate=accumulate)
    torch.manual_seed(5)
    expected = train(make)
    torch.manual_seed(5)
    found = interrupted(make, tmp_path / "last.pt", at=11 * accumulate)
    assert found["from"] == (1, 4)
    check_same(expected, found)


@pytest.mark.parametrize("at, begins", [(2, None), (3, (0, 2)), (6, (0, 4)), (7, (1, 0)), (8, (1, 0)), (13, (2, 0))])
def test_wherever_it_is_interrupted(tmp_path, at, begins):
    if begins is None:
        with pytest.raises(FileNotFoundError):
            interrupted(plain, tmp_path / "last.pt", at)
        return
    found = interrupted(plain, tmp_path / "last.pt", at)
    assert found["from"] == begins
    check_same(train(plain), found)


class Augmented(Dataset):
    """Samples with noise that is drawn when they are loaded, as augmentation does."""

    def __init__(self):
        self.samples = numbers(42)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        inputs, label = self.samples[number]
        return inputs + 0.1 * torch.randn(12), label


@pytest.mark.parametrize("workers", [0, 2])
def test_random_augmentation_goes_on_as_well(tmp_path, workers):
    make = partial(plain, workers=workers, data=Augmented(), seed=None)
    torch.manual_seed(5)
    expected = train(make, 2)
    torch.manual_seed(5)
    found = interrupted(make, tmp_path / "last.pt", at=10, epochs=2)
    assert found["from"] == (1, 2)
    check_same(expected, found)


def test_the_tests_above_would_notice_another_order_or_dropout():
    one, other = (train(partial(plain, seed=seed)) for seed in (3, 4))
    assert not same(one["weights"], other["weights"])


def test_twice_interrupted(tmp_path):
    path = tmp_path / "last.pt"
    with pytest.raises(Interruption):
        plain(checkpoint=path, save_every=1, loss=Interrupting(3)).train(3)
    second = plain(checkpoint=path, save_every=1, loss=Interrupting(3))
    assert second.resume() == 0 and second.position.steps == 2
    with pytest.raises(Interruption):
        second.train(3)
    third = plain(checkpoint=path)
    assert third.resume() == 0 and third.position.steps == 4
    third.train(3)
    check_same(train(plain), summary(third, DROPOUT))


def test_an_error_in_the_middle_of_an_epoch_lets_the_next_call_begin_a_whole_one():
    made = plain(loss=Interrupting(3))
    with pytest.raises(Interruption):
        made.train(1)
    assert made.train(1)[0].steps == 6


def test_a_snapshot_of_the_middle_is_an_ordinary_checkpoint(tmp_path):
    with pytest.raises(Interruption):
        plain(checkpoint=tmp_path / "last.pt", save_every=2, loss=Interrupting(9)).train(2)
    model = mlp(0.5)
    assert load_checkpoint(tmp_path / "last.pt", model) == 0  # the epoch that was finished last


def test_a_checkpoint_that_no_trainer_wrote_is_resumed_at_its_epoch(tmp_path):
    made = plain()
    save_checkpoint(tmp_path / "own.pt", made.model, made.optimizer, 4, made.scheduler)
    assert plain().resume(tmp_path / "own.pt") == 5


def test_the_scale_of_float16_goes_on(tmp_path):
    def scaled(**options):
        made = with_schedule(amp="fp16", **options)
        made.precision.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        return made

    path = tmp_path / "last.pt"
    expected = train(scaled, 2)
    check_same(expected, interrupted(scaled, path, at=9, epochs=2))
    assert torch.load(path, weights_only=True)["training"]["scaler"]["scale"] == 4.0 * 2**4


# ------------------------------------------------------------------------------------------------- many ranks


@pytest.mark.parametrize("seed", [3, None])
def test_ranks_in_the_middle_of_an_epoch(tmp_path, seed):
    expected = in_ranks(2, lambda: train(partial(with_schedule, seed=seed)))
    make = partial(with_schedule, seed=seed)
    found = in_ranks(2, lambda: interrupted(make, tmp_path / "last.pt", at=10))
    for one, other in zip(expected, found, strict=True):
        assert other["from"] == (1, 2)
        check_same(one, other)
    assert os.listdir(tmp_path) == ["last.pt"]


def test_ranks_on_virtual_gpus_with_accumulation(tmp_path):
    make = partial(with_schedule, batch=4, accumulate=2, seed=None)
    with virtual_gpus(2):
        expected = in_ranks(2, lambda: train(make))
        found = in_ranks(2, lambda: interrupted(make, tmp_path / "last.pt", at=17))
    for one, other in zip(expected, found, strict=True):
        assert other["from"] == (1, 2)
        check_same(one, other)


def augmented(accumulate=1, **options):
    """Ranks load a step ahead: what loading draws lies between what the steps draw."""
    made = with_schedule(batch=8 // accumulate, accumulate=accumulate, seed=None, **options)
    made.loader = rank_loader(Augmented(), 8 // accumulate)
    return made


@pytest.mark.parametrize("ranks, accumulate", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("at, begins", [(9, (1, 2)), (11, (1, 4))])
def test_ranks_with_random_augmentation(tmp_path, ranks, accumulate, at, begins):
    make, at = partial(augmented, accumulate), 1 + (at - 1) * accumulate
    expected = in_ranks(ranks, lambda: train(make))
    found = in_ranks(ranks, lambda: interrupted(make, tmp_path / "last.pt", at=at))
    for one, other in zip(expected, found, strict=True):
        assert other["from"] == begins
        check_same(one, other)


def test_ranks_that_are_interrupted_twice(tmp_path):
    path = tmp_path / "last.pt"

    def again_and_again():
        begun = []
        for at in (4, 2, 7, None):
            made = augmented(checkpoint=path, save_every=1, **({"loss": Interrupting(at)} if at else {}))
            made.resume(missing_ok=True)
            begun.append((made.epoch, made.steps_done))
            torch.rand(5 if made.position else 0)
            if at is None:
                made.train(3 - made.epoch)
                return summary(made, DROPOUT) | {"begun": begun}
            with pytest.raises(Interruption):
                made.train(3)
            torch.distributed.barrier()

    expected = in_ranks(2, lambda: train(augmented))
    for one, other in zip(expected, in_ranks(2, again_and_again), strict=True):
        assert other["begun"] == [(0, 0), (0, 3), (0, 4), (1, 4)]
        check_same(one, other)


def no_dropout(**options):
    return with_schedule(job=(mlp, DROPOUT[1], 8), **options)


@pytest.mark.parametrize("before, now", [(2, 4), (4, 2), (2, 1)])
def test_another_number_of_ranks_goes_on_at_the_same_sample(tmp_path, before, now):
    path = tmp_path / "last.pt"

    def first():
        with pytest.raises(Interruption):
            no_dropout(checkpoint=path, save_every=2, loss=Interrupting(10)).train(3)

    def second():
        made = no_dropout()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert made.resume(path) == 1 and made.position.steps == 2
        made.train(2)
        return summary(made, DROPOUT) | {"said": [str(line.message) for line in said]}

    in_ranks(before, first)
    expected = in_ranks(1, lambda: train(no_dropout))[0]
    for rank, found in enumerate(in_ranks(now, second)):
        assert found["history"] == expected["history"][1:]
        assert found["losses"] == pytest.approx(expected["losses"][1:], rel=1e-5)
        assert largest_difference(found["weights"], expected["weights"]) < 1e-5
        text = f"a snapshot of {before} ranks goes on with {now}: weights, optimizer, schedule and the order"
        assert [line[: len(text)] for line in found["said"]] == ([] if rank else [text])


def test_the_same_samples_in_other_micro_batches(tmp_path):
    path = tmp_path / "last.pt"
    with pytest.raises(Interruption):
        no_dropout(checkpoint=path, save_every=2, loss=Interrupting(10)).train(3)
    made = no_dropout(batch=4, accumulate=2)
    assert made.resume(path) == 1 and made.position.batches == 4
    made.train(2)
    expected = train(no_dropout)
    assert largest_difference(summary(made, DROPOUT)["weights"], expected["weights"]) < 1e-5
    assert [record.batch_size for record in made.history] == [8, 8]


def test_from_the_end_of_an_epoch_with_any_batch_and_any_number_of_ranks(tmp_path):
    path = tmp_path / "last.pt"

    def first():
        no_dropout(checkpoint=path).train(1)

    def second():
        made = no_dropout(batch=6)
        assert made.resume(path) == 1 and made.position is None
        return made.train(1)[0].batch_size

    in_ranks(2, first)
    assert in_ranks(3, second) == [6, 6, 6]


def test_only_the_first_rank_needs_the_file_and_all_hear_of_its_errors(tmp_path):
    def act(rank):
        folder = tmp_path / f"host {rank}"
        made = no_dropout(checkpoint=folder / "last.pt")
        with pytest.raises(FileNotFoundError, match="no checkpoint at .*host 0"):
            made.resume(folder / "last.pt")
        made.train(1)
        assert (folder / "last.pt").exists() == (rank == 0)
        other = no_dropout()
        other.resume(folder / "last.pt")
        other.train(1)
        damaged = folder / "damaged.pt"
        if rank == 0:
            damaged.write_bytes((folder / "last.pt").read_bytes()[:1000])
        before = [parameter.detach().clone() for parameter in other.model.parameters()]
        with pytest.raises(CheckpointError, match="damaged, cut off"):
            other.resume(damaged)
        return before, list(map(torch.detach, other.model.parameters()))

    answers = launch(act, ranks=2, show=False)
    assert same(answers[0][0], answers[0][1]) and same(answers[0][1], answers[1][1])


# ------------------------------------------------------------------------------------------ what is refused


def snapshot(path, **options):
    with pytest.raises(Interruption):
        no_dropout(checkpoint=path, save_every=2, loss=Interrupting(10), **options).train(3)
    return path


def test_the_middle_of_an_epoch_of_another_job(tmp_path):
    path = snapshot(tmp_path / "last.pt")
    longer = with_schedule(job=(mlp, partial(numbers, 43), 8))
    shuffled = no_dropout()
    shuffled.loader = DataLoader(numbers(42), 8, shuffle=True)
    unknown = no_dropout()
    unknown.loader = list(unknown.loader)
    for made in (no_dropout(batch=6), no_dropout(accumulate=2), longer, shuffled, unknown):
        before = [parameter.detach().clone() for parameter in made.model.parameters()]
        with pytest.raises(
            CheckpointError, match="middle of an epoch of another job .*same number of samples per step"
        ):
            made.resume(path)
        assert same(before, list(made.model.parameters())) and made.epoch == 0 and made.position is None


def test_another_model_or_optimizer(tmp_path):
    path = snapshot(tmp_path / "last.pt")
    for other, text in (
        (with_schedule(job=(lambda: nn.Linear(12, 3), DROPOUT[1], 8)), "was not made by this Linear"),
        (trainer(DROPOUT), "the state of Adam, not of SGD"),
    ):
        before = [parameter.detach().clone() for parameter in other.model.parameters()]
        with pytest.raises(CheckpointError, match=text):
            other.resume(path)
        assert same(before, list(other.model.parameters()))


def test_a_snapshot_cut_in_half(tmp_path):
    path = snapshot(tmp_path / "last.pt")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="damaged, cut off"):
        no_dropout().resume(path)


def test_save_needs_a_file():
    with pytest.raises(ValueError, match="save to which file"):
        plain().save()


# ------------------------------------------------------------------------------------- killed in mid-write


def save_for_ever(path):
    torch.manual_seed(0)
    model = nn.Linear(512, 512)  # 1 MiB, and 2 of Adam's: a save takes a few ms
    loader = rank_loader(numbers(4), 4)
    made = Trainer(model, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss(), loader, "cpu")
    while True:
        made.epoch += 1
        made.save(path)


def test_a_process_killed_while_it_writes_leaves_the_last_whole_file(tmp_path):
    """Until three were killed with an unfinished file beside the whole one."""
    path, unfinished = tmp_path / "last.pt", 0
    for attempt in range(60):
        process = mp.get_context("fork").Process(target=save_for_ever, args=(path,))
        process.start()
        end = time.monotonic() + 60
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.002 * (attempt % 10))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        unfinished += any(name.endswith(".tmp") for name in os.listdir(tmp_path))
        model = nn.Linear(512, 512)
        made = Trainer(model, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss(), [], "cpu")
        assert made.resume(path) >= 1
        assert os.listdir(tmp_path) == ["last.pt"]  # what the killed process had begun is gone
        path.unlink()
        if unfinished == 3:
            return
    pytest.fail(f"only {unfinished} of 60 processes were killed in the middle of a save")
