"""run_ranks: ranks that raise, die, hang; Ctrl-C; what is refused. No process is left by any of them."""

import ctypes
import multiprocessing
import multiprocessing.process
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from measuring import table
from ranks import until
from test_run_ranks import leaves_nothing  # noqa: F401  (a fixture for every test here too)
from virtual_gpus import virtual_gpus
from virtual_gpus.files import write_whole
from virtual_gpus.testing import RankError, run, run_ranks
from virtual_gpus.testing import rank as in_rank
from virtual_gpus.testing.failures import Failure, _short, _without_middle, run_error


def wait_for_the_end(pid):
    with suppress(psutil.NoSuchProcess):
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, seconds=60)


def sleeps(rank, folder):
    """Tells its process id and goes on for longer than any test."""
    print("at work", rank)
    write_whole(folder / f"{rank}.pid", str(os.getpid()))
    time.sleep(1000)


def process_ids(folder):
    """Those of two ranks that sleep, as soon as both do."""
    files = [folder / f"{rank}.pid" for rank in range(2)]
    until(lambda: all(file.exists() for file in files))
    return [int(file.read_text()) for file in files]


def fails(function, *args, **options):
    """The text of the error of a run."""
    with pytest.raises(RankError) as caught:
        run_ranks(function, args=args, **{"ranks": 3, "show": False, **options})
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # as concurrent.futures does it
    return str(caught.value)


def inner():
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        raise RuntimeError("and so\nthis") from error


def one_raises(rank, folder):
    """Ranks 1 and 2 start a process each, for which rank 2 waits. Rank 0 waits for the others."""
    if rank:
        child = subprocess.Popen(["sleep", "1000"])
        write_whole(folder / str(rank), str(child.pid))
    if rank == 1:
        until((folder / "2").exists)
        inner()
    if rank == 2:
        child.wait()
    dist.all_reduce(torch.ones(3))


def test_a_rank_that_raises_is_named_with_its_traceback_and_others_end_with_what_they_began(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_GRACE_S", 0.1)
    text = fails(one_raises, tmp_path)
    assert text.startswith("Rank 1 of 3 raised RuntimeError: and so\n\nIn rank 1:\nTraceback ")
    assert text.endswith("RuntimeError: and so\nthis") and text.count("Traceback") == 2
    assert "ValueError: no such thing" in text and "direct cause" in text
    frames = [line.split(", in ")[1] for line in text.split("\n") if line.startswith("  File")]
    assert frames == ["inner", "one_raises", "inner"] and "    inner()\n" in text
    for rank in "12":
        wait_for_the_end(int((tmp_path / rank).read_text()))


def leaves(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(3, device="cuda:0"))


def test_an_error_on_virtual_gpus_says_who_had_returned(monkeypatch):
    monkeypatch.setattr(run, "_GRACE_S", 60)  # nobody ends rank 0, however long it waits for a core
    with virtual_gpus(2, memory="64 MiB"):
        text = fails(leaves, ranks=2)
    assert text.startswith("Rank 0 of 2 raised RuntimeError: ") and "virtual_gpus" not in text
    assert "Rank 1 had returned by then" in text


def failure(rank, kind="error", what="raised ValueError: same", when=1.0):
    return Failure(rank, kind, what, f"of {rank}" if kind != "late" else "", when)


def test_the_cause_is_the_earliest_and_no_rank_that_only_lost_a_connection_and_how_each_is_told():
    lost = failure(0, "lost", "raised RuntimeError: Connection closed by peer", when=0.1)
    died = failure(1, what="died with exit code 1.", when=0.2)
    later, sooner, late = failure(0), failure(2, when=0.3), failure(0, "late", "had reached:\n  x", when=0.0)
    causes = (((lost, died), 1), ((failure(0, what="another"), sooner), 2), ((lost,), 0), ((late, died), 1))
    for failures, cause in causes:
        assert str(run_error(failures, 3, [], "late")).startswith(f"Rank {cause} of 3 ")
    error = run_error([sooner, failure(1, what="raised ValueError: another"), later], 3, [], "late")
    assert str(error) == "Ranks 0, 2 of 3 raised ValueError: same\n\nIn rank 0:\nof 0"
    misused = dist.DistBackendError("NCCL error\nncclInvalidUsage: ...\nDuplicate GPU detected")
    kinds = {
        "lost": [
            RuntimeError("[x/pair.cc:1] Read error [127.0.0.1]:4711: Connection reset by peer"),
            RuntimeError("Broken pipe"),
            dist.DistBackendError("NCCL error: remote process exited"),
            ConnectionResetError(),
        ],
        "error": [misused, ValueError("Connection closed"), RuntimeError("shapes cannot be multiplied")],
    }
    for kind, errors in kinds.items():
        assert {Failure.of_error(error, 0, {}).kind for error in errors} == {kind}
    said = Failure.of_error(misused, 0, {}).what
    assert said == "raised torch.distributed.DistBackendError: Duplicate GPU detected"
    ways = {
        0: "died with exit code 0.",
        -9: "was ended by signal 9 (Killed). The system sends this signal when memory runs out.",
        0xC0000005: "died with exit code 0xC0000005.",  # on Windows
    }
    assert {code: Failure.of_exit(code, 0).what for code in ways} == ways
    alike = run_error([Failure.of_exit(-9, 1), Failure.of_exit(-9, 0)], 2, [], "late")
    assert str(alike).startswith("Ranks 0, 1 of 2 were ended by signal 9 (Killed).")


def dies(rank):
    if rank == 1:
        print("last words", flush=True)
        ctypes.string_at(0)
    dist.all_reduce(torch.ones(3))


def test_a_rank_that_dies(capsys):
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # as a library may leave it
    assert fails(dies).startswith("Rank 1 of 3 was ended by signal 11 (Segmentation fault).")
    said = capsys.readouterr()
    assert "[rank 1] last words" in said.out and "in dies" in said.err  # shown all the same


def test_the_ranks_die_with_their_parent(tmp_path):
    parent = multiprocessing.get_context("fork").Process(target=run_ranks, args=(sleeps, 2, [tmp_path]))
    parent.start()
    ranks = process_ids(tmp_path)
    parent.kill()
    parent.join()
    for process in ranks:
        wait_for_the_end(process)
    for folder in tmp_path.glob("ranks-*"):  # nobody is left who could remove it
        shutil.rmtree(folder)


@pytest.fixture
def ranks_that_rest(monkeypatch):
    """A rank reports once it has come to rest, however long after the time limit that is on a busy machine."""

    def rests():
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
        return stack[-1].line.startswith("time.sleep(") or "recv" in [frame.name for frame in stack]

    def report_at_rest(number, job):
        if number != 2:  # which returns
            until(rests)
            report(number, job)

    report = in_rank._report_time_limit
    monkeypatch.setattr(in_rank, "_report_time_limit", report_at_rest)
    monkeypatch.setattr(run, "_SILENT_S", 200)


def hangs(rank):
    if rank in (1, 3):
        time.sleep(1000)
    if rank == 2:
        return
    dist.recv(torch.ones(3), 1)


@pytest.mark.usefixtures("ranks_that_rest")
def test_ranks_that_hang_say_where():
    with pytest.raises(TimeoutError) as caught:
        run_ranks(hangs, ranks=4, timeout=0.5, show=False)
    text = str(caught.value)
    parts = text.split("\n\n")
    assert parts[0] == "The 4 ranks were not done within the time limit of 0.5 s (timeout=0.5)."
    assert parts[1].startswith("Rank 0 had reached:\n  File") and "distributed_c10d.py" in parts[1]
    assert "in hangs\n    dist.recv(torch.ones(3), 1)\n" in parts[1]
    assert parts[2].startswith("Ranks 1, 3 had reached:\n  File") and "in hangs\n    time.sleep(1000)" in parts[2]
    assert parts[3] == "Rank 2 had returned."
    assert "testing" not in text and "run_ranks" not in text.replace("test_run_ranks_failures", "")


def test_files_and_long_ways_through_pytorch_are_short(monkeypatch):
    """Deep in a model's layers, nobody finds the own line among twenty of PyTorch's."""
    monkeypatch.setattr(sys, "path", ["/a/lib", "/a/lib/site-packages", "/a"])
    files = {"/a/lib/site-packages/torch/x.py": "torch/x.py", "/b/x.py": "/b/x.py", "/tmp/7.py": "Cell In[3]"}
    assert [_short(file, {"/tmp/7.py": "Cell In[3]"}) for file in files] == list(files.values())
    own = ("train.py", 7, "train", "model(images)")
    inside = [("torch/nn/module.py", number, "forward", "return call()") for number in range(9)]
    text = _without_middle(traceback.StackSummary.from_list([own, *inside[:3], own, *inside]))
    numbers = [(number, "") for number in "70127"]
    cut = [("", "... 7 frames of PyTorch ..."), ("7", ""), ("8", "")]
    assert re.findall(r"line (\d)|(\.\.\. .*)", text) == numbers + cut


def test_a_rank_that_looks_for_a_file_before_its_function_has_not_started(monkeypatch, tmp_path):
    job, where = in_rank.Job(tmp_path, 2, False, "gloo", 0, 0, b"", {}, None, 0.0), []
    monkeypatch.setattr(Path, "stat", lambda *_, **__: where.append(Failure.of_time_limit(sys._getframe(1), 0, {})))
    job.who_has("ready")
    assert {failure.what for failure in where} == {"had not started the function."}


@pytest.mark.usefixtures("ranks_that_rest")
def test_ranks_that_do_not_start_have_a_limit_and_an_error_of_their_own(monkeypatch):
    def one_never_connects(*args, **named):
        if os.environ["RANK"] == "0":
            time.sleep(1000)

    monkeypatch.setattr(run, "_START_S", 0.2)
    monkeypatch.setattr(dist, "init_process_group", one_never_connects)
    with pytest.raises(TimeoutError) as caught:
        run_ranks(lambda rank: None, ranks=2, timeout=0.01, show=False)
    parts = str(caught.value).split("\n\n")
    assert parts[0].startswith("The 2 ranks did not start within 0.2 s. The time limit of the function (timeout=0.01)")
    assert parts[1].startswith("Rank 0 had reached:\n") and parts[2] == "Rank 1 had not started the function."


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_ends_the_ranks(tmp_path, capsys):
    def interrupt():
        process_ids(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt, match=r"^The 2 ranks were interrupted and ended\.$") as caught:
            run_ranks(sleeps, ranks=2, args=[tmp_path], timeout=None)
    assert [entry.name for entry in caught.traceback][1:] == ["run_ranks"]  # and not what it was waiting in
    assert signal.getsignal(signal.SIGINT) is handler
    for process in process_ids(tmp_path):
        wait_for_the_end(process)
    assert "[rank 0] at work 0\n[rank 1] at work 1\n" in capsys.readouterr().out


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_ends_what_is_started_if_the_rest_is_not(monkeypatch):
    def start(self):
        started.append(self)
        begin(self)
        os.kill(os.getpid(), signal.SIGINT)

    started, begin = [], multiprocessing.process.BaseProcess.start
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(lambda rank: time.sleep(1000), ranks=2, show=False)
    assert len(started) == 1 and not started[0].is_alive()


@pytest.mark.parametrize(("options", "text"), table("wrong_settings")["run_ranks"])
def test_what_is_refused(options, text):
    with virtual_gpus(2), pytest.raises((ValueError, TypeError), match=text):
        run_ranks(print, **{"ranks": 2, **options})


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="names of threads are read from /proc, on Linux")
def test_fork_while_autograd_has_threads():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ctypes.CDLL(None).prctl, 15, b"pt_autograd_0", 0, 0, 0).result()
        assert run.start_method() == "forkserver"  # the thread waits for more to do
