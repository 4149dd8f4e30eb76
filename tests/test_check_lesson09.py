"""The checks of lesson 09: solutions pass, typical mistakes are explained, nothing raises; and its helpers."""

import io
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest
import torch

from helpers.parallel.hosts import TORCHRUN, run_hosts
from notebooks.checks import lesson09 as check
from tests.check_answers import explains, survives_strange_answers, told
from tests.programs import SCRIPTS, descendants


def test_no_answer_makes_a_check_raise():
    assert survives_strange_answers(check.guilty, check.interval, check.arguments)
    assert survives_strange_answers(lambda answer: check.snapshots(answer, answer))


def own(report):
    return report["error"] and "Connection" not in report["error"] and "Timed" not in report["error"]


def killed(report):
    return report["exit_code"] == -9 and not report["waits_in"]


def silent(report):
    return not report["error"] and not report["waits_in"]


def first_of(reports, *tests):
    """The first rank that passes the first test, else the second, and so on; the last two are added."""
    for test in (*tests, killed, silent):
        for rank, report in enumerate(reports):
            if test(report):
                return rank


def guilty(reports):
    return first_of(reports, own)


LISTED = ("IndexError", "OutOfMemory", "shapes", "ValueError")  # what check.REPORTS shows


def first(reports, found):
    return next(rank for rank, report in enumerate(reports) if found(report))


def test_guilty():
    assert check.guilty(guilty)
    assert check.guilty(lambda reports: torch.tensor(guilty(reports)))
    assert check.guilty(lambda reports: first_of(reports, lambda report: report["error"] and not report["waits_in"]))
    assert check.guilty(lambda reports: first_of(reports, lambda report: own(report) and "peer" not in report["error"]))
    explains(
        check.guilty,
        (lambda reports: 0, "another rank did not answer"),
        (lambda reports: first(reports, lambda report: report["error"] == ""), "still running when torchrun ended it"),
        (lambda reports: first(reports, lambda report: "Index" in report["error"] or report["exit_code"] == -15),
         "Which exit code does SIGKILL give?"),
        (lambda reports: first(reports, lambda report: "Index" in report["error"] or report["exit_code"] == -9),
         "StopIteration"),
        (lambda reports: len(reports), "The ranks are 0 to 3"),
        (lambda reports: first(reports, lambda report: not report["waits_in"]), "may just have been computing"),
        (lambda reports: first(reports, lambda report: "Runtime" not in report["error"] and not report["waits_in"]),
         "Which rank has an error of its own?"),
        (lambda reports: guilty(sorted(reports, key=lambda report: report["exit_code"] != -9)), "you name rank"),
        (lambda reports: first_of(reports, lambda report: any(word in report["error"] for word in LISTED)),
         "After a crash with \"KeyError: 'labels'\", your function returns None"),
        (lambda reports: first_of(reports, own, silent), "may just have been computing. Which exit code"),
        (lambda reports: first_of(reports, own, lambda report: report["exit_code"] == -9), "waited for no other"),
        (lambda reports: first_of(reports, lambda report: own(report) or "Timed" in report["error"]),
         "none was killed"),
    )  # fmt: skip


def save(folder, step, state):
    torch.save(state, folder / "unfinished.tmp")
    os.replace(folder / "unfinished.tmp", folder / f"step_{step:09}.pt")
    for old in sorted(folder.glob("step_*.pt"))[:-2]:
        old.unlink()


def load(folder, errors=Exception):
    return newest(sorted(folder.glob("step_*.pt")), errors)


def newest(paths, errors=Exception):
    for path in reversed(paths):
        try:
            return torch.load(path, weights_only=True)
        except errors:
            pass


def by_time(folder):
    return sorted(folder.glob("*.pt"), key=os.path.getmtime)


def load_newest(folder):
    paths = sorted(folder.glob("step_*.pt"))
    return torch.load(paths[-1], weights_only=True) if paths else None


def save_in_place(folder, step, state):
    torch.save(state, folder / f"step_{step:09}.pt")
    for old in sorted(folder.glob("step_*.pt"))[:-2]:
        old.unlink()


def saves(write):
    """A function `save` that writes and renames with `write(state, temporary, final)` and keeps the two newest."""

    def save(folder, step, state):
        write(state, folder / "unfinished.tmp", folder / f"step_{step:09}.pt")
        for old in sorted(folder.glob("step_*.pt"))[:-2]:
            old.unlink()

    return save


def under_a_similar_name(state, temporary, final):
    torch.save(state, temporary.with_suffix(".tmp.pt"))
    temporary.with_suffix(".tmp.pt").rename(final)


def through_a_buffer(state, temporary, final):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    temporary.write_bytes(buffer.getvalue())
    shutil.move(temporary, final)


def buffer_in_place(state, temporary, final):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    final.write_bytes(buffer.getvalue())


def copied(state, temporary, final):
    torch.save(state, temporary)
    shutil.copy(temporary, final)
    temporary.unlink()


def synced(state, temporary, final):
    with open(temporary, "wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())
    temporary.replace(final)


def own_name(state, temporary, final):
    with tempfile.NamedTemporaryFile(dir=final.parent, suffix=".tmp", delete=False) as file:
        torch.save(state, file)
    os.replace(file.name, final)


def elsewhere(state, temporary, final):
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, f"{folder}/unfinished")
        shutil.move(f"{folder}/unfinished", final)


def delete_first(state, temporary, final):
    torch.save(state, temporary)
    for old in sorted(final.parent.glob("step_*.pt"))[:-1]:
        old.unlink()
    os.replace(temporary, final)


def save_folders(folder, step, state):
    temporary = folder / "unfinished"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    torch.save(state, temporary / "state.pt")
    temporary.rename(folder / f"step_{step:09}")
    for old in sorted(folder.glob("step_*"))[:-2]:
        shutil.rmtree(old)


def load_folders(folder):
    return newest([path / "state.pt" for path in sorted(folder.glob("step_*"))])


def save_by_time(folder, step, state):
    torch.save(state, folder / "unfinished.tmp")
    os.replace(folder / "unfinished.tmp", folder / f"{step}.pt")
    for old in by_time(folder)[:-2]:
        old.unlink()


def without_zeros(folder, step, state):
    torch.save(state, folder / "unfinished.tmp")
    os.replace(folder / "unfinished.tmp", folder / f"step_{step}.pt")
    for old in sorted(folder.glob("step_*.pt"))[:-2]:
        old.unlink()


def keep_all(folder, step, state):
    torch.save(state, folder / "unfinished.tmp")
    os.replace(folder / "unfinished.tmp", folder / f"step_{step:09}.pt")


def one_file(folder, step, state):
    torch.save(state, folder / "last.pt")


def load_one_file(folder):
    return torch.load(folder / "last.pt", weights_only=True) if (folder / "last.pt").exists() else None


def test_snapshots():
    assert check.snapshots(save, load)
    for write in (under_a_similar_name, through_a_buffer, synced, own_name):
        assert check.snapshots(saves(write), load), write
    assert check.snapshots(save_folders, load_folders)
    assert check.snapshots(save_by_time, lambda folder: newest(by_time(folder)))
    told(check.snapshots(save_in_place, load), "reads what it left, ['step_000000015.pt']", "another ending")
    told(check.snapshots(saves(under_a_similar_name), lambda folder: newest(by_time(folder))), "unfinished.tmp.pt")
    told(check.snapshots(saves(buffer_in_place), load), "does not rename a file", "can be interrupted")
    told(check.snapshots(saves(copied), load), "does not rename a file")
    told(check.snapshots(saves(elsewhere), load), "is in another folder", "another disk")
    told(check.snapshots(save, load_newest), "cut in half", "RuntimeError")
    told(check.snapshots(save, lambda folder: load(folder, RuntimeError)), "is empty", "EOFError")
    errors = (RuntimeError, OSError, EOFError)
    told(check.snapshots(save, lambda folder: load(folder, errors)), "begins with zeros", "UnpicklingError")
    told(check.snapshots(save_in_place, load_newest), "reads what it left")
    told(check.snapshots(one_file, load_one_file), "last.pt was damaged or lost", "rename")
    told(
        check.snapshots(saves(delete_first), load), "just before it renamed", "was damaged or lost", "only then delete"
    )
    told(check.snapshots(without_zeros, load), "returns the state of step")
    told(check.snapshots(keep_all, load), "Keep the two newest")
    told(check.snapshots(save, lambda folder: {}), "It should return None")
    told(check.snapshots(lambda folder, step, state: None, load), "After the snapshot of step 5")
    told(check.snapshots(lambda folder, step, state: ..., load), "still returns")


def interval(save_seconds, machine_days, machines):
    return math.sqrt(2 * save_seconds * machine_days * 86400 / machines) / 60


def test_interval():
    assert check.interval(interval)
    assert check.interval(lambda cost, days, machines: round(interval(cost, days, machines)))
    explains(
        check.interval,
        (lambda cost, days, machines: 60 * interval(cost, days, machines), "is in seconds"),
        (lambda cost, days, machines: interval(cost, days, machines) / 2**0.5, "lacks the factor 2"),
        (lambda cost, days, machines: interval(cost, days, 1), "interval of a single machine"),
        (lambda cost, days, machines: interval(cost, days, 1 / machines), "More machines fail more often"),
        (lambda cost, days, machines: math.sqrt(2 * cost * days * 1440 / machines), "mixes seconds and minutes"),
        (lambda cost, days, machines: interval(cost, days, machines) - cost / 60, "leaves out the time of saving"),
        (lambda cost, days, machines: interval(cost, days, machines) ** 2, "without the root"),
        (lambda cost, days, machines: interval(cost, days / 24, machines), "takes a day for an hour"),
    )


C10D = ["--rdzv-backend", "c10d", "--rdzv-id", "1", "--rdzv-endpoint", "node-1:29400"]
SIZE = ["--nnodes=2", "--nproc-per-node=8", "--max-restarts=2"]


def static(node, **changes):
    words = {"node-rank": int(node[-1]) - 1, "master-addr": "node-1", "master-port": 29400} | changes
    return [*SIZE, *[f"--{name.replace('_', '-')}={value}" for name, value in words.items()], "train.py"]


def test_arguments(capsys):
    assert check.arguments(lambda node: [*SIZE, *C10D, "train.py"])
    assert check.arguments(static)
    others = ["--nnodes=2:2", "--nproc-per-node=gpu", "--max-restarts=3"]
    assert check.arguments(lambda node: [*others, *C10D, "train.py"])
    assert check.arguments(
        lambda node: (*SIZE[:1], "--nproc_per_node=auto", *SIZE[2:], *C10D[:-1], "node-1", "train.py")
    )
    point = ["--rdzv-backend=static", "--rdzv-endpoint=node-1:29400"]
    assert check.arguments(lambda node: [*SIZE, *point, "--node-rank", str(int(node[-1]) - 1), "train.py"])
    explains(
        check.arguments,
        (lambda node: "--nnodes 2 train.py", "is not a list of strings"),
        (lambda node: ["--nnodes", 2], "Write numbers as strings"),
        (lambda node: ["--nnodes 2", "train.py"], "one word with a space"),
        (lambda node: ["--nodes", "2", "train.py"], "torchrun does not understand"),
        (lambda node: ["--nproc-per-node=8", *C10D, "train.py"], "It is the number of machines"),
        (lambda node: ["--nnodes=2", "--nproc-per-node=16", *C10D, "train.py"], "each of the 8 GPUs"),
        (lambda node: [*SIZE, "--standalone", "train.py"], "meet nobody"),
        (lambda node: [*SIZE[:2], *C10D, "train.py"], "must survive 2 failures"),
        (lambda node: [*SIZE, *C10D[:-1], f"{node}:29400", "train.py"], "--rdzv-endpoint is node-2:29400"),
        (lambda node: [*SIZE, *C10D, "--rdzv-id", node, "train.py"], "so they do not meet"),
        (lambda node: [*SIZE, *C10D[:2], "train.py"], "--rdzv-endpoint is missing"),
        (lambda node: ["torchrun", *SIZE, *C10D, "train.py"], "begins with 'torchrun'"),
        (lambda node: static("node-1"), "It should be 1"),
        (lambda node: static(node, master_addr=node), "meet at node-2:29400"),
        (lambda node: [f"--rdzv-endpoint={node}:29400", *static(node)], "--rdzv-endpoint is node-2:29400"),
        (lambda node: [*SIZE, *C10D, "-m", "train.py"], "asks for a module"),
        (lambda node: [*SIZE, *C10D, "--no-python", "train.py"], "without Python"),
        (lambda node: [*SIZE, *C10D, "drill.py"], "not 'train.py'"),
    )


# ---- the helpers and the programs


def torchrun(program, *arguments):
    return [
        *TORCHRUN,
        "--standalone",
        "--nproc-per-node",
        "1",
        "--no-python",
        sys.executable,
        "-uc",
        program,
        *arguments,
    ]


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_an_interrupted_cell_leaves_no_host_no_rank_and_no_file(tmp_path, monkeypatch):
    """Ctrl-C while two hosts run. One rank ignores SIGTERM, and the other has started a process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ranks = {
        "a": "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); pid = os.getpid()",
        "b": "import subprocess; pid = subprocess.Popen(['sleep', '600']).pid",
    }
    say = "import sys, time; open(sys.argv[1], 'w').write(str(pid))"

    def interrupt():
        while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in ranks):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    hosts = {name: torchrun(f"{does}; {say}; time.sleep(600)", tmp_path / name) for name, does in ranks.items()}
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_hosts(hosts, leave_s=0.3)
    for name in ranks:
        with pytest.raises(ProcessLookupError):
            wait_until_gone(int((tmp_path / name).read_text()))
    assert {path.name for path in tmp_path.iterdir()} == set(ranks)


def wait_until_gone(pid):
    """Raises ProcessLookupError when it has ended, also if nobody has asked for its exit code."""
    for _ in range(500):
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                raise ProcessLookupError
        time.sleep(0.01)


def test_hosts_that_take_too_long_end_with_what_they_said():
    with pytest.raises(TimeoutError, match="not done within 5 s(.|\n)*host A:(.|\n)*here"):
        run_hosts({"A": torchrun("import time; print('here'); time.sleep(60)")}, timeout=5)
    with pytest.raises(ValueError, match="must begin with"):
        run_hosts({"A": ["true"]})


def test_a_dry_run_of_the_job_array():
    done = subprocess.run(
        ["bash", str(SCRIPTS / "dry_run.sh"), str(SCRIPTS / "train_array.slurm"), "--epochs", "1"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[::3] == [f"task {task}" for task in range(4)], done
    program = "    python notebooks/scripts/one_gpu.py"
    sizes = enumerate((32, 64, 128, 256))
    words = [f"{program} --batch-size {size} --checkpoint run/4042-{task}.pt --epochs 1" for task, size in sizes]
    assert lines[2::3] == words


def test_two_hosts_have_networks_of_their_own_and_leave_none_behind():
    command = "echo $NODE; cat /proc/net/dev | grep -c eth0; exec sleep $((60 * (1 - NODE)))"
    done = subprocess.Popen(["bash", str(SCRIPTS / "two_hosts.sh"), command], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        lines = sorted(done.stdout.readline() for _ in range(4))
        if lines == [""] * 4:
            pytest.skip(done.stderr.read())
        assert lines == ["0\n", "1\n", "1\n", "1\n"]
        inside = descendants(done.pid)
    finally:
        done.terminate()
    done.wait(30)
    for pid in inside:
        with pytest.raises(ProcessLookupError):
            wait_until_gone(pid)
