"""A net's layers measured for the guide: `net_of`. Part of `helpers.lesson07.advice`.

    net = net_of("mine", layers, inputs, targets, WordLoss(), "cuda:0")     # virtual GPUs in shapes only will do
    advise(net, batch=256, gpus=8, cluster=Cluster("A100", 8))

Each layer runs forward and backward, with all samples and with half of them. The difference is what a sample takes;
what does not grow with the batch, such as reading the weights, falls out of it (the guide adds that itself).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import mean

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from helpers.lesson07.advice.nets import Layers, Net

_ALIKE = 0.01  # of the whole net's activations and operations: neighbours that differ by less make one run
_IDLE = ("empty", "_unsafe_view", "detach", "record_stream", "set_")  # start no kernel, as views do not


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

    inputs, targets: of at least two samples; some dozen, so that memory's rounding does not matter. criterion: of
    outputs and targets. Raises ValueError for less.
    """
    if len(inputs) < 2 or not layers:
        raise ValueError(f"{len(layers)} layers, {len(inputs)} samples: at least one layer and two samples are needed")
    half = len(inputs) // 2
    few, many = (_passes(layers, inputs[:n], targets[:n], criterion, gpu) for n in (half, len(inputs)))
    found = [
        Layers(1, _numbers(layer), *_each(less, more, len(inputs) - half), more[-1], len(list(layer.parameters())))
        for layer, less, more in zip(layers, few, many, strict=True)
    ]
    return Net(name, _runs(found), optimizer, convolutions)


def _numbers(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


def _each(less: Sequence[float], more: Sequence[float], samples: int) -> list[float]:
    """Of one sample, by the difference; the last figure, operators, does not grow."""
    return [(high - low) / samples for low, high in zip(less[:-1], more[:-1], strict=True)]


def _passes(
    layers: Sequence[nn.Module], inputs: Tensor, targets: Tensor, criterion: Callable, gpu
) -> list[list[float]]:
    """Per layer (kept, output, moved, flops, operators), of all samples."""
    found, x = [], inputs.to(gpu)
    for layer in layers:
        layer.to(gpu)
        work, before = _both(layer, x), _held(gpu)
        x = layer(x)
        found.append([_held(gpu) - before, x.nbytes, *work])
    # The loss lets go of the outputs if it does not need them; what it keeps is as large as they are, and not counted.
    outputs, before = x.nbytes, _held(gpu)
    x = criterion(x, targets.to(gpu))
    found[-1][0] += _held(gpu) - before - outputs
    return found


def _held(gpu) -> int:
    """Bytes that tensors asked for; what the allocator rounds up would depend on what ran before."""
    return torch.cuda.memory_stats(gpu)["requested_bytes.all.current"]


def _both(layer: nn.Module, x: Tensor) -> tuple[float, float, int]:
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
    """Adds up what operators read and write: each its arguments and results once, as the clock takes it."""

    def __init__(self):
        super().__init__()
        self.nbytes = self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func._schema.name.split("::")[1].startswith(_IDLE)):
            parts = tree_leaves((args, kwargs, result))
            self.nbytes += sum(part.nbytes for part in parts if isinstance(part, Tensor) and part.is_cuda)
            self.operators += 1
        return result


def _runs(layers: list[Layers]) -> tuple[Layers, ...]:
    """Neighbours that are alike as one run of their means; the last layer, before the loss, stays alone."""
    most = {what: _ALIKE * sum(getattr(layer, what) for layer in layers) for what in ("activations", "flops")}
    edges = [0]
    for number, layer in enumerate(layers[:-1]):
        first = layers[edges[-1]]
        if any(abs(getattr(layer, what) - getattr(first, what)) > most[what] for what in most):
            edges.append(number)
    edges += [len(layers) - 1, len(layers)]
    return tuple(_mean(layers[start:end]) for start, end in pairwise(edges) if end > start)


def _mean(layers: list[Layers]) -> Layers:
    columns = zip(*([*vars(layer).values()][1:] for layer in layers), strict=True)
    return Layers(len(layers), *(mean(column) for column in columns))
