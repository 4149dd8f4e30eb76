"""The modelled clock against a real H200. The goals stand in virtual-gpus/benchmarks/reference/timing.py.

`python -m benchmarks.clock` prints what these tests compare.
"""

import functools

import pytest
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
