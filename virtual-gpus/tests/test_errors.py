"""Mistakes raise what they raise on a real GPU, in its words; what CUDA refuses or can do unlike a CPU."""

import re
import warnings

import pytest
import torch
from measuring import rows_of_features, table
from torch import nn
from virtual_gpus import NotModelled, errors, virtual_gpus

WRONG = table("wrong_settings")["virtual_gpus"]
ROWS = torch.tensor([0, 1])
LONG, HALF = ({"dtype": kind, "device": 0} for kind in (torch.int64, torch.half))


@pytest.fixture(autouse=True)
def gpus():
    with virtual_gpus(2, memory="1 GiB"):
        yield
        torch.use_deterministic_algorithms(False)


def one(*sizes, **options):
    return torch.ones(*(sizes or (1,)), **options)


def random(*sizes):
    return torch.rand(*sizes, device="cuda", requires_grad=True)


def run(code, **tensors):
    return eval(code, globals() | {"F": nn.functional} | tensors)


MIXTURES = dict(rows_of_features("mixed"))


@pytest.mark.parametrize("name", MIXTURES)
def test_mixed_devices(name):
    code, text = MIXTURES[name]
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}") as raised:
        run(code)
    assert "virtual_gpus" not in str(raised.traceback[-1].path)  # it ends at the line that made it


@pytest.mark.parametrize("shapes_only", [False, True])
@pytest.mark.parametrize("devices", [(0, "cpu"), ("cpu", 0), (0, 1)])
def test_losses_and_norms_refuse_an_argument_that_is_elsewhere(devices, shapes_only):
    with virtual_gpus(2, shapes_only=shapes_only):
        for code in rows_of_features("two"):
            with pytest.raises(RuntimeError, match="same device"):
                run(code, x=one(4, 4, device=devices[0]), y=one(4, 4, device=devices[1]))


@pytest.mark.parametrize(("words", "code"), rows_of_features("refused"))
def test_what_cuda_refuses_and_the_cpu_computes(words, code):
    with pytest.raises(RuntimeError, match=f"^{re.escape(words)}"):
        run(code)


@pytest.mark.parametrize("shapes_only", [False, True])
@pytest.mark.parametrize(("words", "code"), rows_of_features("mixed_types"))
def test_types_that_differ_are_refused(words, code, shapes_only):
    with virtual_gpus(1, shapes_only=shapes_only), pytest.raises(RuntimeError, match=f"^{re.escape(words)}"):
        run(code)


@pytest.mark.parametrize("code", rows_of_features("same_words"))
def test_mistakes_are_told_in_the_same_words_without_values(code):
    told = []
    for shapes_only in (False, True):
        with virtual_gpus(1, shapes_only=shapes_only), pytest.raises((RuntimeError, IndexError, ValueError)) as raised:
            run(code)
        told.append((raised.type, str(raised.value), raised.value.__context__))  # which would hold tensors
    assert told[0] == told[1]


@pytest.mark.parametrize("code", rows_of_features("computed"))
def test_what_cuda_computes(code):
    assert run(code)


def test_operators_without_a_deterministic_algorithm_are_refused():
    torch.use_deterministic_algorithms(True)
    for name, code in rows_of_features("not_deterministic"):
        with pytest.raises(RuntimeError, match=f"^{name} does not have a deterministic implementation"):
            run(code)
    with warnings.catch_warnings(action="error"):
        for code in rows_of_features("deterministic"):
            run(code)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name, code in rows_of_features("not_deterministic"):
        with pytest.warns(UserWarning, match=f"^{name} does not have a deterministic implementation"):
            run(code)


@pytest.mark.skipif(not torch.version.cuda, reason="a build for CPUs has no kernels for CUDA")
def test_operators_that_check_each_argument_have_a_kernel_of_their_own():
    for name, entry in errors._yaml_entries().items():
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")
        assert errors.checks_each_argument(name) == (has_kernel and "device_check: NoCheck" not in entry), name


def test_numpy_of_a_gpu_tensor():
    x = torch.ones(2, device=1)
    text = "can't convert cuda:1 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
    for act in (x.numpy, x.__array__):
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            act()
    assert x.numpy(force=True).tolist() == [1, 1] and x.cpu().numpy().tolist() == [1, 1]
    for act in (lambda: x.apply_(lambda v: v), lambda: x.map_(x, lambda a, b: a)):
        with pytest.raises(TypeError, match="only implemented on CPU tensors"):
            act()


@pytest.mark.parametrize("code", rows_of_features("missing"))
def test_a_gpu_that_does_not_exist(code):
    with pytest.raises(torch.AcceleratorError, match="^CUDA error: invalid device ordinal\nGPU device may be out of"):
        run(code)


@pytest.mark.parametrize(("arguments", "text"), [*WRONG, ({"torch_version": (2, 11)}, "must be text from")])
def test_bad_arguments_say_what_to_do(arguments, text):
    with pytest.raises(TypeError if "both" in text else ValueError, match=text):
        virtual_gpus(**{"count": 2, **arguments})


@pytest.mark.parametrize(("name", "code"), rows_of_features("not_modelled"))
def test_what_is_not_modelled_names_itself(name, code):
    with pytest.raises(NotModelled, match=f"Virtual GPUs do not model .*({name})"):
        run(code, x=one(2, device=0))
