"""The programs in notebooks/scripts: alone, with python and torchrun, interrupted, and under SLURM; equal losses."""

import ast
import html
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.functional import cross_entropy
from virtual_gpus import virtual_gpus

from helpers.show import show_diff
from tests.programs import ROOT, SCRIPTS, in_ranks, killed_before_it_names, printed, set_rank, torchrun, write_images

ON_SEVERAL_GPUS = ["data_parallel", "parallel_loss", "model_parallel", "pipeline"]
SHARDED = ["fsdp", "tensor_parallel", "pipeline_ranks"]
PROGRAMS = ["one_gpu", "ddp", *ON_SEVERAL_GPUS, *SHARDED]
BATCH = 8
# Neither is a multiple of the batch size: 6 steps per epoch. Of two processes, one has 9 test images, which make three
# batches of 4, and the other has 8.
TRAIN, TEST = 50, 17


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The first images of the bundled files, in the same format."""
    return write_images(tmp_path_factory.mktemp("data"), TRAIN, TEST)


def execute(name, *arguments):
    """Runs a program in this process and returns the lines that it prints."""
    return lines(printed(name, *arguments))


@pytest.fixture(scope="module")
def run(data):
    """`run("one_gpu", "--epochs", 2)` with the small data."""
    return lambda name, *arguments: execute(name, *small(data), *arguments)


@pytest.fixture(scope="module")
def reference(run, tmp_path_factory):
    """What one_gpu.py prints on the CPU in two epochs, and its checkpoint."""
    path = tmp_path_factory.mktemp("reference") / "last.pt"
    return run("one_gpu", "--epochs", 2, "--checkpoint", path), path


def small(data):
    return ["--data", data, "--batch-size", BATCH, "--workers", 0]


def lines(output):
    return [line for line in output.splitlines() if line.startswith(("epoch", "gpus", "No checkpoint"))]


def close(printed, expected):
    """Whether lines are equal, except for the last digit of a loss."""
    one, other = ([re.findall(r"[\d.]+", line) for line in each] for each in (printed, expected))
    one, other = np.array(one, float), np.array(other, float)
    return one.shape == other.shape and np.allclose(one, other, rtol=0, atol=0.0011)


def same_state(one, other):
    """Whether two checkpoints have the same keys, epochs, weights and momenta, up to rounding error."""
    torch.testing.assert_close(read(one), read(other), rtol=0, atol=1e-5)
    return True


def read(path):
    if path.is_dir():
        path, shards = path.with_suffix(".pt"), path
        dcp_to_torch_save(shards, path)
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    momenta = checkpoint["optimizer"]["state"]
    if 0 in momenta:  # in the order of the weights, and those of sharded checkpoints with the same names
        momenta = dict(zip(checkpoint["model"], momenta.values(), strict=True))
    return dict(checkpoint["model"]), momenta, checkpoint["epoch"]


def test_programs_continue_from_each_others_checkpoints(run, monkeypatch, tmp_path):
    """Each trains one more epoch as one_gpu.py does, elsewhere. ddp.py is rank 0, but its machine's second process."""
    monkeypatch.chdir(tmp_path)
    set_rank(monkeypatch, local_rank=1)
    used = {"one_gpu": [True, False], "ddp": [False, True]}
    continued = []
    for epoch, name in enumerate(["one_gpu", *ON_SEVERAL_GPUS, "ddp", "one_gpu"], 1):
        expected = run("one_gpu", "--epochs", epoch, "--checkpoint", "alone.pt")
        with virtual_gpus(2):
            assert close(run(name, "--epochs", 1), continued[:1] or expected), name
            continued += run(name, "--epochs", epoch, "--checkpoint", "run/last.pt")
            assert [torch.cuda.max_memory_allocated(gpu) > 0 for gpu in range(2)] == used.get(name, [True, True])
        assert len(continued) == epoch and close(continued[-1:], expected), name
        same_state(tmp_path / "run" / "last.pt", tmp_path / "alone.pt")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["last.pt"]
    losses = [float(line.split()[4]) for line in continued]
    assert losses[-1] < 0.9 * losses[0]


def test_sharded_programs_continue_with_another_number_of_processes(run, data, reference, monkeypatch, tmp_path):
    """From another folder. A process that had fewer batches than others would leave them waiting for its weights."""
    monkeypatch.chdir(tmp_path)
    said = []
    with virtual_gpus(4):
        for epochs, (count, name) in enumerate([(2, "fsdp"), (4, "tensor_parallel"), (2, "pipeline_ranks")], 1):
            options = [*small(data), "--checkpoint", "run", "--epochs", epochs]
            said += lines("".join(in_ranks(count, tmp_path, SCRIPTS / f"{name}.py", *options)))
            if epochs == 2:
                assert same_state(tmp_path / "run" / "epoch_0001", reference[1])
    assert close(said, run("one_gpu", "--epochs", 3)) and len(said) == 3
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()] == ["epoch_0002"]


def test_max_steps_stops_early_and_leaves_the_checkpoint_of_the_last_complete_epoch(run, reference, tmp_path):
    path = tmp_path / "last.pt"
    *stopped, said = run("one_gpu", "--epochs", 3, "--max-steps", 8, "--checkpoint", path)
    assert close(stopped[:1], reference[0][:1]) and len(stopped) == 2
    assert said == "No checkpoint: --max-steps ended the program within an epoch."
    assert torch.load(path, weights_only=True)["epoch"] == 0
    assert close(run("one_gpu", "--epochs", 2, "--checkpoint", path), reference[0][1:])


@pytest.mark.parametrize("error", [KeyboardInterrupt("killed"), RuntimeError("unexpected pos 6272 vs 6224")])
def test_a_killed_program_or_a_full_disk_leaves_the_old_checkpoint_intact(error, run, monkeypatch, tmp_path):
    path = tmp_path / "last.pt"
    run("one_gpu", "--epochs", 1, "--checkpoint", path)
    before = path.read_bytes()

    def write_half(content, file):
        file.write_bytes(before[: len(before) // 2])
        raise error

    monkeypatch.setattr(torch, "save", write_half)
    with pytest.raises((KeyboardInterrupt, SystemExit), match=r"killed|Could not save .*last\.pt\. .* unexpected pos"):
        run("one_gpu", "--epochs", 2, "--checkpoint", path)
    assert path.read_bytes() == before
    assert type(error) is KeyboardInterrupt or [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_a_killed_fsdp_leaves_the_old_checkpoints_intact(run, reference, monkeypatch, tmp_path):
    """Killed when its second checkpoint has no name yet. It runs as rank 0 of 1, but second process of its machine."""
    set_rank(monkeypatch, local_rank=1)
    options = ["fsdp", "--epochs", 2, "--checkpoint", tmp_path]
    with virtual_gpus(2):
        with killed_before_it_names("epoch_0001"):
            run(*options)
        torch.distributed.destroy_process_group()
        assert {path.name for path in tmp_path.iterdir()} == {"epoch_0000", "temporary"}
        assert close(run(*options), reference[0][1:])
        assert torch.cuda.max_memory_allocated(1) > torch.cuda.max_memory_allocated(0) == 0  # LOCAL_RANK's
    assert {path.name for path in tmp_path.iterdir()} == {"epoch_0001"}
    assert same_state(tmp_path / "epoch_0001", reference[1])


def test_a_folder_that_nobody_may_write_and_an_incomplete_group_are_named(run, monkeypatch, tmp_path):
    set_rank(monkeypatch)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(SystemExit, match=r"Could not save to .*file\. Is there space"):
        run("fsdp", "--epochs", 1, "--checkpoint", tmp_path / "file")
    torch.distributed.destroy_process_group()
    with pytest.raises(SystemExit, match="1 processes must form groups of --tensor-parallel"):
        run("tensor_parallel")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", PROGRAMS)
def test_they_say_which_folder_gpus_or_launcher_they_want(name, run, monkeypatch, capsys):
    set_rank(monkeypatch)
    with pytest.raises(SystemExit):
        execute(name, "--data", "/nowhere")
    assert "/nowhere contains no folder FashionMNIST/raw. Give --data the folder that does." in capsys.readouterr().err
    monkeypatch.delenv("RANK")
    needed = r"Start this program with torchrun: torchrun --standalone --nproc-per-node 2"
    if name in ON_SEVERAL_GPUS:
        needed = r"This program needs 2 GPUs\. To use virtual ones: python -m virtual_gpus --gpus 2"
    if name != "one_gpu":
        with virtual_gpus(1), pytest.raises(SystemExit, match=rf"{needed} .*{name}\.py"):
            run(name)


def test_from_another_folder_with_the_bundled_images_and_workers(tmp_path):
    """In a process of its own, because the workers are forks: pytest's process may have threads, which forks lose."""
    words = [sys.executable, "-m", "virtual_gpus", "--gpus", "2", SCRIPTS / "data_parallel.py", "--max-steps", "2"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    line = r"epoch 0 \| loss 2\.\d{3} \| test loss 2\.\d{3} \| accuracy \d+\.\d%\n"
    assert done.returncode == 0 and re.fullmatch(line, done.stdout), done.stdout + done.stderr


def test_ranks_of_ddp_continue_without_a_shared_disk(run, data, reference, monkeypatch, tmp_path):
    """Each has a folder of its own, only that of rank 0 has the checkpoint, and each draws numbers of its own."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("0"), os.mkdir("1")
    run("one_gpu", "--epochs", 1, "--checkpoint", "0/last.pt")
    options = [*small(data), "--epochs", 2, "--checkpoint", "last.pt"]
    with virtual_gpus(2):
        said = "".join(in_ranks(2, tmp_path, SCRIPTS / "ddp.py", *options))
    assert close(lines(said), reference[0][1:]) and not os.listdir("1")
    assert len(set(re.findall("random .*", said))) == 2


# A program, but rank 0 is killed in its eighth step, the second one of epoch 1. When it is started again it comes late,
# so that rank 1 would find the address of the killed process in a store that torchrun has kept.
KILLED = """
import os, runpy, signal, sys, time
from torch.optim.optimizer import register_optimizer_step_pre_hook

place, steps = (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]), iter(range(8))

def killed(optimizer, *_):
    if next(steps) == 7:
        os.kill(os.getpid(), signal.SIGKILL)

if place == ("0", "0"):
    register_optimizer_step_pre_hook(killed)
elif place[0] == "0":
    time.sleep(3)
sys.argv[0] = os.environ["PROGRAM"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.outside  # 19 s each
@pytest.mark.parametrize("name, saved", [("ddp", "last.pt"), ("fsdp", "last.pt/epoch_0001")])
def test_torchrun_starts_a_killed_process_again_as_in_the_slurm_files(name, saved, data, reference, tmp_path):
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    words = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 1, program, *small(data), "--epochs", 2]
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PROGRAM": str(SCRIPTS / f"{name}.py")}
    with torchrun(*words, "--checkpoint", tmp_path / "last.pt", log=tmp_path / "log", environment=settings) as program:
        output = program.wait()
    assert "exitcode: -9" in output or "Signal 9" in output, output
    assert close(lines(output), reference[0])
    assert same_state(tmp_path / saved, reference[1])


def dry_run(folder, job, *arguments):
    (folder / "job.slurm").write_text("#!/bin/bash\n" + job)
    words = ["bash", str(SCRIPTS / "dry_run.sh"), str(folder / "job.slurm"), *arguments]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=60)
    return done.returncode, done.stdout + done.stderr


TO_DDP = "notebooks/scripts/ddp.py --checkpoint run/4042.pt --epochs 3"


@pytest.mark.parametrize(
    "file, count, words",
    [
        ("train_one_node", 1, f"torchrun --standalone --nproc-per-node 4 --max-restarts 3 {TO_DDP}"),
        ("train_many_nodes", 2, "torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 3 --rdzv-backend c10d "
                                f"--rdzv-id 4042 --rdzv-endpoint node-1:29542 {TO_DDP}"),
        ("scaling", 3 * 4, "torchrun --nnodes 4 --nproc-per-node 4 --rdzv-backend c10d --rdzv-id 4042-4-4"),
    ],
)  # fmt: skip
def test_a_dry_run_of_the_slurm_files(tmp_path, file, count, words):
    job = (SCRIPTS / f"{file}.slurm").read_text()
    said = 'echo "threads ${OMP_NUM_THREADS:-} share ${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-}"\n'
    code, output = dry_run(tmp_path, job + said, "--epochs", "3")
    assert code == 0 and output.count(words) == count and "is not here" not in output, output
    assert ("threads 4 share 1" in output) == (file != "scaling")


@pytest.mark.parametrize(
    "job, code, words",
    [
        ("#SBATCH -N 2\n#SBATCH --gres=gpu:4\nsrun torchrun --nproc-per-node $SLURM_GPUS_ON_NODE x.py", 0, "node-2:"),
        ("#SBATCH -N2 --gres=gpu:a100:4\nsrun torchrun -n $SLURM_GPUS_ON_NODE x.py", 0, "node-2:\n    torchrun -n 4"),
        ("#SBATCH --nodes 3\nsrun --nodes=1 --label -w node-3 python x.py", 0, "node-3:\n    python x.py"),
        ("#SBATCH -N 2\nsrun bash -c 'torchrun --node-rank $SLURM_NODEID x.py'", 0, "torchrun --node-rank 1 x.py"),
        ("#SBATCH -N 2\n#SBATCH --ntasks-per-node=2\nsrun ./train.sh", 0, "node-2:\n    ./train.sh\n    ./train.sh"),
        ("#SBATCH --array=1,4-6:2\nsrun python x.py $SLURM_ARRAY_TASK_ID", 0, "task 6\nnode-1:\n    python x.py 6"),
        ("module load cuda\ntorchrun x.py", 0, "x.py is not here. Call sbatch from"),
        ("srun python x.py --cores $SLURM_CPUS_PER_TASK", 0, "the file uses SLURM_CPUS_PER_TASK, which"),
        ("#SBATCH -N 1\necho hello", 1, "Nothing was started"),
        ("if true", 2, "syntax error"),
        ("srun --immediate", 1, "srun: no command"),
    ],
)
def test_a_dry_run_reads_job_files_of_others(tmp_path, job, code, words):
    found, output = dry_run(tmp_path, job + "\n")
    assert found == code and words in output, output


def test_the_drill_notices_a_rank_that_hangs_before_the_first_step(tmp_path):
    with pytest.raises(mp.ProcessExitedException):
        in_ranks(2, tmp_path, SCRIPTS / "drill.py", "--steps", 2, "--patience", 5, "--fail", "hang", 1, 0)
    said = "".join(log.read_text() for log in tmp_path.glob("rank_*.log"))
    assert "Timeout (0:00:05)!" in said and "in fail" in said


def test_scaling_prints_a_line(tmp_path):
    options = ["--model", "small", "--steps", 3, "--per-gpu", "--batch-size", 2]
    with virtual_gpus(2, shapes_only=True):
        (line,) = lines("".join(in_ranks(2, tmp_path, SCRIPTS / "scaling.py", *options)))
    assert re.fullmatch(r"gpus=2 batch=4 step_ms=\d+\.\d least_ms=\d+\.\d most_ms=\d+\.\d", line)


def test_scaling_measures_llama_1b_and_its_batch_fits_one_h100():
    program = runpy.run_path(str(SCRIPTS / "scaling.py"))
    with virtual_gpus(1, kind="H100", shapes_only=True) as gpus:
        with gpus[0]:
            model = program["build"]("1b")
        assert sum(parameter.numel() for parameter in model.parameters()) == 1_235_814_400
        optimizer = torch.optim.AdamW(model.parameters())
        for sequences in (16, 16):
            tokens = torch.zeros(sequences, 1024, dtype=torch.long, device=gpus[0])
            cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.cuda.max_memory_allocated() / 2**30 == pytest.approx(41, abs=1)  # as scaling.slurm says


OTHERS = ["scaling", "drill", "who", "fragmentation", "train_llama", "context_parallel", "experts"]
OTHERS += ["all_reduce", "count_graphs"]


@pytest.mark.parametrize("name", [*PROGRAMS, *OTHERS])
def test_they_import_only_pytorch_and_the_standard_library(name):
    tree = ast.parse((SCRIPTS / f"{name}.py").read_text(encoding="utf-8"))
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    roots = {module.split(".")[0] for module in modules}
    assert roots <= {"torch", "torchvision", *sys.stdlib_module_names}


# A program, its neighbour, and by how many lines they may differ.
NEIGHBOURS = (
    "one_gpu data_parallel 10, one_gpu ddp 45, one_gpu model_parallel 15, data_parallel parallel_loss 25, "
    "model_parallel pipeline 10, ddp fsdp 40, fsdp tensor_parallel 20, fsdp pipeline_ranks 40"
)


@pytest.mark.parametrize("pair", NEIGHBOURS.split(", "))
def test_neighbours_are_short_and_differ_in_few_lines(pair):
    one, other, most = pair.split()
    shown = show_diff(*(SCRIPTS / f"{name}.py" for name in (one, other)))
    whole = (SCRIPTS / f"{other}.py").read_text(encoding="utf-8").splitlines()
    assert len(whole) <= 180 and whole[0] not in repr(shown)
    assert 0 < len([line for line in shown.lines[2:] if line.startswith("+")]) <= int(most)
    assert html.unescape(re.sub("<[^>]*>", "", shown._repr_html_())) == f"{shown}\n"  # as GitHub shows it


def test_any_two_programs_are_compared_below_their_docstrings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("one.py").write_text("x = 1\nprint(x)\n")
    Path("two.py").write_text('"""Two\nlines."""\n\nx = 2\nprint(x)\n')
    assert str(show_diff("one.py", "two.py")).splitlines() == "--- one.py,+++ two.py,,-x = 1,+x = 2, print(x)".split(
        ","
    )
    with pytest.raises(FileNotFoundError, match=r"no program 'three\.py' in the folder .*\. Pass its path"):
        show_diff("one.py", "three.py")
