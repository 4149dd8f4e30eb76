"""CUDA's fused attention kernels, a class each: when CUDA takes it, its operator, its memory, its time.

`forward` and `backward` take memory block by block in CUDA's order, and give back the allocations of what stays.
Sources, whose names stand at the numbers: sdp_utils.cpp, attention.cu, attention_backward.cu, flash_attn/flash_api.cpp,
and kernel_forward.h, kernel_backward.h and kernels/cutlassB.h of mem_eff_attention, in
aten/src/ATen/native/transformers/cuda; aten/src/ATen/native/cudnn/MHA.cpp; for cuDNN's workspace
include/cudnn_frontend/node/scaled_dot_product_flash_attention.h of cudnn-frontend, whose buffers are what a real H200
measured but for 512 bytes.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from virtual_gpus import figures, gpus
from virtual_gpus.arithmetic import ceil_div, rounded_up
from virtual_gpus.clock.cost import PRODUCT_ON_HOST
from virtual_gpus.clock.work import Cost
from virtual_gpus.dispatch.half_precision import HALVES
from virtual_gpus.dispatch.operators import OpCall
from virtual_gpus.dispatch.timing import precision_of
from virtual_gpus.features.attention.values import Mask, Numbers, Parts, Scale
from virtual_gpus.placement.storages import ScratchBlock, StorageAllocation, empty_in, put, scratch
from virtual_gpus.settings import INSTALLED
from virtual_gpus.versions import NEWEST, Version

Blocks = list[StorageAllocation]
FLOAT = 4
_FITTED = figures.beside(__file__)
_CUDNN_OWN: int = _FITTED["memory"]["cudnn"]
# Rules of sdp_utils.cpp and attention.cpp, and the version of PyTorch since which each holds.
_CUDNN_DROPOUT_IN_SIXTEENTHS: Version = (2, 12)  # cuDNN's kernel takes no other probability
_EFFICIENT_NEEDS_ALIGNMENT: Version = (2, 13)  # of where its inputs begin, from Ampere on
_CUDNN_LIMITS_BATCH_AND_HEADS: Version = (2, 13)  # to 65535
_SHARED_HEADS: Version = (2, 14)  # the memory-efficient kernel shares keys among heads, and all kernels one key
_CUDNN_WIDE_HEADS: Version = (2, 15)  # of up to 256 numbers, if cuDNN is newer than this:
_CUDNN_HAS_WIDE_HEADS = 92200  # as PyTorch counts it
# Where torch was built without cuDNN: what the wheels for Linux bring.
CUDNN_OF_WHEELS: dict[Version, int] = {(2, 11): 91900, (2, 12): 92000, (2, 13): 92000, (2, 14): 92600, (2, 15): 92600}


@dataclass(slots=True)
class AttentionCall:
    """query (N, heads, rows, width), key and value (N, heads, columns, width or another one), and settings.

    mask: None, or what `scores` can be expanded from. gqa: heads may share keys (enable_gqa). spec: of the GPU.
    version: of the PyTorch whose rules hold, (major, minor).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask
    dropout: float
    causal: bool
    gqa: bool
    spec: gpus.GPUSpec
    version: Version = INSTALLED
    scale: Scale = None

    @property
    def parts(self) -> Parts:
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        """True if a gradient will be wanted."""
        return torch.is_grad_enabled() and any(part.requires_grad for part in self.parts)

    @property
    def scores(self) -> tuple[int, ...]:
        """Shape of the scores, (N, heads, rows, columns)."""
        return *self.query.shape[:-1], self.key.shape[-2]

    def is_dense(self, ignore_width_one: bool) -> bool:
        """What all kernels want: four dimensions, one dtype, rows of numbers that lie together, something to do."""
        query, key, value = self.query, self.key, self.value
        packed = query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        return (
            query.dim() == key.dim() == value.dim() == 4
            and query.dtype == key.dtype == value.dtype
            and (packed or (ignore_width_one and query.shape[-1] == 1))
            and (self.mask is None or self.mask.stride(-1) == 1)
            and query.shape[-2] > 0 < key.shape[-2]
        )

    def heads_fit(self, may_share: bool, same: bool) -> bool:
        """may_share: the kernel shares keys among heads. same: keys and values must agree."""
        (n, query), (key_n, key), (value_n, value) = self.query.shape[:2], self.key.shape[:2], self.value.shape[:2]
        if not n == key_n == value_n:
            return False
        one_for_all = may_share and self.version >= _SHARED_HEADS and query and key == value == 1
        if query == key == value or one_for_all:
            return True
        if not (may_share and self.gqa) or (same and key != value):
            return False
        return bool(key and value) and query % key == query % value == 0


def rule(name: str, spec: gpus.GPUSpec) -> bool:
    """What the figures say of the compute capability of `spec`."""
    return _FITTED["capabilities"]["{}.{}".format(*spec.capability)][name]


def must_be_deterministic() -> bool:
    """True if PyTorch takes deterministic algorithms only, and does not just warn of others."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@functools.cache
def cudnn_version(version: Version = INSTALLED) -> int:
    """cuDNN's version as PyTorch counts it, 91900 for 9.19.0: the installed one, or that of a version's wheels."""
    if version != INSTALLED or not torch.backends.cudnn.is_available():
        return CUDNN_OF_WHEELS.get(version, CUDNN_OF_WHEELS[NEWEST])
    major, minor, patch = torch._C._cudnn.getCompileVersion()
    return major * 10000 + minor * 100 + patch


class Kernel:
    """One run of a kernel, with query (N, heads, rows, width), key and value (N, kv_heads, columns, ...).

    backend: PyTorch's number. name: of the operator. only_half: it is for fp16 and bf16. gradient: the argument of its
    backward operator that the output's gradient is. Each has `takes`, if CUDA may take it, `forward` and `backward`.
    """

    backend: SDPBackend
    name: str
    only_half = True
    gradient = "grad_out"

    @classmethod
    def attend(cls, call: AttentionCall) -> Tensor:
        """The output of its operator, with a mask that is added."""
        operator = getattr(torch.ops.aten, cls.name).default
        if call.mask is not None:
            call.mask = cls.expanded(call, call.mask)  # the one before goes
        return operator(*call.parts, call.mask, call.trains, call.dropout, call.causal, scale=call.scale)[0]

    @staticmethod
    def expanded(call: AttentionCall, mask: Tensor) -> Tensor:
        """The mask in four dimensions."""
        n, _, *rest = call.scores
        return mask.expand(n, mask.shape[1] if mask.dim() == 4 else 1, *rest)

    def __init__(self, call: OpCall):
        self.call, self.gpu, self.dropout = call, call.gpu, call["dropout_p"]
        self.allocate = functools.partial(StorageAllocation, call.gpu)  # a block that stays
        self.parts = query, key, value = call["query"], call["key"], call["value"]
        self.bias: Mask = call["attn_bias"] if "attn_bias" in call.op.positions else None
        self.numbers = Numbers(self.parts, self.bias, self.dropout, call["is_causal"], call["scale"])
        self.bytes, self.half = query.element_size(), query.dtype in HALVES
        if self.only_half and not self.half:
            raise RuntimeError(f"aten::{call.op.name} takes fp16 and bf16 on CUDA, not {query.dtype}.")
        self.n, self.heads, self.rows, self.width = query.shape
        self.kv_heads, self.columns = key.shape[1:3]
        self.value_width = value.shape[3]
        self.per_row = self.n * self.heads * self.rows  # rows of the scores in all heads and samples
        self.out = self.per_row * self.value_width * self.bytes  # bytes of the output
        self.lse: tuple[int, ...] = (self.n, self.heads, self.rows)  # shape of the logarithms of the rows' sums
        keys = self.n * self.kv_heads * self.columns * self.bytes
        # Bytes of the gradients of query, key and value.
        self.gradients = self.per_row * self.width * self.bytes, keys * self.width, keys * self.value_width

    def strides(self, like: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the output or a gradient of `shape`, made for the input `like`: packed, in the order of its dimensions."""
        given = like.stride()  # with a 0 if it is expanded
        order = range(4) if 0 in given else tuple(sorted(range(4), key=lambda dim: -given[dim]))
        return packed_strides(order, shape)

    def results(self, out: Tensor, lse: Tensor, seed: Tensor | None, blocks: Blocks) -> tuple[Any, ...]:
        """What the operator returns. seed: None without dropout. blocks: of the random numbers' seed and offset."""
        seed = empty_in(blocks[0], (), torch.float64) if seed is None else put(seed, blocks[0])
        offset = empty_in(blocks[1], (), torch.float64)
        return out, lse, None, None, self.rows, self.columns, seed, offset, None  # None: of several texts in one


@functools.lru_cache(maxsize=4096)
def cost(kind: str, query: torch.Size, columns: int, dtype: torch.dtype, *how: bool) -> Cost:
    """Tiles of the scores (rows of the query, columns of the key) that the causal mask empties are skipped.
    kind: of the GPU. query: its shape. how: if it is the backward pass, if it is causal, if there is dropout."""
    (n, heads, rows, width), (backward, causal, drops), spec, fitted = query, how, gpus.spec(kind), _FITTED["time"]
    precision, reached, tile = precision_of("", dtype), spec.reached, fitted["tile"]
    down, across = ceil_div(rows, tile), ceil_div(columns, tile)
    tiles = sum(min(across, row + 1) for row in range(down)) if causal else down * across
    flops = 4 * n * heads * tiles * tile * tile * width * (fitted["backward"] if backward else 1)
    cores = precision in spec.tensor_cores
    share = fitted["share_on_cores" if cores else "share"]
    if cores and dtype in HALVES and rule("small_tensor_cores", spec):
        share = fitted["share_of_products"] * reached.tensor
    share /= fitted["dropout"] if drops else 1
    read = n * heads * (2 * rows + 2 * columns) * width * dtype.itemsize
    seconds = max(flops / (spec.flops_of(precision) * share), spec.seconds_to_move(read))
    if not backward:
        return Cost(seconds + fitted["floor"] * reached.kernel, 1, PRODUCT_ON_HOST)
    seconds += spec.seconds_to_move(2 * read)
    return Cost(seconds + fitted["floor_backward"] * reached.kernel, 1 + fitted["other_kernels"], PRODUCT_ON_HOST)


@functools.lru_cache(maxsize=4096)
def packed_strides(order: Sequence[int], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor whose dimensions lie in memory in this order, the first one outermost."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


class Cudnn(Kernel):
    """cuDNN's kernel. Output and gradients lie in memory as query, key and value do."""

    backend = SDPBackend.CUDNN_ATTENTION
    name = "_scaled_dot_product_cudnn_attention"

    def __init__(self, call: OpCall):
        super().__init__(call)
        self.lse = (*self.lse, 1)

    @staticmethod
    def takes(call: AttentionCall) -> bool:
        """The conditions of can_use_cudnn_attention."""
        return (
            torch.backends.cuda.cudnn_sdp_enabled()
            and call.query.dtype in HALVES
            and call.spec.capability >= (8, 0)
            and not must_be_deterministic()
            and (call.version < _CUDNN_DROPOUT_IN_SIXTEENTHS or call.dropout * 16 % 1 == 0)
            and call.is_dense(ignore_width_one=True)
            and call.heads_fit(may_share=True, same=False)
            and (call.mask is None or Cudnn._takes_mask(call, call.mask))
            and Cudnn._takes_sizes(call)
        )

    @staticmethod
    def _takes_mask(call: AttentionCall, mask: Tensor) -> bool:
        shape = call.scores[-mask.dim() :]
        fits = mask.dim() in (2, 4) and all(m in (1, n) for m, n in zip(mask.shape, shape, strict=True))
        return fits and not mask.requires_grad

    @staticmethod
    def _takes_sizes(call: AttentionCall) -> bool:
        """check_cudnn_tensor_shapes, where all numbers are."""
        pair = width, value_width = call.query.shape[-1], call.value.shape[-1]
        wide = rule("prefers_cudnn", call.spec)
        may_be_wider = wide and call.version >= _CUDNN_WIDE_HEADS
        newest = may_be_wider and cudnn_version(call.version) > _CUDNN_HAS_WIDE_HEADS
        limit = 192 if wide and pair == (192, 128) else 128
        one_row = call.key.shape[-2] == 1 or (call.dropout and call.query.shape[-2] == 1)
        too_many = call.version >= _CUDNN_LIMITS_BATCH_AND_HEADS and max(call.query.shape[:2]) > 65535
        if max(pair) > (256 if newest else limit) or width % 8 or value_width % 8 or one_row or too_many:
            return False
        # Such wide heads have no backward pass otherwise.
        return not (newest and call.trains and max(pair) > 128) or pair in ((192, 128), (256, 256))

    def forward(self) -> tuple[StorageAllocation, StorageAllocation | None, Blocks]:
        """Blocks of the output, of one float per row (if it trains) and of seed and offset of the random numbers."""
        seeds = [self.allocate(8), self.allocate(8)]
        out = self.allocate(self.out)
        lse = self.allocate(self.per_row * FLOAT) if self.call["compute_log_sumexp"] else None
        with scratch(self.gpu, _CUDNN_OWN):
            return out, lse, seeds

    def backward(self, gradient: Tensor, out: Tensor) -> Blocks:
        """Blocks of the gradients of query, key and value."""
        gradients = [self.allocate(nbytes) for nbytes in self.gradients]
        copy = self.out if gradient.stride(-1) != 1 else 0  # as after out.sum()
        sums = self.per_row * (self.width + 1) * FLOAT  # of query's gradient, and of gradient times output
        # Gradients of key and value, before those of heads that share them are added up.
        of_heads = self.n * self.heads * self.columns * (self.width + self.value_width) * self.bytes
        with scratch(self.gpu, copy, sums + (of_heads if self.heads != self.kv_heads else 0) + _CUDNN_OWN):
            return gradients


class Flash(Kernel):
    """FlashAttention 2. Output and gradients lie in memory as query, key and value do."""

    backend = SDPBackend.FLASH_ATTENTION
    name = "_scaled_dot_product_flash_attention"

    @staticmethod
    def takes(call: AttentionCall) -> bool:
        """The conditions of can_use_flash_attention."""
        (rows, width), columns = call.query.shape[-2:], call.key.shape[-2]
        return (
            torch.backends.cuda.flash_sdp_enabled()
            and call.query.dtype in HALVES
            and call.spec.capability >= (8, 0)
            and call.mask is None
            and width == call.key.shape[-1] == call.value.shape[-1] <= 256
            and (not call.causal or rows == columns)
            and call.is_dense(ignore_width_one=True)
            and call.heads_fit(may_share=True, same=True)
        )

    @classmethod
    def attend(cls, call: AttentionCall) -> Tensor:
        """The output. Widths are filled up to multiples of 8 (pad_last_dim); the scale is that of the real one."""
        width = call.query.shape[-1]
        scale = 1 / math.sqrt(width) if call.scale is None else call.scale
        parts = [torch.nn.functional.pad(part, (0, -width % 8)) if width % 8 else part for part in call.parts]
        operator = torch.ops.aten._scaled_dot_product_flash_attention.default
        out = operator(*parts, call.dropout, call.causal, scale=scale)[0]
        return out[..., :width] if width % 8 else out

    def results(self, *made: Any) -> tuple[Any, ...]:
        """The base's, and a mask for debugging."""
        return *super().results(*made)[:-1], empty_in(None, (0,), self.parts[0].dtype)

    def forward(self) -> tuple[StorageAllocation, StorageAllocation, Blocks]:
        """Blocks of the output, of one float per row and of the random numbers' state (two numbers, one unused)."""
        out, lse = self.allocate(self.out), self.allocate(self.per_row * FLOAT)
        splits = 1 if self.dropout else self._splits()
        rows = splits * self.per_row * FLOAT
        with scratch(self.gpu, *((rows, rows * self._rounded_width()) if splits > 1 else ())):
            state, unused = self.allocate(16), self.allocate(8)
            if self.dropout:  # made a second time, before the first goes
                state = self.allocate(16)
        return out, lse, [state, unused]

    def backward(self, gradient: Tensor, out: Tensor) -> Blocks:
        """Blocks of the gradients of query, key and value."""
        copies = [self.out for tensor in (gradient, out) if not tensor.transpose(1, 2).is_contiguous()]
        rows = self.n * self.heads * rounded_up(self.rows, 128) * FLOAT
        # The gradient of key or value, before those of heads that share them are added up.
        of_heads = self.n * self.heads * self.columns * self.width * self.bytes if self.heads != self.kv_heads else 0
        sums = 1  # of query's gradient; one per group of thread blocks when the order of adding must be fixed
        if must_be_deterministic():
            sums = ceil_div(self.gpu.spec.multi_processor_count, self.n * self.heads)
        with scratch(self.gpu, *copies):
            gradients = [self.allocate(nbytes) for nbytes in self.gradients]
            with scratch(self.gpu, rows, rows * self._rounded_width() * sums, of_heads, of_heads):
                return gradients

    def _rounded_width(self) -> int:  # head_size_rounded
        return rounded_up(self.width, 32 if self.width <= 128 else 64)

    def _splits(self) -> int:
        """In how many parts the keys are worked on at the same time (set_params_splitkv, num_splits_heuristic)."""
        processors = 2 * self.gpu.spec.multi_processor_count
        blocks = self.n * self.heads * ceil_div(self.rows, 64)  # kBlockM
        columns = 256 if self.width <= 64 else 128
        key_blocks = ceil_div(self.columns, columns if self.width <= 128 else 64)  # block_n
        return 1 if blocks >= 0.8 * processors else _best_split(blocks, processors, key_blocks)


def _best_split(blocks: int, processors: int, key_blocks: int) -> int:
    """The smallest number of parts that keeps the processors at least 85 % as busy as the best number does."""
    busy = {}
    for splits in range(1, min(128, processors, key_blocks) + 1):  # max_splits
        if splits == 1 or ceil_div(key_blocks, splits) != ceil_div(key_blocks, splits - 1):  # else it is the same work
            busy[splits] = blocks * splits / processors / ceil_div(blocks * splits, processors)  # of all waves
    best = max(busy.values(), default=0)
    return next((splits for splits, share in busy.items() if share >= 0.85 * best), 1)


class Efficient(Kernel):
    """The memory-efficient kernel (cutlass). Its output and gradients lie in memory as (N, rows, heads, width)."""

    backend = SDPBackend.EFFICIENT_ATTENTION
    name = "_scaled_dot_product_efficient_attention"
    only_half = False
    gradient = "grad_out_"

    def __init__(self, call: OpCall):
        super().__init__(call)
        self.lse = (self.n, self.heads, rounded_up(self.rows, 32))  # kAlignLSE

    @staticmethod
    def takes(call: AttentionCall) -> bool:
        """The conditions of can_use_mem_efficient_attention."""
        major, half = call.spec.capability[0], call.query.dtype in HALVES
        multiple = 1  # of the width, in numbers (minimum_gemm_alignment)
        if major >= 8 or (major == 7 and half):
            multiple = 8 if half else 4
        dtypes = (torch.float16, torch.float32, torch.bfloat16) if major >= 8 else (torch.float16, torch.float32)
        query, key, value = call.query.shape[-1], call.key.shape[-1], call.value.shape[-1]
        # Blocks begin at multiples of 512 bytes, so where a view starts within its storage decides.
        aligned = all([part.storage_offset() % multiple == 0 or not part.numel() for part in call.parts])
        return (
            torch.backends.cuda.mem_efficient_sdp_enabled()
            and call.query.dtype in dtypes
            and call.spec.capability >= (5, 0)
            and query == key > 0 < value
            and query % multiple == value % multiple == 0
            and (aligned or call.version < _EFFICIENT_NEEDS_ALIGNMENT or major < 8)
            and call.is_dense(ignore_width_one=False)
            and call.heads_fit(may_share=call.version >= _SHARED_HEADS, same=True)
        )

    @staticmethod
    def expanded(call: AttentionCall, mask: Tensor) -> Tensor:
        """The mask for each head, its rows at multiples of 8 numbers (mem_eff_alignment, pad_bias in attention.cpp)."""
        if mask.dtype != call.query.dtype:
            raise RuntimeError("invalid dtype for bias - should match query's dtype")
        if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
            length = mask.shape[-1]
            mask = torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]
        return mask.expand(call.scores)

    def strides(self, like: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the output or a gradient of `shape`: packed as (N, rows, heads, width)."""
        return packed_strides((0, 2, 1, 3), shape)

    def results(self, out: Tensor, lse: Tensor, seed: Tensor | None, blocks: Blocks) -> tuple[Any, ...]:
        """What the operator returns. The random numbers' seed and offset are on the host."""
        return out, lse, empty_in(None, (), torch.int64) if seed is None else seed, empty_in(None, (), torch.int64)

    def forward(self) -> tuple[StorageAllocation, StorageAllocation | None, Blocks]:
        """Blocks of the output and, if it trains, of one float per row. Seeds stay on the host."""
        out = self.allocate(self.out)
        lse = self.allocate(math.prod(self.lse) * FLOAT) if self.call["compute_log_sumexp"] else None
        if self.half and max(self.width, self.value_width) > 128:  # kNeedsOutputAccumulatorBuffer
            ScratchBlock(self.gpu, self.per_row * self.value_width * FLOAT)
        return out, lse, []

    def backward(self, gradient: Tensor, out: Tensor) -> Blocks:
        """Blocks of the gradients of query, key, value and, if it wants one, bias."""
        with scratch(self.gpu) as held:
            if not gradient.transpose(1, 2).is_contiguous():
                held.take(self.out)
            query, key, value = self.gradients
            grouped = self.heads != self.kv_heads
            if grouped:  # one gradient per head of the query, added up in the end
                share = self.heads // self.kv_heads
                gradients = [self.allocate(query)]
                held.take(key * share, value * share)
            else:
                gradients = [self.allocate(nbytes) for nbytes in (query, key, value)]
            bias: Blocks = []
            if self.bias is not None and self.bias.requires_grad:
                bias = [self.allocate(self.per_row * rounded_up(self.columns, 16) * self.bytes)]  # alignTo
            kernel = _BackwardKernel(self)
            # The sum over each row of gradient times output: by the kernel, or by operators with temporaries.
            rows, sums = self.per_row * FLOAT, list[int]()
            if not kernel.finds_delta:
                sums = [self.per_row * self.value_width * FLOAT] * (3 if self.half else 1)
                if self.heads > 1 and self.rows > 1:  # (N, rows, heads), copied to (N, heads, rows)
                    sums.append(rows)
            with scratch(self.gpu, *sums):
                held.take(rows)
            held.take(kernel.workspace())
            if grouped:
                gradients += [self.allocate(key), self.allocate(value)]
        return gradients + bias


class _BackwardKernel:
    """Which of the backward kernels runs, and the workspace it asks for (mem_eff_attention/kernels/cutlassB.h)."""

    def __init__(self, sizes: Kernel):
        self.sizes = sizes
        major = sizes.gpu.spec.capability[0]
        self.splits_keys = major >= 7  # kEnableSplitKeys
        widest = next(w for w in (32, 64, 128, 1 << 16) if max(sizes.width, sizes.value_width) <= w)  # kMaxK
        large = widest > 64 and (major >= 8 or (major == 7 and sizes.half))
        self.rows = 128 if large else 64  # kBlockSizeI
        in_registers = sizes.half and widest <= self.rows  # kOutputInRF
        self.columns = 128 if large and in_registers and major >= 8 else 64  # kBlockSizeJ
        self.sums_keys = sizes.half and not in_registers  # kNeedsAccumGradK, kNeedsAccumGradV
        self.finds_delta = sizes.half and (in_registers or sizes.gpu.spec.capability != (7, 0))  # kKernelComputesDelta

    def workspace(self) -> int:
        """Bytes: sums of query's gradient and, where registers cannot hold them, of key's and value's."""
        sizes, numbers = self.sizes, 0
        if self.sums_keys:
            widths = rounded_up(sizes.width, self.rows) + rounded_up(sizes.value_width, self.rows)
            numbers += self._splits() * self.columns * widths
        if self.splits_keys or sizes.half:
            blocks = ceil_div(sizes.rows, self.rows) * ceil_div(sizes.width, self.columns)
            numbers += blocks * (4 + self.rows * self.columns)  # GradQTempStorage: lock, counter, padding, sums
        return sizes.n * sizes.heads * rounded_up(numbers, 4) * FLOAT

    def _splits(self) -> int:
        """In how many parts the keys are worked on at the same time (num_splits_key in attention_backward.cu)."""
        if not self.splits_keys or must_be_deterministic():
            return 1
        # Its rule for few columns asks for 256 heads in all samples, of which none is split anyway.
        return max(1, min(ceil_div(self.sizes.columns, self.columns), 200 // max(1, self.sizes.n * self.sizes.heads)))


Fused = Cudnn | Flash | Efficient
FUSED = (Cudnn, Flash, Efficient)
