"""The inference fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer: one operator for the whole layer.

PyTorch takes it in eval mode without gradients. The sources are native_multi_head_attention_cuda in
aten/src/ATen/native/transformers/cuda/attention.cu and aten/src/ATen/native/transformers/transformer.cpp.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.features.attention.attention_call import MATH, AttentionCall
from virtual_gpus.features.attention.choice import choose
from virtual_gpus.features.attention.fused import KERNELS
from virtual_gpus.features.attention.memory import Sizes
from virtual_gpus.features.blas.products import with_workspace
from virtual_gpus.placement.storages import nbytes
from virtual_gpus.threads import seen


def multi_head_attention(call: OpCall):
    """Projections around a fused kernel, or around the scores where weights or a mask are wanted. CPU's numbers."""
    query = call["query"]
    if query.is_nested or not query.numel():
        return call.run()
    projected = 3 * nbytes(query)
    kernel = _fused_kernel(call, query)
    with ExitStack() as stack:
        stack.enter_context(call.scratch(projected))
        if kernel is not None:
            kept = kernel.forward()
            result = with_workspace(call, lt=True)
            del kept
            return result
        return _by_scores(call, query, projected, stack)


def _fused_kernel(call: OpCall, query):
    """The kernel that CUDA takes for this self-attention, or None for the scores."""
    key, value, heads = call["key"], call["value"], call["num_head"]
    width = call["embed_dim"] // heads
    if query is not key or key is not value or width % 8 or call["need_weights"] or call["mask"] is not None:
        return None
    part = query.view(query.shape[0], -1, heads, width).transpose(1, 2)
    gpu = call.gpu
    version = gpu.machine.settings.version
    backend = choose(AttentionCall(part, part, part, None, 0.0, False, False, gpu.spec.capability, version))
    if backend == MATH:
        return None
    return KERNELS[backend](Sizes(gpu, part, part, part, None, 0.0, False))


def _by_scores(call: OpCall, query, projected: int, stack: ExitStack):
    """Query, key and value per head, once more; the scores and their softmax; the mixed values, put in order again."""
    scores = call["num_head"] * query.shape[0] * query.shape[1] * call["key"].shape[1] * query.element_size()
    with call.scratch(projected):
        stack.close()  # the projection before it was split
        with call.scratch(scores):  # softmax
            with call.scratch(scores):
                pass
            with call.scratch(nbytes(query)):
                return with_workspace(call)


def encoder_layer(call: OpCall):
    """The layer's operators one by one, as PyTorch's C++ runs them."""
    src = call["src"]
    if src.is_nested or not src.numel():
        return call.run()
    with seen():
        return _layer(call, src)


def _layer(call: OpCall, src):
    first = call["norm_first"]
    x = _norm(call, src, 1) if first else src
    x = torch._native_multi_head_attention(
        x, x, x, call["embed_dim"], call["num_heads"], call["qkv_weight"], call["qkv_bias"], call["proj_weight"],
        call["proj_bias"], call["mask"], False, True, call["mask_type"]
    )[0]  # fmt: skip
    x = x.add_(src)
    before = x = x if first else _norm(call, x, 1)
    x = _norm(call, x, 2) if first else x
    gelu, weight = call["use_gelu"], call["ffn_weight_1"].t()
    x = torch._addmm_activation(call["ffn_bias_1"], x.flatten(0, -2), weight, use_gelu=gelu)
    x = torch.addmm(call["ffn_bias_2"], x, call["ffn_weight_2"].t()).view(before.shape)
    x = x.add_(before)
    return x if first else _norm(call, x, 2)


def _norm(call: OpCall, x, number: int):
    return torch.layer_norm(
        x, (call["embed_dim"],), call[f"norm_weight_{number}"], call[f"norm_bias_{number}"], call["eps"]
    )


RECIPES = {"_native_multi_head_attention": multi_head_attention, "_transformer_encoder_layer_fwd": encoder_layer}
