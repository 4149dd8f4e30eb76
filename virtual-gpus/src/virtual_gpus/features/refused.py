"""Names that a real GPU has and a virtual one does not: they raise, with their name, instead of failing obscurely."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from virtual_gpus import errors
from virtual_gpus.patches.table import Patch

_HOST = ("host_memory_stats", "host_memory_stats_as_nested_dict", "reset_accumulated_host_memory_stats",
         "reset_peak_host_memory_stats")  # fmt: skip
_ALLOCATORS = ("CUDAPluggableAllocator", "change_current_allocator", "caching_allocator_alloc",
               "caching_allocator_delete", "caching_allocator_enable")  # fmt: skip
_GRAPHS = ("CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle", "export_dot", "export_graph_data")
_WORKSPACES = ("cublas_workspace_size", "cublaslt_workspace_size", "blas_workspace_size")
_POOLS = ("MemPool", "use_mem_pool")
_SYNC = ("set_sync_debug_mode", "get_sync_debug_mode")
_GROUPS = ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy")  # they look for real GPUs
# By module, torch.cuda last: a class that is in two modules is named as the last one. docs/refused.md lists them all.
_REFUSED = {
    "torch._C": ("_cuda_beginAllocateCurrentStreamToPool", "_cuda_beginAllocateToPool", "_cuda_getCheckpointState",
                 "_cuda_checkPoolLiveAllocations", "_cuda_setCheckpointPoolState"),  # of torch.compile's graph trees
    "torch.accelerator": ("get_device_capability", "Graph"),
    "torch.backends.cuda": (*_WORKSPACES, "preferred_blas_library"),
    "torch.cuda.gds": ("GdsFile", "gds_register_buffer", "gds_deregister_buffer"),
    "torch.cuda.graphs": _GRAPHS,
    "torch.cuda.green_contexts": ("GreenContext", "SMPartition", "get_num_locality_domains",
                                  "is_localization_supported"),
    # _allocation_traceback wants a GPU's address, and tensors have the CPU's.
    "torch.cuda.memory": ("_allocation_traceback", "_set_memory_metadata", "_get_memory_metadata", "_annotate_tensor",
                          *_HOST, *_ALLOCATORS, *_POOLS),
    "torch.cuda.nccl": ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "init_rank", "unique_id"),
    "torch.cuda.tunable": ("get_results", "get_validators", "get_rotating_buffer_size", "set_rotating_buffer_size",
                           "read_file", "tune_gemm_in_file", "mgpu_tune_gemm_in_file"),
    "torch.distributed": _GROUPS,
    "torch.jit": ("trace", "trace_module"),
    "torch.cuda": ("GreenContext", "current_blas_handle", "current_solver_handle", "temperature", "power_draw",
                   "clock_rate", *_SYNC, *_HOST, *_ALLOCATORS, *_GRAPHS, *_POOLS),
}  # fmt: skip

_INSTEAD = {
    **dict.fromkeys(_GROUPS, 'Use init_process_group("nccl").'),
    **dict.fromkeys((*_GRAPHS, "Graph"), "Run the work without a graph: the numbers are the same, and so is the memory"
                                         ", but for the graph's own pool."),
    **dict.fromkeys(_WORKSPACES, "Set CUBLAS_WORKSPACE_CONFIG before the program starts."),
    "preferred_blas_library": "Products with a bias go through cublasLt, all others through cuBLAS.",
    **dict.fromkeys(_POOLS, "Allocate without a pool: the sizes are the same."),
}  # fmt: skip


def _refuse(owner: object, name: str, path: str) -> Patch:
    """The patch that refuses `owner.name`. A class stays the type it is, since programs name it in annotations and
    ask isinstance; only making one is refused, of subclasses too."""
    original, refused = vars(owner)[name], errors.refusing(path, _INSTEAD.get(name, ""))
    if isinstance(original, type):
        # Bases of a CPU build are dummies whose __new__, in Python, raises something obscure before any __init__ runs.
        maker = next((base for base in original.__mro__ if isinstance(vars(base).get("__new__"), staticmethod)), None)
        return (original, "__init__", refused) if maker is None else (maker, "__new__", staticmethod(refused))
    return owner, name, functools.update_wrapper(refused, original)


_NESTED = ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "narrow")
# What works on the CPU alone. DLPack would hand out a CPU address as if it were a GPU's. An exported program would make
# its new tensors on the CPU, since PyTorch traces with fake tensors, which are there.
_ON_CPU_ONLY = [(torch.export, "export", "torch.export of a module on a GPU")]
_ON_CPU_ONLY += [(owner, "to_dlpack", "DLPack export of a GPU tensor") for owner in (torch, torch.utils.dlpack)]
_ON_CPU_ONLY += [(torch.Tensor, f"__dlpack{end}__", "DLPack export of a GPU tensor") for end in ("", "_device")]
_ON_CPU_ONLY += [(torch.nested, name, f"torch.nested.{name} on a GPU") for name in _NESTED]


def _on_cpu_only(error: Callable[[], Exception], original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which refuses tensors and modules on a GPU, and a `device` that is one."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors, device = tree_leaves((args, kwargs)), kwargs.get("device")
        modules = [leaf for leaf in tensors if isinstance(leaf, torch.nn.Module)]
        tensors += [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        on_gpu = any(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in tensors)
        if on_gpu or (device is not None and torch.device(device).type == "cuda"):
            raise error()
        return original(*args, **kwargs)

    return call


def patches() -> list[Patch]:
    """See `features`. A name that this PyTorch version lacks gives no row."""
    rows = [
        _refuse(sys.modules[path], name, f"{path}.{name}")
        for path, names in _REFUSED.items()
        for name in names
        if path in sys.modules and name in vars(sys.modules[path])
    ]
    # The attributes of the manager are those of the current GPU's cache, which it asks for in this way.
    plans = errors.refusing("torch.backends.cuda.cufft_plan_cache")
    rows.append((torch.backends.cuda.cuFFTPlanCacheManager, "__getitem__", plans))
    # Making such a function compiles nothing yet, and programs do that when they are imported.
    jitted = errors.refusing("functions of torch.cuda.jiterator")
    rows.append((torch.cuda.jiterator._JittedFunction, "__call__", jitted))
    only = [(owner, name, functools.partial(errors.not_modelled, what)) for owner, name, what in _ON_CPU_ONLY]
    only += [(torch.Tensor, name, functools.partial(TypeError, f"{name} is only implemented on CPU tensors"))
             for name in ("apply_", "map_")]  # a real GPU refuses them too  # fmt: skip
    return rows + [(owner, name, _on_cpu_only(error, getattr(owner, name))) for owner, name, error in only
                   if hasattr(owner, name)]  # fmt: skip
