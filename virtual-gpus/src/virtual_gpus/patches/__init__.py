"""The one table of every name that answers for the virtual GPUs while they are on.

Each module beside this one gives rows `(owner, name, stand_in)`. `install` remembers what stood there and puts the
stand-ins in; `uninstall` puts everything back, names that were inherited included.
"""

from __future__ import annotations

import importlib
import sys

import torch

from virtual_gpus.ops import dropout, normalization
from virtual_gpus.ops.attention import functions as attention
from virtual_gpus.ops.rnn import functions as rnn
from virtual_gpus.patches import (
    accelerator,
    autocast,
    autograd,
    blas,
    cuda,
    distributed,
    generators,
    memory,
    numbers,
    parallel,
    processes,
    refused,
    saved_tensors,
    smi,
    snapshots,
    storages,
    streams,
    tensors,
    transfers,
)

_MODULES = (tensors, transfers, storages, autograd, cuda, memory, streams, generators, accelerator, parallel,
            smi, processes, distributed, refused, numbers, snapshots, dropout, attention, normalization,
            rnn, autocast, saved_tensors, blas)  # fmt: skip
_ABSENT = object()
_before: list[tuple[object, str, object]] = []
_scripted: list[tuple[int, object]] = []  # (id, stand-in): the ids stay taken while they are in TorchScript's table
_default_device: list[object] = []  # what torch.set_default_device had set before, where it had set anything


def rows() -> list[tuple[object, str, object]]:
    """Every stand-in of this PyTorch version: (module or class, name, what answers there)."""
    return [row for module in _MODULES for row in module.rows()]


def _default_device_context():
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def install() -> None:
    """Put all stand-ins in. Called when the first virtual GPUs go on."""
    # Optimizers import this on first use. It keeps what it finds in torch.cuda for ever, and torch 2.11's does not even
    # import beside our `Tensor.device`: it must come before the stand-ins.
    importlib.import_module("torch._dynamo")
    _default_device[:] = [_default_device_context()]
    try:
        for owner, name, stand_in in rows():
            _before.append((owner, name, vars(owner).get(name, _ABSENT)))
            _tell_torchscript(_before[-1][2], stand_in)
            setattr(owner, name, stand_in)
    except BaseException:
        uninstall()
        raise


def _tell_torchscript(original, stand_in) -> None:
    """torch.jit.script, which forward-mode differentiation uses too, knows PyTorch's operators by their Python id."""
    known = torch.jit._builtins._get_builtin_table()
    if id(original) in known and id(stand_in) not in known:
        known[id(stand_in)] = known[id(original)]
        _scripted.append((id(stand_in), stand_in))


def uninstall() -> None:
    """Put everything back, in the reverse order. Called when the last virtual GPUs go off."""
    autocast.forget()
    while _scripted:
        torch.jit._builtins._get_builtin_table().pop(_scripted.pop()[0], None)
    while _before:
        owner, name, original = _before.pop()
        if original is not _ABSENT:
            setattr(owner, name, original)
        elif name in vars(owner):  # else Ctrl-C came before the stand-in
            delattr(owner, name)
    if _default_device and _default_device_context() is not _default_device.pop():
        torch.set_default_device(None)  # set while they were on: probably to a GPU that is no more
    sys.modules["torch.nn.parallel._functions"]._streams = None  # cached per machine by Scatter
