"""The checks of lesson 12: right and wrong answers of each exercise, its traces, and its programs."""

import copy
import re
from unittest import mock

import pytest
import torch
from virtual_gpus import virtual_gpus

from notebooks.checks import lesson12 as check
from tests.check_answers import STRANGE_RESULTS, Answers, answers_test, cells_of, stored
from tests.programs import SCRIPTS, in_ranks, printed, set_rank

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

LESSON = "12_slow_steps_and_strange_losses"
MS = stored(LESSON, "all_reduce_ms_solution")
WAY_BACK = stored(LESSON, "way_back_solution")
TRAIN = stored(LESSON, "train_solution", copy=copy)
IN_HOOKS = stored(LESSON, "train_in_hooks")
RIGHT = {"A": "slow rank", "B": "small kernels", "C": "slow link", "D": "copy", "E": "reads"}

pytestmark = pytest.mark.usefixtures("four")


TABLE = {
    "diseases": Answers(
        check.diseases,
        right=[RIGHT, {letter: f" {name.upper().replace(' ', '_')}" for letter, name in reversed(RIGHT.items())}],
        wrong=[
            ({**RIGHT, "A": "slow link"}, "In trace A, the all-reduces of rank 2 carry 22 GB/s"),
            ({**RIGHT, "B": "reads"}, "In trace B, nothing is copied to the host"),
            ({**RIGHT, "C": "one bucket"}, "In trace C, the first all-reduce begins while the backward pass goes on"),
            ({**RIGHT, "C": "slow rank"}, "all ranks compute equally long"),
            ({**RIGHT, "D": "small kernels"}, "hardly waits between kernels"),
            ({**RIGHT, "E": "small kernels"}, "look at their names"),
            ({**RIGHT, "E": "flu"}, "There is no disease 'flu'"),
            ({"A": "copy"}, "Name the diseases of A, B, C, D and E"),
        ],
    ),
    "all_reduce_ms": Answers(
        check.all_reduce_ms,
        right=[MS(), lambda nbytes, ranks, busbw: round(nbytes / busbw * (2 - 2 / ranks) / 1e6, 1)],
        wrong=[
            (MS("2 * (ranks - 1) / ranks * nbytes", "nbytes"), "send the bytes once"),
            (MS("2 * (ranks", "(ranks"), "to add the pieces"),
            (MS("(ranks - 1) / ranks * ", ""), "without the factor"),
            (MS("1e3 * sent", "8e3 * sent"), "gigabits"),
            (MS("1e9", "2**30"), "2**30 bytes"),
            (MS(" / ranks", ""), "the traffic of all ranks"),
        ],
    ),
    "way_back": Answers(
        check.way_back,
        right=[WAY_BACK()],
        wrong=[
            (WAY_BACK("(step - 5)", "step"), ("With a spike in step 41", "is less than 5 steps before")),
            (WAY_BACK("(step - 5)", "(step - 10)"), ("step 37", "is too early")),
            (WAY_BACK(" // every * every", ""), "there is no checkpoint of step"),
            (WAY_BACK("* every", "* every or None"), ("a spike in step 10", "sees no spike")),
            (WAY_BACK("> 3 *", ">= 3 *"), ("6.0 in step 30", "there is no spike by the rule")),
            (WAY_BACK("statistics.median(", "statistics.median_low("), "The first spike is in step 50"),
            (WAY_BACK("range(10", "range(9", "step - 10 :", "max(0, step - 10) :"), "With a high loss in step 9"),
            (WAY_BACK("range(10", "range(11"), ("a spike in step 10", "sees no spike")),
            (WAY_BACK("step - 10 :", "step - 9 :"), ("from step 20 on of 5.0", "sees no spike")),
            (WAY_BACK("step - 10 :", "max(0, step - 11) :"), ("from step 20 on of 2.0", "sees no spike")),
            (WAY_BACK("median", "mean"), ("losses of 100 up to step 3", "sees no spike")),
            (WAY_BACK("(step - 5) // every * every", "50"), "comes after the spike"),
            (lambda losses, every: losses.clear(), "changes the list"),
        ],
    ),
    "train": Answers(
        check.train,
        scored=[(TRAIN(), "You reach par in time"), (check._waiting, "over par"), (IN_HOOKS(), "You beat par in time")],
        wrong=[
            (TRAIN("DistributedDataParallel(net)", "net"), "from its own batches only"),
            (TRAIN("DistributedDataParallel(net)", "DistributedDataParallel(copy.deepcopy(net))"), "not a copy"),
            (TRAIN("loss.backward()", "(2 * loss).backward()"), "summed over the ranks"),
            (TRAIN("optimizer.zero_grad()", "pass"), "gradients reset"),
            (TRAIN("loss.detach()", "model(inputs).mean()"), "one loss for each batch, from before"),
            (TRAIN("torch.stack(losses)", "sum(losses)"), "Rank 0's losses are 1"),
            (TRAIN("loss.detach()", "(dist.all_reduce(loss, op=dist.ReduceOp.AVG), loss.detach())[1]"), "averages"),
            (mock.patch("torch.cuda.Stream.wait_stream", id)(TRAIN()), ("model(inputs)", "Let the second stream wait")),
            (mock.patch("torch.Tensor.record_stream", lambda *_: None)(TRAIN()), "Call tensor.record_stream"),
            (IN_HOOKS("work.wait()", "pass"), ("steps[parameter].step()", "Call wait() of the Work")),
        ],
        strange=STRANGE_RESULTS[-2:],
        ranks=[2],
    ),
}  # fmt: skip
test_answers = answers_test(TABLE)


@torch.no_grad()  # as a cell may have left it
def test_each_trace_has_its_disease_and_no_other():
    """By the lesson's own functions, as its solution reads them."""
    breakdown = cells_of(LESSON)[1]["breakdown"]
    found = {}
    for letter, ranks in check.five_traces().items():
        copies = [event for event in ranks[0] if event["cat"] == "gpu_memcpy"]
        sent = [event for event in ranks[2] if event["name"].startswith("ncclDevKernel_AllReduce")]
        again = [event for event in ranks[2] if event["ts"] >= sent[len(sent) // 2 - 1]["ts"]]  # the second step
        assert sent[0]["ts"] < max(event["ts"] for event in ranks[2] if event not in sent)  # not one bucket
        marks = {
            "slow rank": breakdown(ranks[2])["computing"] > 1.2 * breakdown(ranks[0])["computing"],
            "small kernels": breakdown(again, 1)["gaps"] > 5 and not copies,
            "slow link": sum(event["dur"] for event in sent) / 2 > 30_000,
            "copy": any(event["dur"] > 1000 for event in copies),
            "reads": sum(event["name"].startswith("Memcpy DtoH") for event in copies) > 100,
        }
        found[letter] = [name for name, has in marks.items() if has]
    assert found == {letter: [name] for letter, name in RIGHT.items()}


def test_all_reduce_measures_all_ranks_and_each_pair(tmp_path, monkeypatch):
    options = ["--least", 2**20, "--most", 2**26, "--repeats", 2, "--pairs"]
    with virtual_gpus(4, kind="H100", shapes_only=True, links=cells_of(LESSON)[1]["without_nvlink"](2, 4)):
        output = in_ranks(4, tmp_path, SCRIPTS / "all_reduce.py", *options)[0]
    pairs = {name: float(speed) for name, speed in re.findall(r"^pair (\d \d) ([\d.]+) GB/s$", output, re.M)}
    assert len(pairs) == 6 and {name for name, speed in pairs.items() if speed < 100} == {"0 2", "1 2", "2 3"}
    lines = re.findall(r"^all-reduce ranks=4 bytes=(\d+) ms=([\d.]+) algbw=([\d.]+) busbw=([\d.]+) GB/s$", output, re.M)
    assert [int(nbytes) for nbytes, *_ in lines] == [2**20, 2**22, 2**24, 2**26]
    nbytes, milliseconds, algorithm, bus = map(float, lines[-1])
    assert bus == pytest.approx(1.5 * algorithm, rel=0.01) == pytest.approx(1.5 * nbytes / milliseconds / 1e6, rel=0.01)
    with virtual_gpus(2):
        output = in_ranks(2, tmp_path, SCRIPTS / "all_reduce.py", "--most", 2**18)[0]
    assert output.count("all-reduce ranks=2") == 2 and "pair" not in output
    set_rank(monkeypatch)
    for options, words in (([], "Start two ranks"), (["--least", 2**30], "at most --most"), (["--repeats", 0], "1")):
        with pytest.raises(SystemExit, match=words):
            printed("all_reduce", *options)
