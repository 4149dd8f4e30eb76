"""The rows of `helpers.lesson07.nets.NETS`, measured: `python -m tests.benchmarks.nets` prints them, in seconds.

On virtual GPUs in shapes only. Of the net of 7 billion one block of 32 runs, and counts for all.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torchvision.models import resnet50

from helpers.gpus import modelled_gpus
from helpers.lesson04 import LENGTH, WordLoss
from helpers.lesson07.methods import layers_to_cut
from helpers.lesson07.nets import Net, net_of
from helpers.measure import MiB
from helpers.models import Bert, bert_article, pyramidnet_article

MOMENTUM = "SGD with momentum"


def measured_nets(names=None):
    """Yields the guide's nets, measured one after the other; names: only these."""
    with modelled_gpus(1, "A100", "4 TiB") as (gpu,):
        for name, (build, samples, inputs, targets, optimizer) in CASES.items():
            if names is None or name in names:
                words = len(inputs) == 1
                x = torch.zeros(samples, *inputs, dtype=torch.long if words else torch.float32)
                y = torch.zeros(samples, *targets, dtype=torch.long)
                yield net_of(name, build(), x, y, WordLoss(), gpu, optimizer, convolutions=not words)


def _resnet():
    """The first and the last layers together: they are small, and some work in place."""
    layers = layers_to_cut(resnet50())
    return [nn.Sequential(*layers[:4]), *layers[4:-3], nn.Sequential(*layers[-3:])]


CASES = {  # layers, samples to measure with, shapes of one sample's inputs and targets
    "BERT of the article": (lambda: layers_to_cut(bert_article()), 64, (LENGTH,), (LENGTH,), "Adam"),
    "PyramidNet of the article": (lambda: layers_to_cut(pyramidnet_article()), 256, (3, 32, 32), (), MOMENTUM),
    "ResNet-50, 224 pixels": (_resnet, 64, (3, 224, 224), (), MOMENTUM),
    "BERT large, 512 tokens": (
        lambda: layers_to_cut(Bert(30_522, 1024, 24, 16, 512, fused=True)), 8, (512,), (512,), "Adam"),
    "7 billion, 2,048 tokens": (
        lambda: layers_to_cut(Bert(32_000, 4096, 1, 32, 2048, fused=True)), 2, (2048,), (2048,), "Adam"),
}  # fmt: skip


def rows(net: Net) -> str:
    """As Python writes them: neighbours that are alike as one row of their means."""
    lines = [f"{net.name}, {net.optimizer}"]
    for start, end in _runs(net.layers):
        run = [np.mean(net.layers[column][start:end]) for column in net.layers.dtype.names]
        parameters, kept, output, moved, flops, operators, tensors = run
        count = 32 if parameters > 2e8 else end - start
        lines.append(
            f"        ({count}, {_number(parameters)}, {kept / MiB:.4g}, {output / MiB:.4g}, {moved / MiB:.4g}, "
            f"{flops / 1e9:.4g}, {operators:.3g}, {tensors:.3g}),"
        )
    return "\n".join(lines)


def _runs(layers) -> list[tuple[int, int]]:
    """(start, end) of neighbours that differ by less than 1 % of the whole; the last layer, before the loss, alone."""
    edges = [0]
    for number in range(1, len(layers) - 1):
        for column in ("activations", "flops"):
            of_each = layers[column]
            if abs(of_each[number] - of_each[edges[-1]]) > 0.01 * of_each.sum():
                edges.append(number)
                break
    return [(start, end) for start, end in pairwise([*edges, len(layers) - 1, len(layers)]) if end > start]


def _number(parameters: float) -> str:
    """The mean of a run, so that the whole comes out to a parameter."""
    return f"{parameters:_.3f}".rstrip("0").rstrip(".")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for found in measured_nets():
        print(rows(found))
