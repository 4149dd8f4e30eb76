"""The formula of the memory explorer against shapes-only runs on virtual GPUs: peaks, and what fits."""

import dataclasses
import random

import pytest
import torch
from virtual_gpus import virtual_gpus
from virtual_gpus.gpus import kinds, spec
from virtual_gpus.memory_model import reduction_scratch

from helpers.models import Bert, bert_article, parameter_bytes
from helpers.show.widgets.bert_fits import Verdict, judge
from helpers.show.widgets.bert_memory import KINDS, METHODS, OPTIMIZERS, Job, step_memory
from helpers.show.widgets.bert_sizes import Sizes
from helpers.show.widgets.cards import Card, block, card
from helpers.show.widgets.explorer import SLIDERS
from tests.benchmarks.explorer_time import errors, random_job, run

MIB = 2**20
CLOSE = 0.03


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


# ---- peaks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_article_s_job(method):
    assert max(map(abs, errors(Job(method=method)))) < 0.01


@pytest.mark.parametrize("seed", range(6))
def test_random_jobs_from_anywhere_on_the_sliders(seed):
    """More of them: python -m tests.benchmarks.explorer_time --points 100."""
    job = random_job(random.Random(f"peaks {seed}"), most=24)
    assert max(map(abs, errors(job))) < CLOSE, job


ENDS = [{name: slider[end]} for name, slider in SLIDERS.items() for end in (1, 2)]
SMALLEST, LARGEST = ({name: slider[end] for name, slider in SLIDERS.items()} for end in (1, 2))


@pytest.mark.parametrize("ends", [*ENDS, SMALLEST, LARGEST | {"gpus": 2}], ids=str)
def test_the_ends_of_every_slider(ends):
    """Each with the rest of the article's job, half of its layers; and all at once, the largest on two GPUs."""
    job = Job(**{"layers": 4, "method": "loss in forward"} | ends)
    assert max(map(abs, errors(job))) < CLOSE, job


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_where_the_weights_are_most_of_all(optimizer):
    job = Job(gpus=2, batch=8, length=32, vocabulary=20_000, hidden=512, layers=2, optimizer=optimizer)
    assert max(map(abs, errors(job))) < CLOSE
    assert step_memory(job)[0].moment in ("adding up the gradients", "the optimizer's step")


@pytest.mark.parametrize("version", [(2, 11), (2, 13), (2, 15)])
@pytest.mark.parametrize("method", ["one GPU", "DataParallel", "parallel loss"])
def test_workspaces_that_older_pytorches_keep(version, method):
    rules = dataclasses.replace(card("H200"), torch=version)
    job = Job(gpus=2, batch=40, length=64, vocabulary=5000, layers=3, method=method, card=rules)
    assert max(map(abs, errors(job))) < CLOSE


@pytest.mark.parametrize(
    ("gpus", "batch", "method"),
    [(4, 3, "DataParallel"), (3, 1, "output_device=1"), (8, 9, "DataParallel"), (5, 20, "one GPU")],
)
def test_gpus_without_samples(gpus, batch, method):
    job = Job(gpus=gpus, batch=batch, method=method, layers=1)
    found, measured = step_memory(job), run(job)
    assert [gpu.peak > 0 for gpu in found] == [peak > 0 for peak in measured]
    assert all(abs(gpu.peak - peak) <= CLOSE * peak for gpu, peak in zip(found, measured, strict=True))


def test_samples_are_cut_as_pytorch_cuts_them():
    for batch in range(1, 40):
        for gpus in range(2, 9):
            pieces = [len(piece) for piece in torch.empty(batch).chunk(gpus)]
            assert Job(gpus=gpus, batch=batch).samples == pieces + [0] * (gpus - len(pieces))


def test_kinds_add_up_and_tell_the_story():
    gathered, cured = (step_memory(Job(method=method)) for method in ("DataParallel", "parallel loss"))
    for gpu in [*gathered, *cured]:
        assert sum(gpu.at_peak.values()) == gpu.peak and tuple(gpu.at_peak) == KINDS
    logits = 200 * 163 * 30_000 * 4
    assert gathered[0].moment == "the loss" and gathered[0].at_peak["logits"] == pytest.approx(3 * logits, rel=1e-3)
    assert cured[3].at_peak["logits"] == pytest.approx(3 * logits / 4, rel=1e-3)
    assert gathered[0].at_peak["optimizer state"] == pytest.approx(2 * parameter_bytes(bert_article()), rel=0.03)


@pytest.mark.parametrize("sizes", [(30_000, 256, 8, 8, 163), (50, 64, 1, 4, 9)])
def test_parameters_are_the_model_s_in_its_order(sizes):
    with torch.device("meta"):
        model = Bert(*sizes)
    assert list(Sizes(*sizes).parameters.values()) == [4 * p.numel() for p in model.parameters()]


# ---- does it fit? --------------------------------------------------------------------------------------------------


def least_memory(job: Job) -> int:
    """The least capacity, in MiB, that the verdicts call enough."""
    low, high = 64, 2**20
    while high - low > max(1, low // 500):
        middle = (low + high) // 2
        smaller = dataclasses.replace(job, card=card(job.card.kind, middle * MIB))
        fits = set(judge(smaller, step_memory(smaller))) == {Verdict.FITS}
        low, high = (low, middle) if fits else (middle, high)
    return high


def trains(job: Job, mib: int) -> bool:
    try:
        run(job, memory=mib * MIB, steps=3)
    except torch.OutOfMemoryError:
        return False
    return True


FRAGMENTED = Job(gpus=1, batch=72, length=37, vocabulary=60_000, hidden=448, layers=2, optimizer="AdamW",
                 method="one GPU", card=card("V100"))  # fmt: skip


RANDOM = [random_job(random.Random(f"fits {seed}"), most=16) for seed in range(3)]


@pytest.mark.parametrize("job", [FRAGMENTED, Job(method="parallel loss", layers=4), Job(gpus=2, layers=2), *RANDOM])
def test_verdicts_are_those_of_real_runs(job):
    """Virtual GPUs with 5 % less memory than the least run out of it, those with 5 % more do not."""
    least = least_memory(job)
    assert not trains(job, round(0.95 * least)), least
    assert trains(job, round(1.05 * least)), least


def test_a_job_may_need_far_more_than_its_peak():
    gpu = step_memory(FRAGMENTED)[0]
    room = round(1.15 * gpu.peak)
    job = dataclasses.replace(FRAGMENTED, card=card("V100", room + FRAGMENTED.card.context))
    assert judge(job, [gpu]) == [Verdict.PIECES]
    assert not trains(job, job.card.capacity // MIB)


def test_a_peak_beyond_the_room_does_not_fit():
    job = Job(card=card("TITAN Xp"))
    assert judge(job, step_memory(job)) == [Verdict.OVER, *[Verdict.FITS] * 3]


# ---- cards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kinds())
def test_partial_sums_are_those_of_virtual_gpus(kind):
    one, sheet = card(kind), spec(kind)
    numbers = random.Random(kind)
    for _ in range(300):
        rows, columns = numbers.randrange(1, 100_000), numbers.randrange(1, 50_000)
        partial, semaphores = reduction_scratch((rows, columns), sheet, (0,))
        assert one.partial_sums(rows, columns) == -(-partial // 512) * 512 + -(-semaphores // 512) * 512


@pytest.mark.parametrize("memory", [None, "12 GiB", "300 MiB"])
def test_the_room_is_what_virtual_gpus_leave(memory):
    with virtual_gpus(1, kind="V100", memory=memory):
        torch.empty(1, device="cuda")
        free, total = torch.cuda.mem_get_info()
        one = card("V100", memory)
        assert (one.capacity, one.room) == (total, free + torch.cuda.memory_reserved())


def test_blocks_of_10_mib_and_more_are_those_of_the_allocator():
    with virtual_gpus(1, kind="V100"):
        for size in (10 * MIB, 10 * MIB + 512, 11 * MIB, 11 * MIB - 512, 12 * MIB + 1, 33 * MIB, 1000, 512):
            torch.cuda.empty_cache()
            tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            assert block(size) == torch.cuda.memory_allocated(), size
            del tensor


# ---- bad arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"gpus": 0}, "gpus=0: give a whole number of at least 1"),
        ({"batch": 2.5}, "batch=2.5: give a whole number"),
        ({"layers": True}, "layers=True"),
        ({"hidden": 100}, "shared among 8 heads: take a multiple of 8, such as 96"),
        ({"method": "DDP"}, "method='DDP': choose one of 'one GPU', 'DataParallel'"),
        ({"optimizer": "adam"}, "optimizer='adam': choose one of 'SGD'"),
        ({"gpus": 1, "method": "output_device=1"}, "take 2 GPUs or another method"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_advice(arguments, advice):
    with pytest.raises(ValueError, match=advice):
        Job(**arguments)


def test_unknown_cards():
    with pytest.raises(ValueError, match="choose one of"):
        card("GTX")
    with pytest.raises(ValueError, match="Cannot read '12 apples'"):
        card("V100", "12 apples")
    assert isinstance(card(), Card)
