"""run_ranks: ranks that raise, die, hang; Ctrl-C; what is refused. No process is left by any of them."""

import ctypes
import multiprocessing.process
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from test_run_ranks import leaves_nothing  # noqa: F401  (a fixture for every test here too)
from torch.nn.parallel import DistributedDataParallel
from virtual_gpus import virtual_gpus
from virtual_gpus.testing import RankError, run, run_ranks
from virtual_gpus.testing.failures import Failure, _short, _without_middle, run_error
from waiting import until

LIMIT_S = 4  # for ranks that should hang: a busy machine may need a second until they do


@pytest.fixture
def all_fail_by_themselves(monkeypatch):
    """Nobody ends ranks that fail or return by themselves, however long one of them waits for a core."""
    monkeypatch.setattr("virtual_gpus.testing.run._GRACE_S", 60)


def wait_for_the_end(pid):
    """Until the process has ended; AssertionError if it goes on."""
    until(lambda: has_ended(pid), seconds=60)


def has_ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def write_whole(path, text):
    """In one step: who sees the file can read it."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def fails(fn, *args, **options):
    """The error of a run."""
    with pytest.raises(RankError) as caught:
        run_ranks(fn, args=args, **{"ranks": 3, "show": False, "timeout": 20, **options})
    return caught.value


# ---- a rank raises -------------------------------------------------------------------------------------------


def inner():
    raise ValueError("no such thing")


def one_raises(rank):
    if rank == 1:
        inner()
    dist.all_reduce(torch.ones(3))


def test_a_rank_that_raises_is_named_with_its_traceback_and_the_others_are_not():
    error = fails(one_raises)
    text = str(error)
    assert text.startswith("Rank 1 of 3 raised ValueError: no such thing\n\nIn rank 1:\nTraceback ")
    assert text.endswith("ValueError: no such thing")
    frames = [line.split(", in ")[1] for line in text.split("\n") if line.startswith("  File")]
    assert frames == ["one_raises", "inner"] and "    inner()\n" in text
    assert "Connection" not in text and "rank 0" not in text and "rank 2" not in text


@pytest.mark.usefixtures("all_fail_by_themselves")
def test_an_error_of_all_ranks_is_said_once():
    error = fails(lambda rank: inner())
    assert str(error).startswith("Ranks 0, 1, 2 of 3 raised ValueError: no such thing\n\nIn rank 0:\n")
    assert str(error).count("Traceback") == 1


def chained(rank):
    try:
        inner()
    except ValueError as error:
        raise RuntimeError("and so\nthis") from error


def test_causes_and_several_lines_are_kept():
    error = fails(chained, ranks=1)
    assert str(error).startswith("Rank 0 of 1 raised RuntimeError: and so\n")
    assert "ValueError: no such thing" in str(error) and "direct cause" in str(error)
    assert str(error).endswith("RuntimeError: and so\nthis")


def test_a_rank_that_raises_before_the_group_stands(monkeypatch):
    def refuse(*args, **kwargs):
        if os.environ["RANK"] == "2":
            raise OSError("no network")
        return init(*args, **kwargs)

    init = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", refuse)
    error = fails(one_raises)
    assert str(error).startswith("Rank 2 of 3 raised OSError: no network\n")


def test_errors_on_virtual_gpus():
    with virtual_gpus(2, memory="64 MiB"):
        error = fails(lambda rank: torch.ones(1 << (20 + 8 * rank), device="cuda"), ranks=2)
        assert str(error).startswith("Rank 1 of 2 raised torch.OutOfMemoryError: CUDA out of memory.")
        assert "virtual_gpus" not in str(error)


def on_the_cpu(rank):
    dist.all_reduce(torch.ones(3))


def a_model_on_the_cpu(rank):
    DistributedDataParallel(torch.nn.Linear(2, 2))


def on_one_gpu(rank):
    dist.all_reduce(torch.ones(3, device="cuda:0"))


@pytest.mark.usefixtures("all_fail_by_themselves")
@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (on_the_cpu, "RuntimeError: No backend type associated with device type cpu"),
        (a_model_on_the_cpu, "RuntimeError: No backend type associated with device type cpu"),
        (on_one_gpu, "torch.distributed.DistBackendError: Duplicate GPU detected : rank 1 and rank 0 both on CUDA "),
    ],
)
def test_what_nccl_refuses_is_refused_on_virtual_gpus(fn, words):
    with virtual_gpus(2, memory="1 GiB"):
        text = str(fails(fn, ranks=2))
    assert text.startswith(f"Ranks 0, 1 of 2 raised {words}") and f"in {fn.__name__}\n" in text
    assert "virtual_gpus" not in text


def messages_on_gpus(rank):
    """What nccl takes, objects and barriers among it."""
    x = torch.full((2,), rank + 1.0, device="cuda")
    dist.barrier()
    found = [None, None]
    dist.all_gather_object(found, rank)
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    dist.all_reduce(x)
    return found, x.tolist()


def test_messages_and_objects_travel_between_gpus(capsys):
    with virtual_gpus(2, memory="1 GiB"):
        assert run_ranks(messages_on_gpus, ranks=2) == [([0, 1], [2.0, 2.0])] * 2
    assert capsys.readouterr().out == "2 ranks on 2 virtual GPUs, backend gloo in place of nccl\n"


def test_on_gpus_the_guilty_rank_is_named_and_one_that_left_too():
    def leaves(rank):
        if rank == 0:
            dist.all_reduce(torch.ones(3, device="cuda"))

    def raises(rank):
        if rank == 1:
            inner()
        dist.all_reduce(torch.ones(3, device="cuda"))

    with virtual_gpus(2, memory="1 GiB"):
        assert str(fails(raises, ranks=2)).startswith("Rank 1 of 2 raised ValueError: no such thing\n")
        text = str(fails(leaves, ranks=2))
    assert text.startswith("Rank 0 of 2 raised RuntimeError: ") and "Rank 1 had returned by then" in text


def test_the_error_can_be_pickled():
    """As concurrent.futures and pytest-xdist do it."""
    error = fails(one_raises)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def leaves_early(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(3))


@pytest.mark.usefixtures("all_fail_by_themselves")
def test_a_rank_that_leaves_early():
    text = str(fails(leaves_early))
    assert text.startswith("Rank 0 of 3 raised ") and "Ranks 1, 2 had returned by then" in text


def failure(rank, kind="error", what="raised ValueError: same", when=1.0):
    return Failure(rank, kind, what, f"of {rank}" if kind != "late" else "", when)


def test_the_cause_is_the_earliest_and_no_rank_that_only_lost_a_connection():
    lost = failure(0, "lost", "raised RuntimeError: Connection closed by peer", when=0.1)
    died = failure(1, what="died with exit code 1.", when=0.2)
    later, sooner, late = failure(0), failure(2, when=0.3), failure(0, "late", "had reached:\n  x", when=0.0)
    for failures, cause in (
        ((lost, died), 1),
        ((failure(0, what="another"), sooner), 2),
        ((lost,), 0),
        ((late, died), 1),
    ):
        assert str(run_error(failures, 3, [], "late")).startswith(f"Rank {cause} of 3 ")
    error = run_error([sooner, failure(1, what="raised ValueError: another"), later], 3, [], "late")
    assert str(error) == "Ranks 0, 2 of 3 raised ValueError: same\n\nIn rank 0:\nof 0"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[x/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"), "lost"),
        (RuntimeError("[x/pair.cc:1] Read error [127.0.0.1]:4711: Connection reset by peer"), "lost"),
        (RuntimeError("Broken pipe"), "lost"),
        (dist.DistBackendError("NCCL error: remote process exited"), "lost"),
        (dist.DistBackendError("NCCL error\nncclInvalidUsage: ...\nDuplicate GPU detected"), "error"),
        (ConnectionResetError(), "lost"),
        (ValueError("Connection closed"), "error"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "error"),
    ],
    ids=repr,
)
def test_lost_connections_are_told_from_other_errors(error, kind):
    assert Failure.of_error(error, 0, {}).kind == kind


def test_short_names_of_files(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/a/lib", "/a/lib/site-packages", "/a"])
    assert _short("/a/lib/site-packages/torch/x.py", {}) == "torch/x.py"
    assert _short("/b/x.py", {}) == "/b/x.py"
    assert _short("/tmp/7.py", {"/tmp/7.py": "Cell In[3]"}) == "Cell In[3]"


# ---- a rank dies ---------------------------------------------------------------------------------------------


def dies(rank, how):
    if rank == 1:
        print("last words", flush=True)
        if how == "exit 0":
            os._exit(0)
        if how == "segfault":
            ctypes.string_at(0)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))


DEATHS = {
    "exit 0": "Rank 1 of 3 died with exit code 0.",
    "kill": "Rank 1 of 3 was ended by signal 9 (Killed). The system sends this signal when memory",
    "segfault": "Rank 1 of 3 was ended by signal 11 (Segmentation fault).",
}


@pytest.mark.parametrize("how", DEATHS)
def test_a_rank_that_dies(how, capsys):
    assert str(fails(dies, how, show=False)).startswith(DEATHS[how])
    said = capsys.readouterr()
    assert "[rank 1] last words" in said.out  # shown all the same
    assert ("in dies" in said.err) == (how == "segfault")


def test_ranks_that_die_alike():
    error = fails(lambda rank: os.kill(os.getpid(), signal.SIGKILL), ranks=2)
    assert str(error).startswith("Ranks 0, 1 of 2 were ended by signal 9 (Killed).")


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    def work(rank):
        child = subprocess.Popen(["sleep", "100"])
        write_whole(tmp_path / str(rank), str(child.pid))
        while not (tmp_path / "1").exists():
            pass
        if rank == 0:
            raise ValueError
        time.sleep(100)

    fails(work, ranks=2)
    wait_for_the_end(int((tmp_path / "1").read_text()))


def test_the_ranks_die_with_their_parent(tmp_path):
    program = f"""
        import os, time
        from pathlib import Path
        from virtual_gpus.testing import run_ranks

        def work(rank):
            path = Path({str(tmp_path)!r}) / f"{{rank}}.pid"
            path.with_suffix(".part").write_text(str(os.getpid()))
            path.with_suffix(".part").rename(path)
            time.sleep(100)

        run_ranks(work, ranks=2)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.DEVNULL)
    files = [tmp_path / f"{rank}.pid" for rank in range(2)]
    while not all(file.exists() for file in files):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    for file in files:
        wait_for_the_end(int(file.read_text()))
    for folder in tmp_path.glob("ranks-*"):  # nobody is left who could remove it
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()


# ---- the time limit ------------------------------------------------------------------------------------------


def hangs(rank):
    if rank in (1, 3):
        threading.Event().wait()
    if rank == 2:
        return
    dist.recv(torch.ones(3), 1)


def test_ranks_that_hang_say_where():
    with pytest.raises(TimeoutError) as caught:
        run_ranks(hangs, ranks=4, timeout=LIMIT_S + 0.5, show=False)
    text = str(caught.value)
    parts = text.split("\n\n")
    assert parts[0] == "The 4 ranks were not done within the time limit of 4.5 s (timeout=4.5)."
    assert parts[1].startswith("Rank 0 had reached:\n  File") and "distributed_c10d.py" in parts[1]
    assert "in hangs\n    dist.recv(torch.ones(3), 1)\n" in parts[1]
    assert (
        parts[2].startswith("Ranks 1, 3 had reached:\n  File") and "in hangs\n    threading.Event().wait()" in parts[2]
    )
    assert parts[3] == "Rank 2 had returned."
    assert "testing" not in text and "run_ranks" not in text.replace("test_run_ranks_failures", "")


def test_a_long_way_through_pytorch_is_cut():
    """Deep in a model's layers, nobody finds the own line among twenty of PyTorch's."""
    own = ("train.py", 7, "train", "model(images)")
    inside = [("torch/nn/module.py", number, "forward", "return call()") for number in range(9)]
    way = [own, *inside[:3], own, *inside]
    text = _without_middle(traceback.StackSummary.from_list(way))
    assert re.findall(r"line (\d)|(\.\.\. .*)", text) == [
        *[(number, "") for number in "70127"], ("", "... 7 frames of PyTorch ..."), ("7", ""), ("8", ""),
    ]  # fmt: skip


def test_ranks_that_do_not_start_have_a_limit_and_an_error_of_their_own(monkeypatch):
    """The time limit of the function has not begun."""
    monkeypatch.setattr(run, "_START_S", LIMIT_S / 2)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **named: os.environ["RANK"] == "1" or time.sleep(100))
    with pytest.raises(TimeoutError) as caught:
        run_ranks(lambda rank: None, ranks=2, timeout=0.01, show=False)
    parts = str(caught.value).split("\n\n")
    assert parts[0].startswith(
        "The 2 ranks did not start within 2 s. The time limit of the function (timeout=0.01) begins"
    )
    assert parts[1].startswith("Rank 0 had reached:\n") and parts[2] == "Rank 1 had not started the function."


def test_the_time_limit_counts_from_the_moment_at_which_all_are_connected(monkeypatch):
    begin = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **named: (time.sleep(1), begin(*args, **named)))
    assert run_ranks(lambda rank: time.sleep(0.2), ranks=1, timeout=0.9, show=False) == [None]


# ---- Ctrl-C --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="Ctrl-C is the main thread's")
@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_ends_the_ranks(tmp_path, capsys):
    pids = [tmp_path / str(rank) for rank in range(2)]

    def work(rank):
        print("at work", rank)
        pids[rank].write_text(str(os.getpid()))
        time.sleep(100)

    def interrupt():
        until(lambda: all(path.exists() and path.read_text() for path in pids))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"^The 2 ranks were interrupted and ended\.$") as caught:
        run_ranks(work, ranks=2)
    thread.join()
    assert [entry.name for entry in caught.traceback][1:] == ["run_ranks"]  # and not what it was waiting in
    assert signal.getsignal(signal.SIGINT) is handler
    for path in pids:
        wait_for_the_end(int(path.read_text()))
    assert "[rank 0] at work 0\n[rank 1] at work 1\n" in capsys.readouterr().out


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="Ctrl-C is the main thread's")
@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_while_the_ranks_are_started(monkeypatch):
    def start(self):
        begin(self)
        os.kill(os.getpid(), signal.SIGINT)

    begin = multiprocessing.process.BaseProcess.start
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(lambda rank: time.sleep(100), ranks=2, show=False)


def test_if_not_all_can_be_started_none_is_left(monkeypatch):
    started = []

    def start(self):
        if len(started) == 1:
            raise OSError("no more processes")
        started.append(self)
        begin(self)

    begin = multiprocessing.process.BaseProcess.start
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    with pytest.raises(OSError, match="no more processes"):
        run_ranks(lambda rank: time.sleep(100), ranks=2, show=False)
    assert len(started) == 1 and not started[0].is_alive()


# ---- what is refused -----------------------------------------------------------------------------------------


def nothing(rank):
    return None


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"ranks": 0}, ValueError, "ranks must be an integer of at least 1"),
        ({"ranks": 2.0}, ValueError, "ranks must be an integer"),
        ({"timeout": 0}, ValueError, "timeout must be a time in seconds"),
        ({"start": "twist"}, ValueError, "start must be one of fork, spawn, forkserver, not 'twist'."),
    ],
)
def test_bad_options(options, error, text):
    with pytest.raises(error, match=text):
        run_ranks(nothing, **{"ranks": 2, **options})


def test_more_ranks_than_gpus():
    with (
        virtual_gpus(2),
        pytest.raises(ValueError, match=r"3 ranks need 3 GPUs.*sees 2.*Duplicate.*3 GPUs.*gpus=False"),
    ):
        run_ranks(nothing, ranks=3)


def test_a_rank_cannot_start_ranks():
    error = fails(lambda rank: run_ranks(nothing, ranks=2), ranks=1)
    assert "raised RuntimeError: This process is already a rank" in str(error)


def rename_thread(name):
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="names of threads are read from /proc, on Linux")
def test_fork_while_autograd_has_threads():
    done, named = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (rename_thread(b"pt_autograd_0"), named.set(), done.wait()))
    thread.start()
    named.wait()
    try:
        assert run.start_method() == "forkserver"
    finally:
        done.set()
        thread.join()
