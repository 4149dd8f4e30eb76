"""The modelled clock against a real H200. The goals stand in virtual-gpus/benchmarks/reference/timing.py. `python -m
benchmarks.clock` prints what these tests compare."""

import functools
import inspect
from collections import Counter

import pytest
from benchmarks import clock
from benchmarks.reference import timing
from benchmarks.reference.cases import CASES
from virtual_gpus.clock import cost
from virtual_gpus.dispatch.operators import ROWS

MEASURED = timing.measured_steps()
steps = functools.cache(lambda: timing.steps(CASES))
operators = functools.cache(timing.operators)


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_as_long_as_on_the_h200(name):
    measured, modelled = MEASURED[name], steps()[name]
    limits = {"kernels": timing.BUSY_EACH, "annotated": timing.BUSY_EACH, "wall": timing.wall_limit(measured)}
    for figure, limit in limits.items():
        assert abs(timing.error(measured[figure], modelled[figure])) < limit, figure


def test_the_median_error_of_the_busy_seconds():
    for figure in ("kernels", "annotated"):
        assert timing.median_error(MEASURED, steps(), figure) < timing.BUSY_MEDIAN


@pytest.mark.parametrize("name", ["unet_adam_b8", "gru_tagger_b64", "mobilenet_v3_64px_b64", "resnet50_bf16_64px_b64"])
def test_a_step_of_the_later_sets_keeps_the_gpu_busy_as_long_as_the_h200(name):
    """DenseNet's is compared by `python -m benchmarks.clock --leave-one-out`."""
    real, modelled, _ = clock.kernels_of(name)
    assert abs(timing.error(sum(real.values()), sum(modelled.values()))) < 0.15


def test_operators_that_only_move_their_bytes_are_near_the_kernels_of_the_h200():
    real, modelled = Counter(), Counter()
    for name in ("gpt_small_b8", "resnet50_64px_b32"):
        for total, seconds in zip((real, modelled), clock.kernels_of(name), strict=False):
            total.update(seconds)
    rows = [op for op, row in ROWS.items() if row.time is not cost.READS_AND_WRITES
            and inspect.getclosurevars(row.time.formula).nonlocals.get("nbytes") is cost.all_bytes]  # fmt: skip
    ratios = {name: modelled[name] / real[name] for name in rows if real[name]}
    assert len(ratios) >= 4 and all(0.75 < ratio < 1.25 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("op", sorted({entry["op"] for entry in timing.measure.load("ops.json")}))
def test_an_operator_or_copy_takes_the_h200s_time_at_each_size(op):
    rows = [row for name, *row in operators() if name == op]
    errors = {f"{op} of {size} {dtype}": timing.error(measured, modelled) for dtype, size, measured, modelled in rows}
    assert errors
    assert {case: error for case, error in errors.items() if abs(error) > timing.OPERATORS_EACH} == {}
