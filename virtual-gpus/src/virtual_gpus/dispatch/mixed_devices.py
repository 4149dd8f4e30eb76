"""Tensors on different devices in one operator: what CUDA allows, what it refuses and in which words."""

import torch

from virtual_gpus import errors
from virtual_gpus.dispatch.operators import OpCall
from virtual_gpus.placement.creation_sites import may_be_adopted
from virtual_gpus.placement.storages import device_of, former_gpu_of, gpu_of, place


def resolve_common_device(call: OpCall) -> bool:
    """Judge a mixture of devices: adopt what C++ made on the way, let through what CUDA allows, refuse the rest.

    False: the operators that this one is made of have to judge.
    """
    gpu, site, common, op = call.gpu, call.site, None, call.op
    for name, tensor in sorted(call.named_tensors(), key=lambda pair: pair[0] not in op.outputs):  # checked first
        where = gpu_of(tensor)
        if where is None and (former := former_gpu_of(tensor)) is not None:
            raise errors.gpu_is_off(former)
        if where is None and (may_be_adopted(tensor, site) or (tensor.is_meta and gpu.machine.shapes_only)):
            place(tensor, gpu)
            where = gpu
        # A 0-dim CPU tensor counts as a number, unless the operator writes to it or checks every argument.
        is_number = tensor.dim() == 0 and name not in op.written and not errors.checks_each_argument(op.name)
        if where is None and (name in op.row.on_host or (is_number and not op.has_parts)):
            continue
        device = device_of(tensor)
        if common is None:
            common = device
        elif where is not None and where.machine is not gpu.machine:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but one on {device} belongs to a different "
                "virtual_gpus(...) block. Nested blocks have different GPUs, even if their names are the same. "
                "Copy the tensor with .to(...)."
            )
        elif device != common or (where is not None and where is not gpu):
            own = None if op.row.mixture is None else op.row.mixture(call, name, common, device)
            if own is not None:
                raise own
            if errors.checks_each_argument(op.name):
                raise errors.argument_elsewhere(op.name, name, device, common)
            if op.has_parts:
                return False
            cuda = [d for d in (common, device) if d.type == "cuda"]
            raise errors.two_devices(cuda[0], device if device != cuda[0] else common)
    return True


def require_one_device(name: str, first: torch.Tensor, **others: torch.Tensor | None) -> None:
    """For a function that stands in for CUDA's operator `name`: raise as its generated check does, by its arguments."""
    common = device_of(first)
    for argument, tensor in others.items():
        if tensor is not None and device_of(tensor) != common:
            raise errors.argument_elsewhere(name, argument, device_of(tensor), common)
