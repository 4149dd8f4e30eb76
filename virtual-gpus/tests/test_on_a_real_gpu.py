"""Virtual GPUs compared with a real one. Skipped, with the reason, on machines that have none."""

import functools
import gc

import pytest
import torch
from benchmarks.reference import compare, measure, real_gpu
from benchmarks.reference.cases import CASES
from benchmarks.reference.further import FURTHER
from benchmarks.reference.operators import OPERATORS
from test_errors import MIXTURES, run

pytestmark = pytest.mark.gpu
WITH_ONE_GPU = ("GPU and CPU", "in place into a number on the CPU", "matrix product", "net on the CPU",
                "batch on the CPU", "targets on the CPU", "concatenation", "convolution", "mask")  # fmt: skip


@pytest.fixture(autouse=True)
def real():
    gc.collect()  # what another test left behind must not be freed in the middle of this one
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", WITH_ONE_GPU)
def test_the_error_texts_are_the_real_ones(name):
    code, text = MIXTURES[name]
    with pytest.raises(RuntimeError) as error:
        run(code)
    assert str(error.value).startswith(text)


@pytest.mark.parametrize("name", {**CASES, **FURTHER})
def test_training_steps_take_the_memory_that_virtual_gpus_say(name):
    build = {**CASES, **FURTHER}[name]
    real = real_gpu.measure_cases({name: build})
    kind = real_gpu.kind_of(real["meta"])
    virtual = measure.on_virtual_gpu(lambda: measure.training_steps(build), torch.__version__, kind=kind)
    for step in compare.step_errors(real["cases"][name], virtual):
        assert all(abs(part) <= compare.GOAL[figure].largest for figure, part in step.items()), step


@functools.cache
def operators():
    """What they all need on the card, and on a virtual GPU of its kind."""
    kind = real_gpu.kind_of(real_gpu.description())
    real = measure.operators_in_order(OPERATORS)
    act = functools.partial(measure.operators_in_order, OPERATORS)
    return real, measure.on_virtual_gpu(act, torch.__version__, kind=kind)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_take_the_memory_that_virtual_gpus_say(name):
    if name in compare.KNOWN_DIFFERENCES:
        pytest.skip(compare.KNOWN_DIFFERENCES[name])
    real, virtual = operators()
    assert compare.worst(compare.operator_errors(real[name], virtual[name])) <= compare.OPERATOR_LIMIT
