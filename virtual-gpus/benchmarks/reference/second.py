"""The second set of steps and operators that the H200 was measured with (tests/data/h200/second).

They hold what the first set does not: depthwise convolutions, dense concatenations of images with few pixels, a GRU in
two directions, a U-Net with group norms, and single layers of 5x5 filters, of many channels and few pixels, and a wide
LSTM. The U-Net's memory was not measured. Its seconds were.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models

from benchmarks.reference import operators
from benchmarks.reference.cases import Build, TrainingStep, images, training


def twice(inputs: int, outputs: int) -> nn.Sequential:
    """Twice 3x3 convolution, group norm and SiLU."""
    layers = [(nn.Conv2d(i, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()) for i in (inputs, outputs)]
    return nn.Sequential(*(module for layer in layers for module in layer))


class UNet(nn.Module):
    """Two poolings down and two enlargements up. Each way up also sees the pictures of the way down."""

    def __init__(self, classes: int = 5):
        super().__init__()
        self.down = nn.ModuleList(twice(i, o) for i, o in ((3, 32), (32, 64), (64, 128)))
        self.up = nn.ModuleList(twice(i, o) for i, o in ((128 + 64, 64), (64 + 32, 32)))
        self.predict = nn.Conv2d(32, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, height, width) -> logits of each pixel, (batch, classes, height, width)."""
        passed = []
        for number, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if number else x)
            passed.append(x)
        passed.pop()
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), passed.pop()], 1))
        return self.predict(x)


class Tagger(nn.Module):
    """A tag for each word, from a GRU that reads in both directions."""

    def __init__(self, words: int = 3000, embedding: int = 128, hidden: int = 256, tags: int = 50):
        super().__init__()
        self.words = nn.Embedding(words, embedding)
        self.recurrent = nn.GRU(embedding, hidden, batch_first=True, bidirectional=True)
        self.predict = nn.Linear(2 * hidden, tags)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) of word numbers -> logits (batch, length, tags)."""
        return self.predict(self.recurrent(self.words(tokens))[0])


def tagged(count: int = 64, length: int = 80):
    """Texts and their tags."""
    return torch.randint(0, 3000, (count, length)), torch.randint(0, 50, (count, length))


def segmented(count: int = 8, size: int = 128):
    """Pictures, and a class for each pixel."""
    return torch.randn(count, 3, size, size), torch.randint(0, 5, (count, size, size))


class SegmentationStep(TrainingStep):
    """Trains on a class for every pixel."""

    def forward(self) -> Tensor:
        """The loss, of logits (batch, classes, height, width)."""
        inputs, targets = self.batch
        return F.cross_entropy(self.net(inputs.to(self.device)), targets.to(self.device))


def unet(device) -> TrainingStep:
    """The U-Net, eight pictures of 128 x 128, Adam."""
    torch.manual_seed(0)
    net = UNet().to(device)
    return SegmentationStep(net, torch.optim.Adam(net.parameters()), segmented(), device)


STEPS: dict[str, Build] = {
    "mobilenet_v3_64px_b64": training(
        partial(models.mobilenet_v3_small, num_classes=100), images(64, 3, 64, 64, classes=100)
    ),
    "densenet121_32px_b32": training(partial(models.densenet121, num_classes=10), images(32, 3, 32, 32, classes=10)),
    "gru_tagger_b64": training(Tagger, tagged, partial(torch.optim.SGD, lr=0.1)),
}
TIMED: dict[str, Build] = STEPS | {"unet_adam_b8": unet}
THIRD: dict[str, Build] = {  # only its seconds, in tests/data/h200/third
    "resnet50_bf16_64px_b64": training(
        partial(models.resnet50, num_classes=100), images(64, 3, 64, 64, classes=100), autocast=torch.bfloat16
    )
}
OPERATORS: dict[str, operators.Build] = {
    "conv3_256_8": operators.module(lambda: nn.Conv2d(256, 256, 3, padding=1, bias=False), 64, 256, 8, 8),
    "conv5": operators.module(lambda: nn.Conv2d(32, 64, 5, padding=2), 32, 32, 28, 28),
    "lstm_3x300": operators.module(lambda: nn.LSTM(300, 300, 3, batch_first=True), 20, 50, 300),
}
