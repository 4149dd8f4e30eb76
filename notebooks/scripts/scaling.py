"""One point of a scaling analysis: the time of a training step of the course's BERT with DDP. Lesson 07 is about it.

    torchrun --nproc-per-node 4 notebooks/scripts/scaling.py --batch-size 256              # strong: 64 on each of four
    torchrun --nproc-per-node 4 notebooks/scripts/scaling.py --batch-size 256 --per-gpu    # weak: 256 on each

Rank 0 prints one line, which lesson 07's `read_log` reads. The lines of a series of runs go to one file:

    gpus=4 batch=256 step_ms=123.4 least_ms=120.1 most_ms=130.9

It is the median of the timed steps, with the shortest and the longest beside it. A step ends when the slowest rank is
done. CUDA's events measure it, so that on virtual GPUs the times are modelled (put -m virtual_gpus --gpus 4 before
the script's name, --shapes-only to compute nothing). Under SLURM: scaling.slurm beside this file.
"""

import argparse
import os
import statistics

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from helpers.models import bert_article, bert_small


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=256, help="samples per step, on all ranks together")
    parser.add_argument("--per-gpu", action="store_true", help="the batch size is that of each rank")
    parser.add_argument("--model", choices=["article", "small"], default="article")
    parser.add_argument("--warm-up", type=int, default=5, help="steps that are not timed")
    parser.add_argument("--steps", type=int, default=20, help="steps that are")
    return parser.parse_args()


def training_step(args, device, samples):
    """A function that trains one step, always on the same invented words, so that no data has to be loaded."""
    model, length = (bert_article(), 163) if args.model == "article" else (bert_small(), 32)
    ddp = DistributedDataParallel(model.to(device), device_ids=[device])
    adam = torch.optim.Adam(ddp.parameters())
    words = torch.zeros(samples, length, dtype=torch.long, device=device)

    def step():
        adam.zero_grad()
        cross_entropy(ddp(words).flatten(0, 1), words.flatten()).backward()
        adam.step()

    return step


def timed(step):
    """Milliseconds of a step, by the GPU's own clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def main():
    args = parse()
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    ranks = dist.get_world_size()
    samples = args.batch_size if args.per_gpu else args.batch_size // ranks
    if samples < 1:
        raise SystemExit(f"a batch of {args.batch_size} leaves nothing for each of {ranks} ranks")
    step = training_step(args, gpu, samples)
    for _ in range(args.warm_up):
        step()
    times = [timed(step) for _ in range(args.steps)]
    everyones = [None] * ranks
    dist.all_gather_object(everyones, times)
    times = [max(each) for each in zip(*everyones, strict=True)]
    if dist.get_rank() == 0:
        print(f"gpus={ranks} batch={samples * ranks} step_ms={statistics.median(times):.1f} "
              f"least_ms={min(times):.1f} most_ms={max(times):.1f}")  # fmt: skip
    del step  # DistributedDataParallel must end before its process group does, or they can wait for each other
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
