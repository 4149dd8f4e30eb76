"""Training steps that no real GPU has been asked about yet: they wait for a card.

    python -m benchmarks.memory --real-gpu further.json vgg11_64px_b64 gru_words_b64 ...

They hold what the measured cases do not: deep concatenations, depthwise and transposed convolutions, cross attention
with masks, GRUs, dropout on attention, a whole network in bf16 with channels_last. Nothing was fitted to them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torchvision import models

from benchmarks.reference.cases import ADAM, ADAMW, SGD, Build, images, texts, training
from benchmarks.reference.networks import GPT, Recurrent, positions


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    """Twice 3x3 convolution, batch norm and ReLU."""
    widths = ((inputs, outputs), (outputs, outputs))
    layers = [(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True)) for i, o in widths]
    return nn.Sequential(*(module for layer in layers for module in layer))


class UNet(nn.Module):
    """Down by pooling, up by transposed convolutions, with the pictures of the way down beside those of the way up."""

    def __init__(self, widths=(32, 64, 128, 256), channels: int = 3, classes: int = 8):
        super().__init__()
        steps = list(zip(widths, widths[1:], strict=False))
        self.first = double_conv(channels, widths[0])
        self.down = nn.ModuleList(double_conv(small, large) for small, large in steps)
        self.widen = nn.ModuleList(nn.ConvTranspose2d(large, small, 2, stride=2) for small, large in reversed(steps))
        self.up = nn.ModuleList(double_conv(large, small) for small, large in reversed(steps))
        self.pool, self.predict = nn.MaxPool2d(2), nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) -> a class per pixel, (batch, height, width, classes)."""
        passed = [self.first(x)]
        for down in self.down:
            passed.append(down(self.pool(passed[-1])))
        x = passed.pop()
        for widen, up in zip(self.widen, self.up, strict=True):
            x = up(torch.cat((widen(x), passed.pop()), dim=1))
        return self.predict(x).movedim(1, -1)


class Translator(nn.Module):
    """PyTorch's encoder-decoder transformer: the text is its own source; the decoder sees only what came before."""

    def __init__(self, words: int = 10_000, hidden: int = 256, heads: int = 8, layers: int = 3, length: int = 96):
        super().__init__()
        self.words, self.positions = nn.Embedding(words, hidden), nn.Embedding(length, hidden)
        self.transformer = nn.Transformer(hidden, heads, layers, layers, 4 * hidden, dropout=0.1, batch_first=True)
        self.predict = nn.Linear(hidden, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) of word numbers -> logits (batch, length, words)."""
        embedded = self.words(tokens) + self.positions(positions(tokens))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=tokens.device)
        return self.predict(self.transformer(embedded, embedded, tgt_mask=mask, tgt_is_causal=True))


def pixels(count: int, size: int, classes: int):
    """Random pictures, and a class for every pixel."""
    return lambda: (torch.randn(count, 3, size, size), torch.randint(0, classes, (count, size, size)))


def bf16_images(count: int, size: int, classes: int):
    """Random pictures in bf16, laid out with the channels last."""
    of_floats = images(count, 3, size, size, classes=classes)

    def batch():
        inputs, targets = of_floats()
        return inputs.to(torch.bfloat16, memory_format=torch.channels_last), targets

    return batch


def builds(share: int = 1) -> dict[str, Build]:
    """Name -> training step, with the batch size in its name divided by `share`."""
    half = {"dtype": torch.bfloat16, "memory_format": torch.channels_last}
    resnet18, bf16 = partial(models.resnet18, num_classes=10), torch.bfloat16
    return {
        "vgg11_64px_b64": training(partial(models.vgg11, num_classes=10), images(64 // share, 3, 64, 64, classes=10)),
        "densenet121_64px_b32": training(
            partial(models.densenet121, num_classes=10), images(32 // share, 3, 64, 64, classes=10)
        ),
        "mobilenet_v2_96px_b64": training(
            partial(models.mobilenet_v2, num_classes=10), images(64 // share, 3, 96, 96, classes=10)
        ),
        "unet_96px_b16": training(UNet, pixels(16 // share, 96, 8), ADAM),
        "translator_b32": training(Translator, texts(32 // share, 96, 10_000), ADAM),
        "gru_words_b64": training(partial(Recurrent, nn.GRU), texts(64 // share, 48, 5000), ADAM),
        "gpt_dropout_b8": training(partial(GPT, 0.1), texts(8 // share, 256, 8192), ADAMW),
        "gpt_dropout_bf16_b8": training(partial(GPT, 0.1), texts(8 // share, 256, 8192), ADAMW, autocast=bf16),
        "resnet18_bf16_channels_last_b128": training(resnet18, bf16_images(128 // share, 64, 10), SGD, place=half),
    }


FURTHER = builds()
