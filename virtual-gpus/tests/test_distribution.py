"""The distribution on its own: the built wheel, without the repository beside it and without the extras."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import virtual_gpus

ROOT = Path(__file__).resolve().parents[1]
UV = os.environ.get("UV") or shutil.which("uv")  # `uv run` names itself

START = """\
import sys
sys.modules.update(dict.fromkeys(("numpy", "matplotlib", "GPUtil")))  # importing one fails, as if it was not installed
import torch
before = set(sys.modules)
from virtual_gpus.__main__ import main
main(sys.argv[1:])
beside = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print("beside it:", sorted(beside - {"torch", "virtual_gpus", "__mp_main__"}), sys.modules["virtual_gpus"].__file__)
sys.modules["__main__"].timeline.plot()
"""
PROGRAM = """\
import torch
from virtual_gpus import record_timeline

net = torch.nn.DataParallel(torch.nn.Linear(8, 4).cuda())
with record_timeline() as timeline:
    net(torch.ones(6, 8, device="cuda")).sum().backward()
print("trained", net.module.weight.grad.device, [torch.cuda.max_memory_allocated(i) > 0 for i in range(3)])
"""


def test_a_program_runs_from_the_wheel_alone_and_names_a_missing_extra(tmp_path):
    """The wheel is made with the setuptools that is installed, so that nothing is fetched."""
    if UV is None:
        pytest.skip("uv is not on the PATH: run the tests with `python3 -m uv run pytest`")
    left_out = shutil.ignore_patterns("*.egg-info", "build", "__pycache__")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=left_out)
    command = [UV, "build", "--no-build-isolation", "--python", sys.executable, "--out-dir", tmp_path, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    names, sources = zipfile.ZipFile(wheel).namelist(), tarfile.open(source).getnames()
    assert {"virtual_gpus/__init__.py", "virtual_gpus/py.typed", "pytest_virtual_gpus.py"} <= set(names)
    files = [path for end in (".toml", "limits.md") for path in ROOT.rglob(f"src/virtual_gpus/**/*{end}")]
    data = {path.relative_to(ROOT / "src").as_posix() for path in files}
    assert len(data) > 35 and data <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "helpers"))]
    assert any(name.endswith("src/virtual_gpus/__init__.py") for name in sources)
    assert not [name for name in sources if "benchmarks/outside" in name]
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-c", START, "--gpus", "3", "--memory", "1GiB", "train.py"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    place = tmp_path / "site" / "virtual_gpus" / "__init__.py"
    assert done.stdout.splitlines() == ["trained cuda:0 [True, True, True]", f"beside it: [] {place}"], done.stderr
    assert "Drawing a timeline needs matplotlib: pip install 'virtual-gpus[plot]'." in done.stderr.splitlines()[-1]


def test_the_version_is_the_distribution_s_and_has_an_entry_in_the_changelog():
    assert virtual_gpus.__version__ == importlib.metadata.version("virtual-gpus")
    assert f"## {virtual_gpus.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
