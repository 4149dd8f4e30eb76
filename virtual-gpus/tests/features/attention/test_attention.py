"""Attention on virtual GPUs: CUDA's choice of kernel, the numbers of the CPU, memory as a real H200 measured it."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from measuring import bytes_of, events_of, rows_of
from pairwise import pairwise, title
from torch.nn.attention import SDPBackend, sdpa_kernel
from virtual_gpus import virtual_gpus
from virtual_gpus.features.attention.kernels import CUDNN_OF_WHEELS, AttentionCall, Cudnn, Efficient, Flash, _best_split
from virtual_gpus.features.attention.sdpa import Formula, choose, order
from virtual_gpus.gpus import spec
from virtual_gpus.settings import INSTALLED
from virtual_gpus.versions import NEWEST

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)


def parts(shape, device="cuda", dtype=FP32, kv_heads=None, columns=None, value_width=None, layout="heads first"):
    """Query, key and value as leaves; "heads inside": lying in memory as (N, T, heads, width)."""
    n, heads, rows, width = shape
    shapes = [shape] + [(n, kv_heads or heads, columns or rows, w) for w in (width, value_width or width)]
    if layout == "heads inside":
        made = [torch.randn(s[0], s[2], s[1], s[3]).transpose(1, 2) for s in shapes]
    else:
        made = [torch.randn(s) for s in shapes]
    return [part.to(dtype).to(device).requires_grad_() for part in made]


def mask_of(kind, query, columns):
    """A mask of this kind for this query; a "learnt" one wants a gradient."""
    n, heads, rows, _ = query.shape
    if kind in ("bool", "row"):
        return (torch.rand((rows, columns) if kind == "bool" else (n, 1, 1, columns)) > 0.3).to(query.device)
    made = torch.randn((n, 1, rows, columns) if kind == "float" else (1, heads, rows, columns))
    return made.to(query.dtype).to(query.device).requires_grad_(kind == "learnt")


def results(device, backend, dtype, shape, mask, causal, scale=0.3, **sizes):
    torch.manual_seed(0)
    leaves = parts(shape, device, dtype, **sizes)
    gqa = leaves[0].shape[1] != leaves[1].shape[1]
    added = None if mask is None else mask_of(mask, leaves[0], leaves[1].shape[2])
    gradient = torch.randn(*shape[:3], leaves[2].shape[3]).to(dtype).to(device)
    with sdpa_kernel([*FUSED, SDPBackend.MATH] if device == "cpu" or backend is None else backend):
        out = F.scaled_dot_product_attention(*leaves, added, is_causal=causal, enable_gqa=gqa, scale=scale)
    out.backward(gradient)
    wanted = [*leaves, added] if mask == "learnt" else leaves
    return [t.detach() for t in (out, *[leaf.grad for leaf in wanted])]


KINDS = ("H200", "A100", "T4", "V100", "TITAN Xp", "K80")
CASES = [
    {"backend": backend, "kind": kind, "dtype": dtype, "shape": shape, "mask": mask, "causal": causal, "sizes": sizes}
    for backend, kinds, dtypes, masks in (
        (None, KINDS, (FP32, FP16, BF16), (None, "bool", "row", "float", "learnt")),
        (SDPBackend.MATH, ("H200",), (FP32, FP16), (None, "bool", "learnt")),
        (SDPBackend.FLASH_ATTENTION, ("H200",), (BF16,), (None,)),
        (SDPBackend.EFFICIENT_ATTENTION, ("H200",), (FP32, FP16), (None, "bool", "row", "learnt")),
        (SDPBackend.CUDNN_ATTENTION, ("H200",), (BF16, FP16), (None, "bool", "row", "float")),
    )
    for kind in kinds
    for dtype in dtypes
    for mask in masks
    for causal in (False, True)
    for shape, sizes in (
        ((2, 4, 16, 32), {}),
        ((2, 4, 13, 24), {"layout": "heads inside"}),
        ((2, 4, 9, 16), {"columns": 16}),
        ((1, 4, 9, 16), {"kv_heads": 2}),
        ((1, 2, 9, 16), {"value_width": 32}),
        ((1, 2, 70, 136), {"scale": None}),
        ((1, 2, 6, 5), {"scale": None}),  # flash works on multiples of 8; the scale is still that of the real width
    )
    if not (causal and mask)
    and not (shape[3] % 8 and backend is not SDPBackend.FLASH_ATTENTION)
    and not (backend is SDPBackend.FLASH_ATTENTION and (sizes.get("value_width") or (causal and sizes.get("columns"))))
    and not (backend is SDPBackend.EFFICIENT_ATTENTION and sizes.get("kv_heads") and INSTALLED < (2, 14))
    and not (backend is SDPBackend.CUDNN_ATTENTION and shape[3] > 128)
]


@pytest.mark.parametrize("case", pairwise(CASES), ids=title)
def test_output_and_gradients_are_those_of_the_cpu_and_shapes_take_the_same_memory(case):
    options = {name: value for name, value in case.items() if name not in ("kind", "sizes")} | case["sizes"]
    memory = []
    for shapes_only in (True, False):
        with virtual_gpus(1, kind=case["kind"], shapes_only=shapes_only):
            found, events = events_of(partial(results, "cuda", **options))
            memory.append(([t.stride() for t in found], events))
    assert memory[0] == memory[1]
    wanted, dtype = results("cpu", **options), case["dtype"]
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == FP32 else {"atol": 4e-2, "rtol": 4e-2}
    assert {t.dtype for t in found} == {dtype}
    torch.testing.assert_close(found, wanted, check_device=False, **close)


@pytest.mark.parametrize("backend", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def test_dropout_drops_the_same_weights_forward_and_backward(backend):
    """With the unit matrix as value the output shows the weights that stayed; the formula then gives all gradients."""
    found, wanted = [], []
    with virtual_gpus(1), sdpa_kernel(backend):
        query, key, value = leaves = parts((2, 3, 8, 16), columns=12, value_width=12)
        unit = torch.eye(12, device="cuda").expand_as(value)
        torch.cuda.manual_seed(1)
        with torch.no_grad():
            stayed = F.scaled_dot_product_attention(query, key, unit, dropout_p=0.25) != 0
        assert 0.15 < 1 - stayed.float().mean().item() < 0.35
        plain = (query @ key.transpose(-2, -1) / 4).softmax(-1) * stayed / 0.75 @ value
        torch.cuda.manual_seed(1)
        fused = F.scaled_dot_product_attention(query, key, value, dropout_p=0.25)
        for results, out in ((found, fused), (wanted, plain)):
            results += [out, *torch.autograd.grad(out.square().sum(), leaves)]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


CHOICES = rows_of("attention")["kernels"]


def _asked(kind, shape=(2, 4, 16, 64), dtype="float32", mask=None, learnt=False, dropout=0.0, causal=False, gqa=False,
           three=False, strided=False, shifted=False, columns=None, since=None, before=None, **sizes):  # fmt: skip
    query, key, value = parts(tuple(shape), "cpu", getattr(torch, dtype), **sizes)
    if columns is not None:
        key, value = key.new_zeros(2, 4, columns, shape[3]), value.new_zeros(2, 4, columns, shape[3])
    if three:
        query, key, value = query[0], key[0], value[0]
    if strided:
        query = query.detach().transpose(-2, -1).contiguous().transpose(-2, -1)
    if shifted:
        query = torch.zeros(query.numel() + 1)[1:].view(query.shape)
    mask = None if mask is None else torch.zeros(mask, dtype=query.dtype, requires_grad=learnt)
    return AttentionCall(query, key, value, mask, dropout, causal, gqa, spec(kind))


@pytest.mark.parametrize(("kernel", "row"), [(kernel, row) for kernel in CHOICES for row in CHOICES[kernel]])
def test_choice_of_kernel(kernel, row):
    if not row.get("since", [0]) <= [*INSTALLED] < row.get("before", [9]):
        pytest.skip("a rule of another version of PyTorch")
    assert choose(_asked(**row)).__name__ == kernel


def test_switches_and_priorities(monkeypatch):
    half = _asked("H200", dtype="bfloat16")
    (flash, *others), math = FUSED, SDPBackend.MATH
    for on, first, kernel in (([flash, math], False, Flash), (others, True, Efficient), (math, False, Formula)):
        with sdpa_kernel(on, set_priority=first):
            assert choose(half) == kernel
    assert order(spec("A100"))[0] == SDPBackend.FLASH_ATTENTION
    try:
        for strict, warn_only, kernel in ((True, False, Flash), (True, True, Cudnn), (False, False, Cudnn)):
            torch.use_deterministic_algorithms(strict, warn_only=warn_only)
            assert choose(half) == kernel
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert choose(half) == Flash and max(CUDNN_OF_WHEELS) == NEWEST


MISTAKES = [
    (lambda q: (q, q.to(BF16), q), "to have the same dtype"),
    (lambda q: (q, q.cpu(), q), "same device type, but got query.device: cuda:0 key.device: cpu"),
    (lambda q: (q[0, 0, 0], q, q), "at least 2 dimensional"),
    (lambda q: (q, q, q, q[0, 0, :, :4].int()), "Expected attn_mask dtype to be bool"),
    (lambda q: (q, q, q, None, 1.5), "dropout probability has to be between 0 and 1"),
    (lambda q: (q, q, q, q[0, 0, :, :4] > 0, 0.0, True), "Explicit attn_mask should"),
    (lambda q: (*[q.half()] * 3, q[..., :4].clone().requires_grad_()), "for bias"),
    (lambda q: (q, q, q, q[..., :4] > 0), "^No available kernel. Aborting execution.$"),  # flash takes no mask
]


@pytest.mark.parametrize(("make", "text"), MISTAKES)
def test_mistakes_get_pytorchs_words(make, text):
    with virtual_gpus(1):
        query = parts((2, 2, 4, 8))[0].detach()
        flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if "kernel" in text else nullcontext()
        with flash, pytest.raises(RuntimeError, match=text):
            F.scaled_dot_product_attention(*make(query))


@pytest.mark.parametrize(("dtype", "kept"), [(FP32, 0), (BF16, 1024)])
def test_without_gradients_only_the_output_stays(gpu, dtype, kept):
    """cuDNN's random numbers' seed and offset go with the call; with gradients they stay."""
    leaves = parts((2, 4, 64, 64), dtype=dtype)
    nbytes = leaves[0].numel() * dtype.itemsize
    with torch.no_grad():
        out, stayed, _ = bytes_of(lambda: F.scaled_dot_product_attention(*leaves))
    assert stayed == nbytes
    assert bytes_of(lambda: F.scaled_dot_product_attention(*leaves))[1] == nbytes + 2 * 4 * 64 * 4 + kept
    if dtype == FP32:  # the memory-efficient kernel writes (N, T, heads, width): the usual reshape is a view
        assert bytes_of(lambda: out.transpose(1, 2).reshape(2, 64, 256))[1] == 0


def test_flash_splits_keys_when_few_rows_would_leave_processors_idle():
    """The published heuristic's own example: 48 blocks on 108 processors are better off with 2 parts than with 3."""
    assert _best_split(48, 108, 100) == 2
    assert _best_split(200, 216, 100) == 1
    with virtual_gpus(1, kind="A100", shapes_only=True), torch.no_grad():
        leaves = parts((1, 1, 64, 64), dtype=BF16, columns=4096)
        peak = bytes_of(lambda: F.scaled_dot_product_attention(*leaves))[2]
    assert peak == 64 * 64 * 2 + 16 * 64 * (1 + 64) * 4 + 3 * 512  # 16 parts; a number for each row, and two seeds


@pytest.mark.parametrize(("kind", "splits", "rows"), [("TITAN Xp", 1, 64), ("T4", 16, 128), ("H200", 16, 128)])
def test_kernels_workspaces_by_hand(kind, splits, rows):
    """Memory-efficient backward in fp16, width 256, where registers do not hold the gradients."""
    with virtual_gpus(1, kind=kind, shapes_only=True), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = F.scaled_dot_product_attention(*parts((1, 2, 1024, 256), dtype=FP16))
        gradient = torch.zeros(1, 1024, 2, 256, device="cuda", dtype=FP16).transpose(1, 2)
        peak = bytes_of(lambda: out.backward(gradient))[2]
    gradients, delta = 3 * 2 * 1024 * 256 * 2, 2 * 1024 * 4
    workspace = 2 * 4 * (splits * 64 * 256 * 2 + 1024 // rows * 4 * (4 + rows * 64))
    assert peak == pytest.approx(gradients + delta + workspace, abs=1 << 20)  # blocks have unsplit tails


def test_backward_under_autocast_has_the_inputs_precision_and_rows_that_see_nothing_zeros():
    with virtual_gpus(1):
        leaves = parts((2, 2, 8, 16))
        out = F.scaled_dot_product_attention(*leaves, dropout_p=0.5)
        wanted = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        with torch.autocast("cuda", dtype=BF16):
            found = torch.autograd.grad(out.sum(), leaves)
        assert all(map(torch.equal, found, wanted))
        leaves, mask = parts((1, 2, 4, 8)), torch.ones(4, 4, dtype=torch.bool, device="cuda")
        mask[1] = False
        for dropout in (0.0, 0.5, 1.0):
            out = F.scaled_dot_product_attention(*leaves, mask, dropout_p=dropout)
            (gradient,) = torch.autograd.grad(out.sum(), leaves[:1])
            assert not out[:, :, 1].any() and not gradient[:, :, 1].any() and (dropout < 1 or not out.any())
            assert out[:, :, 0].isfinite().all() and gradient.isfinite().all()
