"""launch as it works on other systems: spawned ranks that are used again, no libuv, no fcntl, other names."""

import asyncio
import importlib
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from test_launch import children, is_alive
from test_launch_notebook import execute
from virtual_gpus import virtual_gpus
from virtual_gpus.patches import process_groups
from virtual_gpus.processes import shared_memory

from helpers.parallel import network
from helpers.parallel.hosts import TORCHRUN, run_hosts
from helpers.parallel.launching import RankError, launch, processes
from helpers.parallel.launching.processes import end_free
from helpers.parallel.launching.reuse import Fresh
from tests.programs import until


@pytest.fixture
def none_is_left():
    before = set(children())
    yield
    end_free()
    assert set(children()) <= before


# ---- spawned ranks are used again ------------------------------------------------------------------------------------


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
            "module": __import__(module).number,
            "folder": os.getcwd(),
            "environment": {name: os.environ.get(name) for name in ("RANK", "SAID")},
            "net": Net(),
        }

    return seen


@pytest.mark.usefixtures("none_is_left")
def test_a_spawned_rank_is_used_again_with_what_is_new(tmp_path, monkeypatch, capsys):
    """Two launches with other GPUs, folders and modules; then an error, after which the process is gone."""
    answers = []
    for number, memory in enumerate(("1 GiB", "2 GiB")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "changing.py").write_text(f"number = {number}")
        monkeypatch.syspath_prepend(folder)
        monkeypatch.chdir(folder)
        with virtual_gpus(1, memory=memory) as (gpu,):
            mine = torch.zeros(2**28, dtype=torch.uint8, device=gpu)
            (answer,) = launch(job(), "changing", ranks=1, start="spawn", timeout=60)
        answers.append(answer)
        context = (number + 1) * 2**30 // 8  # of each process; the parent's tensor is on the GPU as well
        assert answer["taken"] == 2 * context + mine.nbytes
        assert (answer["total"], answer["module"]) == (torch.tensor(30.0), number)
        assert (answer["folder"], answer["environment"]) == (str(folder), {"RANK": "0", "SAID": None})
        assert type(answer["net"]).__name__ == "Net"
        assert capsys.readouterr().out.splitlines()[1:] == ["[rank 0] said by 0"]
    process = answers[0]["process"]
    assert process == answers[1]["process"] != os.getpid()
    with pytest.raises(RankError, match="ZeroDivisionError"):
        launch(lambda rank: rank / 0, ranks=1, start="spawn", show=False)
    assert not processes._free and not psutil.pid_exists(process)


def test_a_process_does_not_serve_a_launch_with_other_variables(monkeypatch):
    ended = []
    process = SimpleNamespace(is_alive=lambda: True)
    waiting = SimpleNamespace(process=process, environment=processes._environment(), end=lambda: ended.append(1))
    monkeypatch.setattr(processes, "_free", [waiting, waiting])
    monkeypatch.setenv("VIRTUAL_GPUS_FOLDER", "another")  # read when GPUs are switched on
    assert processes._take() is waiting and not ended
    monkeypatch.setenv("SAID", "now")
    assert processes._take() is None and ended == [1]


def set_default_dtype():
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def replace_a_function():
    before = dist.all_reduce
    dist.all_reduce = lambda *args, **named: before(*args, **named)
    return lambda: setattr(dist, "all_reduce", before)


def leave_a_thread():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    return lambda: (done.set(), thread.join())


def keep_records():
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    return lambda: os.environ.pop("TORCH_FR_BUFFER_SIZE")


def leave_gpus():
    gpus = virtual_gpus(1)
    gpus.start()
    return gpus.stop


@pytest.mark.parametrize("change", [set_default_dtype, replace_a_function, leave_a_thread, keep_records, leave_gpus])
def test_a_process_whose_function_changed_pytorch_is_not_used_again(change):
    fresh = Fresh()
    undo = change()
    try:
        assert not fresh.restore()
    finally:
        undo()
    assert fresh.restore()


def test_modules_of_the_user_are_imported_anew(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "edited.py").write_text("")
    fresh = Fresh()
    importlib.import_module("edited")
    assert fresh.restore() and "edited" not in sys.modules


CELLS = {
    "first": """
        import os, sys, time
        import psutil, torch
        from pathlib import Path
        from helpers import use_gpus
        from helpers.parallel.launching import launch
        gpus = use_gpus(2, memory="1 GiB")
        factor = 3
        def work(rank):
            x = factor * torch.ones(1, device="cuda")
            torch.distributed.all_reduce(x)
            return os.getpid(), x.item()
        print(launch(work, ranks=2, start="spawn", show=False))""",
    "second": """
        begin = time.perf_counter()
        factor = 4
        print([launch(work, ranks=2, start="spawn", show=False), time.perf_counter() - begin])""",
    "interrupted": """
        def long(rank):
            Path(os.environ["BEGUN"], str(rank)).touch()
            time.sleep(600)
        launch(long, ranks=2, start="spawn", timeout=None)""",
    "left": "print([process.pid for process in psutil.Process().children(recursive=True)])",
}


@pytest.mark.outside  # 16 s of CPU: four processes import PyTorch
def test_spawned_ranks_of_a_notebook(tmp_path):
    """They serve the next launch. The button ends them, and new ones are prepared. The kernel leaves none."""
    client, cells = execute(CELLS, tmp_path, timeout=300)
    said = {name: cell.outputs[-1] for name, cell in cells.items()}
    first = eval(said["first"].text.splitlines()[-1])
    second, seconds = eval(said["second"].text)
    assert [answer for _, answer in first + second] == [6.0, 6.0, 8.0, 8.0]
    assert dict(first).keys() == dict(second).keys() and seconds < 5
    assert said["interrupted"].ename == "KeyboardInterrupt"
    left = set(eval(said["left"].text))
    assert len(left - dict(first).keys()) >= 2 and not left & dict(first).keys()
    asyncio.run(client.km.shutdown_kernel(now=True))
    until(lambda: not any(is_alive(psutil.Process(pid)) for pid in left if psutil.pid_exists(pid)), seconds=30)


# ---- forked from a server --------------------------------------------------------------------------------------------


@pytest.mark.outside  # starts a server, which then lives as long as the tests
@pytest.mark.usefixtures("none_is_left")
def test_ranks_of_a_fork_server(monkeypatch, tmp_path):
    """Each is a new process that shares its GPU with the parent. A launch with another variable spawns."""
    (tmp_path / "changing.py").write_text("number = 0")
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for _ in range(2):
        with virtual_gpus(2, memory="1 GiB"):
            found.append(launch(job(), "changing", ranks=2, start="forkserver", show=False))
    assert len({answer["process"] for answers in found for answer in answers}) == 4
    assert all(answer["taken"] == 2**30 // 8 for answers in found for answer in answers)
    monkeypatch.setenv("SAID", "now")
    with virtual_gpus(1):
        (answer,) = launch(job(), "changing", ranks=1, start="forkserver", show=False)
    assert answer["environment"]["SAID"] == "now"


# ---- what other systems lack or name otherwise -----------------------------------------------------------------------


class StoreOfWindows(dist.TCPStore):
    """A store as in PyTorch for Windows, which is built without libuv."""

    def __init__(self, *args, use_libuv=True, **named):
        if use_libuv:
            raise RuntimeError("use_libuv was requested but PyTorch was built without libuv support")
        super().__init__(*args, use_libuv=False, **named)


@pytest.fixture
def no_libuv(monkeypatch):
    monkeypatch.setenv("USE_LIBUV", "0")
    for module in ("torch.distributed", "torch.distributed.rendezvous",
                   "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
                   "torch.distributed.elastic.rendezvous.static_tcp_rendezvous"):  # fmt: skip
        monkeypatch.setattr(importlib.import_module(module), "TCPStore", StoreOfWindows)


def summed(rank):
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return total.item(), os.environ.get("GLOO_SOCKET_IFNAME")


@pytest.mark.usefixtures("no_libuv")
def test_ranks_meet_without_libuv():
    assert launch(summed, ranks=2, show=False, gpus=False) == [(3.0, "lo")] * 2


@pytest.mark.usefixtures("no_libuv")
def test_torchrun_without_libuv():
    say = "import os; print('says', os.environ['RANK'], os.environ['GLOO_SOCKET_IFNAME'])"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", 1, "--no-python", sys.executable, "-c", say]
    assert "says 0 lo" in run_hosts({"A": command})["A"]


REFUSING_LIBUV = """
import importlib, sys
import torch.distributed as dist

class Store(dist.TCPStore):
    def __init__(self, *args, use_libuv=True, **named):
        if use_libuv:
            raise RuntimeError("use_libuv was requested but PyTorch was built without libuv support")
        super().__init__(*args, use_libuv=False, **named)

for module in ("rendezvous", "elastic.rendezvous.c10d_rendezvous_backend"):
    importlib.import_module(f"torch.distributed.{module}").TCPStore = Store
dist.TCPStore = Store
"""


@pytest.mark.outside  # torchrun and two ranks import PyTorch
def test_the_users_own_torchrun_without_libuv(tmp_path):
    """With the options that lesson 04 gives, and not with those for other systems."""
    program = tmp_path / "program.py"
    program.write_text(
        REFUSING_LIBUV + "import torch\ndist.init_process_group('gloo')\n"
        "total = torch.ones(1)\ndist.all_reduce(total)\nprint(f'sum {total.item()}\\n', end='')"
    )
    torchrun = [sys.executable, "-c", REFUSING_LIBUV + "from torch.distributed.run import main; main(sys.argv[1:])"]
    environment = os.environ | {"USE_LIBUV": "0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    lesson = Path(__file__, "../../notebooks/04_distributed_data_parallel.ipynb").resolve().read_text(encoding="utf-8")
    meeting = "--rdzv-backend c10d --rdzv-conf store_type=file --rdzv-endpoint meeting-1"
    assert meeting in lesson
    ended = {}
    for options in (meeting, "--standalone"):
        command = [*torchrun, "--nproc-per-node", "2", *options.split(), program]
        ended[options] = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended[meeting].stdout.count("sum 2.0") == 2 and (tmp_path / "meeting-1").exists()
    assert ended["--standalone"].returncode != 0 and "use_libuv was requested" in ended["--standalone"].stderr


def remove_as_on_windows(path, remove=os.remove):
    """Windows does not remove a file that a process has open. The name of such a file ends with the process."""
    process = str(path).rpartition("-")[2]
    for file in Path("/proc", process, "fd").glob("*") if process.isdigit() else ():
        with suppress(FileNotFoundError):
            if os.readlink(file) == str(path):
                raise PermissionError(path)
    remove(path)


@pytest.mark.usefixtures("no_libuv")
def test_virtual_gpus_without_fcntl_and_proc(monkeypatch, tmp_path):
    """Ranks see what their parent holds, and files of processes that have ended do not count."""
    monkeypatch.setattr(shared_memory, "fcntl", None)
    monkeypatch.setattr(os, "remove", remove_as_on_windows)
    monkeypatch.setattr(process_groups, "Path", lambda path: tmp_path / "missing")
    monkeypatch.setattr(processes, "Path", lambda path: tmp_path / "missing")
    with virtual_gpus(2, memory="1 GiB") as gpus:
        mine = [torch.zeros(2**28, dtype=torch.uint8, device=gpu) for gpu in gpus]
        for _ in range(2):  # the ranks of the first launch have ended
            found = launch(lambda rank: torch.cuda.mem_get_info(rank), ranks=2, show=False)
            assert [total - free for free, total in found] == [2 * 2**30 // 8 + mine[0].nbytes] * 2


def test_the_loopback_interface_has_other_names_elsewhere(monkeypatch):
    def interfaces(name):
        address = SimpleNamespace(address="127.0.0.1")
        return {"Ethernet": [SimpleNamespace(address="192.0.2.7")], name: [SimpleNamespace(address="::1"), address]}

    for name in ("lo0", "Loopback Pseudo-Interface 1"):
        monkeypatch.setattr(psutil, "net_if_addrs", lambda name=name: interfaces(name))
        assert network.loopback() == name
        assert network.interface() == {"GLOO_SOCKET_IFNAME": name}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    assert network.interface() == {}
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    assert network.loopback() is None


def test_libuv_is_not_asked_for_on_windows(monkeypatch):
    monkeypatch.delenv("USE_LIBUV", raising=False)
    assert network.has_libuv() == (sys.platform != "win32")
    monkeypatch.setattr(sys, "platform", "win32")
    assert not network.has_libuv()
    monkeypatch.setenv("USE_LIBUV", "1")
    assert network.has_libuv()
