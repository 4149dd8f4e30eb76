"""The networks of the measured training steps that torchvision does not have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def positions(tokens: Tensor) -> Tensor:
    """0, 1, 2 ... along a text: (batch, length) -> (length,), on the GPU of `tokens`."""
    return torch.arange(tokens.size(1), device=tokens.device)


def mlp(width: int = 2048, layers: int = 6, classes: int = 10) -> nn.Sequential:
    """`layers` times Linear and ReLU of one width, then a Linear to the classes."""
    hidden = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, classes))


class TokenEncoder(nn.Module):
    """A small BERT: PyTorch's own pre-norm encoder, and a prediction of the word at every place."""

    def __init__(self, dropout: float, words=20_000, hidden=256, layers=8, heads=8, length=163):
        super().__init__()
        self.words, self.positions = nn.Embedding(words, hidden), nn.Embedding(length, hidden)
        layer = nn.TransformerEncoderLayer(
            hidden, heads, 4 * hidden, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.predict = nn.Linear(hidden, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) of word numbers -> logits (batch, length, words)."""
        return self.predict(self.encoder(self.words(tokens) + self.positions(positions(tokens))))


class GPTBlock(nn.Module):
    """Causal attention and a feed-forward net, each after a layer norm and added to its input."""

    def __init__(self, hidden: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1 = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.project = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.widen, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def attention(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) -> the same shape. What norm1 gives has no name: autocast lets go of it early."""
        heads = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.split(self.norm1(x)))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=self.dropout * self.training)
        return self.project(mixed.transpose(1, 2).reshape(x.shape))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each (batch, length, hidden)."""
        return self.query_key_value(x).split(x.size(-1), dim=2)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) -> the same shape."""
        x = x + self.drop(self.attention(x))
        return x + self.drop(self.narrow(F.gelu(self.widen(self.norm2(x)))))

    def drop(self, x: Tensor) -> Tensor:
        """Dropout, if the network has any."""
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """A small GPT: 6 layers, 6 heads, hidden 384, texts of 256 tokens."""

    def __init__(self, dropout: float = 0.0, words=8192, hidden=384, layers=6, heads=6, length=256):
        super().__init__()
        self.words, self.positions = nn.Embedding(words, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.Sequential(*[GPTBlock(hidden, heads, dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) of word numbers -> logits (batch, length, words)."""
        return self.head(self.norm(self.blocks(self.words(tokens) + self.positions(positions(tokens)))))


class Recurrent(nn.Module):
    """Predicts the next word from an LSTM, GRU or RNN: `kind` is its class."""

    def __init__(self, kind=nn.LSTM, words: int = 5000, embedding: int = 256, hidden: int = 512, layers: int = 2):
        super().__init__()
        self.words = nn.Embedding(words, embedding)
        self.recurrent = kind(embedding, hidden, layers, batch_first=True)
        self.predict = nn.Linear(hidden, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) of word numbers -> logits (batch, length, words)."""
        return self.predict(self.recurrent(self.words(tokens))[0])
