"""What a real GPU has and a virtual one does not raises by its name, and is in docs/refused.md."""

import ast
import re
from pathlib import Path

import pytest
import torch
import virtual_gpus as package
from measuring import every_overload
from virtual_gpus import NotModelled, virtual_gpus
from virtual_gpus.dispatch.operators import operator

SOURCE = Path(package.__file__).parent
REFUSALS = (SOURCE.parents[1] / "docs" / "refused.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["GreenContext", "CUDAPluggableAllocator", "CUDAGraph", "graph", "MemPool"])
@virtual_gpus(2)
def test_a_refused_class_names_itself_when_one_is_made(name):
    kind = getattr(torch.cuda, name, None) or getattr(torch.cuda.memory, name)
    for made in (kind, type("Own", (kind,), {})):
        with pytest.raises(NotModelled, match=f"torch.cuda.{name}"):
            made("an argument")
    assert torch.cuda.is_current_stream_capturing() is False  # optimizers ask


@virtual_gpus(2)
def test_streams_by_handle_and_the_plans_of_cufft():
    for refused in (torch.cuda.ExternalStream, torch.cuda.get_stream_from_external):
        with pytest.raises(NotModelled, match=refused.__name__):
            refused(torch.cuda.Stream().cuda_stream)
    plans = torch.backends.cuda.cufft_plan_cache
    for use in (lambda: plans.size, lambda: plans[1], lambda: setattr(plans, "max_size", 3), lambda: plans.clear()):
        with pytest.raises(NotModelled, match=r"torch\.backends\.cuda\.cufft_plan_cache"):
            use()


def of(op, device):
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.func.name(), device)


@pytest.mark.skipif(not torch.version.cuda, reason="a build for CPUs has no kernels for CUDA")
def test_what_has_a_kernel_for_the_cpu_alone_is_refused():
    """Unless it makes a tensor on any device, C++ chooses it for tensors on the CPU, or PyTorch's tests use it."""
    apart = re.compile("flash_attention_for_cpu|mkldnn_rnn|slow_conv3d|_test_|_foobar")
    lacking = [op for op in map(operator, every_overload()) if of(op, "CPU") and not of(op, "CUDA")]
    found = [op for op in lacking if op.kind != "factory" and not apart.search(op.name)]
    assert len(found) > 20 and [op.name for op in found if op.row.check is None] == []


def test_every_refusal_is_in_the_list():
    """Every text in a call of `not_modelled`, up to its explanation in parentheses."""
    words, listed = [], REFUSALS.replace("`", "")
    for file in SOURCE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "not_modelled(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("not_modelled") and node.args:
                parts = node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else node.args
                words += [part.value for part in parts if isinstance(part, ast.Constant)]
    assert len(words) > 15  # most refusals are rows of `refused`
    assert {word for word in words if word.partition(" (")[0].strip(' ,"().') not in listed} == set()
