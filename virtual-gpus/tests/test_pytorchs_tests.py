"""PyTorch's test_cuda.py on virtual GPUs: nothing fails but what docs/pytorchs_tests.md names, with its reason."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

LIST = Path(__file__).resolve().parents[1] / "docs" / "pytorchs_tests.md"


@pytest.mark.outside
def test_what_fails_is_in_the_list(tmp_path):
    folder = os.environ.get("VIRTUAL_GPUS_PYTORCH_TESTS")
    if not folder:
        pytest.skip("VIRTUAL_GPUS_PYTORCH_TESTS names no folder with PyTorch's tests")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "virtual_gpus", "--gpus", "2", "--memory", "16GiB", "-m", "pytest", "-q", "-o",
               "addopts=", "-p", "no:cacheprovider", f"--junitxml={report}", "test_cuda.py"]  # fmt: skip
    subprocess.run(command, cwd=folder, check=False)
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None}
    assert len(cases) > 100
    assert failed <= set(re.findall(r"`(test_\w+)`", LIST.read_text(encoding="utf-8")))
