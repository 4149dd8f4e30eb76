"""The single operators and optimizers that a real H200 was measured with (tests/data/h200/operator_memory.json).

    inputs, forward = OPERATORS["softmax"]("cuda")
    forward().float().sum().backward()

Their memory on CUDA is not the CPU's. Inputs are made on the device, in the order in which the H200 made them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHARE = 1  # tests of shapes against numbers take a part of each batch, because a CPU is slow
Build = Callable[[str], tuple[list[Tensor], Callable[[], Tensor]]]


def part(number: int) -> int:
    """The share that is asked for of the samples of a batch."""
    return max(1, number // SHARE)


def values(shape, device, dtype=FP32) -> Tensor:
    """Random numbers that want a gradient. The first dimension is that of the batch."""
    return torch.randn(part(shape[0]), *shape[1:], device=device, dtype=dtype, requires_grad=True)


def function(forward: Callable[[Tensor], Tensor], *shape: int, dtype=FP32) -> Build:
    """`forward` of one tensor."""

    def build(device):
        x = values(shape, device, dtype)
        return [x], lambda: forward(x)

    return build


def module(make: Callable[[], nn.Module], *shape: int, dtype=FP32, numbers: int | None = None) -> Build:
    """A module's first output, of an input of `shape`: random values, or whole numbers below `numbers`."""

    def build(device):
        net = make().to(device=device, dtype=dtype)
        sizes = part(shape[0]), *shape[1:]
        x = torch.randint(0, numbers, sizes, device=device) if numbers else values(shape, device, dtype)

        def forward():
            output = net(x)
            return output[0] if isinstance(output, tuple) else output

        return [x, *net.parameters()], forward

    return build


def cross_entropy(dtype=FP32, rows: int = 4096, classes: int = 20_000, **options) -> Build:
    """The loss of `rows` x `classes` logits."""

    def build(device):
        logits = values((rows, classes), device, dtype)
        targets = torch.randint(0, classes, (part(rows),), device=device)
        return [logits], lambda: F.cross_entropy(logits, targets, **options)

    return build


def attention(*shape: int, dtype=FP32, mask: torch.dtype | None = None, key_heads: int | None = None, **options):
    """Scaled dot-product attention of (batch, heads, length, width), with a causal bool mask or one of zeros."""
    batch, heads, length, width = shape

    def make_mask(device):
        if mask == torch.bool:
            return torch.ones(length, length, device=device).tril().bool()
        return None if mask is None else torch.zeros(part(batch), 1, length, length, device=device, dtype=mask)

    def build(device):
        of_keys = (batch, key_heads or heads, length, width)
        inputs = [values(size, device, dtype) for size in (shape, of_keys, of_keys)]
        kept = make_mask(device)
        call = partial(F.scaled_dot_product_attention, attn_mask=kept, enable_gqa=key_heads is not None, **options)
        return inputs, lambda: call(*inputs)

    return build


def with_gradients(act: Callable[[list[Tensor]], Callable[[], object]], count=20, size=1_000_000) -> Build:
    """Twenty parameters of 3.8 MiB with gradients, and what is done to them; its output is a lone zero."""

    def build(device):
        parameters = [nn.Parameter(torch.randn(part(size), device=device)) for _ in range(count)]
        do = act(parameters)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)

        def forward():
            do()
            return torch.zeros((), device=device, requires_grad=True)

        return parameters, forward

    return build


def optimizer(kind, **options) -> Build:
    """One step of an optimizer."""
    return with_gradients(lambda parameters: kind(parameters, **options).step)


def clip(parameters: list[Tensor]) -> Callable[[], object]:
    """Gradient clipping by norm."""
    return lambda: nn.utils.clip_grad_norm_(parameters, 1.0)


def against_zeros(loss) -> Callable[[Tensor], Tensor]:
    """A loss whose targets are zeros, made at each call."""
    return lambda x: loss(x, torch.zeros_like(x))


WIDE = (1000, 10_000)  # 38 MiB in fp32
encoder_layer = partial(nn.TransformerEncoderLayer, 256, 8, 1024, activation="gelu", batch_first=True)
conv = partial(nn.Conv2d, padding=1)
optim = torch.optim

OPERATORS: dict[str, Build] = {
    "dropout_fp32": function(partial(F.dropout, p=0.1), *WIDE),
    "dropout_bf16": function(partial(F.dropout, p=0.5), *WIDE, dtype=BF16),
    "relu": function(F.relu, *WIDE),
    "gelu": function(F.gelu, *WIDE),
    "silu": function(F.silu, *WIDE),
    "tanh": function(torch.tanh, *WIDE),
    "leaky_relu": function(F.leaky_relu, *WIDE),
    "softmax": function(lambda x: x.softmax(-1), *WIDE),
    "log_softmax": function(lambda x: x.log_softmax(-1), *WIDE),
    "norm_l2": function(lambda x: x.norm(2, 1), *WIDE),
    "layer_norm": module(lambda: nn.LayerNorm(1024), 8000, 1024),
    "layer_norm_bf16": module(lambda: nn.LayerNorm(1024), 8000, 1024, dtype=BF16),
    "rms_norm": module(lambda: nn.RMSNorm(1024), 8000, 1024),
    "group_norm": module(lambda: nn.GroupNorm(8, 64), 32, 64, 32, 32),
    "batch_norm2d": module(lambda: nn.BatchNorm2d(64), 64, 64, 32, 32),
    "batch_norm2d_bf16": module(lambda: nn.BatchNorm2d(64), 64, 64, 32, 32, dtype=BF16),
    "batch_norm1d": module(lambda: nn.BatchNorm1d(1024), 4096, 1024),
    "linear_bias": module(lambda: nn.Linear(2048, 1024), 4096, 2048),
    "linear_nobias": module(lambda: nn.Linear(2048, 1024, bias=False), 4096, 2048),
    "linear_3d": module(lambda: nn.Linear(512, 512), 16, 128, 512),
    "linear_bf16": module(lambda: nn.Linear(2048, 1024), 4096, 2048, dtype=BF16),
    "bmm": function(lambda x: x @ x.transpose(1, 2), 64, 256, 64),
    "einsum": function(lambda x: torch.einsum("bij,bkj->bik", x, x), 64, 256, 64),
    "conv3_64_32": module(lambda: conv(64, 64, 3, bias=False), 128, 64, 32, 32),
    "conv3_128_16": module(lambda: conv(128, 128, 3), 128, 128, 16, 16),
    "conv1_256_8": module(lambda: nn.Conv2d(256, 512, 1), 128, 256, 8, 8),
    "conv7_s2": module(lambda: nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), 64, 3, 64, 64),
    "conv3_s2": module(lambda: conv(64, 128, 3, stride=2), 64, 64, 32, 32),
    "conv_depthwise": module(lambda: conv(128, 128, 3, groups=128), 64, 128, 16, 16),
    "conv_bf16": module(lambda: conv(64, 64, 3, bias=False), 128, 64, 32, 32, dtype=BF16),
    "conv_transpose": module(lambda: nn.ConvTranspose2d(64, 32, 2, stride=2), 32, 64, 16, 16),
    "max_pool": function(lambda x: F.max_pool2d(x, 2), 64, 64, 32, 32),
    "avg_pool": function(lambda x: F.avg_pool2d(x, 2), 64, 64, 32, 32),
    "adaptive_avg": function(lambda x: F.adaptive_avg_pool2d(x, 1), 64, 512, 8, 8),
    "interpolate_nearest": function(lambda x: F.interpolate(x, scale_factor=2), 16, 32, 32, 32),
    "interpolate_bilinear": function(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), 16, 32, 32, 32),
    "pad": function(lambda x: F.pad(x, (1, 1, 1, 1)), 64, 64, 32, 32),
    "embedding": module(lambda: nn.Embedding(20_000, 256), 64, 163, numbers=20_000),
    "embedding_sparse": module(lambda: nn.Embedding(20_000, 256, sparse=True), 64, 163, numbers=20_000),
    "cross_entropy": cross_entropy(),
    "cross_entropy_sum": cross_entropy(reduction="sum"),
    "cross_entropy_bf16": cross_entropy(BF16),
    "cross_entropy_smooth": cross_entropy(label_smoothing=0.1),
    "mse": function(against_zeros(F.mse_loss), *WIDE),
    "bce_logits": function(against_zeros(F.binary_cross_entropy_with_logits), *WIDE),
    "lstm_2x512": module(lambda: nn.LSTM(256, 512, 2, batch_first=True), 32, 64, 256),
    "lstm_bi": module(lambda: nn.LSTM(128, 256, bidirectional=True), 64, 32, 128),
    "gru_1x256": module(lambda: nn.GRU(128, 256, batch_first=True), 64, 80, 128),
    "rnn_tanh": module(lambda: nn.RNN(128, 256, 2, batch_first=True), 64, 80, 128),
    "lstm_dropout": module(lambda: nn.LSTM(256, 256, 3, batch_first=True, dropout=0.2), 32, 64, 256),
    "sdpa_fp32": attention(16, 8, 163, 32),
    "sdpa_fp32_causal": attention(8, 6, 256, 64, is_causal=True),
    "sdpa_fp32_dropout": attention(16, 8, 163, 32, dropout_p=0.1),
    "sdpa_bf16": attention(8, 12, 512, 64, dtype=BF16),
    "sdpa_bf16_causal": attention(8, 12, 512, 64, dtype=BF16, is_causal=True),
    "sdpa_bf16_dropout": attention(8, 12, 512, 64, dtype=BF16, dropout_p=0.1),
    "sdpa_fp16_d128": attention(4, 16, 1024, 128, dtype=FP16, is_causal=True),
    "sdpa_bool_mask": attention(8, 6, 256, 64, mask=torch.bool),
    "sdpa_float_mask": attention(8, 6, 256, 64, mask=FP32),
    "sdpa_bf16_mask": attention(8, 6, 256, 64, dtype=BF16, mask=BF16),
    "sdpa_gqa_bf16": attention(4, 16, 512, 64, dtype=BF16, is_causal=True, key_heads=4),
    "mha": module(partial(encoder_layer, dropout=0.1), 16, 163, 256),
    "mha_nodrop": module(partial(encoder_layer, dropout=0.0), 16, 163, 256),
    "sgd": optimizer(optim.SGD, lr=0.1),
    "sgd_momentum_wd": optimizer(optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "sgd_nesterov": optimizer(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": optimizer(optim.Adam),
    "adam_wd": optimizer(optim.Adam, weight_decay=1e-2),
    "adam_amsgrad": optimizer(optim.Adam, amsgrad=True),
    "adamw": optimizer(optim.AdamW),
    "adamw_fused": optimizer(optim.AdamW, fused=True),
    "adamw_loop": optimizer(optim.AdamW, foreach=False),
    "rmsprop": optimizer(optim.RMSprop),
    "adagrad": optimizer(optim.Adagrad),
    "adadelta": optimizer(optim.Adadelta),
    "radam": optimizer(optim.RAdam),
    "nadam": optimizer(optim.NAdam),
    "lion_like_adamax": optimizer(optim.Adamax),
    "sgd_fused": optimizer(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "clip_grad_norm": with_gradients(clip),
}
