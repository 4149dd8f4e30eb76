"""The rows of helpers/lesson07/nets.json, measured: `python -m tests.benchmarks.nets` prints them, in seconds.

`net_of` measures a net of your own as well, for `helpers.lesson07.advise`.

On virtual GPUs in shapes only. Of the net of 7 billion one block of 32 runs, and counts for all.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet50

from helpers.gpus import modelled_gpus
from helpers.lesson04 import LENGTH, WordLoss
from helpers.lesson07.nets import Net
from helpers.measure import MiB
from helpers.models import Bert, bert_article, pyramidnet_article
from helpers.parallel.pipeline import layers_of

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
    layers = layers_of(resnet50())
    return [nn.Sequential(*layers[:4]), *layers[4:-3], nn.Sequential(*layers[-3:])]


CASES = {  # layers, samples to measure with, shapes of one sample's inputs and targets
    "BERT of the article": (lambda: layers_of(bert_article()), 64, (LENGTH,), (LENGTH,), "Adam"),
    "PyramidNet of the article": (lambda: layers_of(pyramidnet_article()), 256, (3, 32, 32), (), MOMENTUM),
    "ResNet-50, 224 pixels": (_resnet, 64, (3, 224, 224), (), MOMENTUM),
    "BERT large, 512 tokens": (
        lambda: layers_of(Bert(30_522, 1024, 24, 16, 512, fused=True)), 8, (512,), (512,), "Adam"),
    "7 billion, 2,048 tokens": (
        lambda: layers_of(Bert(32_000, 4096, 1, 32, 2048, fused=True)), 2, (2048,), (2048,), "Adam"),
}  # fmt: skip


# ---- one net ---------------------------------------------------------------------------------------------------------


def net_of(
    name: str,
    layers: Sequence[nn.Module],
    inputs: Tensor,
    targets: Tensor,
    criterion: Callable[[Tensor, Tensor], Tensor],
    gpu,
    optimizer: str = "Adam",
    convolutions: bool = False,
) -> Net:
    """The `Net` of `layers`, which follow one another, measured on `gpu`, to which they are moved.

    Each layer runs forward and backward with all samples and with half of them. The difference is what a sample takes;
    what does not grow with the batch, such as reading the weights, falls out of it. inputs, targets: of some dozen
    samples, so that rounding does not matter. Raises ValueError for less than two samples, and for no layers.
    """
    if len(inputs) < 2 or not layers:
        raise ValueError(
            f"{len(layers)} layers and {len(inputs)} samples. At least one layer and two samples are needed."
        )
    half = len(inputs) // 2
    few, many = (np.array(_passes(layers, inputs[:n], targets[:n], criterion, gpu)) for n in (half, len(inputs)))
    per_sample = (many - few) / (len(inputs) - half)
    rows = []
    for layer, grown, whole in zip(layers, per_sample, many, strict=True):
        sizes = [parameter.numel() for parameter in layer.parameters()]
        rows.append((1, sum(sizes), *grown[:-1], whole[-1], len(sizes)))
    return Net.of(name, rows, optimizer, convolutions)


def _passes(layers: Sequence[nn.Module], inputs: Tensor, targets: Tensor, criterion, gpu) -> list[list[float]]:
    """Per layer (kept, output, moved, flops, operators) of all samples together."""
    found, x = [], inputs.to(gpu)
    for layer in layers:
        layer.to(gpu)
        work, before = _both_passes(layer, x), _held(gpu)
        x = layer(x)
        found.append([_held(gpu) - before, x.nbytes, *work])
    # The loss lets go of the outputs if it does not need them. What it keeps is as large as they are, and not counted.
    outputs, before = x.nbytes, _held(gpu)
    x = criterion(x, targets.to(gpu))
    found[-1][0] += _held(gpu) - before - outputs
    return found


def _held(gpu) -> int:
    """Bytes that tensors asked for. What the allocator rounds up would depend on what ran before."""
    return torch.cuda.memory_stats(gpu)["requested_bytes.all.current"]


def _both_passes(layer: nn.Module, x: Tensor) -> tuple[float, float, int]:
    """(bytes moved, operations, operators) of a forward and a backward pass, of which nothing stays."""
    x = x.detach().requires_grad_() if x.is_floating_point() else x
    start = x.clone()  # not a leaf: the layer may change it in place
    with FlopCounterMode(display=False) as flops, _Traffic() as traffic:
        y = layer(start)
        y.backward(torch.empty_like(y))
    for parameter in layer.parameters():
        parameter.grad = None
    return traffic.nbytes, flops.get_total_flops(), traffic.operators


class _Traffic(TorchDispatchMode):
    """Adds up what operators read and write: the arguments and results of each once, as the clock counts them."""

    _IDLE = ("empty", "_unsafe_view", "detach", "record_stream", "set_")  # start no kernel, as views do not

    def __init__(self):
        super().__init__()
        self.nbytes = self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func._schema.name.split("::")[1].startswith(self._IDLE)):
            parts = tree_leaves((args, kwargs, result))
            self.nbytes += sum(part.nbytes for part in parts if isinstance(part, Tensor) and part.is_cuda)
            self.operators += 1
        return result


# ---- as rows ---------------------------------------------------------------------------------------------------------


def rows(net: Net) -> str:
    """As nets.json has them: neighbours that are alike as one row of their means."""
    lines = [f"{net.name}, {net.optimizer}"]
    for start, end in _runs(net.layers):
        run = [np.mean(net.layers[column][start:end]) for column in net.layers.dtype.names]
        parameters, kept, output, moved, flops, operators, tensors = run
        count = 32 if parameters > 2e8 else end - start
        lines.append(
            f"      [{count}, {_number(parameters)}, {kept / MiB:.4g}, {output / MiB:.4g}, {moved / MiB:.4g}, "
            f"{flops / 1e9:.4g}, {operators:.3g}, {tensors:.3g}],"
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
    return f"{parameters:.3f}".rstrip("0").rstrip(".")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for found in measured_nets():
        print(rows(found))
