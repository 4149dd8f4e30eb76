"""The one table of every name that answers for the virtual GPUs while they are on.

Each module beside this one gives its part in `patches()`, as `(owner, name, replacement)`, see `table`. `install` puts
them all in, `uninstall` puts everything back.
"""

from __future__ import annotations

import sys

import torch

from virtual_gpus.ops import dropout, indexing, normalization
from virtual_gpus.ops.attention import functions as attention
from virtual_gpus.ops.rnn import functions as rnn
from virtual_gpus.patches import (
    accelerator,
    autocast,
    autograd,
    blas,
    captured,
    comm,
    compiler,
    cuda,
    distributed,
    driver,
    dynamo,
    factories,
    generators,
    graphs,
    legacy,
    memory,
    nccl,
    numbers,
    own_kernels,
    parallel,
    process_groups,
    processes,
    profiler,
    refused,
    rpc,
    saved_tensors,
    sharing,
    smi,
    snapshots,
    storages,
    streams,
    table,
    tensors,
    transfers,
)

_MODULES = (tensors, transfers, factories, storages, autograd, cuda, memory, streams, generators, accelerator, comm,
            parallel, legacy, driver, graphs, smi, processes, process_groups, nccl, distributed, refused, numbers,
            snapshots, dropout, indexing, attention, normalization, rnn, autocast, saved_tensors, blas, compiler,
            profiler, rpc, sharing, own_kernels)  # fmt: skip
_default_device: list[object] = []  # what torch.set_default_device had set before, where it had set anything


def patches() -> list[table.Patch]:
    """Every patch of this PyTorch version."""
    table.modules_of.cache_clear()  # once for all of the modules here: there are thousands in sys.modules
    return [patch for module in _MODULES for patch in module.patches()]


def _default_device_context():
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def install() -> None:
    """Put all patches in. Called when the first virtual GPUs go on."""
    captured.watch()
    dynamo.put_in()
    own_kernels.watch()
    _default_device[:] = [_default_device_context()]
    try:
        table.put_in(patches())
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Put everything back. Called when the last virtual GPUs go off."""
    dynamo.take_out()
    own_kernels.forget()
    compiler.forget()
    autocast.forget()
    legacy.forget()
    originals = table.take_out()
    if _default_device and _default_device_context() is not _default_device.pop():
        torch.set_default_device(None)  # set while they were on: probably to a GPU that is no more
    sys.modules["torch.nn.parallel._functions"]._streams = None  # cached per machine by Scatter
    captured.give_back(originals)
