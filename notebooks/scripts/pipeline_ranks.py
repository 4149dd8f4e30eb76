"""Train a small network on Fashion-MNIST with a pipeline of two processes, each of which has a part of it.

    torchrun --standalone --nproc-per-node 2 pipeline_ranks.py
    torchrun --standalone --nproc-per-node 2 -m virtual_gpus --gpus 2 pipeline_ranks.py     # without GPUs

The job is that of one_gpu.py, and so are the losses that it prints. As in pipeline.py, micro-batches keep both GPUs
busy. Here torch.distributed.pipelining sends what the parts need to each other. With 1F1B, a process computes the
backward pass of a micro-batch as soon as it can, so that the activations of few micro-batches are kept.
"""

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import FashionMNIST
from torchvision.transforms import ToTensor

DATA = Path(__file__).parent / "../../data"  # the images that come with the course
# LOCAL_RANK numbers the processes on this machine, RANK those on all machines. GPUs are numbered per machine.
LOCAL_RANK = os.environ.get("LOCAL_RANK", "0")
DEVICE = torch.device(f"cuda:{LOCAL_RANK}" if torch.cuda.is_available() else "cpu")
MICRO_BATCHES = 4  # with more of them the GPUs wait less, but each kernel has less to do


class Net(nn.Module):
    """A small network in two parts: images (N, 1, 28, 28) -> logits (N, 10).

    GroupNorm treats each image separately. BatchNorm would use the mean of a batch, so that the losses would change
    when the batch is divided over GPUs.
    """

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 32, 5, padding=2), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(4))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images):
        hidden = self.features(images)
        return self.classifier(hidden)


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2, help="epochs in total, including those before a restart")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, on all GPUs together")
    parser.add_argument("--max-steps", type=int, help="stop after this many steps, and save nothing")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder that contains FashionMNIST/raw")
    parser.add_argument("--checkpoint", type=Path, help="the folder to save to after each epoch and to continue from")
    parser.add_argument("--workers", type=int, default=2, help="processes that load images, for each GPU")
    args = parser.parse_args()
    if not (args.data / "FashionMNIST/raw").is_dir():
        parser.error(f"{args.data} contains no folder FashionMNIST/raw. Give --data the folder that does.")
    return args


@torch.no_grad()
def evaluate(part, loader, last):
    """The mean loss and the share of correct answers, in the last process."""
    part.eval()
    loss_sum, correct, count = 0.0, 0, 0
    for images, labels in loader:
        if not last:
            dist.send(part(images.to(DEVICE)), 1)
            continue
        hidden = torch.empty(len(images), 32, 7, 7, device=DEVICE)
        dist.recv(hidden, 0)
        outputs, labels = part(hidden), labels.to(DEVICE)
        loss_sum += cross_entropy(outputs, labels, reduction="sum").item()
        correct += (outputs.argmax(dim=1) == labels).sum().item()
        count += len(labels)
    return loss_sum / max(1, count), correct / max(1, count)


def save_checkpoint(path, model, optimizer, epoch):
    """Write a temporary folder and then rename it, so that a program that is killed leaves the old folders intact."""
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "epoch": epoch}
    try:
        dcp.save(state, checkpoint_id=path / "temporary")  # returns when the shards of all processes are written
    except dcp.CheckpointException as error:
        shutil.rmtree(path / "temporary", ignore_errors=True)
        raise SystemExit(f"Could not save to {path}. Is there space, and may you write there? {error}") from error
    if dist.get_rank() == 0:
        os.replace(path / "temporary", path / f"epoch_{epoch:04}")
        for old in sorted(path.glob("epoch_????"))[:-1]:
            shutil.rmtree(old)


def main():
    args = parse_arguments()
    if "RANK" not in os.environ:
        raise SystemExit(f"Start this program with torchrun: torchrun --standalone --nproc-per-node 2 {__file__}")
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    last = rank == ranks - 1
    if ranks != 2 or args.batch_size % MICRO_BATCHES:
        raise SystemExit(f"This network has 2 parts, for 2 processes, and --batch-size must divide by {MICRO_BATCHES}.")

    train_data = FashionMNIST(args.data, train=True, transform=ToTensor())
    test_data = FashionMNIST(args.data, train=False, transform=ToTensor())
    sampler = RandomSampler(train_data, generator=torch.Generator())
    loading = {"num_workers": args.workers, "pin_memory": torch.cuda.is_available()}  # faster copies to a GPU
    # drop_last: all steps have the same number of images, so that every image counts the same.
    train_loader = DataLoader(train_data, args.batch_size, sampler=sampler, drop_last=True, **loading)
    test_loader = DataLoader(test_data, args.batch_size, **loading)

    torch.manual_seed(0)  # All processes make the same network, and each keeps its part.
    model = Net()
    if last:
        del model.features
    else:
        del model.classifier
    part = (model.classifier if last else model.features).to(DEVICE)
    stage = PipelineStage(part, rank, ranks, DEVICE)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)

    first_epoch = 0
    saved = sorted(args.checkpoint.glob("epoch_????"))[-1:] if args.checkpoint else []
    saved = saved or [None]
    dist.broadcast_object_list(saved)  # All processes load what rank 0 has found.
    if saved[0]:
        # dcp.load fills these tensors, however many processes saved them. It uses pickle: load only what you trust.
        checkpoint = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "epoch": 0}
        dcp.load(checkpoint, checkpoint_id=saved[0])
        model.load_state_dict(checkpoint["model"])
        set_optimizer_state_dict(model, optimizer, checkpoint["optimizer"])
        first_epoch = checkpoint["epoch"] + 1

    step = 0
    for epoch in range(first_epoch, args.epochs):
        sampler.generator.manual_seed(epoch)  # a different order in each epoch, and the same one after a restart
        model.train()
        losses = []
        for images, labels in train_loader:
            optimizer.zero_grad()
            if last:
                of_micro_batches = []  # step() fills it, and computes the gradients of their mean.
                schedule.step(target=labels.to(DEVICE, non_blocking=True), losses=of_micro_batches)
                losses.append(torch.stack(of_micro_batches).detach().mean())
            else:
                schedule.step(images.to(DEVICE, non_blocking=True))
            optimizer.step()
            step += 1
            if step == args.max_steps:
                break
        test_loss, accuracy = evaluate(part, test_loader, last)
        if last:
            train_loss = torch.stack(losses).mean()
            report = f"epoch {epoch} | loss {train_loss:.3f} | test loss {test_loss:.3f} | accuracy {accuracy:.1%}"
            print(report, flush=True)
        if step == args.max_steps:
            if args.checkpoint and last:
                print("No checkpoint: --max-steps ended the program within an epoch.")
            break
        if args.checkpoint:
            save_checkpoint(args.checkpoint, model, optimizer, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
