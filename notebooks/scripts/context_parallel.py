"""Train a small Llama with context parallelism, which divides each sequence among GPUs, and FSDP2. See lesson 11.

    torchrun --standalone --nproc-per-node 4 context_parallel.py --bfloat16
    torchrun --standalone --nproc-per-node 4 -m virtual_gpus --gpus 4 context_parallel.py     # without GPUs

--context-parallel processes share each sequence of the text, and all such groups share each batch. In float32, the
losses are the same on any number of processes. A token is a byte of the file.

Context parallelism is a prototype in PyTorch, so it may change. It runs only with the fused attention kernels for GPUs.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method  # has no public name so far
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, silu

DATA = Path(__file__).parent / "../../data/pride_and_prejudice.txt"  # the novel that comes with the course
# LOCAL_RANK numbers the processes on this machine, RANK those on all machines. GPUs are numbered per machine.
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
# Context parallelism knows only these kernels. Without this list, PyTorch could choose another one.
FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x, cosines, sines):
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in layers)
        query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        # Call it by its module. context_parallel replaces this attribute of the module. A function that was imported
        # by name would stay the old one: each process would attend to its own tokens only, without an error.
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x, cosines, sines):
    """Rotary positions: each pair of numbers turns by an angle that grows with the position."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width, eps=1e-5), Attention(width, heads)
        self.norm2, self.feed_forward = nn.RMSNorm(width, eps=1e-5), FeedForward(width, hidden)

    def forward(self, x, cosines, sines):
        x = x + self.attention(self.norm1(x), cosines, sines)
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):
    """Tokens (N, T) and their positions (T) -> logits (N, T, vocabulary)."""

    def __init__(self, vocabulary=256, width=64, layers=2, heads=4, hidden=192):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.head_width = width // heads

    def forward(self, tokens, positions):
        speeds = 500_000 ** -(torch.arange(0, self.head_width, 2, device=tokens.device) / self.head_width)
        angles = torch.outer(positions, speeds)  # not of torch.arange(T): a process has some of the tokens only
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.output(self.norm(x))


def parse_arguments():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="a file whose bytes are the tokens")
    parser.add_argument("--sequence", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per step, on all GPUs together")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--context-parallel", type=int, help="processes that share each sequence; default: all")
    parser.add_argument("--rotate", choices=("allgather", "alltoall"), default="allgather", help="how keys travel")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16, and not in float32")
    return parser.parse_args()


def check(args, ranks):
    """The number of processes per sequence and the number of such groups, if they fit the arguments."""
    for name, value in vars(args).items():
        if type(value) in (int, float) and not value > 0:
            raise SystemExit(f"--{name.replace('_', '-')} is {value}. It must be more than 0.")
    context = args.context_parallel or ranks
    groups = max(1, ranks // context)
    if ranks % context or args.batch_size % groups:
        raise SystemExit(
            f"{ranks} processes must form groups of --context-parallel {context} that share --batch-size "
            f"{args.batch_size} equally."
        )
    # Later tokens attend to more keys. Therefore each process takes two chunks of a sequence: one from its head, and
    # the mirrored one from its tail. In float32, the kernel also needs chunks of a multiple of 32 tokens.
    multiple = 2 * context if args.bfloat16 else 64 * context
    if args.sequence % multiple:
        longer = -(-args.sequence // multiple) * multiple
        raise SystemExit(
            f"--sequence is {args.sequence}. With {context} processes per sequence, it must be a multiple of "
            f"{multiple}, for example {longer}."
        )
    if not args.data.is_file() or args.data.stat().st_size <= args.sequence:
        raise SystemExit(f"{args.data} is not a file with more than {args.sequence} bytes. Give --data another file.")
    return context, groups


def main():
    args = parse_arguments()
    if "RANK" not in os.environ:
        raise SystemExit(f"Start this program with torchrun: torchrun --standalone --nproc-per-node 2 {__file__}")
    ranks = int(os.environ["WORLD_SIZE"])
    context, groups = check(args, ranks)
    if not torch.cuda.is_available():
        virtual = f"torchrun --standalone --nproc-per-node {ranks} -m virtual_gpus --gpus {ranks} {__file__}"
        raise SystemExit(f"Context parallelism needs kernels for GPUs. To use virtual GPUs: {virtual}")
    device = torch.device("cuda", LOCAL_RANK)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    everyone = dist.init_device_mesh("cuda", (ranks,))
    mesh = dist.init_device_mesh("cuda", (groups, context), mesh_dim_names=("data", "context"))
    set_rotate_method(args.rotate)  # allgather: one message with all keys and values; alltoall: one after the other

    torch.manual_seed(0)  # All processes need the same weights, since each keeps a shard of its own copy.
    model = Llama()
    # cast_forward_inputs would round the cosines and sines as well.
    policy = MixedPrecisionPolicy(torch.bfloat16 if args.bfloat16 else None, torch.float32, cast_forward_inputs=False)
    for part in (*model.blocks, model):
        # over all processes: each has other tokens, and weights need the mean of the gradients of all tokens
        fully_shard(part, mesh=everyone, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)

    text = torch.frombuffer(bytearray(args.data.read_bytes()), dtype=torch.uint8)
    for step in range(1, args.steps + 1):
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - args.sequence, (args.batch_size, 1), generator=random)
        positions = torch.arange(args.sequence)
        own = starts.chunk(groups)[mesh.get_local_rank("data")] + positions
        # The target of a token is the next one. Shift before the sequence is divided: the last token of a chunk has
        # its target in another process.
        buffers = [text[own].long().to(device), text[own + 1].long().to(device), positions.to(device)]
        # In this block, the three tensors have this process's tokens only. The block must contain the backward pass.
        with context_parallel(mesh["context"], buffers=buffers, buffer_seq_dims=[1, 1, 0]), sdpa_kernel(FUSED):
            tokens, targets, positions = buffers
            logits = model(tokens, positions)
            loss = cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps:
            total = loss.detach() / ranks
            dist.all_reduce(total)  # All have the same number of tokens, so this is the mean over all tokens.
            if dist.get_rank() == 0:
                print(f"step {step} | loss {total.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
