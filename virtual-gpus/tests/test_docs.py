"""Pages of the package: the code of docs/a_small_virtual_gpu.md runs as printed, and files that are named exist."""

import re
from pathlib import Path

import pytest
import torch
from virtual_gpus import virtual_gpus

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "a_small_virtual_gpu.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def names():
    """What the first block of code defines."""
    before = torch.Tensor.device, torch.Tensor.to, torch.cuda._lazy_init
    found = {}
    exec(CODE[0], found)
    yield found
    assert (torch.Tensor.device, torch.Tensor.to, torch.cuda._lazy_init) == before


def test_the_example_trains_counts_and_refuses(names, capsys):
    exec(CODE[1], names)
    shape, refused = capsys.readouterr().out.splitlines()
    assert shape.startswith("torch.Size([500, 1000]) [4") and "found GPUs {" in refused


def test_gradients_are_the_cpu_s_and_memory_comes_back(names):
    layers = torch.nn.Linear(20, 10), torch.nn.Linear(10, 3)
    x = torch.randn(4, 20)
    torch.nn.Sequential(*layers)(x).square().mean().backward()
    wanted = [layer.weight.grad.clone() for layer in layers]
    with names["SmallGPUs"](count=2, memory=1 << 20) as gpus:
        copies = [torch.nn.Linear(layer.in_features, layer.out_features) for layer in layers]
        for number, (copy, layer) in enumerate(zip(copies, layers, strict=True)):
            copy.load_state_dict(layer.state_dict())
            copy.to(f"cuda:{number}")
        hidden = copies[0](x.to("cuda:0")).to("cuda:1")
        copies[1](hidden).square().mean().backward()
        assert [str(copy.weight.grad.device) for copy in copies] == ["cuda:0", "cuda:1"]
        with pytest.raises(torch.OutOfMemoryError, match="on GPU 1"):
            torch.empty(1 << 20, device="cuda:1")
        gradients = [copy.weight.grad for copy in copies]
    for gradient, same in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, same)
    assert min(gpus.peak) > 0
    del copies, copy, hidden, gradients, gradient
    assert gpus.allocated == [0, 0]


def test_the_page_keeps_its_promise_of_sixty_lines():
    assert 55 <= len([line for line in CODE[0].splitlines() if line.strip()]) <= 65


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "docs/a_small_virtual_gpu.md", "docs/accuracy.md"])
def test_every_file_that_a_page_names_is_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]*(?:\.py)?|[a-z_0-9]+\.py)`", text)) - {"train.py"}
    named |= {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    folders = ROOT, (ROOT / page).parent, ROOT / "src" / "virtual_gpus", ROOT / "src" / "virtual_gpus" / "ops"
    assert {name for name in named if not any((folder / name).exists() for folder in folders)} == set()
    assert len(named) > (1 if page == "docs/accuracy.md" else 2)


def test_the_example_of_several_ranks_passes():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "run_ranks" in code]
    names = {}
    exec(example, names)
    with virtual_gpus(4):
        tests = [value for name, value in names.items() if name.startswith("test_")]
        assert len(tests) == 2
        for test in tests:
            test()
