"""Train a small network on Fashion-MNIST with PyTorch Lightning on one or more GPUs.

    pip install lightning
    python lightning_ddp.py --devices 2                                    # starts the second process itself
    python -m virtual_gpus --gpus 2 lightning_ddp.py --devices 2           # without GPUs

The job is that of one_gpu.py and ddp.py, and so are the losses, up to rounding error. The lines of their loop that are
about the network are methods here, which Lightning's Trainer calls. The Trainer does everything else: it starts the
processes, deals out the images, averages the gradients and saves.
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.datasets import FashionMNIST
from torchvision.transforms import ToTensor

DATA = Path(__file__).parent / "../../data"  # the images that come with the course


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


class Job(L.LightningModule):
    """The network with its loss and its optimizer. Lightning moves the batches to the GPU of the process."""

    def __init__(self):
        super().__init__()
        self.model = Net()

    def training_step(self, batch, index):
        images, labels = batch
        loss = cross_entropy(self.model(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)  # sync_dist: the mean over all processes
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        outputs = self.model(images)
        accuracy = (outputs.argmax(dim=1) == labels).float().mean()
        results = {"test loss": cross_entropy(outputs, labels), "accuracy": accuracy}
        self.log_dict(results, sync_dist=True, batch_size=len(labels))  # weights each mean by its number of images

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.002, momentum=0.9)


class Report(L.Callback):
    """Prints a line after each epoch, on rank 0."""

    def on_train_epoch_end(self, trainer, module):
        values = trainer.callback_metrics
        report = f"epoch {trainer.current_epoch} | loss {values['loss']:.3f} | test loss {values['test loss']:.3f} | "
        module.print(f"{report}accuracy {values['accuracy']:.1%}", flush=True)


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2, help="epochs in total, including those before a restart")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, on all GPUs together")
    parser.add_argument("--max-steps", type=int, help="stop after this many steps, and save nothing")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder that contains FashionMNIST/raw")
    parser.add_argument("--checkpoint", type=Path, help="the folder to save in after each epoch and to continue from")
    parser.add_argument("--workers", type=int, default=2, help="processes that load images, for each GPU")
    parser.add_argument("--devices", type=int, default=1, help="GPUs, or processes on a machine that has no GPU")
    args = parser.parse_args()
    if not (args.data / "FashionMNIST/raw").is_dir():
        parser.error(f"{args.data} contains no folder FashionMNIST/raw. Give --data the folder that does.")
    return args


def main():
    args = parse_arguments()
    if args.batch_size % args.devices:
        raise SystemExit(f"--batch-size must be a multiple of {args.devices}, the number of processes.")

    train_data = FashionMNIST(args.data, train=True, transform=ToTensor())
    test_data = FashionMNIST(args.data, train=False, transform=ToTensor())
    batch_size = args.batch_size // args.devices  # a DataLoader's batch size and num_workers are for one process
    # Lightning replaces the sampler of each loader by a DistributedSampler.
    train_loader = DataLoader(train_data, batch_size, shuffle=True, num_workers=args.workers, drop_last=True)
    test_loader = DataLoader(test_data, batch_size, num_workers=args.workers)

    L.seed_everything(0)  # also the seed of Lightning's samplers
    job = Job()

    callbacks = [Report()]
    checkpoint = None
    if args.checkpoint:
        saved = args.checkpoint / "last.ckpt"
        checkpoint = saved if saved.exists() else None
    saves = args.checkpoint is not None and args.max_steps is None  # only complete epochs
    if saves:
        callbacks.append(ModelCheckpoint(args.checkpoint, "last", enable_version_counter=False))
    trainer = L.Trainer(
        accelerator="auto",
        devices=args.devices,
        strategy="ddp",  # also with one device, so that the sampler and the order of the images are the same
        precision="32-true",
        max_epochs=args.epochs,
        max_steps=args.max_steps or -1,
        limit_train_batches=args.max_steps or 1.0,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=saves,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(job, train_loader, test_loader, ckpt_path=checkpoint)


if __name__ == "__main__":
    main()
