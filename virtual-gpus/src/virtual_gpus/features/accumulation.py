"""Additions that PyTorch's C++ does in place, unless a dispatch mode is on, as it is here. Where two paths of a network
join, autograd's engine adds the second gradient onto the first, unless that one has another holder
(torch/csrc/autograd/input_buffer.cpp). And `linear` adds its bias onto the product, where it cannot do both at once
(aten/src/ATen/native/Linear.cpp). With a mode on, both make a new tensor. Such a sum takes the block of its first term
over, so that memory is as without a mode."""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from virtual_gpus.clock.cost import FREE, READS_AND_WRITES
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.entrance import calling_frame
from virtual_gpus.placement.creation_sites import Site
from virtual_gpus.placement.storages import record_of
from virtual_gpus.threads import OfEachThread, this_thread

# What C++ counts while the engine holds a gradient alone: references to its storage and to the tensor.
_ALONE = (2, 4)
_ENGINE = ("autograd/graph.py", "autograd\\graph.py")
_FRESH = (object(),)  # a tuple that alone holds its element
# Where the last product that `matmul` gave a shape lives, and the Python instruction that asked for it.
_product: OfEachThread[tuple[Callable[[], Any], Site | None]] = OfEachThread((lambda: None, None))


def _is_lent(call: OpCall) -> bool:
    """True if C++ holds the first argument of a call, and Python does only in the call. C++ keeps one reference to the
    Python object of a tensor that it holds (c10/util/intrusive_ptr.h). It takes a gradient as its own if that reference
    is the only one (is_tensor_stealable in torch/csrc/autograd/variable.h). The call has another one, in its `tensors`.
    How many more Python counts depends on its version: both terms have them. Callers may have no name for the tensor.
    """
    return sys.getrefcount(call.args[0]) - sys.getrefcount(_FRESH[0]) == 2


def add(call: OpCall) -> torch.Tensor:
    """`a + b`; in place where C++ would."""
    args = call.args
    if len(call.tensors) == len(args) == 2 and not call.kwargs:
        if this_thread.in_backward:
            is_in_place = _engine_adds(call)
        else:  # a bias is a vector
            is_in_place = args[1].dim() == 1 and _linear_adds(call, args[0])
        if is_in_place:
            return call.compute_into(args[0])
    return call.run()


def _engine_adds(call: OpCall) -> bool:
    """True if the engine itself adds two gradients, and holds the first one alone."""
    is_lent = _is_lent(call)  # before the terms get names
    first, second = call.args
    is_alike = first.shape == second.shape and first.dtype == second.dtype
    if not is_lent or not is_alike or torch.is_grad_enabled():
        return False
    if not calling_frame().f_code.co_filename.endswith(_ENGINE):
        return False
    uses_of_storage = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    is_alone = (uses_of_storage, first._use_count()) == _ALONE
    return is_alone and torch.ops.aten.is_non_overlapping_and_dense(first)


def _linear_adds(call: OpCall, product: torch.Tensor) -> bool:
    """True if one call of `linear` made the product and now adds a vector, the bias."""
    last, site = _product.value
    return last() is record_of(product.untyped_storage()) and site == call.site


def reshape_product(call: OpCall) -> torch.Tensor:
    """`matmul` gives its product the shape of its inputs; the Python instruction that asked for it is noted."""
    result = call.run()
    if result.dim() > 2:
        _product.value = weakref.ref(result.untyped_storage()._record), call.site
    return result


OPERATORS = {"add": Row(READS_AND_WRITES, add), "_unsafe_view": Row(FREE, reshape_product)}
