"""The fixture and the marker, as a project that installs this package uses them."""

import os
import subprocess
import sys

import pytest

PROJECT = """\
import pytest
import torch


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
"""


@pytest.mark.skipif("__import__('torch').cuda.device_count() > 0", reason="expects a machine without real GPUs")
def test_a_project_that_uses_the_plugin(tmp_path):
    (tmp_path / "test_project.py").write_text(PROJECT)
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", "-p", "no:nbval"]
    alone = os.environ | {"PYTEST_ADDOPTS": ""}
    done = subprocess.run([*command, "."], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=alone)
    said = done.stdout + done.stderr
    assert "5 passed, 1 error" in said.replace("1 failed, ", "") and "1 failed" in said, said
    assert "as planned" in said and "no data sheet for a GPU of kind 'Voodoo'" in said
