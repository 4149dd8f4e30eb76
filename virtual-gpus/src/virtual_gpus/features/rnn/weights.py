"""The weights of an LSTM, GRU or RNN in the one buffer that cuDNN wants: laid there, cast there, found there.

Sources: aten/src/ATen/native/cudnn/RNN.cpp (what copies, and try_get_weight_buf) and torch/nn/modules/rnn.py.
"""

from collections.abc import Sequence
from typing import Any

import torch

from virtual_gpus.entrance import entrance
from virtual_gpus.features.rnn.sizes import Network, weight_offsets
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import StorageAllocation, empty_in, gpu_of
from virtual_gpus.threads import below

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.float16, torch.float64)  # torch.backends.cudnn.CUDNN_TENSOR_DTYPES
_raw_flatten_parameters = torch.nn.RNNBase.flatten_parameters


def is_acceptable(tensor: Tensor) -> bool:
    """torch.backends.cudnn.is_acceptable: cuDNN is enabled and takes this tensor."""
    return torch._C._get_cudnn_enabled() and gpu_of(tensor) is not None and tensor.dtype in DTYPES


def empty(gpu: VirtualGPU, count: int, dtype: torch.dtype) -> Tensor:
    """A buffer of `count` elements on `gpu`."""
    return empty_in(StorageAllocation(gpu, count * dtype.itemsize), (count,), dtype)


def pieces(flat: Tensor, like: Sequence[Tensor], offsets: list[int]) -> list[Tensor]:
    """Tensors shaped as `like` on the storage of `flat`, each a tensor of its own rather than a view."""
    with below(), torch._C._DisableTorchDispatch(), torch.no_grad():
        none: Any = torch.empty(0, dtype=flat.dtype, device=flat.device)  # PyTorch's stubs want `set_` to have strides
        storage = flat.untyped_storage()
        return [none.new_empty(0).set_(storage, at, t.shape) for t, at in zip(like, offsets, strict=True)]


def fill(flat: Tensor, parts: Sequence[Tensor], sources: Sequence[Tensor | None]) -> None:
    """Copy `sources` into `parts` of `flat`, zeros between them; None among the sources leaves zeros too."""
    if flat.is_meta:
        return
    with below(), torch._C._DisableTorchDispatch(), torch.no_grad():
        flat.zero_()
        for part, source in zip(parts, sources, strict=True):
            if source is not None:
                part.copy_(source)


def are_flat(net: Network, params: Sequence[Tensor], biases: bool) -> bool:
    """True if the weights are where cuDNN wants them: in one storage, from its beginning, in its order."""
    offsets, total = weight_offsets(net, biases)
    storage = params[0].untyped_storage()
    if storage.nbytes() < total * params[0].element_size() or not params[-1].is_contiguous():
        return False
    in_order = all(p.storage_offset() == at for p, at in zip(params, offsets, strict=True))
    return in_order and all(p.untyped_storage()._cdata == storage._cdata for p in params)


class CastFlat(torch.autograd.Function):
    """Weights as float16 in one buffer, for autocast (aten/src/ATen/cudnn/AutocastRNN.cpp)."""

    @staticmethod
    def forward(ctx: Any, net: Network, biases: bool, gpu: VirtualGPU, *params: Tensor) -> tuple[Tensor, ...]:
        """The cast weights, all on one storage."""
        ctx.dtype = params[0].dtype
        offsets, total = weight_offsets(net, biases)
        flat = empty(gpu, total, torch.float16)
        parts = pieces(flat, params, offsets)
        fill(flat, parts, params)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Each gradient as the weight's own dtype."""
        return None, None, None, *(None if g is None else g.to(ctx.dtype) for g in gradients)


@entrance
def flatten_parameters(self: Any) -> None:
    """`RNNBase.flatten_parameters` on a virtual GPU: the weights move into one buffer, and stay the same tensors."""
    weights = self._flat_weights
    if torch._C._are_functorch_transforms_active():
        return None  # their wrappers have no storage
    gpu = gpu_of(weights[0]) if weights and isinstance(weights[0], torch.Tensor) else None
    if gpu is None or len(weights) != len(self._flat_weights_names):
        return _raw_flatten_parameters(self)
    dtype = weights[0].dtype
    fit = all(isinstance(w, Tensor) and w.dtype == dtype and is_acceptable(w) and gpu_of(w) is gpu for w in weights)
    if not fit or len({(w.untyped_storage()._cdata, w.storage_offset()) for w in weights}) != len(weights):
        return None  # the last: a weight that is used twice
    cell, output = self.mode.partition("_")[0], self.proj_size or self.hidden_size
    net = Network(cell, self.num_layers, 2 if self.bidirectional else 1, 1, 1, self.input_size, self.hidden_size,
                  output, 4)  # of one sequence of one step  # fmt: skip
    offsets, total = weight_offsets(net, self.bias)
    flat = empty(gpu, total, dtype)
    fill(flat, pieces(flat, weights, offsets), weights)
    # Below autograd, as in C++: DataParallel's replicas are views, which autograd would not let us lay elsewhere.
    with below(), torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
        for weight, at in zip(weights, offsets, strict=True):
            weight.set_(flat.untyped_storage(), at, weight.shape)


def patches() -> list[Patch]:
    rows: list[Patch] = [(torch.nn.RNNBase, "flatten_parameters", flatten_parameters)]
    return [*rows, (torch.backends.cudnn, "is_acceptable", is_acceptable)]
