"""The training steps that a real H200 was measured with (tests/data/h200/steps.json).

    step = CASES["resnet18_cifar_b64"]("cuda")
    loss = step()                       # trains once

Weights and data are made on the CPU from one seed, so the losses compare across devices.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models

from benchmarks.reference import networks

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4)
ADAM = partial(torch.optim.Adam, lr=1e-4)
ADAMW = partial(torch.optim.AdamW, lr=1e-4)
Batch = tuple[Tensor, Tensor]


class TrainingStep:
    """Trains `net` on the same batch at every call, which returns the loss.

    The net's last dimension is the classes; targets have one number for each row of logits. `autocast`: the dtype
    of torch.autocast, if any.
    """

    def __init__(self, net: nn.Module, optimizer, batch: Batch, device, autocast: torch.dtype | None = None):
        self.net, self.optimizer, self.batch = net, optimizer, batch
        self.device, self.autocast = torch.device(device), autocast

    def __call__(self) -> float:
        loss = self.forward()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def forward(self) -> Tensor:
        """The loss. Logits and the batch on the GPU have no name: they live as long as autograd needs them."""
        inputs, targets = self.batch
        with torch.autocast(self.device.type, self.autocast) if self.autocast else nullcontext():
            return F.cross_entropy(self.net(inputs.to(self.device)).flatten(0, -2), targets.to(self.device).flatten())


Build = Callable[[str], TrainingStep]


def training(
    net: Callable[[], nn.Module], batch: Callable[[], Batch], optimizer=SGD, autocast=None, place: dict | None = None
) -> Build:
    """How to build a step on a device. `place`: what `net.to` is told beside the device (dtype, memory_format)."""

    def build(device) -> TrainingStep:
        torch.manual_seed(0)
        placed = net().to(device, **(place or {}))
        return TrainingStep(placed, optimizer(placed.parameters()), batch(), device, autocast)

    return build


def images(count: int, *shape: int, classes: int) -> Callable[[], Batch]:
    """`count` random inputs of `shape`, and a class for each."""
    return lambda: (torch.randn(count, *shape), torch.randint(0, classes, (count,)))


def texts(count: int, length: int, words: int) -> Callable[[], Batch]:
    """Random tokens (count, length), and as many to predict."""
    return lambda: (torch.randint(0, words, (count, length)), torch.randint(0, words, (count, length)))


CASES: dict[str, Build] = {
    "mlp_adamw_b256": training(networks.mlp, images(256, 2048, classes=10), torch.optim.AdamW),
    "resnet18_cifar_b64": training(partial(models.resnet18, num_classes=10), images(64, 3, 32, 32, classes=10)),
    "resnet34_cifar_b128": training(partial(models.resnet34, num_classes=10), images(128, 3, 32, 32, classes=10)),
    "resnet50_64px_b32": training(partial(models.resnet50, num_classes=100), images(32, 3, 64, 64, classes=100)),
    "bert_small_b16": training(partial(networks.TokenEncoder, 0.1), texts(16, 163, 20_000), ADAM),
    "bert_small_nodrop_b16": training(partial(networks.TokenEncoder, 0.0), texts(16, 163, 20_000), ADAM),
    "gpt_small_b8": training(networks.GPT, texts(8, 256, 8192), ADAMW),
    "gpt_small_bf16_b8": training(networks.GPT, texts(8, 256, 8192), ADAMW, autocast=torch.bfloat16),
    "lstm_words_b32": training(networks.Recurrent, texts(32, 64, 5000), partial(torch.optim.SGD, lr=0.1)),
}
