"""The numbers of fused attention, computed by the CPU below the accounting.

The CPU's own fused kernel is taken wherever it can be, so that results are those of the CPU and cost what they cost
there. With dropout, or where a mask wants a gradient, the scores are computed, one sample at a time: those of a whole
batch are what fused kernels were made to save. Dropout's mask is drawn from a seed, again in the backward pass.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from virtual_gpus.arithmetic import ceil_div
from virtual_gpus.dispatch.half_precision import slow_types, wide

Parts, Mask, Scale = tuple[Tensor, Tensor, Tensor], Tensor | None, float | None  # None: no mask; 1 / sqrt(width)
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]  # gradients of query, key, value and a bias that wants one
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Numbers:
    """The computation of one call. bias: added to the scores. seed (of its methods): 0-dim tensor, None: no dropout."""

    def __init__(self, parts: Parts, bias: Mask, dropout: float, causal: bool, scale: Scale):
        self.query, self.key, self.value = query, key, value = parts
        self.bias, self.dropout, self.causal = bias, dropout, causal
        self.scale = 1 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale
        wants_gradient = bias is not None and bias.requires_grad
        is_empty = not (query.numel() and key.numel())
        self.fused = not (dropout or wants_gradient or is_empty or query.shape[-1] != value.shape[-1])

    def forward(self, seed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The output, and the logarithm of each row's sum (None if the CPU's kernel did not run)."""
        query, (key, value) = self.query, self._for_all_heads()
        if self.fused:
            parts = query, key, value, self.bias
            *parts, bias = map(wide, parts) if query.dtype in slow_types() else parts
            out, lse = _fused(*parts, 0.0, self.causal, attn_mask=bias, scale=self.scale)
            return out if out.dtype is query.dtype else out.to(query.dtype), lse
        samples = zip(query, key, value, self._biases(), self._masks(seed), strict=True)
        parts = [self._weights(q, k, b, m)[0] @ wide(v) * self._kept_scale for q, k, v, b, m in samples]
        shape = (*query.shape[:3], value.shape[3])
        return torch.stack(parts).to(query.dtype) if parts else query.new_empty(shape), None

    def backward(self, gradient: Tensor, out: Tensor, lse: Tensor, seed: Tensor) -> Gradients:
        """Gradients of query, key, value and of a bias that wants one (else None)."""
        query, (key, value) = self.query, self._for_all_heads()
        if self.fused:
            parts = gradient, query, key, value, out, self.bias
            *parts, bias = map(wide, parts) if query.dtype in slow_types() else parts
            results = _fused_backward(*parts, lse, 0.0, self.causal, attn_mask=bias, scale=self.scale)
            gradients: Gradients = *(result.to(query.dtype) for result in results), None
        else:
            gradients = self._all_samples(gradient, key, value, seed)
        return gradients[0], _added_up(gradients[1], self.key), _added_up(gradients[2], self.value), gradients[3]

    def _for_all_heads(self) -> tuple[Tensor, Tensor]:
        return for_all_heads(self.query, self.key), for_all_heads(self.query, self.value)

    def _all_samples(self, gradient: Tensor, key: Tensor, value: Tensor, seed: Tensor) -> Gradients:
        query, bias, zeros = self.query, self.bias, torch.zeros_like
        wanted = bias if bias is not None and bias.requires_grad else None
        if not query.numel():
            return zeros(query), zeros(key), zeros(value), None if wanted is None else zeros(wanted)
        one_by_one = zip(gradient, query, key, value, self._biases(), self._masks(seed), strict=True)
        *parts, of_bias = zip(*(self._sample_backward(*sample) for sample in one_by_one), strict=True)
        of_query, of_key, of_value = (torch.stack(part).to(query.dtype) for part in parts)
        return of_query, of_key, of_value, None if wanted is None else torch.stack(of_bias).to(query.dtype)

    @property
    def _kept_scale(self) -> float:
        """What stays after dropout counts 1 / (1 - p) times."""
        return 1 / (1 - self.dropout) if self.dropout < 1 else 0.0

    def _biases(self) -> Tensor | list[None]:
        """What is added to the scores of each sample: (heads or 1, rows, columns), or None."""
        query, key, bias = self.query, self.key, self.bias
        if self.causal:
            bias = query.new_full((1, 1, query.shape[2], key.shape[2]), -math.inf).triu_(1)
        return [None] * len(query) if bias is None else bias.expand(len(query), -1, -1, -1)

    def _masks(self, seed: Tensor | None) -> Iterable[Tensor | None]:
        """Dropout's mask of each sample, True where a weight stays: 16 random bits each."""
        if seed is None or not self.dropout:
            return [None] * len(self.query)
        generator = torch._C.Generator("cpu").manual_seed(int(seed))
        shape = (*self.query.shape[1:3], self.key.shape[2])
        below = min(round((1 - self.dropout) * 65536) - 32768, 32767)
        return (_bits(math.prod(shape), generator).view(shape) < below for _ in range(len(self.query)))

    def _weights(self, query: Tensor, key: Tensor, bias: Mask, mask: Mask) -> tuple[Tensor, Tensor]:
        """The weights of one sample after dropout (not yet scaled) and before."""
        query, key = wide(query), wide(key).transpose(-2, -1)
        if bias is None:
            weights = torch.softmax((query * self.scale) @ key, -1)
        else:  # rows that see nothing have zeros
            weights = torch._safe_softmax(torch.baddbmm(wide(bias).to(query.dtype), query, key, alpha=self.scale), -1)
        return weights if mask is None else weights * mask, weights

    def _sample_backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Mask, mask: Mask
    ) -> Gradients:
        """Gradients of one sample's query, key, value and scores."""
        left, weights = self._weights(query, key, bias, mask)
        query, key, value, gradient = map(wide, (query, key, value, gradient))
        gradient = gradient * self._kept_scale
        of_weights = gradient @ value.transpose(-2, -1)
        if mask is not None:
            of_weights.mul_(mask)
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_query, of_key = of_scores @ key * self.scale, of_scores.transpose(-2, -1) @ query * self.scale
        return of_query, of_key, left.mT @ gradient, of_scores


def _bits(count: int, generator: torch._C.Generator) -> Tensor:
    """`count` random integers of 16 bits; four come with each draw."""
    drawn = torch.empty(ceil_div(count, 4), dtype=torch.int64).random_(-(1 << 63), None, generator=generator)
    return drawn.view(torch.int16)[:count]


def for_all_heads(query: Tensor, tensor: Tensor) -> Tensor:
    """Keys or values that heads share, once per head of the query."""
    shared = query.shape[-3] // max(1, tensor.shape[-3])
    return tensor if shared <= 1 else tensor.repeat_interleave(shared, -3)


def _added_up(gradient: Tensor, tensor: Tensor) -> Tensor:
    """The gradients of all heads that share a key, added up."""
    if gradient.shape[1] == tensor.shape[1]:
        return gradient
    return gradient.unflatten(1, (tensor.shape[1], -1)).sum(2)
