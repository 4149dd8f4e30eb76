"""DeepSpeed's own tests of ZeRO, as far as they go without compiling kernels: each test in a process of its own."""

from __future__ import annotations

from pathlib import Path

from benchmarks.outside.suites import Case, python_path, virtual

NEEDS = "einops, hjson, msgpack, ninja, psutil, py-cpuinfo, pydantic, tqdm and pytest"
GPUS = 2
V1, RUNTIME = "unit/v1/zero/test_zero", "unit/runtime/zero/test_zero"
_MEAN = "test[True-True-False-1.0-mean-1.0-"
TESTS = (
    *(f"{V1}.py::TestGradientAllreduceOp::{_MEAN}{stage}]" for stage in (1, 2)),
    f"{V1}_coalesce_grad_reduction.py::TestCoalesceCombinations::test_multi_backward_bit_exact[False-False-3]",
    f"{RUNTIME}_context.py::TestGatherUpdate::test",
    f"{V1}_user_backward.py::TestZeroUserBackwardMultipleEngines::test_multiple_engines_combined_loss[2]",
    f"{RUNTIME}_nesting_init.py::TestNestedParallelInit::test_nested_parallel_init",
    f"{RUNTIME}_context.py::TestScatterGather::test",
    f"{V1}_autocast.py::TestZeroAutoCast::test[dtype0-3-True]",
    f"{RUNTIME}_autocast_mixed_dtype.py::TestZero3AutocastMixedDtype::test_fp32_adapter_with_bf16_base_params",
    f"{V1}.py::TestEmptyParameterGroup::test_empty_param_groups[dtype0-True-True]",
)
_INSTALLED = "It asks for NCCL's version in a file that only an installation in the checkout writes."
KNOWN = {
    "test_zero_autocast.py::TestZeroAutoCast::test[dtype0-3-True]": _INSTALLED,
    "test_zero_autocast_mixed_dtype.py::TestZero3AutocastMixedDtype::test_fp32_adapter_with_bf16_base_params": (
        _INSTALLED
    ),
    "test_zero_user_backward.py::TestZeroUserBackwardMultipleEngines::test_multiple_engines_combined_loss[2]": (
        "DeepSpeed compiles its optimizer FusedAdam, which is a kernel in CUDA."
    ),
}


def about() -> str:
    """What was run, for the page."""
    return (
        f"Ten of DeepSpeed's tests of ZeRO 1, 2 and 3, on {GPUS} virtual GPUs, each in a pytest of its own. All but "
        "one train with PyTorch's optimizers or without one. Most others ask for DeepSpeed's FusedAdam, which is "
        "a CUDA kernel that DeepSpeed compiles, and no virtual GPU can run it."
    )


def cases(folder: Path | None, work: Path) -> list[Case]:
    """A case for each test of a checkout."""
    if folder is None or not (folder / "deepspeed" / "runtime").is_dir():
        raise SystemExit(f"FOLDER must be a checkout of DeepSpeed, and these be installed: {NEEDS}.")
    settings = {
        "PYTHONPATH": python_path(folder),
        "CUDA_HOME": str(work / "no-compiler"),  # what looks for a compiler finds none
    }
    command = virtual(GPUS, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    return [Case(test.partition("zero/")[2], [*command, test], folder / "tests", settings) for test in TESTS]
