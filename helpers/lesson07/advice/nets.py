"""What the guide is told of a net: its layers in runs of like ones. Part of `helpers.lesson07.advice`.

    Net("mine", (Layers(1, ...), Layers(24, ...), Layers(1, ...)), outputs=40)
    net_of("mine", layers, inputs, targets)              # the same, measured (`helpers.lesson07.advice.measured`)

A net is more than five totals: where its activations lie says how full the first stage of a pipeline gets, and what its
operators move in memory takes as long as their arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from helpers.measure import MiB

OPTIMIZERS = {"SGD": 0, "SGD with momentum": 1, "Adam": 2}


@dataclass(frozen=True)
class Layers:
    """`count` layers that are alike and can be put on different GPUs one by one. Of each of them:

    parameters   a number
    activations  bytes per sample that it keeps until the backward pass, in float32, its output among them (of the last
                 layer: without, since the loss keeps its own)
    output       bytes per sample that it hands on
    moved        bytes per sample that its operators read and write, in both passes
    flops        operations per sample of matrix products and convolutions, in both passes
    operators    that start kernels, in both passes
    tensors      that its parameters lie in
    """

    count: int
    parameters: float
    activations: float
    output: float
    moved: float
    flops: float
    operators: float
    tensors: float


@dataclass(frozen=True)
class Net:
    """A net and its optimizer. runs: its layers from the first to the last; convolutions: whether its arithmetic is
    that of convolutions rather than of matrix products."""

    name: str
    runs: tuple[Layers, ...]
    optimizer: str = "Adam"
    convolutions: bool = False

    @cached_property
    def layers(self) -> tuple[Layers, ...]:
        """Each layer on its own."""
        return tuple(run for run in self.runs for _ in range(run.count))

    @property
    def parameters(self) -> int:
        """Of all layers."""
        return round(self._sum("parameters"))

    @property
    def weights(self) -> int:
        """Bytes of the parameters in float32."""
        return 4 * self.parameters

    @property
    def states(self) -> int:
        """Optimizer states per parameter."""
        return OPTIMIZERS[self.optimizer]

    @property
    def activations(self) -> float:
        """Bytes that a sample keeps for the backward pass, what the loss keeps not among them."""
        return self._sum("activations")

    @property
    def outputs(self) -> float:
        """Bytes of a sample's outputs, which the loss gets."""
        return self.runs[-1].output

    @property
    def flops(self) -> float:
        """Operations of a sample, both passes."""
        return self._sum("flops")

    @property
    def operators(self) -> float:
        """That start kernels, in both passes."""
        return self._sum("operators")

    @property
    def at_loss(self) -> float:
        """Bytes per sample at the loss: its log-softmax and two gradients are as large as the outputs."""
        return self.activations + 3 * self.outputs

    @property
    def tensors(self) -> float:
        """That the parameters lie in."""
        return self._sum("tensors")

    def _sum(self, what: str) -> float:
        return sum(run.count * getattr(run, what) for run in self.runs)


def layers_alike(count: int, parameters: float, activations: float, outputs: float, flops: float) -> tuple[Layers, ...]:
    """A net of which only its totals are known (per sample in bytes, both passes): as many layers, all alike.

    Taken from the blocks of BERT: 51 operators in each and parameters in 12 tensors; nine bytes are moved for each that
    is kept, and a thirtieth is handed on. The last layer hands on `outputs` bytes.
    """
    kept = activations / count
    one = (parameters / count, kept, kept / 30, 9 * kept, flops / count, 51, 12)
    last = (*one[:2], outputs, *one[3:])
    return (Layers(count - 1, *one), Layers(1, *last)) if count > 1 else (Layers(1, *last),)


def _run(count, parameters, activations, output, moved, gigaflops, *counts) -> Layers:
    """activations, output and moved in MiB."""
    return Layers(count, parameters, activations * MiB, output * MiB, moved * MiB, gigaflops * 1e9, *counts)


# Measured on virtual GPUs in shapes only, per sample in float32, by `python -m tests.benchmarks.nets` (PyTorch 2.15).
# The columns: layers, parameters, MiB kept, MiB handed on, MiB moved, 10^9 operations, operators, tensors.
_BERT, _PYRAMIDNET, _RESNET, _BERT_LARGE, _LARGEST = (
    (
        _run(1, 7_721_728, 0.199, 0.1592, 1.515, 0, 9, 2),
        _run(8, 789_760, 4.612, 0.1592, 41.28, 0.8508, 51, 12),
        _run(1, 512, 0.1604, 0.1592, 0.7984, 0, 2, 2),
        _run(1, 7_710_000, 0.001244, 18.65, 75.09, 7.511, 4, 2),
    ),
    (
        _run(3, 6_239, 0.3346, 0.08203, 2.436, 0.03773, 14.3, 6.33),
        _run(4, 25_731.5, 0.7324, 0.1504, 5.762, 0.1567, 19, 8),
        _run(4, 59_871.5, 1.123, 0.2285, 8.887, 0.3658, 19, 8),
        _run(3, 101_294, 1.465, 0.2969, 11.62, 0.6196, 19, 8),
        _run(3, 145_799, 1.758, 0.3555, 13.96, 0.8925, 19, 8),
        _run(1, 179_669, 1.953, 0.3945, 15.53, 1.1, 19, 8),
        _run(8, 272_076.5, 0.6351, 0.1206, 5.34, 0.4168, 19.2, 8),
        _run(6, 447_321.5, 0.769, 0.1548, 6.128, 0.6856, 19, 8),
        _run(3, 582_929, 0.8789, 0.1768, 7.007, 0.8937, 19, 8),
        _run(16, 940_461.5, 0.2862, 0.05579, 2.349, 0.3606, 19.1, 8),
        _run(1, 1_311_359, 0.3296, 0.06616, 2.631, 0.5029, 19, 8),
        _run(1, 3_262, 0.0672, 3.815e-05, 0.8644, 1.626e-05, 11, 4),
    ),
    (
        _run(1, 9_536, 8.422, 0.7656, 52.25, 0.7081, 9, 3),
        _run(1, 75_008, 12.25, 3.062, 97.23, 1.387, 28, 12),
        _run(2, 70_400, 9.188, 3.062, 87.28, 1.31, 23, 9),
        _run(1, 379_392, 8.422, 1.531, 89.96, 2.235, 28, 12),
        _run(3, 280_064, 4.594, 1.531, 43.64, 1.31, 23, 9),
        _run(1, 1_512_448, 4.211, 0.7656, 44.98, 2.235, 28, 12),
        _run(5, 1_117_184, 2.297, 0.7656, 21.82, 1.31, 23, 9),
        _run(1, 6_039_552, 2.105, 0.3828, 22.49, 2.235, 28, 12),
        _run(2, 4_462_592, 1.148, 0.3828, 10.91, 1.31, 23, 9),
        _run(1, 2_049_000, 0.00782, 0.003815, 1.195, 0.01229, 6, 2),
    ),
    (
        _run(1, 31_778_816, 2.5, 2, 19.01, 0, 9, 2),
        _run(24, 12_596_224, 35.04, 2, 276, 38.65, 39, 12),
        _run(1, 2_048, 2.004, 2, 10.01, 0, 2, 2),
        _run(1, 31_285_050, 0.003906, 59.61, 244.5, 96.01, 4, 2),
    ),
    (
        _run(1, 139_460_608, 40, 32, 304, 0, 9, 2),
        _run(32, 201_379_840, 560.3, 32, 4416, 2474, 39, 12),
        _run(1, 8_192, 32.02, 32, 160, 0, 2, 2),
        _run(1, 131_104_000, 0.01562, 250, 1096, 1611, 4, 2),
    ),
)  # fmt: skip

NETS = {net.name: net for net in (
    Net("BERT of the article", _BERT),
    Net("PyramidNet of the article", _PYRAMIDNET, "SGD with momentum", convolutions=True),
    Net("ResNet-50, 224 pixels", _RESNET, "SGD with momentum", convolutions=True),
    Net("BERT large, 512 tokens", _BERT_LARGE),
    Net("7 billion, 2,048 tokens", _LARGEST),
)}  # fmt: skip
