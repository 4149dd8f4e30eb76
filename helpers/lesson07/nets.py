"""What the advice is told of a net: of each layer what it keeps, moves, computes and hands on. Measured, per sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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


# Measured on virtual GPUs in shapes only, by `python -m tests.benchmarks.nets` (PyTorch 2.15); `net_of` there measures
# any net so.
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
