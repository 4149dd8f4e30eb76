"""The modelled clock against a real H200. The goals stand in virtual-gpus/benchmarks/reference/timing.py.

`python -m benchmarks.clock` prints what these tests compare.
"""

import functools

import pytest
from benchmarks import clock
from benchmarks.reference import timing
from benchmarks.reference.cases import CASES

MEASURED = timing.measured_steps()


@functools.cache
def steps() -> dict:
    return timing.steps(CASES)


@functools.cache
def operators() -> list:
    return timing.operators()


@pytest.mark.parametrize("name", CASES)
def test_the_gpu_is_busy_as_long_as_the_h200(name):
    for figure in ("kernels", "annotated"):
        assert abs(timing.error(MEASURED[name][figure], steps()[name][figure])) < timing.BUSY_EACH, figure


def test_the_median_error_of_the_busy_seconds():
    for figure in ("kernels", "annotated"):
        assert timing.median_error(MEASURED, steps(), figure) < timing.BUSY_MEDIAN


@pytest.mark.parametrize("name", CASES)
def test_the_wall_time_of_a_step(name):
    limit = timing.wall_limit(MEASURED[name])
    assert abs(timing.error(MEASURED[name]["wall"], steps()[name]["wall"])) < limit


@pytest.mark.parametrize("name", ["unet_adam_b8", "gru_tagger_b64", "mobilenet_v3_64px_b64"])
def test_a_step_of_the_second_set_keeps_the_gpu_busy_as_long_as_the_h200(name):
    """DenseNet's is compared by `python -m benchmarks.clock --leave-one-out`."""
    real, modelled, _ = clock.kernels_of(name)
    assert abs(timing.error(sum(real.values()), sum(modelled.values()))) < 0.15


def test_leaving_out_replaces_a_classs_rate_by_that_of_the_others(monkeypatch):
    cases = {
        "a": ({"mm": 2.0, "add": 1.0}, {"mm": 1.0, "add": 1.0}, {}),
        "b": ({"mm": 3.0, "add": 1.0}, {"mm": 1.0, "add": 1.0}, {}),
    }
    monkeypatch.setattr(timing, "BUILDS", dict.fromkeys(cases))
    monkeypatch.setattr(clock, "kernels_of", cases.get)
    assert [row[3] for row in clock.leave_one_out()] == pytest.approx([4 / 3 - 1, 3 / 4 - 1])


def test_the_profilers_sum_counts_the_optimizer_twice():
    """Why `annotated` is another figure: the two runs differ by the optimizer's range, and not at all without one."""
    surplus = {name: case["annotated"] / case["kernels"] for name, case in MEASURED.items()}
    assert abs(surplus["lstm_words_b32"] - 1) < 0.02  # plain SGD of 11 tensors: 27 microseconds
    assert min(value for name, value in surplus.items() if name != "lstm_words_b32") > 1.1


@pytest.mark.parametrize("op", sorted({entry["op"] for entry in timing.measure.load("ops.json")}))
def test_an_operator_or_copy_takes_the_h200s_time_at_each_size(op):
    errors = {
        f"{op} of {size} {dtype}": timing.error(measured, modelled)
        for name, dtype, size, measured, modelled in operators()
        if name == op
    }
    assert errors
    assert {case: error for case, error in errors.items() if abs(error) > timing.OPERATORS_EACH} == {}


@pytest.mark.parametrize("name", ["mlp_adamw_b256", "resnet18_cifar_b64"])
def test_shapes_only_gives_the_same_times(name):
    with_numbers = timing.steps([name], shapes_only=False)[name]
    assert with_numbers == pytest.approx(steps()[name], rel=1e-9)
