"""The models' figures on which the advice is based: what each layer keeps, moves, computes and passes on per sample."""

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
    """A model and its optimizer. layers: a record array with a row for each layer and these columns:

    parameters   the number of parameters
    activations  bytes per sample, in float32, that the layer keeps until the backward pass. They include its output,
                 except for the last layer, because the loss keeps its own copy.
    output       bytes per sample of the output
    moved        bytes per sample that its operators read and write, in both passes
    flops        operations per sample of matrix multiplications and convolutions, in both passes
    operators    the number of operators that start kernels, in both passes
    tensors      the number of tensors that contain its parameters
    """

    name: str
    layers: np.recarray
    optimizer: str = "Adam"
    convolutions: bool = False

    @classmethod
    def of(cls, name: str, rows: Sequence[Sequence[float]], *how) -> Net:
        """Create a net from rows (count, ...), each for `count` equal layers. how: optimizer, convolutions."""
        found = [tuple(map(float, row)) for count, *row in rows for _ in range(int(count))]
        return cls(name, np.rec.fromrecords(found, names=COLUMNS), *how)

    @property
    def weights(self) -> float:
        """Bytes of the parameters in float32."""
        return 4 * self.layers.parameters.sum()

    @property
    def states(self) -> int:
        """The number of values that the optimizer keeps for each parameter."""
        return STATES[self.optimizer]

    @property
    def outputs(self) -> float:
        """Bytes per sample of the outputs, from which the loss is computed."""
        return self.layers.output[-1]

    @property
    def activations(self) -> float:
        """Bytes per sample that are kept for the backward pass, without those of the loss."""
        return self.layers.activations.sum()


def _stored() -> dict[str, Net]:
    """Read nets.json, whose rows are a count and `COLUMNS`, in MiB and 10^9 operations. The figures were measured by
    `python -m tests.benchmarks.nets` on virtual GPUs in shapes only (PyTorch 2.15). Its `net_of` measures any model."""
    units, found = np.array([1, 1, MiB, MiB, MiB, 1e9, 1, 1]), {}
    for name, stored in json.loads(Path(__file__).with_name("nets.json").read_text(encoding="utf-8")).items():
        found[name] = Net.of(name, stored["rows"] * units, stored["optimizer"], stored["convolutions"])
    return found


NETS = _stored()
