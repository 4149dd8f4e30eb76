"""Networks of known results, which neither torchvision nor the benchmarks have; and functions of autograd."""

import math

import torch
import torch.nn.functional as F
from benchmarks.reference.networks import GPT, GPTBlock
from torch import Tensor, nn


class PyramidBlock(nn.Module):
    """BN-conv-BN-ReLU-conv-BN, and a shortcut without weights: pooled if smaller, zero-padded if wider."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.stride, self.extra = stride, outputs - inputs
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.bn1(x))
        y = self.bn3(self.conv2(F.relu(self.bn2(y), inplace=True)))
        if self.stride != 1:
            x = F.avg_pool2d(x, self.stride, ceil_mode=True)
        return y + F.pad(x, (0, 0, 0, 0, 0, self.extra))


class PyramidNet(nn.Module):
    """Additive PyramidNet for small images (arXiv 1610.02915): (N, 3, H, W) -> logits (N, classes).

    Three stages of (depth - 2) / 6 blocks; every block is wider than the one before it by alpha / (number of blocks).
    """

    def __init__(self, depth: int, alpha: float, classes: int = 10):
        super().__init__()
        blocks = (depth - 2) // 2
        widths = [16 + round(alpha * block / blocks) for block in range(blocks + 1)]
        strides = [2 if block in (blocks // 3, 2 * blocks // 3) else 1 for block in range(blocks)]
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        self.blocks = nn.Sequential(*map(PyramidBlock, widths, widths[1:], strides))
        self.norm = nn.BatchNorm2d(widths[-1])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.stem(images))
        x = F.relu(self.norm(x), inplace=True)
        return self.head(x.mean((2, 3)))


class ScoresBlock(GPTBlock):
    """A block that keeps the attention scores for the backward pass, as code did before fused attention."""

    def attention(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.split(x))
        scores = (query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))).softmax(-1)
        mixed = self.drop(scores) @ value
        return self.project(mixed.transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.narrow(F.gelu(self.widen(self.norm2(x)))))


def unfused_transformer(words: int, hidden: int, layers: int, heads: int, length: int, dropout: float = 0.0) -> GPT:
    """GPT, whose attention sees the whole text and keeps its scores: (N, length) of words -> (N, length, words)."""
    net = GPT(dropout, words, hidden, layers, heads, length)
    net.blocks = nn.Sequential(*[ScoresBlock(hidden, heads, dropout) for _ in range(layers)])
    return net


def function(forward, backward):
    """What applies an autograd.Function of these two, which take a context first."""
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    made = type("Function", (torch.autograd.Function,), parts)
    return lambda *arguments: made.apply(*arguments)  # `apply` is another one while GPUs are on
