"""The memory that CUDA's kernels use and the CPU's do not: workspaces, temporary buffers, results of other sizes.

A *recipe* runs one ATen operator and counts the memory that CUDA would use for it:

    def safe_softmax(call):                   # an `OpCall`, see `dispatch.operators`
        with call.scratch(1024):              # temporaries, in CUDA's order
            return call.run()                 # the kernel itself, and blocks for its results

A recipe returns results that have blocks. Each module has one family of operators. Its `OPERATORS` has a row for each,
with its recipe and all else that is known of it. An operator without a recipe takes only the memory of its results.

`python -m benchmarks.memory` compares nine training steps with measurements on a real H200 under torch 2.11. With
`--operators` it compares eighty single operators, with `--trace` every allocation of a step. If the nine steps run in
the same order as on the H200, all numbers are equal to the byte. If each step runs on a new GPU, they are within 1.4 %
(reserved memory: 7.1 %).

The rules come from these sources:

- PyTorch's source code: sizes and order of results and temporary buffers, partial sums (`reductions`), cuBLAS
  workspaces (`blas`), attention kernels (`attention`), casts by autocast, and gradients that are added in place
  (`accumulation`). These rules are exact to the byte on the H200.
- Measurements on the H200, because NVIDIA does not publish the rules: cuDNN's workspaces of convolutions
  (`conv.workspaces`) and of RNNs (`rnn.sizes`). The rules were fitted to the same cases that they are compared with.
  Expect larger errors for other networks: docs/accuracy.md of the source shows how large.
- For other kinds of GPU, everything that does not follow from the data sheet is taken from the H200.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch._prims_common import alert_not_deterministic

from virtual_gpus import figures
from virtual_gpus.clock import cost
from virtual_gpus.dispatch.operators import OpCall

FIGURES = figures.beside(__file__)["formulas"]  # what the operators take beside their bytes
moves = partial(cost.moves, rows=FIGURES)


def not_deterministic(kernel: str, only_if: Callable[[OpCall], bool] = lambda call: True) -> Callable[[OpCall], None]:
    """A `check` that raises or warns, under `torch.use_deterministic_algorithms(True)`, if `only_if` is true.
    kernel: its name in CUDA's message. Source: the calls of `alertNotDeterministic` in aten/src/ATen/native/cuda, as
    they are in the CUDA libraries of 2.11 to 2.15. What the CPU's kernel refuses itself is not repeated."""
    return lambda call: alert_not_deterministic(kernel) if only_if(call) else None
