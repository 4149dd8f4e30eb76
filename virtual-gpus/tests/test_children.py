"""Programs that are started with `subprocess` inherit the GPUs where the parent asks for it, and have an nvidia-smi."""

import json
import os
import subprocess
import sys

import pytest
import torch
from ranks import HANGS_S
from virtual_gpus import active_machine, virtual_gpus
from virtual_gpus.__main__ import parse
from virtual_gpus.driver import nvidia_smi
from virtual_gpus.driver.nvidia_smi import GPUView

NAMES = ("VIRTUAL_GPUS_CHILDREN", "VIRTUAL_GPUS_PYTHON", "PYTHONPATH", "PATH")
GPUS = [GPUView(0, "NVIDIA A", "GPU-0", 3 << 20, (8, 0), [], 0.0),
        GPUView(1, "NVIDIA B", "GPU-1", 9 << 20, (9, 0), [(7, 2 << 20)], 0.5)]  # fmt: skip
pytest.importorskip("virtual_gpus.features.multiprocessing")
CHILD = """\
import gc, importlib.util, json, os, subprocess
assert importlib.util.find_spec("torch")  # as datasets and transformers ask before they import it
from virtual_gpus import NotModelled  # the package alone is no wish for other GPUs
import virtual_gpus.features.multiprocessing.started, torch  # as a spawned process unpickles it: it is switched on once
os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # before the first use, as programs do
x = torch.ones(1000, device="cuda")
found = {"count": torch.cuda.device_count(), "slot": torch.cuda.get_device_properties(0).pci_bus_id - 1}
found["processes"] = torch.cuda.list_gpu_processes().count("uses")
found["smi"] = subprocess.check_output(["nvidia-smi"], text=True).partition("Processes")[2]
found["collects"] = gc.isenabled() and len(gc.get_objects()) < gc.get_freeze_count()  # not through PyTorch's modules
print(json.dumps(found))
"""


def environment():
    return {name: os.environ.get(name) for name in NAMES}


def run(*command, **kwargs):
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_python_child_has_the_same_gpus():
    before = environment()
    with virtual_gpus(2, kind="A100", children=True):
        x = torch.ones(1000, device="cuda:1")
        found = json.loads(run(sys.executable, "-c", CHILD))
        assert x.is_cuda
    assert found["count"] == found["slot"] == 1 and found["processes"] == 2 and found["collects"]
    assert found["smi"].count("MiB  ") == 2 and str(os.getpid()) in found["smi"].split()
    assert environment() == before


def test_nobody_inherits_who_was_not_asked_for(monkeypatch):
    before = environment()
    with virtual_gpus(2):
        assert environment() == before
        with virtual_gpus(3, children=True):
            offered = os.environ["VIRTUAL_GPUS_CHILDREN"]
            with virtual_gpus(1, children=True):
                assert len(json.loads(os.environ["VIRTUAL_GPUS_CHILDREN"])["gpus"]) == 1
            assert os.environ["VIRTUAL_GPUS_CHILDREN"] == offered and len(json.loads(offered)["gpus"]) == 3
            os.environ["PATH"] += os.pathsep + "added"
        assert environment() == {**before, "PATH": before["PATH"] + os.pathsep + "added"}
    monkeypatch.setenv("PATH", before["PATH"])
    monkeypatch.setenv("VIRTUAL_GPUS_CHILDREN", "0")
    with virtual_gpus(2, children=True):
        assert os.environ["VIRTUAL_GPUS_CHILDREN"] == "0" and os.environ["PATH"] == before["PATH"]
    assert parse([__file__])[0].made._settings.children
    assert not parse(["--no-children", __file__])[0].made._settings.children


def test_children_without_torch_only_get_the_tools(tmp_path, monkeypatch):
    """Another `sitecustomize` runs as well."""
    (tmp_path / "sitecustomize.py").write_text("SEEN = True\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    ask = """
import sys, sitecustomize, virtual_gpus
assert virtual_gpus.gpus.parse_bytes("1 KiB") == 1024 and not hasattr(virtual_gpus, "nothing")
print(sitecustomize.SEEN, "torch" in sys.modules, sitecustomize.__file__)
"""
    with virtual_gpus(2, children=True):
        used = active_machine().slots[0].allocator.device
        assert torch.ones(10, device="cuda").is_cuda
        seen, has_torch, path = run(sys.executable, "-c", ask).split()
        assert (seen, has_torch, path) == ("True", "False", str(tmp_path / "sitecustomize.py"))
        csv = run("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
        assert [int(line) for line in csv.split()] == [used.used_bytes >> 20, 0]
        facts = json.loads(os.environ["VIRTUAL_GPUS_CHILDREN"])
        other = {**os.environ, "VIRTUAL_GPUS_CHILDREN": json.dumps({**facts, "prefix": "/another/python"})}
        assert run(sys.executable, "-c", ask, env=other).split()[:2] == ["True", "False"]


def smi(monkeypatch, capsys, *arguments, gpus=GPUS):
    monkeypatch.setattr(nvidia_smi, "from_environment", lambda: gpus)
    monkeypatch.setattr(sys, "argv", ["nvidia-smi", *arguments])
    nvidia_smi.main()
    return capsys.readouterr()


def test_nvidia_smi_answers_as_the_real_one_and_refuses_what_it_does_not_know(monkeypatch, capsys):
    table = smi(monkeypatch, capsys).out.splitlines()
    assert "virtual" in table[0] and any("NVIDIA B" in line and "2MiB / 9MiB" in line for line in table)
    assert len({len(line) for line in table[2:]}) == 1  # the frame is straight
    listed = smi(monkeypatch, capsys, "-L")
    assert listed.out.splitlines()[1] == "GPU 1: NVIDIA B (UUID: GPU-1)" and "virtual" in listed.err
    fields = "--query-gpu=index, memory.used,utilization.gpu,temperature.gpu"
    assert smi(monkeypatch, capsys, fields, "--format=csv").out.splitlines() == [
        "index, memory.used [MiB], utilization.gpu [%], temperature.gpu",
        "0, 0 MiB, 0 %, [N/A]",
        "1, 2 MiB, 50 %, [N/A]",
    ]
    fields = "--query-gpu=count,uuid,compute_cap"
    assert smi(monkeypatch, capsys, "-i", "1", fields, "--format=csv,noheader,nounits").out == "1, GPU-1, 9.0\n"
    for arguments, gpus, code in (
        (["--query-gpu=colour"], GPUS, 'Field "colour" is not a valid field to query.'),
        (["-i", "5"], GPUS, "No devices were found"),
        (["topo", "-m"], GPUS, 2),
        ([], None, 9),
    ):
        with pytest.raises(SystemExit) as error:
            smi(monkeypatch, capsys, *arguments, gpus=gpus)
        assert error.value.code == code
