"""The models of the lessons, from the smallest to the largest.

    relu_net        linear layers, for thousands of steps in a few seconds
    small_resnet    images; torchvision's ResNet, small enough for a laptop's CPU
    Llama           next words; the shapes of today's large language models

No model here names a device. Every tensor that a `forward` creates has the device of its input, so `nn.DataParallel`
can run a copy of the model on each GPU. Weights come from PyTorch's global random number generator. To get the same
model again, call `torch.manual_seed(...)` before the constructor. Nothing is downloaded.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["LLAMA_1B", "LLAMA_70B", "LLAMA_8B", "Attention", "FeedForward", "Llama", "LlamaBlock", "group_norm",
           "parameter_count", "relu_net", "small_resnet"]  # fmt: skip


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters. A parameter that two layers share counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def relu_net(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers of these sizes with ReLU between them. Inputs (N, ...) of sizes[0] numbers give (N, sizes[-1]).

    He's initialization (arXiv 1502.01852) keeps the variance equal from layer to layer. Biases use PyTorch's default.
    """
    layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(nn.Flatten(), *[part for layer in layers for part in (layer, nn.ReLU())][:-1])


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm with 8 groups, for the argument `norm` of `small_resnet`. It normalizes each sample by itself."""
    return nn.GroupNorm(8, channels)


def small_resnet(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    """A ResNet-10, which is torchvision's ResNet with one block per stage: images (N, 3, H, W) -> logits (N, 10).

    An epoch takes seconds on a CPU. With `norm=group_norm`, the model has no BatchNorm. BatchNorm averages over the
    samples that one GPU sees, so DataParallel on 4 GPUs computes a different function than one GPU. Without BatchNorm,
    the results are equal up to rounding error.
    """
    from torchvision.models.resnet import BasicBlock, ResNet  # here: it imports the compiler unless virtual GPUs are on

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10, norm_layer=norm)


# ---- Llama -----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention (N, T, width) -> (N, T, width). Several query heads share one key head and value head.

    `unflatten` finds the number of heads from the width of its input. The same code therefore runs on a rank that has
    only some of the heads.
    """

    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        if min(heads, kv_heads) < 1 or width % heads or heads % kv_heads:
            raise ValueError(f"width={width} must be a multiple of heads={heads}, and that of kv_heads={kv_heads}.")
        self.head_width = width // heads
        self.query = nn.Linear(width, heads * self.head_width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(heads * self.head_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.query(x), self.key(x), self.value(x))
        parts = [part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts]
        y = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: (N, T, width) -> (N, T, width), with two matrices side by side and one after them."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each with an RMSNorm before and a shortcut: (N, T, width) -> (N, T, width)."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width), Attention(width, heads, kv_heads)
        self.norm2, self.feed_forward = nn.RMSNorm(width), FeedForward(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):
    """A language model with the layers of Llama 3: tokens (N, T) -> logits (N, T, vocabulary).

    It has no positions (Llama rotates queries and keys), which changes no parameter. Source: "The Llama 3 Herd of
    Models", arXiv 2407.21783. The defaults make a model of which a CPU computes a training step in milliseconds.
    `width` must be a multiple of `heads`, and `heads` of `kv_heads`. tied: the output layer has the weight of the
    embedding, as in Llama 3.2 1B. After `model.recompute = True`, the blocks keep only their inputs and compute the
    rest again in the backward pass (activation checkpointing).
    """

    def __init__(
        self,
        vocabulary: int = 512,
        width: int = 64,
        layers: int = 2,
        heads: int = 8,
        kv_heads: int = 4,
        hidden: int = 192,
        tied: bool = False,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        if tied:
            nn.init.normal_(self.embedding.weight, std=width**-0.5)  # so that the first logits are of size 1
            self.output.weight = self.embedding.weight
        self.recompute = False

    def features(self, tokens: Tensor) -> Tensor:
        """What the output layer gets: tokens (N, T) -> (N, T, width)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.features(tokens))


# The arguments of `Llama` for Llama 3.2 1B, Llama 3 8B and Llama 3 70B, from their config.json; those of the last two
# also stand in table 3 of the paper.
LLAMA_1B = {
    "vocabulary": 128_256, "width": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "hidden": 8192, "tied": True,
}  # fmt: skip
LLAMA_8B = {"vocabulary": 128_256, "width": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14_336}
LLAMA_70B = {"vocabulary": 128_256, "width": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "hidden": 28_672}
