"""notebooks/scripts/train.py as learners start it: python, torchrun, two agents, two hosts, SLURM; and interrupted."""

import contextlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from virtual_gpus import virtual_gpus

from tests.ddp_jobs import largest_difference
from tests.programs import ROOT, SCRIPT, free_port, rank_processes, torchrun, until

JOB = ["--samples", 44, "--batch-size", 8, "--epochs", 2, "--warmup", 3, "--lr", 0.001]
DDP = [SCRIPT, "--method", "ddp", *JOB]
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def main(*arguments):
    """train.py in this process."""
    return runpy.run_path(str(SCRIPT))["main"]([str(argument) for argument in arguments])


def weights(path):
    return list(torch.load(path, map_location="cpu", weights_only=True)["model"].values())


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def lines(output):
    """Log lines and score."""
    return [line for line in output.splitlines() if " | loss" in line or line.startswith("test data")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Two ranks on the CPU under torchrun: the checkpoint, and what was printed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with torchrun(
        "--standalone", "--nproc-per-node", 2, *DDP, "--checkpoint", folder / "last.pt", log=folder / "log"
    ) as run:
        return folder / "last.pt", run.wait()


def test_two_ranks_under_torchrun(undisturbed):
    path, output = undisturbed
    assert [re.sub(r"loss.*", "", line) for line in lines(output)] == [
        "[2 x cpu] epoch 0 | batch 8 | steps 6 | lr 1.0e-04 | ",
        "[2 x cpu] epoch 1 | batch 8 | steps 6 | lr 1.0e-03 | ",
        "test data: ",
    ]
    assert torch.load(path, weights_only=True)["epoch"] == 1


def test_one_process_and_data_parallel_train_the_same(undisturbed, tmp_path, capsys):
    path, output = undisturbed
    main("--method", "single", *JOB, "--checkpoint", tmp_path / "single.pt")
    with virtual_gpus(2):
        main("--method", "dp", *JOB, "--checkpoint", tmp_path / "dp.pt")
    main("--method", "single", *JOB, "--accumulate", 2, "--checkpoint", tmp_path / "accumulated.pt")
    for name in ("single", "dp", "accumulated"):
        assert largest_difference(weights(tmp_path / f"{name}.pt"), weights(path)) < 1e-4
    said = capsys.readouterr().out
    assert "[cpu] epoch 1" in said and "[cuda:0-1] epoch 1" in said and "rank 0: at most" in said
    results = [re.search(r"loss .*", line)[0] for line in lines(said)]
    assert results == [re.search(r"loss .*", line)[0] for line in lines(output)] * 3


def test_bert_and_going_on_where_it_stopped(tmp_path, capsys):
    job = ["--model", "bert", "--samples", 32, "--batch-size", 8]
    main(*job, "--epochs", 2, "--checkpoint", tmp_path / "once.pt")
    main(*job, "--epochs", 1, "--checkpoint", tmp_path / "twice.pt")
    main(*job, "--epochs", 2, "--checkpoint", tmp_path / "twice.pt")
    assert same(tmp_path / "once.pt", tmp_path / "twice.pt")
    assert "going on with epoch 1\n[cpu] epoch 1" in capsys.readouterr().out


def test_on_virtual_gpus_under_torchrun(tmp_path, undisturbed):
    start = ["--standalone", "--nproc-per-node", 2, "-m", "virtual_gpus", "--gpus", 2]
    with torchrun(*start, *DDP, "--checkpoint", tmp_path / "last.pt", log=tmp_path / "log") as run:
        output = run.wait()
    assert [line.replace("cuda", "cpu") for line in lines(output)] == lines(undisturbed[1])
    peaks = re.findall(r"rank (\d): at most (\d+) MiB on cuda:(\d)", output)
    assert [(rank, gpu) for rank, _, gpu in peaks] == [("0", "0"), ("1", "1")] and len(
        {peak for _, peak, _ in peaks}
    ) == 1
    assert largest_difference(weights(tmp_path / "last.pt"), weights(undisturbed[0])) < 1e-4


def test_two_agents_on_one_machine(tmp_path, undisturbed):
    start = ["--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-id", "job"]
    start += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", *DDP, "--checkpoint", tmp_path / "last.pt"]
    with torchrun(*start, log=tmp_path / "a") as one, torchrun(*start, log=tmp_path / "b") as other:
        outputs = [one.wait(), other.wait()]
    assert sorted(map(lines, outputs)) == [[], lines(undisturbed[1])]
    assert same(tmp_path / "last.pt", undisturbed[0])


# ------------------------------------------------------------------------------------------- interrupted


# train.py, but rank 0 stops in its eighth step, the second one of epoch 1: else it might be done before it is killed.
STOPS = f"""
import os, pathlib, runpy, sys, time
from torch import nn

class Stopping(nn.CrossEntropyLoss):
    left = 8

    def forward(self, *given):
        Stopping.left -= 1
        if Stopping.left == 0:
            pathlib.Path(os.environ["STOPPED"]).touch()
            time.sleep(600)
        return super().forward(*given)

if os.environ["RANK"] == os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    nn.CrossEntropyLoss = Stopping
sys.argv[0] = {str(SCRIPT)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@linux
def test_a_worker_killed_in_mid_epoch_is_started_again_and_ends_with_the_same_weights(tmp_path, undisturbed):
    """Rank 0, which writes the checkpoints, in the second step of the second epoch."""
    path, program, stopped = tmp_path / "last.pt", tmp_path / "stops.py", tmp_path / "stopped"
    program.write_text(STOPS)
    start = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 1, program]
    start += [*DDP[1:], "--checkpoint", path]
    with torchrun(*start, log=tmp_path / "log", environment={"STOPPED": str(stopped)}) as run:
        until(stopped.exists)
        killed = rank_processes(run.process.pid)[0]
        os.kill(killed, signal.SIGKILL)
        output = run.wait()
    assert "exitcode: -9" in output or "Signal 9" in output, output
    assert "going on with epoch 1" in output, output
    assert same(path, undisturbed[0])
    assert lines(output)[-1] == lines(undisturbed[1])[-1]
    assert not rank_processes(run.process.pid) and not list(tmp_path.glob(".*.tmp"))


# ------------------------------------------------------------------------------------------------ two hosts


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


class TwoHosts:
    """Two network namespaces, each with a name of its own, joined by a cable (a veth pair). Linux, as root."""

    def __init__(self):
        if shutil.which("ip") is None or shutil.which("unshare") is None:
            pytest.skip("two hosts need the programs ip (iproute2) and unshare (util-linux)")
        mark = f"{os.getpid() % 100000}"
        self.names = [f"node-a-{mark}", f"node-b-{mark}"]
        self.cables = [f"va{mark}", f"vb{mark}"]
        self.addresses = ["10.231.77.1", "10.231.77.2"]

    def __enter__(self):
        try:
            for name in self.names:
                ip("netns", "add", name)
            ip("link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
            for name, cable, address in zip(self.names, self.cables, self.addresses, strict=True):
                ip("link", "set", cable, "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
                ip("-n", name, "link", "set", cable, "up")
                ip("-n", name, "link", "set", "lo", "up")
                self._tell_names(name)
        except (OSError, subprocess.SubprocessError) as error:
            self.__exit__()
            told = getattr(error, "stderr", "") or error
            pytest.skip(f"two hosts need the right to make network namespaces: {told}".strip())
        return self

    def _tell_names(self, name):
        """`ip netns exec` puts the files of this folder in the place of those in /etc."""
        folder = Path("/etc/netns") / name
        folder.mkdir(parents=True)
        known = zip(["127.0.0.1", *self.addresses], ["localhost", *self.names], strict=True)
        (folder / "hosts").write_text("".join(f"{address} {host}\n" for address, host in known))

    def __exit__(self, *error):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # not there, or not empty: then it is not this test's
            Path("/etc/netns").rmdir()

    def on(self, host):
        """The words before a command that make it run there."""
        rename = 'hostname "$0"; exec "$@"'
        return ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "sh", "-c", rename, self.names[host]]

    def sent(self, host):
        """Bytes that went out over the cable."""
        said = subprocess.run(
            ["ip", "netns", "exec", self.names[host], "cat", f"/sys/class/net/{self.cables[host]}/statistics/tx_bytes"],
            check=True,
            capture_output=True,
            text=True,
        )
        return int(said.stdout)


@linux
def test_two_real_hosts(tmp_path, undisturbed):
    """As on two machines: each has a name, an address and a loopback of its own, and only the cable between them."""
    with TwoHosts() as hosts:
        start = ["--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-id", "job"]
        start += ["--rdzv-endpoint", f"{hosts.names[0]}:29500", *DDP, "--checkpoint", tmp_path / "last.pt"]
        runs = [
            torchrun(
                *start,
                log=tmp_path / hosts.names[host],
                environment={"GLOO_SOCKET_IFNAME": hosts.cables[host]},
                before=hosts.on(host),
            )
            for host in range(2)
        ]
        with runs[0], runs[1]:
            outputs = [run.wait() for run in runs]
        sent = [hosts.sent(host) for host in range(2)]
    assert sorted(map(lines, outputs)) == [[], lines(undisturbed[1])]
    assert same(tmp_path / "last.pt", undisturbed[0])
    # Of two ranks each sends half of its gradients twice in each of the 12 steps.
    gradients = 4 * sum(weight.numel() for weight in weights(undisturbed[0]))
    assert all(12 * gradients < count < 14 * gradients for count in sent), [count / gradients for count in sent]


# ---------------------------------------------------------------------------------------------------- SLURM


@pytest.mark.parametrize("file, nodes", [("train_one_node.slurm", 1), ("train_many_nodes.slurm", 2)])
def test_the_slurm_files(tmp_path, file, nodes):
    """Run by bash, with stand-ins for srun and scontrol, and a torchrun that says what it was called with."""
    said = 'printf "%s\\n" "threads $OMP_NUM_THREADS" "$@"'
    for name, does in {
        "srun": '"$@"',
        "scontrol": '[ "$*" = "show hostnames node-[a-b]" ] && printf "node-a\\nnode-b\\n"',
        "torchrun": said,
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    settings = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4042",
        "SLURM_NNODES": str(nodes),
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "16",
        "SLURM_JOB_NODELIST": "node-[a-b]",
    }
    slurm = SCRIPT.with_name(file)
    done = subprocess.run(
        ["bash", str(slurm), "--epochs", "3"], capture_output=True, text=True, env=settings, cwd=ROOT, timeout=30
    )
    assert done.returncode == 0, done.stderr
    where = {
        1: ["--standalone"],
        2: ["--rdzv-backend", "c10d", "--rdzv-id", "4042", "--rdzv-endpoint", "node-a:29542"],
    }[nodes]
    words = done.stdout.splitlines()
    assert words[0] == "threads 4" and "--nproc-per-node 4" in " ".join(words)
    assert " ".join(where) in " ".join(words) and (nodes == 1 or "--nnodes 2" in " ".join(words))
    script = words.index("notebooks/scripts/train.py")
    assert (ROOT / words[script]).exists()
    assert words[script + 1 :] == ["--method", "ddp", "--checkpoint", "run/4042.pt", "--epochs", "3"]
    asked = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", slurm.read_text(), re.MULTILINE)
    assert {"nodes": str(nodes), "ntasks-per-node": "1", "gpus-per-node": "4"}.items() <= dict(asked).items()


# ------------------------------------------------------------------------------------------- what is refused


def refused(*arguments, environment=None):
    environment = {**os.environ, **(environment or {})}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        main(*arguments)


def test_bad_arguments(capsys):
    with pytest.raises(SystemExit):
        refused("--method", "single", environment={"WORLD_SIZE": "2"})
    assert "--method single is one process: start it with python, or add --method ddp" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main("--batch-size", 9, "--accumulate", 2)
    assert "a batch of 9 cannot be accumulated in 2 equal pieces" in capsys.readouterr().err
    with pytest.raises(
        RuntimeError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set.*Start it with torchrun"
    ):
        main("--method", "ddp")
