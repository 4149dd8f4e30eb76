"""What CUDA's kernels do with memory that the CPU's do not: workspaces, temporaries, results of other sizes.

A *recipe* runs one ATen operator the way CUDA would use memory for it:

    def softmax_backward(call):               # call: see `on_cuda.call.Call`
        with call.scratch(1024):              # temporaries, in CUDA's order
            return call.run()                 # the kernel itself, and blocks for its results

Each module holds the recipes of one family and a table `RECIPES` from an operator's base name ("mm") to its recipe. An
operator without one takes only the memory of its results. The sources are PyTorch's CUDA files, named in each
module, and what a real H200 measured (tests/data/h200).
"""

from __future__ import annotations

from helpers.virtual.on_cuda import (
    accumulation,
    attention,
    attention_inference,
    blas,
    contiguous,
    convolutions,
    dropout,
    indexing,
    losses,
    normalization,
    reductions,
)

_FAMILIES = (accumulation, blas, contiguous, convolutions, dropout, indexing, losses, normalization, reductions,
             attention, attention_inference)  # a later one wins  # fmt: skip

RECIPES = {name: recipe for family in _FAMILIES for name, recipe in family.RECIPES.items()}
