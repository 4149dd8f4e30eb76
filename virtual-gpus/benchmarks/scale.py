"""What one rank of many costs on this computer: seconds and memory, for 1 to 1,024 ranks and 1 to 100 B parameters.

    python -m benchmarks.scale                # the table
    python -m benchmarks.scale 70B 512        # one row, in this process

Each row trains a Transformer of Llama's shape as rank 0 of a job: from the meta device, `fully_shard` for each block,
bfloat16 with gradients reduced in float32, checkpointed blocks, AdamW, one sequence of 8,192 tokens per rank. The
seconds are CPU seconds of this computer, for building the model and for one step, the second one. The GiB are this
process's at its largest, and those of the modelled GPU.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from virtual_gpus import virtual_gpus

LENGTH = 8192
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama: layers, width, heads, heads of keys and values, hidden width of the MLP, words."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    words: int = 128_256


# Llama 3.2 1B, Llama 3 8B and 70B as Meta published them; 100B is 70B with more layers.
SHAPES = {
    "1B": Shape(16, 2048, 32, 8, 8192),
    "8B": Shape(32, 4096, 32, 8, 14336),
    "70B": Shape(80, 8192, 64, 8, 28672),
    "100B": Shape(116, 8192, 64, 8, 28672),
}
ROWS = [("1B", 1), ("8B", 8), ("8B", 64), ("8B", 1024), ("70B", 64), ("70B", 512), ("70B", 1024), ("100B", 1024)]


class Attention(nn.Module):
    """Causal attention with fewer heads for keys and values than for queries, and rotary positions."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads, self.key_heads, self.size = shape.heads, shape.key_heads, shape.width // shape.heads
        self.wq = nn.Linear(shape.width, shape.heads * self.size, bias=False)
        self.wk = nn.Linear(shape.width, shape.key_heads * self.size, bias=False)
        self.wv = nn.Linear(shape.width, shape.key_heads * self.size, bias=False)
        self.wo = nn.Linear(shape.heads * self.size, shape.width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        query, key, value = (w(x).view(samples, length, -1, self.size) for w in (self.wq, self.wk, self.wv))
        query, key = rotated(query, angles), rotated(key, angles)
        repeats = self.heads // self.key_heads
        key, value = (t.repeat_interleave(repeats, dim=2) for t in (key, value))
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(samples, length, -1))


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary positions: pairs of numbers turn by angles that grow with the position. angles: [length, size / 2]."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2).type_as(x)


class Block(nn.Module):
    """Attention and an MLP with a gate, each behind an RMSNorm and beside a residual connection."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.attention, self.norm1 = Attention(shape), nn.RMSNorm(shape.width)
        self.w1 = nn.Linear(shape.width, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.width, bias=False)
        self.w3 = nn.Linear(shape.width, shape.hidden, bias=False)
        self.norm2 = nn.RMSNorm(shape.width)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), angles)
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    """Words to scores of the next word: [samples, length] to [samples, length, words]."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(shape.words, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.scores = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        size = self.shape.width // self.shape.heads
        speeds = 500_000 ** (-torch.arange(0, size, 2, device=words.device) / size)
        angles = torch.outer(torch.arange(words.shape[1], device=words.device), speeds)
        x = self.words(words)
        for block in self.blocks:
            x = block(x, angles)
        return self.scores(self.norm(x))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, words: torch.Tensor) -> None:
    """One training step on `words`, whose next words are their own."""
    scores = model(words)
    F.cross_entropy(scores.flatten(0, 1).float(), words.flatten()).backward()
    del scores
    optimizer.step()
    optimizer.zero_grad()


def build(name: str, ranks: int, wrapped: Callable[[nn.Module], nn.Module] = checkpoint_wrapper) -> Llama:
    """A sharded Llama on the GPU of this rank, from the meta device. wrapped: makes a checkpointed block of a block."""
    mesh = init_device_mesh("cuda", (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Llama(SHAPES[name])
    for number, block in enumerate(model.blocks):
        model.blocks[number] = block = wrapped(block)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model.to_empty(device="cuda")


def measure(name: str, ranks: int) -> None:
    """Print one row of the table."""
    with virtual_gpus(min(8, ranks), kind="H100", shapes_only=True, rank=0, world_size=ranks):
        began = time.process_time()
        model = build(name, ranks)
        optimizer = torch.optim.AdamW(model.parameters())
        words = torch.zeros(1, LENGTH, dtype=torch.long, device="cuda")
        built = time.process_time() - began
        step(model, optimizer, words)
        torch.cuda.reset_peak_memory_stats()
        began = time.process_time()
        step(model, optimizer, words)
        seconds = time.process_time() - began
        peak = torch.cuda.max_memory_allocated()
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{name:>6} {ranks:6} {built:9.1f} {seconds:9.1f} {own / GIB:9.2f} {peak / GIB:9.2f}")


def main(arguments: list[str]) -> None:
    """The table, each row in a process of its own, or one row."""
    if arguments:
        measure(arguments[0], int(arguments[1]))
        return
    print(f"{'model':>6} {'ranks':>6} {'build s':>9} {'step s':>9} {'own GiB':>9} {'GPU GiB':>9}", flush=True)
    for name, ranks in ROWS:
        subprocess.run([sys.executable, "-m", "benchmarks.scale", name, str(ranks)], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
