"""Tensors on different devices in one operator: what CUDA allows, what it refuses and in which words."""

from __future__ import annotations

import torch

from virtual_gpus import errors
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.operators import Operator
from virtual_gpus.placement.storages import caller, device_of, gpu_of, is_ours_to_adopt, place


def settle(op: Operator, gpu: VirtualGPU, args, kwargs) -> VirtualGPU:
    """Judge a mixture of devices: adopt what C++ made on the way, let through what CUDA allows, refuse the rest."""
    key = caller(4)
    common = None
    for name, tensor in op.named(args, kwargs):
        where = gpu_of(tensor)
        if where is None and (is_ours_to_adopt(tensor, key) or (tensor.is_meta and gpu.machine.shapes_only)):
            place(tensor, gpu)
            where = gpu
        if where is None and (name in op.allowed_on_host or _is_free_scalar(op, name, tensor)):
            continue
        device = device_of(tensor)
        if common is None:
            common = device
        elif where is not None and where.machine is not gpu.machine:
            raise errors.other_machine(device_of(tensor))
        elif device != common or (where is not None and where is not gpu):
            raise _mixture_error(op, name, common, device, args)
    return gpu


def refuse_on_gpu(op: Operator, args, kwargs) -> None:
    """Some arguments must stay on the CPU: the lengths of packed sequences."""
    for name, tensor in op.named(args, kwargs):
        if name == op.host_only and gpu_of(tensor) is not None:
            raise errors.lengths_on_gpu(name, tensor)


def _is_free_scalar(op: Operator, name: str, tensor: torch.Tensor) -> bool:
    """A 0-dim CPU tensor counts as a number, unless the operator writes to it or checks every argument."""
    return tensor.dim() == 0 and name not in op.written and not op.checks_each


def _mixture_error(op: Operator, name: str, common, device, args) -> RuntimeError:
    if op.is_index and name == "indices":
        return errors.indices_elsewhere(common)
    if op.base == "convolution" and name == "weight":
        return _convolution_error(common, device, args)
    if op.base in ("masked_fill", "masked_fill_") and name == "mask":
        return errors.mask_elsewhere(device, common)
    if op.checks_each or op.base == "embedding":
        return errors.argument_elsewhere(op.name, name, device, common)
    cuda = [d for d in (common, device) if d.type == "cuda"]
    return errors.two_devices(cuda[0], device if device != cuda[0] else common)


def _convolution_error(common, device, args) -> RuntimeError:
    """Types are compared first, and two GPUs have the same; then cuDNN's operator complains (Convolution.cpp)."""
    if common.type == device.type:
        operator = "cudnn_convolution_transpose" if args[6] else "cudnn_convolution"
        return errors.argument_elsewhere(operator, "weight", device, common)
    return errors.convolution_weight_elsewhere(*(_type_name(t) for t in args[:2]))


def _type_name(tensor: torch.Tensor) -> str:
    return torch.Tensor.type(tensor)


def adopt_destination(op: Operator, gpu: VirtualGPU, args, key) -> None:
    """DDP's buckets are made in C++ and filled later: the first copy from a GPU shows whose they are."""
    target = args[0] if args else None
    if isinstance(target, torch.Tensor) and gpu_of(target) is None and is_ours_to_adopt(target, key):
        place(target, gpu)
