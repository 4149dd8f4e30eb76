"""Products of matrices: the workspaces of cuBLAS and cublasLt, and how long they take.

Sources of the workspaces: aten/src/ATen/cuda/CublasHandlePool.cpp, CUDABlas.cpp, native/cuda/Blas.cpp.
Every thread that multiplies matrices on a GPU has a cuBLAS handle there; autograd's backward runs in a thread of its
own, so a training step uses two. Handles of threads that ended are used again by others. A workspace belongs to a
handle and a stream. Products with a bias vector go through cublasLt. `memory_model.blas_workspaces` says how large
workspaces are and how long they stay. It is not here, because programs may ask it without virtual GPUs.
"""

import os
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from math import ceil, inf, prod
from typing import Any

import torch

from virtual_gpus import errors, figures
from virtual_gpus.clock.cost import PRODUCT_ON_HOST, READS_AND_WRITES, OperatorClass, moves
from virtual_gpus.clock.work import BYTES, Cost, Operation
from virtual_gpus.dispatch.half_precision import widened
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.gpus import GPUSpec, Precision
from virtual_gpus.machine import Kept, VirtualGPU, active
from virtual_gpus.memory_model import Library, blas_workspaces
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import ScratchBlock, nbytes
from virtual_gpus.threads import OfEachThread, this_thread
from virtual_gpus.versions import Version

MULTIPLIED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}  # by CUDA
_PRODUCTS, _OF_VECTORS, _DRIVERS = (figures.beside(__file__)[part] for part in ("products", "vector", "drivers"))
_LT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LT_FOR_MATRICES_AS_BIAS: Version = (2, 15)  # addmm takes cublasLt in half precision (native/cuda/Blas.cpp)
Tiles = tuple[tuple[int, int, float], ...]  # rows, columns, and the share of the peak that they reach
stands_in_for: OfEachThread[object] = OfEachThread(None)  # the replica of DataParallel whose thread this one is


class Handles:
    """The cuBLAS handles of one GPU and what they keep. Who holds one: a thread, by its number or "autograd".

    The environment is read when the first product runs on the GPU, as PyTorch reads it once.
    """

    def __init__(self, gpu: VirtualGPU):
        self.gpu = gpu
        self.workspaces = blas_workspaces(gpu.spec, gpu.machine.settings.version)
        self.lt_is_on = os.environ.get("DISABLE_ADDMM_CUDA_LT") != "1"  # for products with a bias
        # What one product takes, through cuBLAS and through cublasLt, as (library, bytes): asked for every product.
        size, libraries = self.workspaces.size, self.workspaces.libraries
        self._taken = [[(library, size(library)) for library in libraries(lt)] for lt in (False, True)]
        self._of: dict[object, int] = {}  # holder -> handle number
        self._spare: list[int] = []
        self.blocks: dict[tuple[int, int, Library], ScratchBlock] = {}  # by (handle, stream, library)

    def handle(self) -> int:
        """The running thread's handle: its own, one that a finished thread left, or a new one."""
        holder = "autograd" if this_thread.in_backward else stands_in_for.value or threading.get_ident()
        if holder not in self._of:
            alive = {thread.ident for thread in threading.enumerate()}
            for gone in [h for h in self._of if isinstance(h, int) and h not in alive]:
                self.leave(gone)
            self._of[holder] = self._spare.pop() if self._spare else len(self._of)
        return self._of[holder]

    def leave(self, holder: object) -> None:
        """`holder` has ended; its handle is free for the next thread."""
        if holder in self._of:
            self._spare.append(self._of.pop(holder))

    def work(self, lt: bool) -> None:
        """Have the workspaces of one product: kept for this thread's handle and stream, or taken and returned."""
        for library, size in self._taken[lt]:
            if not self.workspaces.kept:
                ScratchBlock(self.gpu, size)
            elif (key := (self.handle(), self.gpu.stream, library)) not in self.blocks:
                self.blocks[key] = ScratchBlock(self.gpu, size)


_handles = Kept(Handles)


def leave_handle(gpu: VirtualGPU, holder: object) -> None:
    """`holder`, a thread, has ended. If it had a handle on the GPU, the next thread may have it."""
    if _handles in gpu.feature_state:
        _handles.of(gpu).leave(holder)


# ---- how long products take: in tiles, one per multiprocessor at a time ---------------------------------------------
# A product of (m, k) and (k, n) is cut into tiles of the result. As many tiles as there are multiprocessors run at
# once, so work comes in waves, and a wave that is not full leaves multiprocessors idle. For few tiles cuBLAS also cuts
# along k and adds the parts up (split-K). cuBLAS takes what its heuristics say is fastest; here the fastest is taken.


@lru_cache(maxsize=8192)
def product(
    spec: GPUSpec, m: int, n: int, k: int, batch: int, precision: Precision, with_bias: bool = False,
    aligned: bool = True, parts: int = 1
) -> tuple[float, int]:  # fmt: skip
    """(seconds, kernels) of `batch` products of (m, k) and (k, n). aligned: all rows begin at multiples of 16 bytes.
    parts: 2 for complex numbers, whose product is four products of their parts, and 1 for others."""
    if not m * n * k * batch:
        return 0.0, 0
    seconds, kernels = in_tiles(spec, m, parts * n, parts * k, batch, precision, with_bias)
    if not aligned and batch == 1 and precision in spec.tensor_cores:
        seconds += (_PRODUCTS["misaligned"] - 1) * (seconds - _PRODUCTS["start_on_cores"] * spec.reached.kernel)
    nbytes = parts * BYTES[precision] * batch * (m * k + k * n + m * n)
    return max(seconds, spec.seconds_to_move(nbytes) + spec.reached.kernel), kernels


@lru_cache(maxsize=8192)
def in_tiles(
    spec: GPUSpec, m: int, n: int, k: int, batch: int, precision: Precision, with_bias: bool = False, tiles: Tiles = ()
) -> tuple[float, int]:
    """(seconds, kernels) of the arithmetic alone. tiles: others than those of cuBLAS."""
    reached, cores = spec.reached, precision in spec.tensor_cores
    rate = spec.flops_of(precision) * (reached.tensor if cores else reached.simt) / spec.multi_processor_count
    start = reached.kernel * _PRODUCTS["start_on_cores" if cores else "start"]
    best = inf, 1
    for rows, columns, share in tiles or _PRODUCTS["tiles_on_cores" if cores else "tiles"]:
        number = ceil(m / rows) * ceil(n / columns) * batch
        for split in (1,) if with_bias else _PRODUCTS["splits"]:
            if split > 1 and k / split < _PRODUCTS["least_k"]:
                break
            waves = ceil(number * split / spec.multi_processor_count)
            seconds = waves * 2 * rows * columns * ceil(k / split) / (rate * share)
            seconds += start if split == 1 else start + _PRODUCTS["add_up"] * reached.kernel
            if seconds < best[0]:
                best = seconds, 1 if split == 1 else 2
    return best[0] * (_PRODUCTS["with_bias"] if with_bias and not cores else 1), best[1]


# ---- operators ------------------------------------------------------------------------------------------------------


def copied_bytes(matrix: torch.Tensor) -> int:
    """Bytes of the copy of a matrix, or of a batch of them, that goes into a product; 0 if none is made.

    cuBLAS reads rows or columns that are packed, at any distance from each other (prepare_*_for_cublas in Blas.cpp).
    Any other matrix is copied first. A vector is copied only if it was expanded from one number, as gradients can be.
    """
    if matrix.is_contiguous():
        return 0
    if matrix.dim() < 2:
        return nbytes(matrix) if 0 in matrix.stride() else 0
    *_, rows, columns = matrix.shape
    *_, down, across = matrix.stride()
    by_rows = across == 1 and down >= max(1, columns)
    by_columns = down == 1 and across >= max(1, rows)
    return 0 if by_rows or by_columns else nbytes(matrix)


def with_workspace(call: OpCall, kernel: str = "", where: slice = slice(0), lt: bool = False) -> torch.Tensor:
    """Compute the result, then copy the matrices that cuBLAS cannot read, and take its workspace, unless it is empty.

    kernel: the name in the error for integers, if CUDA refuses them (ATen/native/cuda/Blas.cpp). where: positions of
    the matrices among the arguments, if they or a given result may need a copy. lt: whether cublasLt multiplies.
    """
    tensors, matrices = call.tensors, call.args[where]
    is_empty = not all(map(torch.Tensor.numel, tensors[: call.op.takes_first]))
    if kernel and not is_empty:
        dtype = tensors[0].dtype
        if dtype not in MULTIPLIED or tensors[1].dtype is not dtype or tensors[-1].dtype is not dtype:
            _refuse_types(call, kernel, *(matrices or tensors)[:2])
    result = call.run()
    if is_empty:
        return result
    handles: Handles = call.gpu.feature_state.get(_handles) or _handles.of(call.gpu)  # the former spares calls
    if matrices and call.op.written:
        matrices = (*matrices, result)
    if not all(map(torch.Tensor.is_contiguous, matrices)):
        copies = list(filter(None, map(copied_bytes, matrices)))
        if copies:
            with call.scratch(*copies):
                handles.work(lt)
            return result
    handles.work(lt)
    return result


def _refuse_types(call: OpCall, kernel: str, first: torch.Tensor, second: torch.Tensor) -> None:
    """Raise CUDA's error for types that it cannot multiply, and for batches of two types. Other mixtures of types are
    left to the CPU's kernel, which refuses them in the same words."""
    same = first.dtype is second.dtype
    if first.dtype is not call.tensors[0].dtype or not (same or kernel == "baddbmm_cuda"):
        return
    if first.dtype not in MULTIPLIED:
        raise NotImplementedError(f"\"{kernel}\" not implemented for '{errors.scalar_type(first)}'")
    if not same:
        raise errors.other_scalar_type(first, second)


def addmm(call: OpCall) -> torch.Tensor:
    """The product goes through cublasLt if it has a bias vector."""
    lt = _handles.of(call.gpu).lt_is_on and _has_lt_bias(call)
    return with_workspace(call, kernel="addmm_cuda", where=slice(1, 3), lt=lt)


def _has_lt_bias(call: OpCall) -> bool:
    """True if cublasLt adds the bias (isInputCompliesAddmmCudaLt). If not, it is first copied into the result.

    A matrix as bias goes through cublasLt since `_LT_FOR_MATRICES_AS_BIAS`, in half precision.
    """
    bias, _, mat2 = call.args[:3]
    shape = mat2.shape
    if call.kwargs.get("beta", 1) != 1 or bias.dtype not in _LT_TYPES or len(shape) != 2 or min(shape) < 2:
        return False
    sizes, columns = bias.shape, shape[1]
    if (sizes == (columns,) or sizes == (1, columns)) and bias.is_contiguous():
        return True
    half = len(sizes) == 2 and bias.dtype in _LT_TYPES[2:] and bias.is_contiguous() and sizes[0] > 1
    return half and call.gpu.machine.settings.version >= _LT_FOR_MATRICES_AS_BIAS


def _in_its_type(func: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """See `widened`. The CPU has no kernel for the overloads with a dtype for the result."""
    if func._schema.overload_name.startswith("dtype"):
        return partial(_in_another_dtype, getattr(torch, func.overloadpacket.__name__))
    return widened(func)


def _in_another_dtype(product: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    """A product of matrices whose last argument is the dtype of the result, in which the GPU adds up."""
    *matrices, dtype = args
    return product(*(matrix.to(dtype) for matrix in matrices), **options)


def with_driver(call: OpCall) -> Any:
    """An operator of cuSOLVER, which has other drivers than LAPACK (BatchLinearAlgebra.cpp): none is for the CPU."""
    row = _DRIVERS[call.op.base]
    if call["driver"] not in (None, *row["taken"].split()):
        raise RuntimeError(row["refusal"].format(call["driver"]))
    call.kwargs = {**call.kwargs, "driver": row.get("on_cpu")}
    return call.run()


def _matrices(operation: Operation, bias: int = 0) -> Cost:
    """bias: tensors in front of the two matrices."""
    first, second = operation.inputs[bias : bias + 2]
    with_bias = bias > 0 and len(first.shape) == 2
    aligned = all(part.leading * part.itemsize % 16 == 0 for part in (first, second, *operation.outputs[:1]))
    count = prod(first.shape[:-2]) if len(first.shape) == len(second.shape) else 1  # else of groups of rows or columns
    sizes, precision = (first.shape[-2], second.shape[-1], first.shape[-1], count), operation.precision
    precision = "fp16" if first.itemsize == 1 else precision  # of int8 and fp8: up to twice as fast on a real GPU
    seconds, kernels = product(operation.spec, *sizes, precision, with_bias, aligned, operation.parts)
    return Cost(seconds, kernels, PRODUCT_ON_HOST)


_PRODUCT = OperatorClass(_matrices, is_fusible=False, tf32_setting="matmul", depends_on_strides=True)
_ADDED = _PRODUCT._replace(formula=lambda operation: _matrices(operation, bias=1))
_VECTOR = moves(is_fusible=False, host=PRODUCT_ON_HOST, **_OF_VECTORS)
# Recipes: `where` are the matrices, behind what is added to their product.
_mm = partial(with_workspace, kernel="addmm_cuda", where=slice(0, 2))
_bmm = partial(with_workspace, kernel="baddbmm_cuda", where=slice(0, 2))
_baddbmm = partial(with_workspace, kernel="baddbmm_cuda", where=slice(1, 3))
_mv = partial(with_workspace, kernel="addmv_impl_cuda", where=slice(0, 2))
_addmv = partial(with_workspace, kernel="addmv_impl_cuda", where=slice(1, 3))
_of_one_type = partial(Row, refuses_more=True)
OPERATORS = {
    "mm": _of_one_type(_PRODUCT, _mm, cpu_kernel=_in_its_type),
    "bmm": _of_one_type(_PRODUCT, _bmm, cpu_kernel=_in_its_type),
    "addmm": _of_one_type(_ADDED, addmm, cpu_kernel=_in_its_type),
    "_addmm_activation": _of_one_type(_ADDED, addmm),
    "addmm_": _of_one_type(_ADDED, partial(with_workspace, kernel="addmm_cuda", where=slice(1, 3))),
    "baddbmm": _of_one_type(_ADDED, _baddbmm, cpu_kernel=_in_its_type),
    "baddbmm_": _of_one_type(_ADDED, _baddbmm),
    **dict.fromkeys(("addbmm", "addbmm_"), _of_one_type(_ADDED, partial(with_workspace, kernel="addmm_cuda"))),
    **dict.fromkeys(("_int_mm", "_scaled_mm"), Row(_PRODUCT, partial(with_workspace, lt=True))),
    "_grouped_mm": Row(_PRODUCT),
    "mv": _of_one_type(_VECTOR, _mv),
    **dict.fromkeys(("addmv", "addmv_"), _of_one_type(_VECTOR, _addmv)),
    **dict.fromkeys(("dot", "vdot"), _of_one_type(_VECTOR, partial(with_workspace, kernel="dot"))),
    **dict.fromkeys(("ger", "addr"), Row(_VECTOR)),
    **dict.fromkeys(_DRIVERS, Row(READS_AND_WRITES, with_driver)),
    **dict.fromkeys(("linalg_solve_triangular", "triangular_solve"), Row(READS_AND_WRITES, with_workspace)),
}


# ---- settings -------------------------------------------------------------------------------------------------------


def _cuda_clearCublasWorkspaces() -> None:
    """Give the workspaces of all threads on all GPUs back to the caching allocator."""
    for gpu in () if (machine := active()) is None else machine.slots:
        _handles.of(gpu).blocks.clear()


def patches() -> list[Patch]:
    return [(torch._C, "_cuda_clearCublasWorkspaces", _cuda_clearCublasWorkspaces)]
