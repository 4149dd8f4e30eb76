"""The checks of lesson 07."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from virtual_gpus import virtual_gpus

from helpers.measure import measure_memory
from notebooks.checks import lesson07 as check
from notebooks.checks import scores
from tests.check_answers import Answers, answers_test, changed, stored, told

changed_judge = stored("07_choosing_a_method", "judge_solution", fitted=check._amdahl)
judge = changed_judge()
SHARE = "share = (seconds[gpus] / seconds[1] - 1 / gpus) / (1 - 1 / gpus)"


def judge_by(share):
    """The right number of GPUs, with another share."""
    return changed_judge(SHARE, f"share = {share}")


KNOWN = {tuple(log.items()): judge(log) for log in check._LOGS}
JUDGE = Answers(
    check.judge,
    right=[
        # in another form: from the speed-up, as a list with a float
        judge_by("(gpus / (seconds[1] / seconds[gpus]) - 1) / (gpus - 1)\n    return [float(gpus), share]")
    ],
    wrong=[
        (changed_judge("return gpus, share", "return gpus"), "returned 8. Return two numbers, (gpus, share)"),
        (lambda seconds: (min(seconds, key=seconds.get), 0), "from 8 to 16 GPUs a step gets 0.58 times"),
        (changed_judge("1.5", "1.9"), "from 4 to 8 GPUs a step gets 1.86 times as fast"),
        (changed_judge(">=", ">"), "From 2 to 4 GPUs a step gets 1.50 times as fast, and"),
        (judge_by("fitted(seconds)"), "doubling does not pay in all of it"),
        (judge_by("seconds[gpus] / seconds[1]"), "A part of that time is parallel work"),
        (judge_by("seconds[gpus] / seconds[1] - 1 / gpus"), "The serial work is not divided"),
        (judge_by("seconds[1] / seconds[gpus] / gpus"), "is the efficiency"),
        (judge_by("0.3"), "the share of 0.3 is more than twice the right value"),
        (lambda seconds: (7, 0.3), "should be one of 1, 2, 4, 8, 16, 32, 64"),
        (changed_judge("gpus, share", "gpus, 100 * share"), "2 is in percent"),
        (changed_judge("gpus, share", "gpus, round(share, 3)"), "is rounded. Return all of its digits"),
        (judge_by("2 * seconds[2] / seconds[1] - 1"), "fits T(1) and T(2)"),
        (changed_judge("return", "seconds.clear()\n    return"), "changes the log that it gets"),
        (lambda seconds: KNOWN.get(tuple(seconds.items()), (2, 0.05)), "For 1: "),  # a table of the known logs
    ],
)


@pytest.fixture
def one_rank():
    with virtual_gpus(1, kind="H100", shapes_only=True, rank=0, world_size=1):
        dist.init_process_group("nccl")
        yield
        dist.destroy_process_group()


ddp_bytes = stored("07_choosing_a_method", "ddp_bytes_solution")()
FITS = Answers(
    check.fits,
    right=[lambda *job: int(ddp_bytes(*job))],
    wrong=[*check._WRONG_BYTES, (lambda p, k, t, s, n: 17.8 * 2**30, "is too large")],
)


@pytest.mark.parametrize(
    ("states", "temporaries", "make"),
    [(2, 1, torch.optim.AdamW), (1, 0, lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9))],
)
def test_the_budget_is_what_a_model_takes_that_fills_the_gpu(one_rank, states, temporaries, make):
    """Almost no activations: all is parameters, gradients, buckets, states and the optimizer's temporary tensors."""
    with torch.device("cuda"):
        net, x = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(9)]).bfloat16(), torch.zeros(1, 8192).bfloat16()
    ddp = DistributedDataParallel(net)
    optimizer, count = make(ddp.parameters()), sum(each.numel() for each in net.parameters())

    def step():
        optimizer.zero_grad()
        ddp(x).sum().backward()
        optimizer.step()

    step()
    with measure_memory() as readings:
        step()
    assert readings[0].peak_allocated == pytest.approx(ddp_bytes(count, states, temporaries, 0, 1), 0.02)


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


PLAN = Answers(
    check.plan,
    scored=[
        (check.PAR, "You reach par."),
        (check.PAR | {"fused": True}, "You beat par."),
        ({"kind": "A100-80GB", "gpus": 8, "method": "DDP", "sequences": 2},
         "A cheaper plan meets the deadline, too. Your best so far: 8.36 euros."),
    ],
    wrong=[
        (check.PAR | {"gpus": 4}, "1,000,000,000 tokens take 5.50 hours, and the deadline is 3.2 hours"),
        (check.PAR | {"gpus": 4, "sequences": 4}, "the RTX 4090 runs out of memory"),
        (check.PAR | {"sequences": 4}, "8 GPUs with 4 sequences each train on 32 at once, and a step has only 16"),
        (check.PAR | {"gpus": True}, "The plan says True for gpus. It can be 1, 2, 4, 8"),
        (check.PAR | {"kind": "4090"}, "The plan says '4090' for kind. It can be 'RTX 4090', 'A100-80GB', 'H100'"),
        (check.PAR | {"batch": 4}, "There is no choice 'batch'. The choices are kind, gpus, method"),
        ({"kind": "H100", "gpus": 8}, "The plan does not say method, sequences"),
        (("H100", 8, "DDP", 1), "is not a dict. Give one like {'kind': 'H100'"),
        (check.PAR | {"gpus": ...}, "still contains `...`"),
    ],
    fixtures="bills",
)  # fmt: skip


def test_a_process_group_that_is_open_is_no_place_for_a_plan(bills, one_rank):
    assert told(check.plan(check.PAR), "Run `dist.destroy_process_group()` first")


def test_the_puzzle_is_one():
    """Par is in time, with a margin for the clock; DDP is late, and does not fit fewer GPUs. Lesson 07 runs others."""
    par = check.bill(**check.PAR)
    assert par.hours < 0.97 * check.DEADLINE
    assert check.bill(**check.PAR | {"method": "DDP"}).hours > 1.02 * check.DEADLINE
    with pytest.raises(torch.OutOfMemoryError):
        check.bill("RTX 4090", 4, "DDP", 4)
    assert not dist.is_initialized()


RIGHT = {"A": "host", "B": "slower rank", "C": "other stage", "D": "link"}
CAUSES = Answers(
    check.causes,
    right=[RIGHT, {job: cause.title() for job, cause in RIGHT.items()}],
    wrong=[
        ({"A": "host"}, "a cause for each of A, B, C, D"),
        (RIGHT | {"A": "fate"}, "Choose one of slower rank, link, other stage, host"),
    ],
)
CHANGED = {"A": {"micro_batches": 4}, "B": {"shares": (4096, 4096)}, "C": {"micro_batches": 8}, "D": {"average_on": 0}}
ONE_OF = "Give a dict with one of these arguments: "
CHANGES = Answers(
    lambda answer: check.changes(changed(CHANGED, answer)),
    right=[CHANGED, {"B": {"shares": [4096, 4096]}, "C": {"micro_batches": 16}}],
    wrong=[
        ({"A": {"micro_batches": 12}}, "no GPU of its process does anything most of the time"),
        ({"B": {"shares": (2048, 6144)}}, "it is in a collective most of the time"),
        ({"B": {"shares": (1024, 1024)}}, "Job B cannot run with shares=(1024, 1024). shares=(6144, 2048) would be"),
        ({"B": {"shares": (8192, 0)}}, "Job B cannot run with shares=(8192, 0)"),
        ({"B": {"shares": 4096}}, "Job B cannot run with shares=4096"),
        ({"B": {"micro_batches": 2}}, f"{ONE_OF}shares, fused"),
        ({"A": {"micro_batches": 1024}}, "Job A cannot run with micro_batches=1024"),
        ({"A": {"micro_batches": 0}}, "Job A cannot run with micro_batches=0"),
        ({"A": {"fused": 1}}, "Job A cannot run with fused=1"),
        ({"C": {"micro_batches": 2}}, "another GPU of its process works most of the time"),
        ({"C": {"micro_batches": 64}}, "A step takes"),
        ({"C": {"micro_batches": 2.0}}, "Job C cannot run with micro_batches=2.0"),
        ({"D": {"micro_batches": 16}}, "a copy from or to it runs most of the time"),
        ({"D": {"average_on": False}}, "Job D cannot run with average_on=False"),
        ({"D": {"average_on": 0, "fused": True}}, f"{ONE_OF}micro_batches, average_on, fused"),
        ({"D": "average_on"}, f"{ONE_OF}micro_batches, average_on, fused"),
    ],
)
PARTS = {"host": "nothing", "slower rank": "collective", "other stage": "others", "link": "copying"}


@pytest.mark.parametrize("job", RIGHT)
def test_one_cause_is_most_of_the_wait_and_one_argument_halves_it(job):
    """What the timelines say: that fused Adam does not help, and what a wrong cause is refuted with."""
    steps = [{}, CHANGED[job], {"fused": True}]
    (gpu, before), (_, after), (_, fused) = [check._wait(check.record_job(job, **change)) for change in steps]
    assert getattr(before, PARTS[RIGHT[job]]) > 0.8 * before.waiting > 0.3 * sum(before)
    assert after.waiting < before.waiting / 2 and sum(after) < 0.75 * sum(before)
    assert fused.waiting > 0.9 * before.waiting
    for cause in set(PARTS) - {RIGHT[job]}:
        said = check.causes(RIGHT | {job: cause}).text
        words = f"does not compute for {before.waiting:.1f} modelled ms, and "
        assert said.startswith(f"Not yet: {job}: {cause!r} is not the main cause. cuda:{gpu} {words}")
        assert f"in only {getattr(before, PARTS[cause]):.1f} of them." in said
        assert ("A slow link would keep both ranks" in said) == ((job, cause) == ("B", "link"))


def test_a_job_is_recorded_once():
    with pytest.raises(ValueError, match="Job A has no argument 'shares'. It has micro_batches, fused"):
        check.record_job("A", shares=(1, 1))
    before = torch.cuda.device_count()
    assert check.record_job("C")["C"] is check.record_job("C", micro_batches=1)["C"]
    assert torch.cuda.device_count() == before


test_answers = answers_test({"judge": JUDGE, "causes": CAUSES, "changes": CHANGES, "fits": FITS, "plan": PLAN})
