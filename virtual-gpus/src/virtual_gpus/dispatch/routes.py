"""The routes of operators: what is done with each kind of them. An operator's route is chosen once, see `operators`.

A route is given an `OpCall`. It refuses mixed devices in PyTorch's own words, runs the operator as it is or by a
recipe, gives the new storages blocks on the GPU, and puts the operator on the clock.
"""

from typing import Any

import torch

from virtual_gpus import errors
from virtual_gpus.clock.cost import CHARGED_ELSEWHERE
from virtual_gpus.dispatch import creation, valueless
from virtual_gpus.dispatch.copies import charge_copy
from virtual_gpus.dispatch.mixed_devices import resolve_common_device
from virtual_gpus.dispatch.operators import COMPOSITE, CPU, CUDA, OpCall, Route, asked_generator
from virtual_gpus.dispatch.timing import charge_op, charge_read
from virtual_gpus.entrance import calling_frame
from virtual_gpus.placement.creation_sites import may_be_adopted, record_creation_site
from virtual_gpus.placement.storages import former_gpu_of, gpu_of, place
from virtual_gpus.threads import seen

_has_storage = torch._C._has_storage
_SIZED = {torch.Tag.dynamic_output_shape}  # whose result's size hangs on values


def ordinary(call: OpCall) -> Any:
    """Most operators, with all tensors on one GPU."""
    if not call.on_one_gpu:
        return on_host(call) if call.gpu is None else particular(call)
    recipe = call.op.recipe  # not called at once: Python would look for a method first
    result = recipe(call)
    charge_op(call, result)
    return result


def particular(call: OpCall) -> Any:
    """An operator that is refused, reads values or changes sizes, or whose tensors are not all on one GPU."""
    op = call.op
    if call.gpu is None:
        return on_host(call)
    if op.row.check is not None:
        op.row.check(call)
    if not call.on_one_gpu and not resolve_common_device(call):
        with seen():
            return call.func._op_dk(COMPOSITE[0], *call.args, **call.kwargs)
    reads = op.needs_values and not op.row.size_is_known(call)
    if reads and call.gpu.machine.shapes_only and not (_SIZED & op.tags and valueless.truth.value):
        charge_read(call)
        return valueless.value(call)
    is_dense = call.on_one_gpu or all(map(_has_storage, call.tensors))  # CUDA has other kernels for sparse tensors
    result = op.recipe(call) if is_dense else call.run()
    if op.row.time is not CHARGED_ELSEWHERE:  # as of `.item()`
        charge_op(call, result)
    if reads and not op.row.waits:
        charge_read(call)
    return result


def crossing(call: OpCall) -> Any:
    """`copy_` and others whose tensors may be on different devices."""
    if call.gpu is None:
        return on_host(call)
    is_copy, target = call.op.in_place and "non_blocking" in call.op.positions, call.args[0]
    there = gpu_of(target)
    if there is None and not call.all_placed and may_be_adopted(target, call.site):
        there = call.gpu  # as `pad_sequence` makes in C++: the first copy from a GPU shows whose it is
        place(target, there)
    if is_copy and there is None and call.gpu.machine.shapes_only:
        result = valueless.copy_to_host(*call.args[:2])
    else:
        valueless.prepare(call)
        result = call.compute()
    if is_copy:
        source = call.tensors[1]
        here = call.gpu if there is None else gpu_of(source)
        charge_copy(call.op.base, source, call.tensors[0], not call["non_blocking"], here, there)
    return result


def on_host(call: OpCall) -> Any:
    """An operator on CPU tensors. What C++ computes of helpers of its own alone, and numbers, is a helper too."""
    if call.op.has_generator:
        asked_generator(call, "cpu")
    if call.all_placed:
        return call.kernel(*call.args, **call.kwargs)
    for former in filter(None, map(former_gpu_of, call.tensors)):
        errors.warn_of_gpu_that_is_off(former, calling_frame())
    if call.op.needs_values and call.tensors[0].is_meta:  # of C++, which found no GPU to be on
        raise errors.needs_values(call.op.base)
    result = call.kernel(*call.args, **call.kwargs)
    record_creation_site(result, call.tensors, call.site)
    return result


def composite(call: OpCall) -> Any:
    """Take an operator apart that is composite or of higher order, as inference mode does not: its parts use memory."""
    kernels = call.op.kernels
    keys = (CPU, *COMPOSITE) if call.gpu is None else (CUDA, CPU, *COMPOSITE)
    kernel = call.func.decompose if kernels is None else next((kernels[key] for key in keys if key in kernels), None)
    if kernel is None:  # in Python for CUDA alone
        return on_host(call)
    with seen():
        return kernel(*call.args, **call.kwargs)


# By `Operator.kind`.
ROUTES: dict[str, Route] = {
    "composite": composite, "factory": creation.create, "crossing": crossing,
    "list": ordinary, "particular": particular, "ordinary": ordinary,
}  # fmt: skip
