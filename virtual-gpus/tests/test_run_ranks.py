"""run_ranks: results, environment, output, with virtual GPUs and without."""

import io
import os
import socket
import sys
import threading

import psutil
import pytest
import torch
import torch.distributed as dist
from virtual_gpus import virtual_gpus
from virtual_gpus.testing import run_ranks
from waiting import until


def children():
    """Processes of this one's that are alive, except the helpers of multiprocessing."""
    return [process for process in psutil.Process().children(recursive=True) if is_alive(process)]


def is_alive(process):
    try:
        words = " ".join(process.cmdline())
        return process.status() != "zombie" and "resource_tracker" not in words and "forkserver" not in words
    except psutil.NoSuchProcess:
        return False  # it has ended meanwhile


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path, monkeypatch):
    """Every test: no process and no file is left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(children())
    yield
    assert set(children()) <= before
    assert [path for pattern in ("ranks-*", "pytorch-*", "torchelastic*") for path in tmp_path.glob(pattern)] == []


# ---- results and surroundings ------------------------------------------------------------------------------


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
        assert answer == {
            "group": (rank, 3, "gloo"),
            "given": ("word", 3),
            "mean": 2.0,
            "threads": 1,
            "seed": 7 + rank,
            "environment": [str(rank), str(rank), "3", "3"],
        }
    assert capsys.readouterr().out == "3 ranks on the CPU, backend gloo\n"
    assert not dist.is_initialized() and "RANK" not in os.environ


def step(rank):
    """A backward pass with operators large enough to run on several threads."""
    x = torch.full((300, 300), 1.0 + rank, requires_grad=True)
    ((x @ x) + x).sum().backward()
    return x.grad[0, 0].item()


def test_from_two_threads_at_once_after_backward_in_the_parent_on_several_threads():
    answers, before = {}, torch.get_num_threads()

    def work(name):
        answers[name] = run_ranks(lambda rank: (name, rank, step(rank)), ranks=2, show=False)

    torch.set_num_threads(2)
    try:
        step(0)
        threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == {name: [(name, 0, 601.0), (name, 1, 1201.0)] for name in "ab"}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_rank_may_end_the_group_itself_and_leave_a_thread_running(monkeypatch):
    """Without a time limit."""

    def work(rank):
        dist.destroy_process_group()
        threading.Thread(target=threading.Event().wait).start()

    monkeypatch.setattr("virtual_gpus.testing.run._LEAVE_S", 0.2)
    assert run_ranks(work, ranks=2, show=False, timeout=None) == [None, None]


# ---- virtual GPUs --------------------------------------------------------------------------------------------


def on_gpu(rank, parents):
    """What the parent has on its GPU is on the CPU here. It counts as the parent's."""
    at_first = torch.cuda.memory_allocated(rank), torch.cuda.mem_get_info(rank)[0]
    found = str(parents.device), str(parents.to("cuda").device), torch.cuda.current_device(), dist.get_backend()
    x = torch.full((100, 100), rank + 1.0, device="cuda")
    dist.all_reduce(x)
    return x, [torch.cuda.memory_allocated(i) for i in range(2)], found, at_first


def test_virtual_gpus(capsys):
    with virtual_gpus(2, memory="1 GiB"):
        big = torch.ones(1 << 20, device="cuda:1", requires_grad=True)
        big.sum().backward()
        mine, reserved = torch.cuda.memory_allocated(1), torch.cuda.memory_reserved(1)
        free = torch.cuda.mem_get_info(1)[0]
        answers = run_ranks(on_gpu, ranks=2, args=[big])
        assert torch.cuda.memory_allocated(1) == mine and str(big.device) == "cuda:1"
        assert torch.cuda.mem_get_info(1)[0] == free  # the rank is gone
    assert capsys.readouterr().out == "2 ranks on 2 virtual GPUs, backend gloo in place of nccl\n"
    context = 2**30 - free - reserved
    assert context > 0 and answers[1][-1] == (0, free - context)
    for rank, (x, allocated, found, _) in enumerate(answers):
        assert str(x.device) == "cpu" and x[0, 0].item() == 3.0 and found == ("cpu", f"cuda:{rank}", rank, "nccl")
        assert allocated[1 - rank] == 0 and 40_000 <= allocated[rank] < 2**20  # the parent's 8 MiB are not in it


# ---- output --------------------------------------------------------------------------------------------------


class Watcher(io.StringIO):
    """A stdout that notes when rank 0's first line has come."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def write(self, text):
        super().write(text)
        if "[rank 0] rank 0 says\n" in self.getvalue():
            self.seen.touch()


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

    monkeypatch.setattr(sys, "stdout", Watcher(tmp_path / "seen"))
    run_ranks(talk, ranks=2)
    assert sys.stdout.getvalue().split("\n") == [
        "2 ranks on the CPU, backend gloo",
        "[rank 0] rank 0 says", "[rank 0] raw", "[rank 0] a child", "[rank 0] no newline",
        "[rank 1] rank 1 says", "[rank 1] one", "[rank 1] ", "[rank 1] two äöü", "[rank 1] raw",
        "[rank 1] a child", "[rank 1] no newline", "",
    ]  # fmt: skip
    assert capsys.readouterr().err == "[rank 0] oops 0\n[rank 1] oops 1\n"
