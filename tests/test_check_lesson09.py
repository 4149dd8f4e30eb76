"""The checks of lesson 09; and its helpers."""

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from types import SimpleNamespace

import psutil
import pytest
import torch
from virtual_gpus.testing import hosts
from virtual_gpus.testing.hosts import TORCHRUN, run_hosts

from notebooks.checks import lesson09 as check
from tests.check_answers import STRANGE, Answers, answers_test, copied, from_a_buffer, into_an_open_file, stored
from tests.programs import SCRIPTS, until


def own(report):
    return report["error"] and "Connection" not in report["error"] and "Timed" not in report["error"]


def killed(report):
    return report["exit_code"] == -9 and not report["waits_in"]


def silent(report):
    return not report["error"] and not report["waits_in"]


def first(*tests):
    """Names the first rank that passes the first test, else the second, and so on."""

    def answer(reports):
        return next((rank for test in tests for rank, report in enumerate(reports) if test(report)), None)

    return answer


guilty = first(own, killed, silent)
LISTED = ("IndexError", "OutOfMemory", "shapes", "ValueError")  # what check.REPORTS shows
GUILTY = Answers(
    check.guilty,
    right=[
        guilty,
        lambda reports: torch.tensor(guilty(reports)),
        first(lambda report: report["error"] and not report["waits_in"], killed, silent),
    ],
    wrong=[
        (lambda reports: 0, "another rank did not answer"),
        (first(lambda report: report["error"] == ""), "still running when torchrun ended it"),
        (first(lambda report: "Index" in report["error"] or report["exit_code"] == -15), "exit code does SIGKILL"),
        (lambda reports: len(reports), "The ranks are 0 to 3"),
        (first(lambda report: "Runtime" not in report["error"] and not report["waits_in"]), "has an error of its own?"),
        (first(lambda report: any(word in report["error"] for word in LISTED), killed, silent),
         "After a crash with \"KeyError: 'labels'\", your function returns None"),
        (first(own, silent), "may just have been computing. Which exit code"),
        (first(own, lambda report: report["exit_code"] == -9, silent), "waited for no other"),
        (first(lambda report: own(report) or "Timed" in report["error"], killed, silent), "none was killed"),
    ],
)  # fmt: skip


def elsewhere(state, final):
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, f"{folder}/unfinished")
        shutil.move(f"{folder}/unfinished", final)


def as_a_folder(state, final):
    temporary = final.with_name("unfinished")
    temporary.mkdir(exist_ok=True)
    torch.save(state, temporary / "state")
    temporary.rename(final)


def after_a_deletion(old, new):
    for each in sorted(new.parent.glob("step_*.pt"))[:-1]:
        each.unlink()
    os.replace(old, new)


WAYS = elsewhere, as_a_folder, after_a_deletion, copied, from_a_buffer, into_an_open_file
pair = stored(
    "09_many_machines", "save_solution", "load_solution", shutil=shutil, **{each.__name__: each for each in WAYS}
)
WRITE, ANY = "torch.save(state, temporary)\n    os.replace(temporary, ", "except Exception"
IN_PLACE, OLD, FILES, NAME = (WRITE, "torch.save(state, "), "old.unlink()", 'glob("step_*.pt")', 'f"step_{step:09}.pt"'
SNAPSHOTS = Answers(
    lambda pair: check.snapshots(*pair),
    right=[
        pair("torch.save(", "from_a_buffer(", "os.replace", "shutil.move"),
        pair("torch.save(", "into_an_open_file("),
        pair("unfinished.tmp", "unfinished.tmp.pt", "os.replace(temporary, ", "temporary.rename("),
        pair(WRITE, "as_a_folder(state, ", OLD, "shutil.rmtree(old)", "load(path", 'load(path / "state"'),
        pair("{step:09}", "{step}", FILES, f"{FILES}, key=os.path.getmtime"),
    ],
    wrong=[
        (pair(*IN_PLACE), ("reads what it left, ['step_000000015.pt']", "another ending")),
        (pair(*IN_PLACE, ANY, "except ZeroDivisionError"), "reads what it left"),
        (pair("unfinished.tmp", "last.tmp.pt", FILES, 'glob("*.pt"), key=os.path.getmtime'), "last.tmp.pt"),
        (pair("os.replace", "copied"), "does not rename a file"),
        (pair(WRITE, "elsewhere(state, "), ("is in another folder", "another disk")),
        (pair(ANY, "except ZeroDivisionError"), ("cut in half", "RuntimeError")),
        (pair(ANY, "except RuntimeError"), ("is empty", "EOFError")),
        (pair(ANY, "except (RuntimeError, OSError, EOFError)"), ("begins with zeros", "UnpicklingError")),
        (pair(*IN_PLACE, NAME, '"last.pt"', "step_*", "*"), ("last.pt was damaged or lost", "rename")),
        (pair("os.replace", "after_a_deletion", "[:-2]", "[:-9]"), ("just before it renamed", "only then delete")),
        (pair("{step:09}", "{step}"), "returns the state of step"),
        (pair("[:-2]", "[:-9]"), "Keep the two newest"),
        ((pair()[0], lambda folder: {}), "It should return None"),
        ((lambda folder, step, state: None, pair()[1]), "After the snapshot of step 5"),
    ],
    strange=[(answer, answer) for answer in STRANGE],
)
interval = stored("09_many_machines", "interval_solution")()
INTERVAL = Answers(
    check.interval,
    right=[interval, lambda *job: round(interval(*job))],
    wrong=[
        (lambda *job: 60 * interval(*job), "is in seconds"),
        (lambda *job: interval(*job) / 2**0.5, "lacks the factor 2"),
        (lambda cost, days, machines: interval(cost, days, 1), "interval of a single machine"),
        (lambda cost, days, machines: interval(cost, days, 1 / machines), "More machines fail more often"),
        (lambda cost, days, machines: math.sqrt(2 * cost * days * 1440 / machines), "mixes seconds and minutes"),
        (lambda cost, days, machines: interval(cost, days, machines) - cost / 60, "leaves out the time of saving"),
        (lambda *job: interval(*job) ** 2, "without the root"),
        (lambda cost, days, machines: interval(cost, days / 24, machines), "takes a day for an hour"),
    ],
)
C10D = ["--rdzv-backend", "c10d", "--rdzv-id", "1", "--rdzv-endpoint", "node-1:29400"]
SIZE = ["--nnodes=2", "--nproc-per-node=8", "--max-restarts=2"]


def words(*arguments, program="train.py"):
    """`arguments` of each node, with its name for {} and its number for #."""
    given = [*arguments, program]
    return lambda node: [word.replace("{}", node).replace("#", str(int(node[-1]) - 1)) for word in given]


STATIC = [*SIZE, "--node-rank=#", "--master-addr=node-1", "--master-port=29400"]
ARGUMENTS = Answers(
    check.arguments,
    right=[
        words(*SIZE, *C10D),
        words(*STATIC),
        words(*SIZE, "--rdzv-backend=static", "--rdzv-endpoint=node-1:29400", "--node-rank", "#"),
        lambda node: tuple(words("--nnodes=2:2", "--nproc_per_node=gpu", SIZE[2], *C10D[:-1], "node-1")(node)),
    ],
    wrong=[
        (lambda node: "--nnodes 2 train.py", "is not a list of strings"),
        (lambda node: ["--nnodes", 2], "Write numbers as strings"),
        (words("--nnodes 2"), "one word with a space"),
        (words("--nodes", "2"), "torchrun does not understand"),
        (words("--nproc-per-node=8", *C10D), "It is the number of machines"),
        (words("--nnodes=2", "--nproc-per-node=16", *C10D), "each of the 8 GPUs"),
        (words(*SIZE, "--standalone"), "meet nobody"),
        (words(*SIZE[:2], *C10D), "must survive 2 failures"),
        (words(*SIZE, *C10D[:-1], "{}:29400"), "--rdzv-endpoint is node-2:29400"),
        (words(*SIZE, *C10D, "--rdzv-id", "{}"), "so they do not meet"),
        (words(*SIZE, *C10D[:2]), "--rdzv-endpoint is missing"),
        (words("torchrun", *SIZE, *C10D), "begins with 'torchrun'"),
        (words(*SIZE, "--rdzv-backend=etcd", *C10D[2:]), "--rdzv-backend is etcd. Use c10d or static"),
        (words(*STATIC, "--node-rank=0"), "It should be 1"),
        (words(*STATIC, "--master-addr={}"), "meet at node-2:29400"),
        (words(*SIZE, *C10D, "-m"), "asks for a module"),
        (words(*SIZE, *C10D, "--no-python"), "without Python"),
        (words(*SIZE, *C10D, program="drill.py"), "not 'train.py'"),
    ],
)
test_answers = answers_test({"guilty": GUILTY, "snapshots": SNAPSHOTS, "interval": INTERVAL, "arguments": ARGUMENTS})


def torchrun(program, *arguments):
    words = ["--standalone", "--nproc-per-node", "1", "--no-python", sys.executable, "-uc", program, *arguments]
    return [*TORCHRUN, *words]


def gone(pid):
    """Whether it has ended, also if nobody has asked for its exit code."""
    try:
        return psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


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
        until(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in ranks))
        os.kill(os.getpid(), signal.SIGINT)

    commands = {name: torchrun(f"{does}; {say}; time.sleep(600)", tmp_path / name) for name, does in ranks.items()}
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_hosts(commands, leave_s=0.3)
    for name in ranks:
        until(lambda: gone((tmp_path / name).read_text()))  # noqa: B023
    assert {path.name for path in tmp_path.iterdir()} == set(ranks)


def test_hosts_that_take_too_long_end_with_what_they_said(tmp_path, monkeypatch):
    """The time is over when the rank has spoken, however long that takes."""
    said, started = tmp_path / "said", iter([1])
    monkeypatch.setattr(
        hosts, "time", SimpleNamespace(monotonic=lambda: next(started, None) or (until(said.exists) and 1000))
    )
    program = "import sys, time; print('here'); open(sys.argv[1], 'w'); time.sleep(600)"
    with pytest.raises(TimeoutError, match="not done within 5 s(.|\n)*host A:(.|\n)*here"):
        run_hosts({"A": torchrun(program, said)}, timeout=5)
    with pytest.raises(ValueError, match="must begin with"):
        run_hosts({"A": ["true"]})


def test_two_hosts_have_networks_of_their_own_and_leave_none_behind():
    command = "echo $NODE; cat /proc/net/dev | grep -c eth0; exec sleep $((60 * (1 - NODE)))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = subprocess.Popen(["bash", str(SCRIPTS / "two_hosts.sh"), command], **pipes)
    try:
        lines = sorted(done.stdout.readline() for _ in range(4))
        if lines == [""] * 4:
            pytest.skip(done.stderr.read())
        assert lines == ["0\n", "1\n", "1\n", "1\n"]
        inside = psutil.Process(done.pid).children(recursive=True)
    finally:
        done.terminate()
    done.wait(60)
    for process in inside:
        until(lambda: gone(process.pid))  # noqa: B023
