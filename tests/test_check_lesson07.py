"""Checks of lesson 07: right answers pass, mistakes are explained, hostile answers never raise."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from virtual_gpus import virtual_gpus

from helpers.measure.timeline import time_use
from notebooks.checks import lesson07 as check
from notebooks.checks import scores
from tests.check_answers import explains, survives_strange_answers, told


def share(one, many, gpus):
    return (many / one - 1 / gpus) / (1 - 1 / gpus)


def judge(seconds, pays=1.5):
    gpus = 1
    while 2 * gpus in seconds and seconds[gpus] / seconds[2 * gpus] >= pays:
        gpus *= 2
    return gpus, share(seconds[1], seconds[gpus], gpus) if gpus > 1 else 0.0


def more_than(seconds):
    gpus = 1
    while 2 * gpus in seconds and seconds[gpus] / seconds[2 * gpus] > 1.5:
        gpus *= 2
    return gpus, share(seconds[1], seconds[gpus], gpus)


def solved_for_s(seconds):
    """Right in another form: from the speed-up, as a list with a float."""
    gpus, _ = judge(seconds)
    speed_up = seconds[1] / seconds[gpus]
    return [float(gpus), (gpus / speed_up - 1) / (gpus - 1)]


def ddp_bytes(parameters, states, temporaries, per_sequence, sequences):
    weights = 2 * parameters
    return weights * (2 + states) + max(sequences * per_sequence, weights * (1 + temporaries))


def two_moments(parameters, states, temporaries, per_sequence, sequences):
    """Right in another form: each moment summed up apart, as an integer."""
    always = 4 * parameters + 2 * parameters * states
    forward = always + sequences * per_sequence
    update = always + 2 * parameters + 2 * parameters * temporaries
    return int(max(forward, update))


def test_solutions_pass():
    assert check.judge(judge) and check.fits(ddp_bytes) and check.causes(CAUSES) and check.changes(CHANGES)


def test_right_answers_of_another_form_pass():
    assert check.judge(solved_for_s) and check.fits(two_moments)
    assert check.causes({job: cause.title() for job, cause in CAUSES.items()})
    assert check.changes(CHANGES | {"B": {"shares": [4096, 4096]}, "C": {"micro_batches": 16}})


def test_no_answer_makes_a_check_raise():
    assert survives_strange_answers(check.judge, check.fits, check.causes, check.changes, check.plan)


def test_mistakes_in_reading_a_log_are_explained():
    explains(
        check.judge,
        (lambda seconds: judge(seconds)[0], "returned 8. Return two numbers, (gpus, share)"),
        (lambda seconds: (min(seconds, key=seconds.get), 0), "from 8 to 16 GPUs a step gets 0.58 times"),
        (lambda seconds: (max(seconds), 0), "0.58 times as fast, and at least 1.5 times pays"),
        (lambda seconds: (judge(seconds, 1.9)[0], 0), "from 4 to 8 GPUs a step gets 1.86 times as fast"),
        (more_than, "From 2 to 4 GPUs a step gets 1.50 times as fast, and at least 1.5 times pays"),
        (lambda seconds: (judge(seconds)[0], check._amdahl(seconds)), "doubling does not pay in all of it"),
        (lambda seconds: (8, seconds[8] / seconds[1]), "A part of that time is parallel work"),
        (lambda seconds: (8, seconds[8] / seconds[1] - 1 / 8), "The serial work is not divided"),
        (lambda seconds: (8, seconds[1] / seconds[8] / 8), "is the efficiency"),
        (lambda seconds: (8, 0.3), "the share of 0.3 is more than twice the right value"),
        (lambda seconds: (7, 0.3), "should be one of 1, 2, 4, 8, 16, 32, 64"),
        (lambda seconds: (8, "a"), "is text"),
        (lambda seconds: (judge(seconds)[0], 100 * judge(seconds)[1]), "2 is in percent"),
        (lambda seconds: (judge(seconds)[0], round(judge(seconds)[1], 3)), "is rounded. Return all of its digits"),
        (lambda seconds: (judge(seconds)[0], 2 * seconds[2] / seconds[1] - 1), "fits T(1) and T(2)"),
        (lambda seconds: (*judge(seconds), seconds.clear())[:2], "changes the log that it gets"),
        (lambda seconds: judge(seconds)[::-1], "The first number should be one of 1, 2, 4"),
    )


def test_a_table_of_the_known_logs_does_not_pass():
    known = {tuple(log.items()): judge(log) for log in check._LOGS}
    assert told(check.judge(lambda seconds: known.get(tuple(seconds.items()), (2, 0.05))))


def test_mistakes_in_the_budget_are_explained():
    explains(
        check.fits,
        (lambda p, k, t, s, n: ddp_bytes(2 * p, k, t, s, n), "counts four bytes for a number"),
        (lambda p, k, t, s, n: ddp_bytes(p / 2, k, t, s, n), "counts one byte for a number"),
        (lambda p, k, t, s, n: ddp_bytes(p, 2, t, s, n), "counts two states"),
        (lambda p, k, t, s, n: ddp_bytes(p, k, 0, s, n), "lacks the temporary tensors"),
        (lambda p, k, t, s, n: ddp_bytes(p, k, 1, s, n), "temporary tensors that this optimizer does not make"),
        (lambda p, k, t, s, n: ddp_bytes(p, k, t, s, 1), "counts one sequence"),
        (lambda p, k, t, s, n: ddp_bytes(p, k, t, s, n) - 2 * p, "lacks the buckets"),
        (lambda p, k, t, s, n: 2 * p * (3 + k + t) + n * s, "Only the larger is there at the peak"),
        (lambda p, k, t, s, n: 2 * p * (2 + k) + n * s, "lacks the optimizer's step"),
        (lambda p, k, t, s, n: 2 * p * (2 + k) + max(n * s + 2 * p, 2 * p * (1 + t)), "adds the gradients"),
        (lambda p, k, t, s, n: ddp_bytes(p, 0, t, s, n), "lacks the states of the optimizer"),
        (lambda p, k, t, s, n: 4 * p + max(n * s, 2 * p * (1 + t + k)), "counts the states only in the optimizer's"),
        (lambda p, k, t, s, n: 2 * p * (2 + k) + max(n * s, 2 * p * t), "lacks the gradients in the optimizer's step"),
        (lambda p, k, t, s, n: ddp_bytes(p, k, t, s, n) / 2**30, "17.8075 bytes is in GiB. Return bytes"),
        (lambda p, k, t, s, n: ddp_bytes(p, k, t, s, n) / 1e9, "is in GB. Return bytes"),
        (lambda p, k, t, s, n: 17.8 * 2**30, "is too large"),
        (lambda p, k, t, s, n: "17.8 GiB", "is text"),
    )


@pytest.mark.parametrize(
    ("states", "temporaries", "make"),
    [
        (2, 1, torch.optim.AdamW),
        (2, 0, lambda parameters: torch.optim.AdamW(parameters, fused=True)),
        (1, 0, lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)),
        (0, 0, lambda parameters: torch.optim.SGD(parameters, 0.1)),
    ],
)
def test_the_budget_is_what_a_model_takes_that_fills_the_gpu(states, temporaries, make):
    """Almost no activations: all is parameters, gradients, buckets, states and the optimizer's temporary tensors."""
    with virtual_gpus(1, kind="H100", shapes_only=True, rank=0, world_size=1):
        dist.init_process_group("nccl")
        try:
            with torch.device("cuda"):
                net, x = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(9)]).bfloat16(), torch.zeros(1, 8192)
            ddp, x = DistributedDataParallel(net), x.bfloat16()
            optimizer, count = make(ddp.parameters()), sum(each.numel() for each in net.parameters())
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                optimizer.zero_grad()
                ddp(x).sum().backward()
                optimizer.step()
            assert torch.cuda.max_memory_allocated() == pytest.approx(ddp_bytes(count, states, temporaries, 0, 1), 0.02)
        finally:
            dist.destroy_process_group()


# ---- a deadline and a price list -------------------------------------------------------------------------------------


@pytest.fixture
def bills(monkeypatch, tmp_path):
    """Bills without runs, and scores of nobody."""
    monkeypatch.setattr(scores, "FOLDER", tmp_path)
    monkeypatch.setattr(scores, "_here", {})

    def bill(kind, gpus, method, sequences, recompute=False, fused=False):
        if kind == "RTX 4090" and sequences > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        hours = {"RTX 4090": 22, "A100-80GB": 12, "H100": 5}[kind] / gpus * (0.95 if fused else 1)
        return check.Bill(hours * gpus * check.PRICES[kind], hours, 0)

    monkeypatch.setattr(check, "bill", bill)


def test_plans_are_judged(bills):
    assert "You reach par." in check.plan(check.PAR).text
    assert "You beat par." in check.plan(check.PAR | {"fused": True}).text
    worse = check.plan({"kind": "A100-80GB", "gpus": 8, "method": "DDP", "sequences": 2}).text
    assert "A cheaper plan meets the deadline, too. Your best so far: 8.36 euros." in worse
    explains(
        check.plan,
        (check.PAR | {"gpus": 4}, "1,000,000,000 tokens take 5.50 hours, and the deadline is 3.15 hours"),
        (check.PAR | {"gpus": 4, "sequences": 4}, "the RTX 4090 runs out of memory"),
        (check.PAR | {"sequences": 4}, "8 GPUs with 4 sequences each train on 32 at once, and a step has only 16"),
        (check.PAR | {"gpus": 6}, "The plan says 6 for gpus. It can be 1, 2, 4, 8"),
        (check.PAR | {"gpus": True}, "The plan says True for gpus. It can be 1, 2, 4, 8"),
        (check.PAR | {"kind": "4090"}, "The plan says '4090' for kind. It can be 'RTX 4090', 'A100-80GB', 'H100'"),
        (check.PAR | {"method": "FSDP"}, "It can be 'DDP', 'fully_shard'"),
        (check.PAR | {"fused": 1}, "The plan says 1 for fused. It can be False, True"),
        (check.PAR | {"batch": 4}, "There is no choice 'batch'. The choices are kind, gpus, method"),
        ({"kind": "H100", "gpus": 8}, "The plan does not say method, sequences"),
        (("H100", 8, "DDP", 1), "is not a dict. Give one like"),
        (check.PAR | {"gpus": ...}, "still contains `...`"),
    )


def test_the_puzzle_is_one():
    """Par is in time, with a margin for the clock; fewer or larger GPUs are late or cost more, and so does DDP."""
    par = check.bill(**check.PAR)
    assert par.hours < 0.97 * check.DEADLINE
    assert check.bill(**check.PAR | {"method": "DDP"}).hours > 1.02 * check.DEADLINE
    assert check.bill("RTX 4090", 4, "fully_shard", 4).hours > check.DEADLINE
    assert check.bill("H100", 2, "fully_shard", 8).euros > 1.2 * par.euros
    with pytest.raises(torch.OutOfMemoryError):
        check.bill("RTX 4090", 4, "DDP", 4)
    assert not dist.is_initialized()


# ---- why does it wait? -----------------------------------------------------------------------------------------------

CAUSES = {"A": "host", "B": "slower rank", "C": "other stage", "D": "link"}
CHANGES = {"A": {"micro_batches": 4}, "B": {"shares": (4096, 4096)}, "C": {"micro_batches": 8}, "D": {"average_on": 0}}
PARTS = {"host": "nothing", "slower rank": "collective", "other stage": "others", "link": "copying"}


def longest(job, **change):
    """Of the GPU that waits longest: its number and its time."""
    timelines = check.record_job(job, **change).values()
    every = [(gpu, time_use(each, gpu)) for each in timelines for gpu in each.gpus]
    return max(every, key=lambda each: each[1].waiting)


@pytest.mark.parametrize("job", CAUSES)
def test_one_cause_is_most_of_the_wait_and_one_argument_halves_it(job):
    (_, before), (_, after), (_, fused) = longest(job), longest(job, **CHANGES[job]), longest(job, fused=True)
    assert getattr(before, PARTS[CAUSES[job]]) > 0.8 * before.waiting > 0.3 * sum(before)
    assert after.waiting < before.waiting / 2 and sum(after) < 0.75 * sum(before)
    assert fused.waiting > 0.9 * before.waiting


@pytest.mark.parametrize("job", CAUSES)
def test_a_wrong_cause_is_refuted_by_the_timelines_own_figures(job):
    gpu, used = longest(job)
    for cause in set(PARTS) - {CAUSES[job]}:
        said = check.causes(CAUSES | {job: cause}).text
        words = f"does not compute for {1e3 * used.waiting:.1f} modelled ms, and "
        assert said.startswith(f"Not yet: {job}: {cause!r} is not the main cause. cuda:{gpu} {words}")
        assert f"in only {1e3 * getattr(used, PARTS[cause]):.1f} of them." in said
        assert ("A slow link would keep both ranks" in said) == ((job, cause) == ("B", "link"))


def test_a_change_that_does_not_help_is_measured():
    one_of = "Give a dict with one of these arguments: "
    explains(
        lambda change: check.changes(CHANGES | change),
        ({"A": {"micro_batches": 12}}, "no GPU of its process does anything most of the time"),
        ({"A": {"fused": True}}, "no GPU of its process does anything most of the time"),
        ({"B": {"shares": (2048, 6144)}}, "it is in a collective most of the time"),
        ({"B": {"shares": (1024, 1024)}}, "Job B cannot run with shares=(1024, 1024)"),
        ({"B": {"micro_batches": 2}}, f"{one_of}shares, fused"),
        ({"B": {"shares": 4096}}, "Job B cannot run with shares=4096"),
        ({"B": {"shares": (4096,)}}, "Job B cannot run with shares=(4096,)"),
        ({"B": {"shares": "4096"}}, "Job B cannot run with shares='4096'"),
        ({"A": {"micro_batches": 1024}}, "Job A cannot run with micro_batches=1024"),
        ({"C": {"micro_batches": 2}}, "another GPU of its process works most of the time"),
        ({"C": {"micro_batches": 64}}, "A step takes"),
        ({"C": {"micro_batches": 2.0}}, "Job C cannot run with micro_batches=2.0"),
        ({"D": {"micro_batches": 16}}, "a copy from or to it runs most of the time"),
        ({"D": {"average_on": False}}, "Job D cannot run with average_on=False"),
        ({"D": {"average_on": 0, "fused": True}}, f"{one_of}micro_batches, average_on, fused"),
        ({"D": "average_on"}, f"{one_of}micro_batches, average_on, fused"),
        ({"D": {3: 4}}, "Give a dict with one of these arguments"),
    )


def test_a_cause_for_each_job_is_asked_for():
    for answer in ({"A": "host"}, CAUSES | {"E": "host"}):
        assert told(check.causes(answer), "a cause for each of A, B, C, D")
    for answer in ("fate", 3):
        assert told(check.causes(CAUSES | {"A": answer}), "Choose one of slower rank, link, other stage, host")


def test_what_is_no_step_is_refused_and_a_job_is_recorded_once():
    for job, change, said in (
        ("A", {"shares": (1, 1)}, "Job A has no argument 'shares'. It has micro_batches, fused"),
        ("A", {"micro_batches": 0}, "cannot run with micro_batches=0. micro_batches=16 would be possible"),
        ("A", {"fused": 1}, "Job A cannot run with"),
        ("B", {"shares": (8192, 0)}, "Job B cannot run with"),
        ("D", {"average_on": 2}, "cannot run with average_on=2"),
    ):
        with pytest.raises(ValueError, match=said):
            check.record_job(job, **change)
    before = torch.cuda.device_count()
    assert check.record_job("C")["C"] is check.record_job("C", micro_batches=1)["C"]
    assert torch.cuda.device_count() == before
