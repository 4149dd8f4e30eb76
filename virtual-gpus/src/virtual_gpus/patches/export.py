"""torch.export of modules on GPUs, which torch.onnx.export uses too.

PyTorch traces the module with fake tensors, and those are on the CPU (see `dispatch.mode`). So the graph would make its
new tensors on the CPU: their device is put right afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from virtual_gpus import errors
from virtual_gpus.placement.storages import gpu_of

_raw_export = torch.export.export
_CPU = torch.device("cpu")


@functools.wraps(_raw_export)
def export(mod: torch.nn.Module, *args: Any, **kwargs: Any):
    """The exported program. Tensors that it makes are on the GPU of the module and of the example inputs.

    Raises NotModelled if those are on several GPUs and the program makes tensors.
    """
    program = _raw_export(mod, *args, **kwargs)
    tensors = [*mod.parameters(), *mod.buffers(), *tree_leaves((args, kwargs))]
    gpus = {gpu for gpu in (gpu_of(t) for t in tensors if isinstance(t, torch.Tensor)) if gpu is not None}
    makers = list(_makers(program)) if gpus else []
    if makers and len(gpus) > 1:
        raise errors.not_modelled("torch.export of a module on several GPUs that makes new tensors")
    for node in makers:
        node.kwargs = {**node.kwargs, "device": torch.device("cuda", min(gpu.index for gpu in gpus))}
    return program


def _makers(program) -> Iterator[torch.fx.Node]:
    """The nodes that make tensors on the CPU, in the graph and in those inside it."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if node.kwargs.get("device") == _CPU and "_assert" not in str(node.target):
                yield node


def patches():
    """See `patches`."""
    return [(torch.export, "export", export)]
