"""How much memory cuDNN wants for an LSTM, GRU or RNN (weight buffer, reserve, workspace, dropout state), and how long.

cuDNN publishes no formulas. These are built from what it must hold, out of one unit: a *sequence* of `time x batch x
hidden` elements. figures.toml says what is known of each, and from where.

Source of the rules: aten/src/ATen/native/cudnn/RNN.cpp (get_algo), aten/src/ATen/cudnn/Descriptors.h (padded layout).
"""

from typing import NamedTuple

from virtual_gpus import figures
from virtual_gpus.arithmetic import ceil_div, rounded_up
from virtual_gpus.clock.work import Cost
from virtual_gpus.features.blas import product
from virtual_gpus.gpus import GPUSpec, Precision

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
DROPOUT_STATE = 1024 * 48  # per multiprocessor: states of cuRAND's XORWOW, one per thread
FORMATS: dict[int, Precision] = {2: "fp16", 4: "fp32", 8: "fp64"}  # by bytes of a number
_TIME = figures.beside(__file__)["time"]
FITTED = figures.beside(__file__)["memory"]  # `benchmarks.leave_one_out` tries others


class Network(NamedTuple):
    """What the sizes follow from. `output`: hidden size, or the projection's. `time`: the longest sequence's steps."""

    cell: str
    layers: int
    directions: int
    time: int
    batch: int
    input: int
    hidden: int
    output: int
    itemsize: int
    packed: bool = False
    dropout: bool = False

    @property
    def gates(self) -> int:
        """Gates of a cell: 4 in an LSTM, 3 in a GRU, 1 in an RNN."""
        return GATES[self.cell]

    @property
    def inner(self) -> int:
        """Layers times directions: what cuDNN calls pseudo-layers."""
        return self.layers * self.directions


def weight_offsets(net: Network, biases: bool) -> tuple[list[int], int]:
    """(where each weight begins, elements in all) of cuDNN's weight buffer: all matrices first, then all biases.

    Weights in the order of `nn.LSTM._flat_weights`. Both biases have their place in any case.
    """
    rows = net.gates * net.hidden
    matrices, position = list[list[int]](), 0
    for layer in range(net.inner):
        width = net.input if layer < net.directions else net.output * net.directions
        sizes = [rows * width, rows * net.output] + [net.output * net.hidden] * (net.output != net.hidden)
        matrices.append([position + sum(sizes[:i]) for i in range(len(sizes))])
        position += sum(sizes)
    offsets: list[int] = []
    for first, second, *projection in matrices:
        offsets += [first, second, *((position, position + rows) if biases else ()), *projection]
        position += 2 * rows
    return offsets, position


def is_small(net: Network, backward: bool, capability: tuple[int, int]) -> bool:
    """True where PyTorch asks for the persistent algorithm for small hidden sizes; not for float64."""
    if net.output != net.hidden or net.packed or net.itemsize == 8 or capability < (6, 0):
        return False
    limit = (256 if backward else 384) if net.cell == "RNN" else (128 if backward else 192)
    return net.hidden <= limit


def reserve_bytes(net: Network) -> int:
    """What training keeps for backward: each layer's gates (and cell), and the sequences between the layers."""
    steps = net.time * net.batch
    per_step = net.inner * FITTED["reserved"][net.cell] * net.hidden
    if net.output != net.hidden:
        per_step += net.inner * net.hidden  # before the projection
    between = (net.layers - 1) * net.directions * net.output
    masks = ceil_div(steps * between, 8) if net.dropout else 0  # a bit each
    return steps * (per_step + between) * net.itemsize + masks + 256


def workspace_bytes(net: Network, small: bool, training: bool = True) -> int:
    """What a forward or backward pass takes and gives back. In training both ask for the larger of their needs."""
    passes = 2 if training else 1  # values, and gradients
    steps, later, both_ways = net.time * net.batch * net.itemsize, net.layers - 1, net.layers * (net.directions - 1)
    sequence, inputs, outputs = steps * net.hidden, steps * net.input, steps * net.output * net.directions
    matrices = (weight_offsets(net, False)[1] - net.inner * 2 * net.gates * net.hidden) * net.itemsize
    gates, input_gradients = net.gates * net.directions * sequence, (passes - 1) * inputs
    padded = 0 if net.packed else passes * (inputs + outputs)
    between = later * net.directions * sequence * (passes + FITTED["dropout"] * (training and net.dropout))
    copies = outputs + (FITTED["gru_inputs"] if net.cell == "GRU" else 1) * (inputs + outputs)
    of_directions = both_ways * passes * copies
    if small:
        of_algorithm = net.inner * sequence * passes * FITTED["small"] * net.gates
    else:  # padding of the hidden size
        of_algorithm = (net.gates * net.inner + later) * sequence if net.hidden % FITTED["aligned"] else 0
    of_layer = FITTED["states"][net.cell] - (FITTED["padded_states"][net.cell] if net.packed else 0)
    states = (of_layer * net.inner + 4 * both_ways) * net.batch * net.hidden * net.itemsize
    # Integers per sequence and per step, each list from a multiple of 256 bytes on.
    lengths = sum(rounded_up(4 * count, 256) for count in (net.batch, net.time))
    sequences = gates + input_gradients + padded + between + of_directions + of_algorithm
    return matrices + sequences + states + lengths


def cost(net: Network, spec: GPUSpec, backward: bool) -> Cost:
    """The cost of a forward or backward pass: one product of all inputs, then one for each step."""
    fitted, rows, steps = _TIME["backward" if backward else "forward"], net.gates * net.hidden, net.time * net.inner
    precision = FORMATS[net.itemsize]
    flops = 2 * net.batch * rows * net.output * fitted["products"]
    step = fitted["chain"] * spec.reached.kernel + flops / (spec.flops_of(precision) * fitted["share"])
    inputs = 0.0
    for layer in range(net.layers):
        size = net.input if layer == 0 else net.output * net.directions
        seconds, _ = product(spec, net.time * net.batch, rows, size, 1, precision)
        inputs += net.directions * seconds * fitted["all_at_once"]
    return Cost(steps * step + inputs, 1 + _TIME["host"] * (round(steps * fitted["kernels"]) - 1))
