"""run_ranks: results, environment, output, with virtual GPUs and without; and as it works on other systems."""

import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import until
from virtual_gpus import active_machine, virtual_gpus
from virtual_gpus.processes import shared_memory
from virtual_gpus.testing import RankError, child, run, run_ranks
from virtual_gpus.testing.hosts import TORCHRUN, run_hosts

MODULE = "import torch\nnumber = torch.cuda.device_count()"


def children():
    """Processes of this one's that are alive, except the helpers of multiprocessing."""
    return [process for process in psutil.Process().children(recursive=True) if is_alive(process)]


def is_alive(process):
    try:
        words = " ".join(process.cmdline())
        return process.status() != "zombie" and "resource_tracker" not in words and "forkserver" not in words
    except psutil.NoSuchProcess:
        return False  # it has ended meanwhile


def test_ctrl_c_while_lines_are_shown_loses_none(tmp_path, monkeypatch):
    def interrupted(text):
        raise KeyboardInterrupt

    (tmp_path / "out").write_bytes(b"begun\n")
    output, shown = run._Output(SimpleNamespace(ranks=1, file=lambda rank, what: tmp_path / what), True), []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=interrupted, flush=list))
    with pytest.raises(KeyboardInterrupt):
        output.follow()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=shown.append, flush=list))
    output.finish(failed=True)
    assert shown == ["[rank 0] begun\n"]


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path, monkeypatch):
    """Every test: no process and no file is left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(children())
    yield
    assert set(children()) <= before
    assert [path for pattern in ("ranks-*", "pytorch-*", "torchelastic*") for path in tmp_path.glob(pattern)] == []


def surroundings(rank, word, number):
    """A rank that is done first must not cut the others off, so there are many collectives."""
    total = torch.tensor([rank + 1.0])
    for _ in range(20):
        dist.all_reduce(total)
        total /= 3
    with pytest.raises(RuntimeError, match="This process is already a rank"):
        run_ranks(print, ranks=2)
    return {
        "group": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
        "given": (word, number),
        "mean": total.item(),
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "environment": [os.environ[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")],
        "port": int(os.environ["MASTER_PORT"]),
    }


def test_every_rank_returns_and_is_in_the_group(capsys, monkeypatch):
    """On the CPU although there are GPUs; and a port that is taken does not matter."""
    monkeypatch.delenv("RANK", raising=False)
    torch.manual_seed(7)
    with virtual_gpus(2), socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(taken))
        monkeypatch.setenv("WORLD_SIZE", "7")
        answers = run_ranks(surroundings, ranks=3, args=("word", 3), gpus=False)
    for rank, answer in enumerate(answers):
        assert answer.pop("port") not in (0, taken)
        expected = {"group": (rank, 3, "gloo"), "given": ("word", 3), "mean": 2.0, "threads": 1, "seed": 7 + rank}
        assert answer == expected | {"environment": [str(rank), str(rank), "3", "3"]}
    assert capsys.readouterr().out == "3 ranks on the CPU, backend gloo\n"
    assert not dist.is_initialized() and "RANK" not in os.environ


def step(rank):
    """A backward pass with operators large enough to run on several threads."""
    x = torch.full((300, 300), 1.0 + rank, requires_grad=True)
    ((x @ x) + x).sum().backward()
    return x.grad[0, 0].item()


def test_from_two_threads_at_once_after_backward_in_the_parent_on_several_threads():
    def work(name):
        return run_ranks(lambda rank: (name, rank, step(rank)), ranks=2, show=False)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        step(0)
        with ThreadPoolExecutor(2) as pool:
            assert [*pool.map(work, "ab")] == [[(name, 0, 601.0), (name, 1, 1201.0)] for name in "ab"]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_rank_may_end_the_group_itself_and_leave_a_thread_running(monkeypatch):
    def work(rank):
        dist.destroy_process_group()
        threading.Thread(target=threading.Event().wait).start()

    monkeypatch.setattr("virtual_gpus.testing.run._LEAVE_S", 0.2)
    assert run_ranks(work, ranks=2, show=False, timeout=None) == [None, None]  # no time limit


def on_gpu(rank, parents):
    """What the parent has on its GPU is on the CPU here, and it counts as the parent's."""
    found = str(parents.device), str(parents.to("cuda").device), torch.cuda.current_device(), dist.get_backend()
    x = torch.full((100, 100), rank + 1.0, device="cuda")
    dist.all_reduce(x)
    return x, [torch.cuda.memory_allocated(i) for i in range(2)], found


def test_virtual_gpus(capsys):
    with virtual_gpus(2, memory="1 GiB"):
        big = torch.ones(1 << 20, device="cuda:1", requires_grad=True)
        big.sum().backward()
        mine = torch.cuda.memory_allocated(1), torch.cuda.mem_get_info(1)[0]
        answers = run_ranks(on_gpu, ranks=2, args=[big], start="fork")  # what is not pickled
        assert (torch.cuda.memory_allocated(1), torch.cuda.mem_get_info(1)[0]) == mine  # the rank is gone
        assert str(big.device) == "cuda:1"
    assert capsys.readouterr().out == "2 ranks on 2 virtual GPUs, backend gloo in place of nccl\n"
    for rank, (x, allocated, found) in enumerate(answers):
        assert str(x.device) == "cpu" and x[0, 0].item() == 3.0 and found == ("cpu", f"cuda:{rank}", rank, "nccl")
        assert allocated[1 - rank] == 0 and 40_000 <= allocated[rank] < 2**20  # the parent's 8 MiB are not in it


def test_lines_come_in_rank_order_and_those_of_rank_0_while_it_runs(capsys, tmp_path, monkeypatch):
    def talk(rank):
        print("rank", rank, end=" ")
        print("says")
        until((tmp_path / "seen").exists)
        if rank == 1:
            print("one\n\ntwo äöü")
        print("oops", rank, file=sys.stderr)
        os.write(1, b"raw\n")
        os.system("echo a child")
        print("no newline", end="")

    def note(text):
        said.append(text)
        if "[rank 0] rank 0 says\n" in "".join(said):
            (tmp_path / "seen").touch()

    said = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=note, flush=lambda: None))
    run_ranks(talk, ranks=2)
    assert "".join(said).split("\n") == [
        "2 ranks on the CPU, backend gloo",
        "[rank 0] rank 0 says", "[rank 0] raw", "[rank 0] a child", "[rank 0] no newline",
        "[rank 1] rank 1 says", "[rank 1] one", "[rank 1] ", "[rank 1] two äöü", "[rank 1] raw",
        "[rank 1] a child", "[rank 1] no newline", "",
    ]  # fmt: skip
    assert capsys.readouterr().err == "[rank 0] oops 0\n[rank 1] oops 1\n"


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
    monkeypatch.setattr("virtual_gpus.features.distributed.process_groups.Path", lambda path: tmp_path / "x")
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


@pytest.mark.parametrize("system, name", [("linux", "lo"), ("darwin", "lo0"), ("win32", "Loopback Pseudo-Interface 1")])
def test_the_network_of_other_systems(system, name, monkeypatch):
    """The loopback interface has another name, and PyTorch for Windows is built without libuv."""
    monkeypatch.setattr(sys, "platform", system)
    for variable in ("GLOO_SOCKET_IFNAME", "USE_LIBUV"):
        monkeypatch.delenv(variable, raising=False)
    assert child.interface() == {"GLOO_SOCKET_IFNAME": name} and child.has_libuv() == (system != "win32")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    monkeypatch.setenv("USE_LIBUV", "1")
    assert child.interface() == {} and child.has_libuv()
