"""The rows of `helpers.lesson07.advice.nets.NETS`, measured: `python -m tests.benchmarks.nets` prints them, in seconds.

On virtual GPUs in shapes only. Of the net of 7 billion one block of 32 runs, and counts for all.
"""

from dataclasses import replace

import torch
from torch import nn
from torchvision.models import resnet50

from helpers.gpus import modelled_gpus
from helpers.lesson04 import LENGTH, WordLoss
from helpers.lesson07.advice import Net
from helpers.lesson07.advice.measured import net_of
from helpers.lesson07.methods.cuts import layers_to_cut
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
    """As Python writes them."""
    runs = (replace(run, count=32) if run.parameters > 2e8 else run for run in net.runs)
    lines = [
        f"    _run({run.count}, {_number(run.parameters)}, {run.activations / MiB:.4g}, {run.output / MiB:.4g}, "
        f"{run.moved / MiB:.4g}, {run.flops / 1e9:.4g}, {run.operators:.3g}, {run.tensors:.3g}),"
        for run in runs
    ]
    return "\n".join([f"{net.name}, {net.optimizer}", *lines])


def _number(parameters: float) -> str:
    """The mean of a run, so that the whole comes out to a parameter."""
    return f"{parameters:_.3f}".rstrip("0").rstrip(".")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for found in measured_nets():
        print(rows(found))
