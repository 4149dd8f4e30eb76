"""Pooling on CUDA: memory, time and what is refused (aten/src/ATen/native/cuda, DilatedMaxPool2d.cu and its like)."""

from __future__ import annotations

from virtual_gpus.clock.cost import FITTED, OperatorClass, moves
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.features.recipes.packed_inputs import packed
from virtual_gpus.features.recipes.refusals import not_deterministic


def _max_pool_backward_cost(operation: Operation) -> Cost:
    fitted = FITTED["max_pool_backward"]
    share = fitted["share_channels_last" if operation.inputs[1].channels_last else "share"]
    return Cost(fitted["floor"] * operation.kernel + operation.reading(operation.nbytes, share), 1)


RECIPES = {
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d"), packed("self")),
    **dict.fromkeys(("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"),
                    packed("grad_output", "self")),
    **dict.fromkeys(("avg_pool2d_backward", "avg_pool3d_backward"), packed("self", "grad_output")),
    **dict.fromkeys(("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward"),
                    packed("grad_output")),
}  # fmt: skip
COSTS = {
    "max_pool2d_with_indices": moves("max_pool"),
    "max_pool2d_with_indices_backward": OperatorClass(_max_pool_backward_cost, depends_on_strides=True),
}
_REFUSED = ("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
            "adaptive_max_pool2d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
            "max_pool3d_with_indices_backward")  # fmt: skip
CHECKS = {op: not_deterministic(f"{op.removeprefix('_')}_cuda") for op in _REFUSED}
