"""Other kinds of GPUs beside published figures: ResNet-50 and BERT base on ten of them, in samples per second.

    python -m benchmarks.kinds

The figures are Lambda's (github.com/lambdal/deeplearning-benchmark, pytorch/*.csv, one GPU each, 2021 to 2025) for
NVIDIA's DeepLearningExamples in containers of different years. "resnet50", fp32 (TF32 where the GPU has it): 224 x 224
pixels, synthetic data. "bert_base_squad", fp16: 384 words, attention without a fused kernel, apex O2. The programs here
are torchvision's ResNet-50 and a BERT of the same sizes with the same attention and weights in fp16, with batches of
256 and 128. Lambda's batches fill each GPU. None of the clock's constants was fitted to these figures. The second table
is ResNet-50 in fp16, on the kinds that were measured with the newer containers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet50
from virtual_gpus import record_timeline, virtual_gpus

IMAGES, TEXTS, LENGTH = 256, 128, 384
# Kind -> images per second of ResNet-50 with automatic mixed precision in fp16 and the channels last.
PUBLISHED_FP16 = {"H100": 2790, "GH200": 2846, "H200": 3079, "B200": 3076}
# Kind -> images per second of ResNet-50, texts per second of BERT. H100, H200, GH200, B200: the second generation of
# the figures, on newer containers. H100: median of 45 machines.
PUBLISHED = {
    "V100": (369, 189),
    "RTX 3090": (513, 172),
    "A10": (349, 135),
    "A100-80GB": (1066, 443),
    "RTX 4090": (721, 297),
    "RTX 6000 Ada": (647, 255),
    "H100": (1894, 845),
    "GH200": (2063, 838),
    "H200": (2259, 932),
    "B200": (2967, 1405),
}


class Layer(nn.Module):
    """A layer of BERT, attention written out."""

    def __init__(self, hidden: int = 768, heads: int = 12):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out, self.norm1, self.norm2 = nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.widen, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) -> the same shape."""
        query, key, value = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        weights = F.dropout((query @ key.transpose(-1, -2) / 8).softmax(-1), 0.1)
        mixed = (weights @ value).transpose(1, 2).flatten(2)
        x = self.norm1(x + F.dropout(self.out(mixed), 0.1))
        return self.norm2(x + F.dropout(self.narrow(F.gelu(self.widen(x))), 0.1))


class BERT(nn.Module):
    """BERT base with a head that marks the begin and the end of an answer."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(30_528, 768), nn.Embedding(512, 768)
        self.norm, self.layers = nn.LayerNorm(768), nn.Sequential(*(Layer() for _ in range(12)))
        self.answer = nn.Linear(768, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) -> (batch, 2, length)."""
        places = torch.arange(tokens.size(1), device=tokens.device)
        x = F.dropout(self.norm(self.words(tokens) + self.positions(places)), 0.1)
        return self.answer(self.layers(x)).transpose(1, 2)


def images(fp16: bool = False) -> Callable[[], None]:
    """A step of ResNet-50. fp16: with autocast and the channels last."""
    layout = torch.channels_last if fp16 else torch.contiguous_format
    net = resnet50().cuda().to(memory_format=layout)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5)
    x, y = torch.zeros(IMAGES, 3, 224, 224, device="cuda"), torch.zeros(IMAGES, dtype=torch.long, device="cuda")
    x = x.to(memory_format=layout)

    def loss() -> Tensor:
        with torch.autocast("cuda", torch.float16, enabled=fp16):
            return F.cross_entropy(net(x), y)

    return stepping(optimizer, loss)


def texts() -> Callable[[], None]:
    """A step of BERT."""
    net = BERT().cuda().half()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    tokens = torch.zeros(TEXTS, LENGTH, dtype=torch.long, device="cuda")
    ends = torch.zeros(2 * TEXTS, dtype=torch.long, device="cuda")
    return stepping(optimizer, lambda: F.cross_entropy(net(tokens).flatten(0, 1).float(), ends))


def stepping(optimizer, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """A training step."""

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def per_second(kind: str, samples: int, job: Callable) -> float:
    """Samples per second in the second step on one GPU."""
    with virtual_gpus(1, kind=kind, memory="64 GiB", shapes_only=True):
        step = job()
        step()
        torch.cuda.synchronize()
        with record_timeline() as timeline:
            step()
            torch.cuda.synchronize()
    return samples / timeline.seconds


def main() -> None:
    """Print the table."""
    print("| GPU | ResNet-50, images/s | published | error | BERT base, sequences/s | published | error |")
    print("|---|---|---|---|---|---|---|")
    errors = []
    for kind, figures in PUBLISHED.items():
        found = per_second(kind, IMAGES, images), per_second(kind, TEXTS, texts)
        errors += (row := [mine / real - 1 for mine, real in zip(found, figures, strict=True)])
        cells = (f"{m:,.0f} | {p:,} | {100 * e:+.0f} %" for m, p, e in zip(found, figures, row, strict=True))
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)
    print(f"\nMedian error: {100 * statistics.median(map(abs, errors)):.0f} %\n")
    print("| GPU | ResNet-50 in fp16, images/s | published | error |")
    print("|---|---|---|---|")
    for kind, real in PUBLISHED_FP16.items():
        mine = per_second(kind, IMAGES, partial(images, fp16=True))
        print(f"| {kind} | {mine:,.0f} | {real:,} | {100 * (mine / real - 1):+.0f} % |", flush=True)


if __name__ == "__main__":
    main()
