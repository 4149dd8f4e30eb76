"""What the advice is told of a net: of each layer what it keeps, moves, computes and hands on. Measured, per sample.

NETS["BERT of the article"]
net_of("mine", layers, inputs, targets, criterion, "cuda:0")     # your own; virtual GPUs in shapes only will do
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from helpers.measure import MiB

STATES = {"SGD": 0, "SGD with momentum": 1, "Adam": 2}  # numbers per parameter
COLUMNS = ("parameters", "activations", "output", "moved", "flops", "operators", "tensors")


@dataclass(frozen=True, eq=False)
class Net:
    """A net and its optimizer. layers: a record array with a row per layer and these columns:

    parameters   a number
    activations  bytes per sample that it keeps until the backward pass, in float32, its output among them (of the last
                 layer: without, since the loss keeps its own)
    output       bytes per sample that it hands on
    moved        bytes per sample that its operators read and write, in both passes
    flops        operations per sample of matrix multiplications and convolutions, in both passes
    operators    that start kernels, in both passes
    tensors      in which its parameters lie
    """

    name: str
    layers: np.recarray
    optimizer: str = "Adam"
    convolutions: bool = False

    @classmethod
    def of(cls, name: str, rows: Sequence[Sequence[float]], *how) -> Net:
        """From rows (count, ...), each of which stands for `count` equal layers. how: optimizer, convolutions."""
        found = [tuple(map(float, row)) for count, *row in rows for _ in range(count)]
        return cls(name, np.rec.fromrecords(found, names=COLUMNS), *how)

    @property
    def weights(self) -> float:
        """Bytes of the parameters in float32."""
        return 4 * self.layers.parameters.sum()

    @property
    def states(self) -> int:
        """Numbers that the optimizer keeps per parameter."""
        return STATES[self.optimizer]

    @property
    def outputs(self) -> float:
        """Bytes of a sample's outputs, which the loss gets."""
        return self.layers.output[-1]

    @property
    def activations(self) -> float:
        """Bytes that a sample keeps for the backward pass, without those that the loss keeps."""
        return self.layers.activations.sum()


# Measured on virtual GPUs in shapes only, by `python -m tests.benchmarks.nets` (PyTorch 2.15).
# Count, parameters, MiB kept, MiB handed on, MiB moved, 10^9 operations, operators, tensors.
_BERT, _PYRAMIDNET, _RESNET, _BERT_LARGE, _LARGEST = (
    (
        (1, 7_721_728, 0.199, 0.1592, 1.515, 0, 9, 2),
        (8, 789_760, 4.612, 0.1592, 41.28, 0.8508, 51, 12),
        (1, 512, 0.1604, 0.1592, 0.7984, 0, 2, 2),
        (1, 7_710_000, 0.001244, 18.65, 75.09, 7.511, 4, 2),
    ),
    (
        (3, 6_239, 0.3346, 0.08203, 2.436, 0.03773, 14.3, 6.33),
        (4, 25_731.5, 0.7324, 0.1504, 5.762, 0.1567, 19, 8),
        (4, 59_871.5, 1.123, 0.2285, 8.887, 0.3658, 19, 8),
        (3, 101_294, 1.465, 0.2969, 11.62, 0.6196, 19, 8),
        (3, 145_799, 1.758, 0.3555, 13.96, 0.8925, 19, 8),
        (1, 179_669, 1.953, 0.3945, 15.53, 1.1, 19, 8),
        (8, 272_076.5, 0.6351, 0.1206, 5.34, 0.4168, 19.2, 8),
        (6, 447_321.5, 0.769, 0.1548, 6.128, 0.6856, 19, 8),
        (3, 582_929, 0.8789, 0.1768, 7.007, 0.8937, 19, 8),
        (16, 940_461.5, 0.2862, 0.05579, 2.349, 0.3606, 19.1, 8),
        (1, 1_311_359, 0.3296, 0.06616, 2.631, 0.5029, 19, 8),
        (1, 3_262, 0.0672, 3.815e-05, 0.8644, 1.626e-05, 11, 4),
    ),
    (
        (1, 9_536, 8.422, 0.7656, 52.25, 0.7081, 9, 3),
        (1, 75_008, 12.25, 3.062, 97.23, 1.387, 28, 12),
        (2, 70_400, 9.188, 3.062, 87.28, 1.31, 23, 9),
        (1, 379_392, 8.422, 1.531, 89.96, 2.235, 28, 12),
        (3, 280_064, 4.594, 1.531, 43.64, 1.31, 23, 9),
        (1, 1_512_448, 4.211, 0.7656, 44.98, 2.235, 28, 12),
        (5, 1_117_184, 2.297, 0.7656, 21.82, 1.31, 23, 9),
        (1, 6_039_552, 2.105, 0.3828, 22.49, 2.235, 28, 12),
        (2, 4_462_592, 1.148, 0.3828, 10.91, 1.31, 23, 9),
        (1, 2_049_000, 0.00782, 0.003815, 1.195, 0.01229, 6, 2),
    ),
    (
        (1, 31_778_816, 2.5, 2, 19.01, 0, 9, 2),
        (24, 12_596_224, 35.04, 2, 276, 38.65, 39, 12),
        (1, 2_048, 2.004, 2, 10.01, 0, 2, 2),
        (1, 31_285_050, 0.003906, 59.61, 244.5, 96.01, 4, 2),
    ),
    (
        (1, 139_460_608, 40, 32, 304, 0, 9, 2),
        (32, 201_379_840, 560.3, 32, 4416, 2474, 39, 12),
        (1, 8_192, 32.02, 32, 160, 0, 2, 2),
        (1, 131_104_000, 0.01562, 250, 1096, 1611, 4, 2),
    ),
)  # fmt: skip


def _known(name: str, rows: Sequence[Sequence[float]], *how) -> Net:
    units = np.array([1, MiB, MiB, MiB, 1e9, 1, 1])
    return Net.of(name, [(row[0], *(row[1:] * units)) for row in rows], *how)


NETS = {net.name: net for net in (
    _known("BERT of the article", _BERT),
    _known("PyramidNet of the article", _PYRAMIDNET, "SGD with momentum", True),
    _known("ResNet-50, 224 pixels", _RESNET, "SGD with momentum", True),
    _known("BERT large, 512 tokens", _BERT_LARGE),
    _known("7 billion, 2,048 tokens", _LARGEST),
)}  # fmt: skip


# ---- a net of your own, measured -------------------------------------------------------------------------------------


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
