"""The distribution on its own: the built wheel, in an environment that has PyTorch and nothing else of ours."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import virtual_gpus

ROOT = Path(__file__).resolve().parents[1]
UV = os.environ.get("UV") or shutil.which("uv")  # `uv run` names itself

PROGRAM = """\
import sys
import torch
from virtual_gpus import record_timeline

net = torch.nn.DataParallel(torch.nn.Linear(8, 4).cuda())
with record_timeline() as timeline:
    net(torch.ones(6, 8, device="cuda")).sum().backward()
print("trained", net.module.weight.grad.device, [torch.cuda.max_memory_allocated(i) > 0 for i in range(3)])
print("beside it:", sorted({"numpy", "matplotlib", "helpers"} & set(sys.modules)), timeline.seconds > 0)
timeline.plot()
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of what `uv build` makes; with the setuptools that is installed, so that nothing is fetched."""
    if UV is None:
        pytest.skip("uv is not on the PATH: run the tests with `python3 -m uv run pytest`")
    folder = tmp_path_factory.mktemp("built")
    left_out = shutil.ignore_patterns("*.egg-info", "build", "__pycache__")
    source = shutil.copytree(ROOT, folder / "source", ignore=left_out)
    command = [UV, "build", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (found,) = built.glob("*.whl")
    return found


def closure(name, found=None):
    """A distribution and all that it needs, by name."""
    found = {} if found is None else found
    if name not in found:
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # of another system
            return found
        for line in found[name].requires or ():
            if "extra ==" not in line:
                closure(re.match(r"[\w.-]+", line)[0].lower().replace("_", "-"), found)
    return found


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The Python of a new environment with PyTorch, its own needs, and the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    scheme = sysconfig.get_paths("venv", {"base": str(folder), "platbase": str(folder)})
    site = Path(scheme["purelib"])
    for distribution in closure("torch").values():
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                os.symlink(distribution.locate_file(top), site / top)
    zipfile.ZipFile(wheel).extractall(site)
    return Path(scheme["scripts"]) / ("python.exe" if os.name == "nt" else "python")


def test_the_wheel_holds_the_package_the_plugin_and_the_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"virtual_gpus/__init__.py", "virtual_gpus/py.typed", "pytest_virtual_gpus.py"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "helpers"))]


def test_the_source_distribution_leaves_the_programs_from_elsewhere_out(built):
    (found,) = built.glob("*.tar.gz")
    names = tarfile.open(found).getnames()
    assert any(name.endswith("src/virtual_gpus/__init__.py") for name in names)
    assert not [name for name in names if "benchmarks/outside" in name]


def test_a_program_runs_from_the_wheel_alone_and_names_a_missing_extra(python, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [python, "-m", "virtual_gpus", "--gpus", "3", "--memory", "1GiB", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.stdout.splitlines() == ["trained cuda:0 [True, True, True]", "beside it: [] True"], done.stderr
    assert "Drawing a timeline needs matplotlib: pip install 'virtual-gpus[plot]'." in done.stderr.splitlines()[-1]


def test_the_version_is_the_distribution_s_and_has_an_entry_in_the_changelog():
    assert virtual_gpus.__version__ == importlib.metadata.version("virtual-gpus")
    assert f"## {virtual_gpus.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
