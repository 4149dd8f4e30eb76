"""TorchScript: `torch.jit.load` to a GPU and `optimize_for_inference`, both of which ask C++ for the GPU.

`torch.jit.trace`, `script` and `freeze` are PyTorch's own, see `dispatch.tracing`. Their programs run C++ operators, so
they take the memory and the time of those that the CPU picks for attention, dropout and recurrent layers.
"""

from __future__ import annotations

import torch

from virtual_gpus.machine import active
from virtual_gpus.patches.transfers import as_device
from virtual_gpus.placement.storages import find_gpu, gpu_of

_raw_load = torch.jit.load
_raw_optimize = torch._C._jit_pass_optimize_for_inference


def load(f, map_location=None, *args, **kwargs):
    """`torch.jit.load`. A file names no virtual GPU: without `map_location` its tensors are on the CPU."""
    device = as_device(map_location)
    if device is None or device.type != "cuda":
        return _raw_load(f, device, *args, **kwargs)
    find_gpu(active(), device)
    return _raw_load(f, torch.device("cpu"), *args, **kwargs).to(device)


def _jit_pass_optimize_for_inference(module, *args, **kwargs) -> None:
    """For the CPU this converts the weights for mkldnn, which no GPU has. A module on a GPU is left as it is."""
    constants = module._get_method("forward").graph.findAllNodes("prim::Constant", recurse=True)
    tensors = (node.t("value") for node in constants if node.kindOf("value") == "t") if constants else ()
    if not any(gpu_of(tensor) is not None for tensor in tensors):
        _raw_optimize(module, *args, **kwargs)


def patches():
    """See `patches`."""
    return [(torch.jit, "load", load), (torch._C, _raw_optimize.__name__, _jit_pass_optimize_for_inference)]
