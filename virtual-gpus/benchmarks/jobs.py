"""The training steps that the benchmarks time. `JOBS[name](device, gpus=1)` gives (step, net, optimizer)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet18


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.project = nn.Linear(hidden, hidden)
        self.feed_forward = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) -> the same shape."""
        split = self.query_key_value(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """A small GPT: 6 layers, 6 heads, hidden 384, 256 tokens of 8,192 words."""

    def __init__(self, words: int = 8192, hidden: int = 384, layers: int = 6, heads: int = 6, length: int = 256):
        super().__init__()
        self.words, self.places = nn.Embedding(words, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.Sequential(*[Block(hidden, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) of word numbers -> logits (batch, length, words)."""
        places = torch.arange(tokens.size(1), device=tokens.device)
        return self.head(self.norm(self.blocks(self.words(tokens) + self.places(places))))


def _step(net: nn.Module, optimizer, inputs: Tensor, targets: Tensor, device: str):
    def step() -> None:
        output = net(inputs.to(device))
        loss = F.cross_entropy(output.flatten(0, -2), targets.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def _parallel(net: nn.Module, gpus: int) -> nn.Module:
    return nn.DataParallel(net, device_ids=list(range(gpus))) if gpus > 1 else net


def resnet18_b64(device: str, gpus: int = 1):
    """torchvision's ResNet-18, 64 images of 3 x 32 x 32, SGD with momentum."""
    torch.manual_seed(0)
    net = _parallel(resnet18(num_classes=10).to(device), gpus)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    return _step(net, optimizer, torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)), device), net, optimizer


def _gpt(net: GPT, samples: int, device: str, gpus: int):
    words, length = net.words.num_embeddings, net.places.num_embeddings
    net = _parallel(net.to(device), gpus)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    tokens = torch.randint(0, words, (2, samples, length))
    return _step(net, optimizer, tokens[0], tokens[1], device), net, optimizer


def gpt_b8(device: str, gpus: int = 1):
    """The GPT above, 8 texts of 256 tokens, AdamW."""
    torch.manual_seed(0)
    return _gpt(GPT(), 8, device, gpus)


def nanogpt_b12(device: str, gpus: int = 1):
    """A GPT of the sizes that nanoGPT recommends for a CPU: 12 texts of 64 letters, AdamW."""
    torch.manual_seed(0)
    return _gpt(GPT(words=65, hidden=128, layers=4, heads=4, length=64), 12, device, gpus)


def tiny_gpt_b4(device: str, gpus: int = 1):
    """A GPT so small that nearly all of a step is spent around its operators: 4 texts of 32 letters, AdamW."""
    torch.manual_seed(0)
    return _gpt(GPT(words=65, hidden=32, layers=2, heads=2, length=32), 4, device, gpus)


class WordModel(nn.Module):
    """An LSTM of two layers over words, as in PyTorch's word_language_model."""

    def __init__(self, words: int = 2000, hidden: int = 32):
        super().__init__()
        self.words, self.head = nn.Embedding(words, hidden), nn.Linear(hidden, words)
        self.lstm = nn.LSTM(hidden, hidden, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) of word numbers -> logits (batch, length, words)."""
        return self.head(self.lstm(self.words(tokens))[0])


def words_b20(device: str, gpus: int = 1):
    """The model above, 20 texts of 35 words, SGD."""
    torch.manual_seed(0)
    net = _parallel(WordModel().to(device), gpus)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    tokens = torch.randint(0, 2000, (2, 20, 35))
    return _step(net, optimizer, tokens[0], tokens[1], device), net, optimizer


JOBS = {
    "ResNet-18, batch 64": resnet18_b64,
    "GPT, batch 8": gpt_b8,
    "nanoGPT for a CPU, batch 12": nanogpt_b12,
    "LSTM over words, batch 20": words_b20,
    "GPT of two layers of width 32, batch 4": tiny_gpt_b4,
}


def tiny(device, gpus=1):
    net = nn.Linear(4, 2).to(device)
    net = nn.DataParallel(net, device_ids=list(range(gpus))) if gpus > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step():
        step.ran += 1
        net(torch.ones(16, 4, device=device)).sum().backward()
        optimizer.step()

    step.ran = 0
    return step, net, optimizer
