"""run_ranks and run_hosts as they work on other systems: ranks that are not forked, no libuv, no fcntl, other names."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_run_ranks import leaves_nothing  # noqa: F401  (a fixture for every test here too)
from virtual_gpus import active_machine, virtual_gpus
from virtual_gpus.patches import process_groups
from virtual_gpus.processes import shared_memory
from virtual_gpus.testing import RankError, network, run, run_ranks
from virtual_gpus.testing.hosts import TORCHRUN, run_hosts

# ---- ranks that are not forked ---------------------------------------------------------------------------------------


def job():
    """A function that tells what a rank sees. It travels by value, so that ranks need not import this module."""

    class Net(torch.nn.Module):  # cannot be imported either
        def forward(self, x):
            return 3 * x

    def seen(rank, module):
        total = Net()(torch.ones(10, device="cuda") + rank).sum()
        dist.all_reduce(total)
        torch.set_num_threads(7)
        print("said by", rank)
        free, capacity = torch.cuda.mem_get_info(rank)
        return {
            "process": os.getpid(),
            "total": total,
            "taken": capacity - free - torch.cuda.memory_reserved(rank),
            "kind": (torch.cuda.get_device_name(), capacity),
            "at import": __import__(module).number,
            "folder": os.getcwd(),
            "environment": {name: os.environ.get(name) for name in ("RANK", "SAID")},
            "net": Net(),
        }

    return seen


MODULE = "import torch\nnumber = torch.cuda.device_count()"


def test_a_spawned_rank_has_the_surroundings_of_its_parent(tmp_path, monkeypatch, capsys):
    """Its GPUs from the first import on, its folder, its modules and its variables."""
    (tmp_path / "changing.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAID", "now")
    with virtual_gpus(2, memory="1 GiB", kind="RTX 4090") as (gpu, _):
        mine = torch.zeros(2**28, dtype=torch.uint8, device=gpu)
        (answer,) = run_ranks(job(), ranks=1, args=["changing"], start="spawn")
        kind = torch.cuda.get_device_name(), 2**30
        # a context of each process, and the parent's tensor
        assert answer["taken"] == 2 * active_machine().gpus[0].allocator.device.context + mine.nbytes
    assert answer["process"] != os.getpid() and answer["kind"] == kind
    assert (answer["total"], answer["at import"]) == (torch.tensor(30.0), 2)
    assert (answer["folder"], answer["environment"]) == (str(tmp_path), {"RANK": "0", "SAID": "now"})
    assert type(answer["net"]).__name__ == "Net"
    assert capsys.readouterr().out == "1 rank on 1 virtual GPU, backend gloo in place of nccl\n[rank 0] said by 0\n"


def test_without_cloudpickle_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'virtual-gpus\[testing\]'"):
        run_ranks(print, ranks=1, start="spawn")


@pytest.mark.outside  # starts a server, which then lives as long as the tests
def test_ranks_of_a_fork_server(monkeypatch, tmp_path):
    """Each is a new process that shares its GPU with the parent. A launch with another variable spawns."""
    (tmp_path / "changing.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for _ in range(2):
        with virtual_gpus(2, memory="1 GiB"):
            found.append(run_ranks(job(), ranks=2, args=["changing"], start="forkserver", show=False))
    assert len({answer["process"] for answers in found for answer in answers}) == 4
    assert all(answer["taken"] == 2**30 // 8 for answers in found for answer in answers)
    monkeypatch.setenv("SAID", "now")
    with virtual_gpus(1):
        (answer,) = run_ranks(job(), ranks=1, args=["changing"], start="forkserver", show=False)
    assert answer["environment"]["SAID"] == "now"
    with pytest.raises(RankError, match=r"ZeroDivisionError(.|\n)*, in <lambda>\n"):
        run_ranks(lambda rank: rank / 0, ranks=1, start="spawn", show=False)


# ---- what other systems lack or name otherwise -----------------------------------------------------------------------


def remove_as_on_windows(path, remove=os.remove):
    """Windows does not remove a file that a process has open. The name of such a file ends with the process."""
    process = str(path).rpartition("-")[2]
    for file in Path("/proc", process, "fd").glob("*") if process.isdigit() else ():
        with suppress(FileNotFoundError):
            if os.readlink(file) == str(path):
                raise PermissionError(path)
    remove(path)


def memory_and_interface(rank):
    free, total = torch.cuda.mem_get_info(rank)
    return total - free, os.environ.get("GLOO_SOCKET_IFNAME")


@pytest.mark.usefixtures("no_libuv")
def test_virtual_gpus_without_libuv_fcntl_and_proc(monkeypatch, tmp_path):
    """Ranks see what their parent holds, and files of processes that have ended do not count."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(shared_memory, "fcntl", None)
    monkeypatch.setattr(os, "remove", remove_as_on_windows)
    monkeypatch.setattr(process_groups, "Path", lambda path: tmp_path / "missing")
    monkeypatch.setattr(run, "Path", lambda path: tmp_path / "missing" if "/proc" in str(path) else Path(path))
    with virtual_gpus(2, memory="1 GiB", shapes_only=True) as gpus:
        mine = [torch.zeros(2**28, dtype=torch.uint8, device=gpu) for gpu in gpus]
        for _ in range(2):  # the ranks of the first launch have ended
            found = run_ranks(memory_and_interface, ranks=2, show=False)
            assert found == [(2 * 2**30 // 8 + mine[0].nbytes, "lo")] * 2


@pytest.mark.usefixtures("no_libuv")
def test_torchrun_without_libuv(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    say = "import os; print('says', os.environ['RANK'], os.environ['GLOO_SOCKET_IFNAME'])"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", 1, "--no-python", sys.executable, "-c", say]
    assert "says 0 lo" in run_hosts({"A": command})["A"]


@pytest.mark.parametrize(
    ("system", "name"), [("linux", "lo"), ("darwin", "lo0"), ("win32", "Loopback Pseudo-Interface 1")]
)
def test_the_network_of_other_systems(system, name, monkeypatch):
    """The loopback interface has another name, and PyTorch for Windows is built without libuv."""
    monkeypatch.setattr(sys, "platform", system)
    for variable in ("GLOO_SOCKET_IFNAME", "USE_LIBUV"):
        monkeypatch.delenv(variable, raising=False)
    assert network.interface() == {"GLOO_SOCKET_IFNAME": name} and network.has_libuv() == (system != "win32")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    monkeypatch.setenv("USE_LIBUV", "1")
    assert network.interface() == {} and network.has_libuv()
