"""The memory that CUDA's kernels use and the CPU's do not: workspaces, temporary buffers, results of other sizes.

A *recipe* runs one ATen operator and counts the memory that CUDA would use for it:

    def safe_softmax(call):                   # an `OpCall`, see `dispatch.operators`
        with call.scratch(1024):              # temporaries, in CUDA's order
            return call.run()                 # the kernel itself, and blocks for its results

A recipe returns results that have blocks. Each module has one family of operators. Its `OPERATORS` has a row for each,
with its recipe and all else that is known of it. An operator without a recipe takes only the memory of its results.

The rules come from PyTorch's source code, and are exact to the byte there, or were fitted to measurements on an H200,
where NVIDIA does not publish them: cuDNN's workspaces (`conv.workspaces`, `rnn.sizes`). docs/accuracy.md compares both
with a real GPU, and says how to repeat that. What does not follow from another GPU's data sheet is taken from the H200.
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
