"""The networks of the first article, which the appendix checks. Sizes and layers are those of the article's code.

    pyramidnet_article    images; its memory stays balanced with DataParallel
    bert_article          masked words; unbalanced, because its output is far larger than its input

Every tensor that a `forward` creates has the device of its input, so `nn.DataParallel` can run a copy of the model on
each GPU. The weights come from PyTorch's global random number generator.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---- PyramidNet ------------------------------------------------------------------------------------------------------


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


# ---- BERT ------------------------------------------------------------------------------------------------------------


class BertBlock(nn.Module):
    """Self-attention and a feed-forward part of four times the width, each with a LayerNorm before and a shortcut."""

    def __init__(self, hidden: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
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
        scores = query @ key.transpose(-2, -1) / math.sqrt(hidden // self.heads)
        y = self.drop(scores.softmax(-1)) @ value
        return y.transpose(1, 2).reshape(batch, length, hidden)


class Bert(nn.Module):
    """A BERT for masked words: tokens (N, T) with T <= length -> logits (N, T, vocabulary).

    It has learned embeddings of token and position, `layers` blocks, and a linear head that is not tied to the
    embedding. It has no segments, no padding mask and no next-sentence head. Source: "BERT", arXiv 1810.04805.

    The attention is written out, because the code of the article (2019) keeps the attention scores (N, heads, T, T) of
    each layer for the backward pass. `nn.TransformerEncoderLayer` calls `scaled_dot_product_attention`, whose CUDA
    kernels never store them. Raises ValueError if `hidden` is not a multiple of `heads`, and for more than `length`
    tokens.
    """

    def __init__(self, vocabulary: int, hidden: int, layers: int, heads: int, length: int, dropout: float = 0.1):
        super().__init__()
        if hidden % heads:
            raise ValueError(f"hidden ({hidden}) must be a multiple of heads ({heads}).")
        self.token = nn.Embedding(vocabulary, hidden)
        self.place = nn.Embedding(length, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(BertBlock(hidden, heads, dropout) for _ in range(layers)))
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


def bert_article(vocabulary: int = 30_000) -> Bert:
    """The article's BERT: 8 layers, 8 heads, hidden size 256, length 163. The logits of 200 samples take 3.64 GiB."""
    return Bert(vocabulary, hidden=256, layers=8, heads=8, length=163)
