"""What CUDA's kernels do with memory that the CPU's do not: workspaces, temporaries, results of other sizes.

A *recipe* runs one ATen operator the way CUDA would use memory for it:

    def softmax_backward(call):               # an `OpCall`, see `dispatch.call`
        with call.scratch(1024):              # temporaries, in CUDA's order
            return call.run()                 # the kernel itself, and blocks for its results

It returns results that have their blocks. Each module holds the recipes of one family and a table `RECIPES` from an
operator's base name ("mm") to its recipe. An operator without one takes only the memory of its results. Operators that
CUDA does as one and the CPU as many (LSTM, attention, RMS norm) are patches for PyTorch's functions: `patches()`, see
`virtual_gpus.patches`.

How near it is: `python -m benchmarks.memory` compares nine training steps with what a real H200 measured under
torch 2.11, `--operators` eighty single operators, `--trace` every allocation of a step. In the order in which the H200
ran them, all nine come out to the byte in every figure; each on a fresh GPU, within 1.4 % (reserved memory: 7.1 %).

Where it comes from:

- read in PyTorch's sources, and right to the byte on the H200: sizes and order of results and temporaries, partial sums
  (`reductions`), cuBLAS workspaces (`blas`), attention's kernels (`attention`), autocast's casts, gradients added in
  place (`accumulation`);
- fitted to what the H200 measured, since NVIDIA does not publish it: cuDNN's workspaces of convolutions
  (`conv.workspaces`) and of RNNs (`rnn.sizes`). Here the agreement proves little: the rules were chosen on
  these very cases, and other networks of the kinds will be off by some per cent;
- taken over from the H200 for other kinds of GPU: everything that does not follow from a GPU's data sheet.
"""

from __future__ import annotations

from virtual_gpus.ops import (
    accumulation,
    blas,
    contiguous,
    dropout,
    indexing,
    losses,
    normalization,
    reductions,
    sync_batch_norm,
)
from virtual_gpus.ops.attention import functions, inference
from virtual_gpus.ops.conv import convolutions

_FAMILIES = (accumulation, blas, contiguous, convolutions, dropout, indexing, losses, normalization, reductions,
             sync_batch_norm, functions, inference)  # a later one wins  # fmt: skip

RECIPES = {name: recipe for family in _FAMILIES for name, recipe in family.RECIPES.items()}
