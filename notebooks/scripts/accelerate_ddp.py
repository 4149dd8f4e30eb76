"""Train a small network on Fashion-MNIST with Hugging Face Accelerate on one or more GPUs.

    pip install accelerate
    accelerate launch --multi_gpu --num_processes 2 accelerate_ddp.py
    torchrun --standalone --nproc-per-node 2 accelerate_ddp.py                           # the same
    torchrun --standalone --nproc-per-node 2 -m virtual_gpus --gpus 2 accelerate_ddp.py  # without GPUs

The job is that of one_gpu.py and ddp.py, and so are the losses, up to rounding error. The loop is that of one_gpu.py.
To see what changes, run `git diff --no-index one_gpu.py accelerate_ddp.py`.
"""

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import FashionMNIST
from torchvision.transforms import ToTensor

DATA = Path(__file__).parent / "../../data"  # the images that come with the course
# split_batches: a DataLoader's batch size is for all processes together.
ACCELERATOR = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))


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
    parser.add_argument("--checkpoint", type=Path, help="the file to save after each epoch and to continue from")
    parser.add_argument("--workers", type=int, default=2, help="processes that load images, for each GPU")
    args = parser.parse_args()
    if not (args.data / "FashionMNIST/raw").is_dir():
        parser.error(f"{args.data} contains no folder FashionMNIST/raw. Give --data the folder that does.")
    return args


@torch.no_grad()
def evaluate(model, loader):
    """The mean loss and the share of correct answers."""
    model.eval()
    loss_sum, correct, count = 0.0, 0, 0
    for images, labels in loader:
        outputs, labels = ACCELERATOR.gather_for_metrics((model(images), labels))  # of all processes, each image once
        loss_sum += cross_entropy(outputs, labels, reduction="sum").item()
        correct += (outputs.argmax(dim=1) == labels).sum().item()
        count += len(labels)
    return loss_sum / count, correct / count


def save_checkpoint(path, model, optimizer, epoch):
    """Write a temporary file and then rename it, so that a program that is killed leaves the old file intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    try:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError when the disk is full
        temporary.unlink(missing_ok=True)
        raise SystemExit(f"Could not save {path}. Is there space, and may you write there? {error}") from error


def main():
    args = parse_arguments()

    train_data = FashionMNIST(args.data, train=True, transform=ToTensor())
    test_data = FashionMNIST(args.data, train=False, transform=ToTensor())
    sampler = RandomSampler(train_data, generator=torch.Generator())
    loading = {"num_workers": args.workers, "pin_memory": torch.cuda.is_available()}  # faster copies to a GPU
    # drop_last: all steps have the same number of images, so that every image counts the same.
    train_loader = DataLoader(train_data, args.batch_size, sampler=sampler, drop_last=True, **loading)
    test_loader = DataLoader(test_data, args.batch_size, **loading)

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)

    first_epoch = 0
    if args.checkpoint and args.checkpoint.exists():
        # weights_only: the file may contain tensors and numbers, but no code. map_location: it may come from a GPU
        # that this machine does not have. load_state_dict copies the tensors to the device of the model.
        checkpoint = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_epoch = checkpoint["epoch"] + 1

    prepared = ACCELERATOR.prepare(model, optimizer, train_loader, test_loader)
    model, optimizer, train_loader, test_loader = prepared

    step = 0
    for epoch in range(first_epoch, args.epochs):
        sampler.generator.manual_seed(epoch)  # a different order in each epoch, and the same one after a restart
        model.train()
        losses = []
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            ACCELERATOR.backward(loss)
            optimizer.step()
            losses.append(loss.detach())  # loss.item() would make Python wait for the GPU in every step
            step += 1
            if step == args.max_steps:
                break
        train_loss = ACCELERATOR.reduce(torch.stack(losses).mean(), "mean")
        test_loss, accuracy = evaluate(model, test_loader)
        report = f"epoch {epoch} | loss {train_loss:.3f} | test loss {test_loss:.3f} | accuracy {accuracy:.1%}"
        ACCELERATOR.print(report, flush=True)
        if step == args.max_steps:
            if args.checkpoint:
                ACCELERATOR.print("No checkpoint: --max-steps ended the program within an epoch.")
            break
        if args.checkpoint and ACCELERATOR.is_main_process:
            save_checkpoint(args.checkpoint, ACCELERATOR.unwrap_model(model), optimizer, epoch)


if __name__ == "__main__":
    main()
