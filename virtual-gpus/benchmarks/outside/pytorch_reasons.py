"""Why tests of PyTorch fail on virtual GPUs: the name of a test, of a class, or how names begin -> the reason."""

from __future__ import annotations

_STACKS = (
    "It looks for C++ functions in the stacks of a memory snapshot, or compiles C++. Stacks contain only Python here."
)
_CUDART = "It calls a function of the CUDA runtime that is refused by name."
_LONG = "It takes minutes on a CPU, and did not finish within 40 s of processor time."
_OLD = "It needs `torch.set_default_tensor_type` of a CUDA type, or the warning of typed names such as `FloatTensor`."
_FLAGS = "In PyTorch 2.15 the flag has two parts."

# They look at the inside of CUDA.
INSIDES = {
    "TestBlockStateAbsorption": "It saves and restores the blocks of a private pool, as torch.compile's CUDA graph "
    "trees do.",
    "test_cpp_memory_snapshot_pickle": _STACKS,
    "test_memory_snapshot_with_cpp": _STACKS,
    "test_memory_plots": _STACKS,
    "test_cudart_register": _CUDART,
    "test_external_streams": _CUDART,
    "test_external_streams_multi_device": _CUDART,
}
# The file is older than PyTorch 2.15, with which they fail on a real GPU too.
AGE = {
    "test_cublas_allow_bf16_reduced_precision_reduction_get_set": _FLAGS,
    "test_cublas_allow_fp16_reduced_precision_reduction_get_set": _FLAGS,
    "test_allocator_settings": "PyTorch 2.15 raises ValueError for an unknown key. The test expects RuntimeError.",
    "test_cuda_vitals_gpu_only": "PyTorch 2.15 has no `torch.read_vitals`.",
}
GRAPHS = dict.fromkeys(
    ("test_graph_", "test_graphsafe_", "test_cuda_graph_", "test_memory_stats_of_multiple_generators_and_graphs"),
    "`torch.cuda.CUDAGraph`, `make_graphed_callables` and `graphsafe_get_state` are refused by name.",
)
OTHERS = {
    "test_dtypetensor_warnings": _OLD,
    "test_set_default_tensor_type_warnings": _OLD,
    "test_cycles": "It finds the block of a tensor by `data_ptr()`, which is an address in the computer's memory here.",
    "test_cpp_warnings_have_python_context": "If a function of PyTorch is replaced, a warning from C++ names a line "
    "of the replacement.",
    "test_memory_plots_free_segment_stack": "It looks for `empty_cache` in a stack. The stacks of a memory snapshot "
    "do not contain functions that are replaced.",
    "test_stream_event_nogil": "Two threads wait at the same time. The modelled host waits for one after the other.",
    "test_cudnn_multiple_threads_same_device": _LONG,
    "test_cusparse_multiple_threads_same_device": _LONG,
    "test_allocator_fuzz": _LONG,
}


def reason(test: str, reasons: dict[str, str]) -> str | None:
    """Why `test` ("Class.test_name") fails, if that is known."""
    kind, _, name = test.partition(".")
    begin = next((key for key in reasons if key[-1] == "_" and name.startswith(key)), name.removesuffix("_cuda"))
    return reasons.get(kind) or reasons.get(begin)
