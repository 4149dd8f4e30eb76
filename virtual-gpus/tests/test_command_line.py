"""`python -m virtual_gpus`: unmodified programs, under plain Python and under torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forks import command
from measuring import table
from virtual_gpus.__main__ import parse
from virtual_gpus.testing.child import interface

ROOT = str(Path(__file__).resolve().parents[1] / "src")

# What programs do on GPUs, written as if there were no virtual ones.
SCRIPT = """\
import atexit, gc, json, os, sys, threading
import torch
import beside

first = torch.cuda.is_available(), torch.cuda.device_count()
os.environ["CUDA_VISIBLE_DEVICES"] = "2,0"  # before the first touch, as programs do

def main():
    x = torch.ones(100).to("cuda:1")
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    json.dump({
        "argv": sys.argv, "path": sys.path[0], "file": __file__, "main": sys.modules["__main__"].main is main,
        "beside": beside.WHERE, "first": first, "cards": [card.pci_bus_id - 1 for card in cards], "kind": cards[0].name,
        "memory": cards[0].total_memory, "collects": gc.isenabled() and len(gc.get_objects()) < gc.get_freeze_count(),
    }, open("facts.json", "w"))
    threading.Thread(target=later, args=(x,)).start()
    atexit.register(lambda: print("at exit", torch.cuda.max_memory_allocated(1) > 0))
    sys.exit(7)

def later(x):
    threading.main_thread().join()
    print("later", (x + 1).device)

if __name__ == "__main__":
    main()
"""

PACKAGE = """\
import sys
import torch, torch.multiprocessing as mp

assert torch.cuda.is_available() and torch.cuda.device_count() == 2  # at the import, in every process

class Net(torch.nn.Linear):
    pass

def rank_main(rank, net):
    print("in a rank", net.to(rank + 1)(torch.ones(4, device=rank + 1)).device, flush=True)

if __name__ == "__main__":
    mp.spawn(rank_main, args=(Net(4, 1),), nprocs=1)
    raise ValueError(" ".join(sys.argv[1:]))
"""


def test_an_unmodified_script(tmp_path):
    program = tmp_path / "programs" / "train.py"
    program.parent.mkdir()
    program.write_text(SCRIPT)
    (program.parent / "beside.py").write_text("WHERE = __file__")
    options = "-m virtual_gpus --gpus 3 --memory 1GiB --kind A100 programs/train.py --gpus 9 -m --".split()
    process = [sys.executable, *options, "x y"]
    # With this variable PyTorch's own sanitizer is on, which without a driver raises an error at every operator.
    environment = os.environ | {"PYTHONPATH": ROOT, "TORCH_CUDA_SANITIZER": "1"}
    done = subprocess.run(process, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines() == ["later cuda:1", "at exit True"]
    assert json.loads((tmp_path / "facts.json").read_text()) == {
        "argv": ["programs/train.py", "--gpus", "9", "-m", "--", "x y"], "path": str(program.parent),
        "file": str(program), "main": True, "beside": str(program.parent / "beside.py"), "first": [True, 3],
        "cards": [2, 0], "kind": "NVIDIA A100-SXM4-40GB", "memory": 1 << 30, "collects": True,
    }  # fmt: skip


def test_an_unmodified_package_that_spawns(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "trainer.py").write_text(PACKAGE)
    done = command("--gpus 2 -m package.trainer --epochs 1".split(), tmp_path, PYTHONPATH=ROOT)
    assert done.returncode == 1
    first, *_, last = done.stderr.splitlines()
    assert first == "Traceback (most recent call last):" and last == "ValueError: --epochs 1"
    assert "runpy" not in done.stderr and "virtual_gpus" not in done.stderr and 'trainer.py", line' in done.stderr
    assert done.stdout == "in a rank cuda:1\n"


ALL_HERE, ASKED = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, {"GLOO_SOCKET_IFNAME": "eth9"}
RANKS = [(ALL_HERE, interface()), (ALL_HERE | {"WORLD_SIZE": "4"}, {}), (ALL_HERE | ASKED, ASKED), ({}, {})]


@pytest.mark.parametrize(("set_already", "found"), RANKS)
def test_gloo_stays_on_this_machine_if_all_ranks_are_here(set_already, found, tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    (tmp_path / "say.py").write_text("import os; print(os.environ.get('GLOO_SOCKET_IFNAME'))")
    assert command(["say.py"], tmp_path, **set_already).stdout == f"{found.get('GLOO_SOCKET_IFNAME')}\n"


def test_bad_arguments(capsys):
    for arguments, words in table("wrong_settings")["command_line"].items():
        with pytest.raises(SystemExit) as error:
            parse([__file__ if word == "FILE" else word for word in arguments.split()])
        said = capsys.readouterr().err
        assert error.value.code == 2 and said.startswith("usage: python -m virtual_gpus") and words in said, arguments


def test_measure_itself_says_what_it_takes():
    done = subprocess.run([sys.executable, "-m", "virtual_gpus.measure", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "usage: python -m virtual_gpus.measure [-h] file" in done.stdout, done.stderr
