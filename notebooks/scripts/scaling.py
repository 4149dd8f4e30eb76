"""One point of a scaling analysis: the time of a training step of a Llama with DDP. Lesson 07 is about it.

    torchrun --standalone --nproc-per-node 4 scaling.py              # strong: 16 sequences on all GPUs together
    torchrun --standalone --nproc-per-node 4 scaling.py --per-gpu    # weak: 16 sequences on each
    torchrun --standalone --nproc-per-node 4 -m virtual_gpus --gpus 4 --kind H100 --shapes-only scaling.py

Rank 0 prints one line, which lesson 07's `read_log` reads. The lines of a series of runs go to one file:

    gpus=4 batch=16 step_ms=101.0 least_ms=100.1 most_ms=103.9

It is the median of the timed steps, with the shortest and the longest beside it. A step ends when the slowest rank is
done. CUDA's events measure it, so that on virtual GPUs the times are modelled. To measure your own model, replace
`build`. Under SLURM: scaling.slurm beside this file.
"""

import argparse
import os
import statistics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

SIZES = {  # vocabulary, width, layers, query heads, key heads, hidden width; 1b is Llama 3.2 1B
    "1b": (128_256, 2048, 16, 32, 8, 8192),
    "small": (512, 64, 2, 8, 4, 192),
}


class Block(nn.Module):
    """A block of a Llama, without positions: they cost next to no time."""

    def __init__(self, width, heads, kv_heads, hidden):
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, kv_heads * self.head_width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        parts = [layer(y).unflatten(-1, (-1, self.head_width)) for layer in (self.query, self.key, self.value)]
        query, key, value = (part.transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def build(size):
    """Tokens (N, T) -> logits (N, T, vocabulary), in bfloat16. The output layer has the weight of the embedding."""
    vocabulary, width, layers, heads, kv_heads, hidden = SIZES[size]
    embedding, output = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
    output.weight = embedding.weight
    blocks = [Block(width, heads, kv_heads, hidden) for _ in range(layers)]
    return nn.Sequential(embedding, *blocks, nn.RMSNorm(width), output).bfloat16()


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step, on all ranks together")
    parser.add_argument("--per-gpu", action="store_true", help="the batch size is that of each rank")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--model", choices=SIZES, default="1b")
    parser.add_argument("--warm-up", type=int, default=5, help="steps that are not timed")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    return parser.parse_args()


def training_step(args, gpu, sequences):
    """A function that trains one step, always on the same tokens, so that nothing has to be loaded."""
    with gpu:
        model = build(args.model)
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(sequences, args.sequence, dtype=torch.long, device=gpu)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp_model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()

    return step


def milliseconds(step):
    """The time of a step by the GPU's own clock."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def main():
    args = parse_arguments()
    if "RANK" not in os.environ:
        raise SystemExit(f"Start this program with torchrun: torchrun --standalone --nproc-per-node 2 {__file__}")
    if not torch.cuda.is_available():
        raise SystemExit("This program times GPUs. To use virtual ones, put -m virtual_gpus --gpus 2 before its name.")
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    ranks = dist.get_world_size()
    if args.batch_size % ranks and not args.per_gpu:
        raise SystemExit(f"--batch-size must be a multiple of {ranks}, the number of processes, or be --per-gpu.")
    sequences = args.batch_size if args.per_gpu else args.batch_size // ranks

    step = training_step(args, gpu, sequences)
    for _ in range(args.warm_up):
        step()
    everyones = [None] * ranks
    dist.all_gather_object(everyones, [milliseconds(step) for _ in range(args.steps)])
    times = [max(times) for times in zip(*everyones, strict=True)]  # of each step, that of the slowest rank
    if dist.get_rank() == 0:
        line = f"gpus={ranks} batch={sequences * ranks} step_ms={statistics.median(times):.1f}"
        print(f"{line} least_ms={min(times):.1f} most_ms={max(times):.1f}", flush=True)
    del step  # Its DistributedDataParallel uses the process group, so it ends first.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
