"""The models of the lessons.

    relu_net                          linear layers, for thousands of steps in a few seconds
    small_resnet                      images; torchvision's ResNet, small enough for a laptop's CPU
    PyramidNet, pyramidnet_article    images; a large model whose memory stays balanced with DataParallel
    Bert, bert_small, bert_article    masked words; unbalanced, because its output is far larger than its input
    Llama                             next words; the shapes of today's large language models

No model here names a device. Every tensor that a `forward` creates has the device of its input, so `nn.DataParallel`
can run a copy of the model on each GPU. Weights come from PyTorch's global random number generator. To get the same
model again, call `torch.manual_seed(...)` before the constructor. Nothing is downloaded.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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


# ---------------------------------------------------------------------------------------------------- ResNet


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm with 8 groups, for the argument `norm` of `small_resnet`. It normalizes each sample by itself."""
    return nn.GroupNorm(8, channels)


def small_resnet(classes: int = 10, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    """A ResNet-10, which is torchvision's ResNet with one block per stage: images (N, 3, H, W) -> logits (N, classes).

    An epoch takes seconds on a CPU. With `norm=group_norm`, the model has no BatchNorm. BatchNorm averages over the
    samples that one GPU sees, so DataParallel on 4 GPUs computes a different function than one GPU. Without BatchNorm,
    the results are equal up to rounding error.
    """
    from torchvision.models.resnet import BasicBlock, ResNet  # as in data.py

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=classes, norm_layer=norm)


# ------------------------------------------------------------------------------------------------ PyramidNet


class PyramidBlock(nn.Module):
    """BN-conv-BN-ReLU-conv-BN with a shortcut that has no weights and is pooled or zero-padded to the output's size."""

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
        # F.pad creates zeros on the GPU of x. torch.zeros(...) would create them on the CPU, and the sum would fail.
        return y + F.pad(x, (0, 0, 0, 0, 0, self.extra))


class PyramidHead(nn.Module):
    """BN-ReLU, the mean over all places, and a linear layer: (N, inputs, H, W) -> logits (N, classes)."""

    def __init__(self, inputs: int, classes: int):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm2d(inputs), nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.relu(self.norm(x), inplace=True).mean((2, 3)))


class PyramidNet(nn.Module):
    """Additive PyramidNet for small images: (N, 3, H, W) -> logits (N, classes).

    It has three stages of (depth - 2) / 6 blocks. The stem has 16 channels, and every block adds alpha / (number of
    blocks) channels, rounded. The second and the third stage halve height and width. Raises ValueError for a depth that
    is not 6 n + 2. Source: "Deep Pyramidal Residual Networks", arXiv 1610.02915.
    """

    def __init__(self, depth: int, alpha: float, classes: int = 10):
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth must be 6 n + 2 for n blocks in each of 3 stages (8, 14, 20, ...), not {depth}.")
        blocks = (depth - 2) // 2
        widths = [16 + round(alpha * block / blocks) for block in range(blocks + 1)]
        strides = [2 if block in (blocks // 3, 2 * blocks // 3) else 1 for block in range(blocks)]
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        self.blocks = nn.Sequential(*map(PyramidBlock, widths, widths[1:], strides))
        self.head = PyramidHead(widths[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)))


def pyramidnet_article() -> PyramidNet:
    """The article's PyramidNet for 10 classes, with exactly 24,253,410 parameters.

    It is that of the author's code (github.com/dnddnjs/pytorch-multigpu). There, alpha = 270 and 18 blocks set the 5
    channels that each block adds, but each of the 3 stages has only 17 blocks: depth 104, from 16 to 271 channels.
    """
    return PyramidNet(depth=104, alpha=255)


# ------------------------------------------------------------------------------------------------------ BERT


class BertBlock(nn.Module):
    """Self-attention and a feed-forward part of four times the width, each with a LayerNorm before and a shortcut."""

    def __init__(self, hidden: int, heads: int, dropout: float, fused: bool):
        super().__init__()
        self.heads, self.dropout, self.fused = heads, dropout, fused
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.project = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.project(self.attend(self.norm1(x))))
        return x + self.drop(self.down(self.drop(F.gelu(self.up(self.norm2(x))))))

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        shape = (batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = self.query_key_value(x).view(shape).permute(2, 0, 3, 1, 4)
        if self.fused:
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        else:
            scores = query @ key.transpose(-2, -1) / math.sqrt(hidden // self.heads)
            y = self.drop(scores.softmax(-1)) @ value
        return y.transpose(1, 2).reshape(batch, length, hidden)


class Bert(nn.Module):
    """A BERT for masked words: tokens (N, T) with T <= length -> logits (N, T, vocabulary).

    It has learned embeddings of token and position, `layers` blocks, and a linear head that is not tied to the
    embedding. It has no segments, no padding mask and no next-sentence head. Source: "BERT", arXiv 1810.04805.

    The attention is written out, because the code of the article (2019) keeps the attention scores (N, heads, T, T) of
    each layer for the backward pass. `nn.TransformerEncoderLayer` calls `scaled_dot_product_attention`, whose CUDA
    kernels never store them. `fused=True` does the same here, with the same weights and equal results. Raises
    ValueError if `hidden` is not a multiple of `heads`, and for more than `length` tokens.
    """

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        layers: int,
        heads: int,
        length: int,
        dropout: float = 0.1,
        fused: bool = False,
    ):
        super().__init__()
        if hidden % heads:
            raise ValueError(f"hidden ({hidden}) must be a multiple of heads ({heads}).")
        self.token = nn.Embedding(vocabulary, hidden)
        self.place = nn.Embedding(length, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(BertBlock(hidden, heads, dropout, fused) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary)
        self.apply(_bert_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.place.num_embeddings:
            raise ValueError(f"A sample has {length} tokens, but the model has {self.place.num_embeddings} positions.")
        places = torch.arange(length, device=tokens.device)
        x = self.dropout(self.token(tokens) + self.place(places))
        return self.head(self.norm(self.blocks(x)))


def _bert_weights(module: nn.Module) -> None:
    """Initialize as BERT does: weights from N(0, 0.02) and biases 0. The first loss is close to ln(vocabulary)."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def bert_small(vocabulary: int = 2_000, length: int = 32, dropout: float = 0.1) -> Bert:
    """A small BERT for the course: 2 layers, 4 heads, hidden size 64. An epoch takes seconds on a CPU."""
    return Bert(vocabulary, hidden=64, layers=2, heads=4, length=length, dropout=dropout)


def bert_article(vocabulary: int = 30_000, fused: bool = False) -> Bert:
    """The article's BERT: 8 layers, 8 heads, hidden size 256, length 163. The logits of 200 samples take 3.64 GiB."""
    return Bert(vocabulary, hidden=256, layers=8, heads=8, length=163, fused=fused)


# ----------------------------------------------------------------------------------------------------- Llama


class Attention(nn.Module):
    """Causal self-attention (N, T, width) -> (N, T, width). Several query heads share one key head and value head.

    `unflatten` finds the number of heads from the width of its input. The same code therefore runs on a rank that has
    only some of the heads.
    """

    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
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
    """Attention and feed-forward, each with an RMSNorm before and a shortcut."""

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
    Models", arXiv 2407.21783. The defaults make a model that a CPU trains in milliseconds. tied: the output layer has
    the weight of the embedding, as in Llama 3.2 1B. With `recompute = True`, the blocks keep only their inputs and
    compute the rest again in the backward pass (activation checkpointing).
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


LLAMA_1B = {
    "vocabulary": 128_256, "width": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "hidden": 8192, "tied": True,
}  # fmt: skip
LLAMA_8B = {"vocabulary": 128_256, "width": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14_336}
LLAMA_70B = {"vocabulary": 128_256, "width": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "hidden": 28_672}
