"""Train a small network with snapshots, and fail on request. A drill for a cluster, or for one machine without GPUs.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 drill.py --snapshot drill.pt \
        --fail raise 1 7 --fail kill 0 13 --fail hang 1 19

The first --fail happens in the first attempt, the second in the second, and so on. Each names what happens, on which
rank, and before which step. torchrun then starts all processes again, and they continue from the snapshot. The losses
are those of a run without failures, up to rounding error, also with another number of processes.

Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 as in train_one_node.slurm, so that restarts do not meet old addresses.
"""

import argparse
import faulthandler
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

SAMPLES, BATCH = 256, 32  # 8 steps in an epoch, on all ranks together
FAILURES = ("raise", "kill", "hang", "host")
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has no SIGKILL. There, SIGTERM ends a process at once.


def fail(kind, step):
    """Do what goes wrong on clusters. Called on the rank that is to fail."""
    if kind == "raise":
        raise ValueError(f"the sample of step {step} is not an image")
    if kind == "kill":  # as the system does when the machine's memory runs out
        os.kill(os.getpid(), KILL)
    if kind == "hang":  # for example a disk that no longer answers
        time.sleep(3600)
    if kind == "host":  # the machine is gone, and its torchrun with it
        os.kill(os.getppid(), KILL)
        os.kill(os.getpid(), KILL)


def save_snapshot(path, model, optimizer, step):
    """Write a temporary file and then rename it, so that a process that dies in between leaves the old file intact."""
    temporary = path.with_suffix(".tmp")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, temporary)
    os.replace(temporary, path)


def load_snapshot(path, model, optimizer):
    """Return the first step that is still to be done."""
    if path is None or not path.exists():
        return 0
    snapshot = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["step"]


def indices_of(step):
    """The samples of a step. They depend on nothing but its number, so that a restart finds the same ones."""
    epoch, place = divmod(step, SAMPLES // BATCH)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
    return order.split(BATCH)[place]


def own_device():
    """The GPU of this process, or the CPU. GPUs are numbered per machine, so RANK would be wrong."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


def train(steps, snapshot=None, save_every=5, patience=60.0, failure=None):
    """Train up to so many steps in all. Returns the loss of each step that was done here: {step: loss}.

    failure: what happens on which rank before which step, for example ("kill", "0", 13).
    """
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), own_device()
    inputs = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(0))
    targets = inputs.square().sum(dim=1, keepdim=True) / 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = load_snapshot(snapshot, model, optimizer)
    # If the next step takes longer, Python prints where this process is, and ends it. Each step sets this again. It
    # begins here, because many jobs hang when the processes exchange something for the first time. Rank 0 ends first:
    # when one ends, the others get an error, and no longer print where they were.
    patience *= 1 if rank == 0 else 1.25
    faulthandler.dump_traceback_later(patience, exit=True)
    ddp_model = DistributedDataParallel(model)  # waits for all, so that rank 0 saves only after all have loaded

    losses = {}
    for step in range(first, steps):
        if failure and failure[1] in (str(rank), "all") and failure[2] == step:
            fail(failure[0], step)
        mine = indices_of(step)[rank::ranks]
        optimizer.zero_grad()
        loss = mse_loss(ddp_model(inputs[mine].to(device)), targets[mine].to(device))
        loss.backward()
        optimizer.step()
        mean_loss = loss.detach() / ranks
        dist.all_reduce(mean_loss)
        losses[step] = mean_loss.item()
        if rank == 0:
            print(f"step {step} | ranks {ranks} | loss {losses[step]:.4f}", flush=True)
        done = step + 1
        if snapshot and rank == 0 and done % save_every == 0:
            save_snapshot(snapshot, model, optimizer, done)
        faulthandler.dump_traceback_later(patience, exit=True)
    faulthandler.cancel_dump_traceback_later()
    return losses


@record  # writes an error of this process into the file that torchrun reads
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--snapshot", type=Path, help="the file to save and to continue from")
    parser.add_argument("--save-every", type=int, default=5, help="steps between two snapshots")
    parser.add_argument(
        "--patience", type=float, default=60, help="seconds after which a step, or the start, counts as hanging"
    )
    parser.add_argument("--fail", nargs=3, action="append", default=[], metavar=("KIND", "RANK", "STEP"),
                        help=f"{', '.join(FAILURES)}; a rank, or all ranks that have this option; a step")  # fmt: skip
    parser.add_argument("--wait-for", type=int, default=1, help="ranks without which the first attempt does nothing")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit(f"Start this program with torchrun: torchrun --standalone --nproc-per-node 2 {__file__}")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0 and int(os.environ["WORLD_SIZE"]) < args.wait_for:
        time.sleep(3600)  # when another host comes, torchrun ends this process and starts it again
    failure = None
    if attempt < len(args.fail):
        kind, rank, step = args.fail[attempt]
        if kind not in FAILURES:
            raise SystemExit(f"--fail {kind}: choose one of {', '.join(FAILURES)}.")
        failure = (kind, rank, int(step))
    device = own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
    # torchrun asks the others to end (SIGTERM) when one rank has failed, and kills them 30 s later. They print where
    # they are and go on, so that each can still report an error of its own, such as a lost connection. For the same
    # reason `scancel` and Ctrl-C take up to 30 s to end this program. Windows has no `register`.
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGTERM)
    train(args.steps, args.snapshot, args.save_every, args.patience, failure)
    dist.all_reduce(torch.zeros(1, device=device))  # nobody leaves while another still needs its connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
