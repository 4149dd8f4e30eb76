"""Train a small network on Fashion-MNIST with tensor parallelism, which divides layers among GPUs, and FSDP2.

    torchrun --standalone --nproc-per-node 4 tensor_parallel.py
    torchrun --standalone --nproc-per-node 4 -m virtual_gpus --gpus 4 tensor_parallel.py     # without GPUs

The job is that of one_gpu.py, and so are the losses that it prints. Each group of processes trains on its
share of every batch, as each process of fsdp.py does. In a group, each process computes some of the hidden values
(ColwiseParallel) and what they contribute to the logits (RowwiseParallel). An all-reduce adds up these contributions.
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import FashionMNIST
from torchvision.transforms import ToTensor

DATA = Path(__file__).parent / "../../data"  # the images that come with the course
# LOCAL_RANK numbers the processes on this machine, RANK those on all machines. GPUs are numbered per machine.
LOCAL_RANK = os.environ.get("LOCAL_RANK", "0")
DEVICE = torch.device(f"cuda:{LOCAL_RANK}" if torch.cuda.is_available() else "cpu")


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
    parser.add_argument("--tensor-parallel", type=int, default=2, help="processes in each group, best on one machine")
    args = parser.parse_args()
    if not (args.data / "FashionMNIST/raw").is_dir():
        parser.error(f"{args.data} contains no folder FashionMNIST/raw. Give --data the folder that does.")
    return args


@torch.no_grad()
def evaluate(model, loader, own):
    """The mean loss and the share of correct answers, over the first `own` images of each process."""
    model.eval()
    loss_sum, correct, count = 0.0, 0, 0
    for images, labels in loader:
        images = images.to(DEVICE)
        labels = labels.to(DEVICE)[: own - count]
        outputs = model(images).full_tensor()[: own - count]
        loss_sum += cross_entropy(outputs, labels, reduction="sum").item()
        correct += (outputs.argmax(dim=1) == labels).sum().item()
        count += len(labels)
    sums = torch.tensor([loss_sum, correct, count], dtype=torch.float64, device=DEVICE)
    dist.all_reduce(sums)
    loss_sum, correct, count = sums.tolist()
    return loss_sum / count, correct / count


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
    ranks = dist.get_world_size()
    groups = ranks // args.tensor_parallel
    if ranks % args.tensor_parallel or args.batch_size % groups:
        raise SystemExit(f"{ranks} processes must form groups of --tensor-parallel that share --batch-size equally.")
    mesh = dist.init_device_mesh(DEVICE.type, (groups, args.tensor_parallel), mesh_dim_names=("data", "tensor"))
    group = mesh.get_local_rank("data")  # The samplers take it as rank: a whole group trains on the same images.

    train_data = FashionMNIST(args.data, train=True, transform=ToTensor())
    test_data = FashionMNIST(args.data, train=False, transform=ToTensor())
    test_sampler = DistributedSampler(test_data, groups, group, shuffle=False)
    own = len(range(group, len(test_data), groups))  # The sampler may repeat an image, so that no process ends early
    sampler = DistributedSampler(train_data, groups, group, drop_last=True)
    batch_size = args.batch_size // groups  # a DataLoader's batch size and num_workers are for one process
    loading = {"num_workers": args.workers, "pin_memory": torch.cuda.is_available()}  # faster copies to a GPU
    # drop_last: all steps have the same number of images, so that every image counts the same.
    train_loader = DataLoader(train_data, batch_size, sampler=sampler, drop_last=True, **loading)
    test_loader = DataLoader(test_data, batch_size, sampler=test_sampler, **loading)

    torch.manual_seed(0)  # All processes need the same weights, since each keeps a shard of its own copy.
    model = Net()  # on the CPU, as it may be too large for a GPU. train_llama.py never builds a whole model.
    plan = {"1": ColwiseParallel(), "3": RowwiseParallel(use_local_output=False)}  # keys: positions in nn.Sequential
    parallelize_module(model.classifier, mesh["tensor"], plan)
    for part in (model.features, model.classifier, model):
        fully_shard(part, mesh=mesh["data"])  # replaces the parameters by shards, so make the optimizer afterwards
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    torch.manual_seed(group)  # Each group gets random numbers of its own, for example for dropout.

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
        sampler.set_epoch(epoch)  # a different order in each epoch, and the same one after a restart
        model.train()
        losses = []
        for images, labels in train_loader:
            images = images.to(DEVICE, non_blocking=True)
            labels = labels.to(DEVICE, non_blocking=True)
            optimizer.zero_grad()
            loss = cross_entropy(model(images).full_tensor(), labels)  # The model returns a DTensor, as `plan` says.
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())  # loss.item() would make Python wait for the GPU in every step
            step += 1
            if step == args.max_steps:
                break
        train_loss = torch.stack(losses).mean() / ranks
        dist.all_reduce(train_loss)  # the sum over all processes, which makes it the mean of their losses
        test_loss, accuracy = evaluate(model, test_loader, own)
        report = f"epoch {epoch} | loss {train_loss:.3f} | test loss {test_loss:.3f} | accuracy {accuracy:.1%}"
        if dist.get_rank() == 0:
            print(report, flush=True)
        if step == args.max_steps:
            if args.checkpoint and dist.get_rank() == 0:
                print("No checkpoint: --max-steps ended the program within an epoch.")
            break
        if args.checkpoint:
            save_checkpoint(args.checkpoint, model, optimizer, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
