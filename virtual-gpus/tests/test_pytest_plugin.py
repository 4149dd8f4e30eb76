"""The fixture, the marker and tests that run as several ranks, as a project uses them that installs this package."""

import multiprocessing
import os
import re
import sys
from pathlib import Path

import pytest
from ranks import HANGS_S
from virtual_gpus.__main__ import main

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
CONFTEST = """\
import pytest

@pytest.fixture
def factor(request):
    return Factor(getattr(request, "param", 2))

class Factor:  # ranks that are not forked cannot import it
    def __init__(self, number):
        self.number = number
"""
PROJECT = """\
import os, time
import pytest, torch
import torch.distributed as dist

@pytest.fixture
def network():
    return torch.nn.DataParallel(torch.nn.Linear(4, 2).cuda())  # needs the GPUs before the test begins

def test_the_fixture_gives_two(virtual_gpus, pytestconfig):
    assert [str(device) for device in virtual_gpus] == ["cuda:0", "cuda:1"] and torch.cuda.device_count() == 2
    assert any(line.startswith("virtual_gpus(count=2, **settings): run") for line in pytestconfig.getini("markers"))

@pytest.mark.virtual_gpus(4, memory="1 GiB", kind="A100")
def test_the_marker_alone_is_enough(network):
    assert torch.cuda.device_count() == 4 and "A100" in torch.cuda.get_device_name(3)
    assert network(torch.ones(8, 4, device="cuda")).shape == (8, 2)
    assert torch.cuda.get_device_properties(0).total_memory == 1 << 30

@pytest.mark.virtual_gpus(count=3)
class TestOfOneClass:
    def test_the_class_is_marked(self, virtual_gpus):
        assert len(virtual_gpus) == 3 and torch.cuda.memory_allocated(2) == 0

    @pytest.mark.virtual_gpus
    def test_the_nearest_marker_counts(self):
        assert torch.cuda.device_count() == 2

@pytest.mark.virtual_gpus(shapes_only=True)
def test_a_failing_test_leaves_nothing_on():
    raise AssertionError("as planned")

def test_other_tests_have_none():
    assert not torch.cuda.is_available()

@pytest.mark.virtual_gpus(kind="Voodoo")
def test_a_bad_argument_is_told():
    pass

two = pytest.mark.virtual_gpus(2, ranks=2, timeout=60)

def total(number):
    x = torch.full((1,), float(number), device="cuda")
    dist.all_reduce(x)
    return x.item()

@pytest.mark.parametrize("factor", [1, 2], indirect=True)
@pytest.mark.virtual_gpus(2, ranks=2, memory="1 GiB")
def test_passes(factor, tmp_path):
    assert dist.get_backend() == "nccl" and os.environ["LOCAL_RANK"] == str(torch.cuda.current_device())
    assert total(factor.number) == 2 * factor.number and torch.cuda.get_device_properties(0).total_memory == 2**30
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2

@pytest.mark.virtual_gpus(1, ranks=1, start="spawn")
def test_fails_in_a_spawned_rank(factor):
    assert total(factor.number) == 3, "spawned"

@two
def test_rank_1_is_named():
    values = [3, 4]
    assert values[dist.get_rank()] == 3

@pytest.mark.virtual_gpus(2, ranks=2, timeout=0.1)
def test_hangs():
    time.sleep(600)

@two
def test_skips():
    if dist.get_rank():
        pytest.skip("no such library")
    dist.barrier()

@two
def test_xfails():
    pytest.xfail("known")

@pytest.fixture
def layer():
    return {"a layer": [torch.nn.Linear(2, 2).cuda()]}

@two
def test_gpu_tensor(layer):
    pass

@two
async def test_coroutine():
    pass
"""
SAID = """\
Rank 1 of 2 raised AssertionError: assert 4 == 3
>       assert values[dist.get_rank()] == 3
Rank 0 of 1 raised AssertionError: spawned
The 2 ranks were not done within the time limit of 0.1 s
The fixture 'layer' made a GPU tensor
must be a plain function, not a coroutine
no such library
as planned
no data sheet for a GPU of kind 'Voodoo'""".split("\n")


def run_pytest(folder, *options, run=pytest.main):
    """What pytest says of the project, in a fork: PyTorch is imported already."""

    def work():
        sys.stdout = sys.stderr = (folder / "said").open("w")
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stdout.fileno(), 2)
        os.chdir(folder)
        os.environ.update(PYTEST_ADDOPTS="", COLUMNS="200")
        plugins = ("cacheprovider", "nbval", "xdist")
        run(["-rs", "--strict-markers", *(f"-pno:{name}" for name in plugins), *options])

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(HANGS_S)
    assert process.exitcode == 0, process.exitcode
    return (folder / "said").read_text()


@pytest.mark.skipif("__import__('torch').cuda.device_count() > 0", reason="expects a machine without real GPUs")
def test_a_project_that_uses_the_plugin(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_project.py").write_text(PROJECT)
    example = re.findall(r"```python\n(.*?)```", README.split("## Testing several ranks")[1], re.DOTALL)
    (tmp_path / "test_readme.py").write_text("\n".join(example))
    said = run_pytest(tmp_path)
    assert "6 failed, 11 passed, 1 skipped, 1 xfailed, 1 error" in said, said
    assert [line for line in SAID if line not in said] == [], said
    skipped = run_pytest(tmp_path, "--real-gpus")
    run_pytest(tmp_path, "-Werror", "--version", run=lambda options: main(["-m", "pytest", *options]))
    assert "19 skipped" in skipped and "the test needs 3 GPUs, and this machine has 0" in skipped, skipped
