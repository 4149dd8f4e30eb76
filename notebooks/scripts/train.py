"""Train a network on one GPU, on several in one process, or in one process per GPU. Lesson 04 is about the last.

From the course's folder, on GPUs or, slower, without any:

    python notebooks/scripts/train.py --method single
    python notebooks/scripts/train.py --method dp
    torchrun --nproc-per-node 4 notebooks/scripts/train.py --method ddp

On virtual GPUs:

    python -m virtual_gpus --gpus 4 notebooks/scripts/train.py --method dp
    torchrun --nproc-per-node 4 -m virtual_gpus --gpus 4 notebooks/scripts/train.py --method ddp

Surviving failures: torchrun starts all ranks again when one dies, and they go on from the last finished epoch:

    torchrun --nproc-per-node 4 --max-restarts 3 notebooks/scripts/train.py --method ddp --checkpoint run/last.pt

On two machines, the same command on both; one of them is called node-a. A checkpoint must lie on a disk that both see:

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node-a:29500 \
        notebooks/scripts/train.py --method ddp

Under SLURM: train_one_node.slurm and train_many_nodes.slurm beside this file.
"""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import Subset

from helpers.data import fashion_mnist, masked_words, words
from helpers.models import bert_small, group_norm, small_resnet
from helpers.parallel import connect, disconnect, from_all, local_device, rank, rank_loader
from helpers.train import DataParallelTrainer, DistributedTrainer, Trainer


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=["single", "dp", "ddp"], default="single")
    parser.add_argument("--model", choices=["small_resnet", "bert"], default="small_resnet")
    parser.add_argument("--epochs", type=int, default=2, help="in all, those before an interruption included")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, on all ranks together")
    parser.add_argument("--accumulate", type=int, default=1, help="pieces that a rank makes of its share of a batch")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--warmup", type=int, default=10, help="steps until the learning rate is reached")
    parser.add_argument("--amp", choices=["bf16", "fp16"])
    parser.add_argument("--samples", type=int, default=2000, help="to train on; at most 1000 to test on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", help="a file to save to after every epoch, and to go on from if it exists")
    args = parser.parse_args(arguments)
    if args.method != "ddp" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        parser.error(f"--method {args.method} is one process: start it with python, or add --method ddp")
    if args.batch_size % args.accumulate:
        parser.error(f"a batch of {args.batch_size} cannot be accumulated in {args.accumulate} equal pieces")
    return args


def network_and_data(name, samples):
    """The network, the data to train on, and the data to test on."""
    if name == "bert":
        vocabulary = words(2000)
        network = bert_small(len(vocabulary), length=32)
        train, test = (masked_words(32, vocabulary, train=part) for part in (True, False))
    else:
        network = small_resnet(norm=group_norm)
        train, test = (fashion_mnist(train=part) for part in (True, False))
    return network, first(samples, train), first(min(samples, 1000), test)


def first(samples, data):
    return Subset(data, range(min(samples, len(data))))


def make_trainer(method, *parts, **options):
    if method == "ddp":
        return DistributedTrainer(*parts, **options)
    if method == "dp":
        return DataParallelTrainer(*parts, range(torch.cuda.device_count()), **options)
    return Trainer(*parts, local_device(), **options)


def print_memory(device):
    """The most memory that each rank's tensors took on its GPU, in rank order."""
    peak = f"{torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB" if device.type == "cuda" else None
    for number, (gpu, at_most) in enumerate(from_all((str(device), peak))):
        if rank() == 0 and at_most is not None:
            print(f"rank {number}: at most {at_most} on {gpu}")


def main(arguments=None):
    args = parse(arguments)
    if args.method == "ddp":
        connect()
    torch.manual_seed(args.seed)
    network, train_data, test_data = network_and_data(args.model, args.samples)
    optimizer = torch.optim.SGD(network.parameters(), lr=args.lr, momentum=0.9)
    trainer = make_trainer(
        args.method,
        network,
        optimizer,
        nn.CrossEntropyLoss(),
        rank_loader(train_data, args.batch_size // args.accumulate, seed=args.seed),
        scheduler=torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=args.warmup),
        seed=args.seed,
        accumulate=args.accumulate,
        amp=args.amp,
        checkpoint=args.checkpoint,
        log=lambda record: print(record, flush=True),  # at once, also into a file
    )
    if args.checkpoint and trainer.resume() and rank() == 0:
        print(f"going on with epoch {trainer.epoch}", flush=True)
    trainer.train(args.epochs - trainer.epoch)
    score = trainer.evaluate(rank_loader(test_data, args.batch_size, shuffle=False))
    if rank() == 0:
        print(f"test data: loss {score.loss:.3f} | accuracy {100 * score.accuracy:.2f} %", flush=True)
    print_memory(trainer.device)
    disconnect()


if __name__ == "__main__":
    main()
