"""Softmax on CUDA: memory and time (aten/src/ATen/native/cuda/SoftMax.cu)."""

from virtual_gpus.clock.cost import moves
from virtual_gpus.features.recipes.packed_inputs import channels_first_copy, packed

_FORWARD, _BACKWARD = ("_softmax", "_log_softmax"), ("_softmax_backward_data", "_log_softmax_backward_data")
RECIPES = dict.fromkeys(_FORWARD, packed("self", copy_of=channels_first_copy))
RECIPES |= dict.fromkeys(_BACKWARD, packed("grad_output", "output", copy_of=channels_first_copy))
COSTS = dict.fromkeys(_FORWARD, moves("softmax")) | dict.fromkeys(_BACKWARD, moves("softmax_backward"))
