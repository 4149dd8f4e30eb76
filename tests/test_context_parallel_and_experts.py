"""context_parallel.py and experts.py: the same losses on any number of processes, and what they refuse."""

import re

import pytest
from virtual_gpus import virtual_gpus

from tests.programs import SCRIPTS, in_ranks, printed, set_rank

TINY = ["--steps", 3, "--batch-size", 4, "--learning-rate", 0.01]


@pytest.fixture
def alone(monkeypatch):
    """Run a program as the only process of a job, in this process; the numbers of its line."""

    def run(name, *arguments):
        set_rank(monkeypatch)
        return numbers(printed(name, *TINY, *arguments))

    return run


def divided(count, folder, name, *arguments):
    return numbers(in_ranks(count, folder, SCRIPTS / f"{name}.py", *TINY, *arguments)[0])


def numbers(output):
    return [float(word) for word in re.findall(r"[\d.]+", *re.findall("^step 3 .*", output, re.M))]


def test_divided_sequences_have_the_losses_of_whole_ones(alone, tmp_path):
    with virtual_gpus(4):
        expected = alone("context_parallel")
        for count, options in (2, ["--rotate", "alltoall"]), (4, []), (4, ["--context-parallel", 2]):
            assert divided(count, tmp_path, "context_parallel", *options) == pytest.approx(expected, rel=1e-4), options
        rounded = alone("context_parallel", "--bfloat16")
    assert len(expected) == 2 and rounded != expected and rounded == pytest.approx(expected, rel=0.01)


def test_divided_experts_have_the_losses_of_one_process(alone, tmp_path):
    expected = alone("experts")
    assert len(expected) == 4 and expected[-1] == 0
    for count in (2, 4):
        assert divided(count, tmp_path, "experts") == pytest.approx(expected, rel=1e-4)
    with virtual_gpus(2):
        assert divided(2, tmp_path, "experts") == pytest.approx(expected, rel=1e-4)
    few = alone("experts", "--top-k", 1, "--capacity", 0.5)
    assert few[-1] >= 50 and alone("experts", "--capacity", 8) == expected  # percent of tokens dropped, and none


@pytest.mark.parametrize(
    "name, count, options, words",
    [
        ("context_parallel", 2, ["--sequence", 200], "--sequence is 200. With 2 .* multiple of 128, for example 256"),
        ("context_parallel", 3, ["--sequence", 31, "--bfloat16"], "must be a multiple of 6, for example 36"),
        ("context_parallel", 3, ["--context-parallel", 2], "3 processes must form groups of --context-parallel 2"),
        ("context_parallel", 1, [], "To use virtual GPUs: torchrun .* -m virtual_gpus --gpus 1 "),
        ("experts", 3, [], "--experts 8 and --batch-size 4 must be multiples of 3"),
        ("experts", 1, ["--data", "/nowhere"], "/nowhere is not a file with more than 128 bytes"),
    ],
)
def test_what_does_not_fit_is_refused(name, count, options, words, monkeypatch):
    set_rank(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", str(count))
    with pytest.raises(SystemExit, match=words):
        printed(name, *TINY, *options)
