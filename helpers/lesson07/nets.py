"""What the advice is told of a net: of each layer what it keeps, moves, computes and hands on. Measured, per sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
        found = [tuple(map(float, row)) for count, *row in rows for _ in range(int(count))]
        return cls(name, np.rec.fromrecords(found, names=COLUMNS), *how)

    @property
    def weights(self) -> float:
        """Bytes of the parameters in float32."""
        return 4 * self.layers.parameters.sum()

    @property
    def largest_layer(self) -> float:
        """Bytes of the parameters of the layer that has most."""
        return 4 * self.layers.parameters.max()

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


def _stored() -> dict[str, Net]:
    """nets.json: rows of a count and `COLUMNS`, in MiB and 10^9 operations. Measured on virtual GPUs in shapes only, by
    `python -m tests.benchmarks.nets` (PyTorch 2.15); `net_of` there measures any net so."""
    units, found = np.array([1, 1, MiB, MiB, MiB, 1e9, 1, 1]), {}
    for name, stored in json.loads(Path(__file__).with_name("nets.json").read_text()).items():
        found[name] = Net.of(name, stored["rows"] * units, stored["optimizer"], stored["convolutions"])
    return found


NETS = _stored()
