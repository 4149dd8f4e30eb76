"""PyTorch's own tests on virtual GPUs: what passes, what fails, and why what fails is known to.

    python -m benchmarks.pytorch_tests test/distributed/test_data_parallel.py
    python -m benchmarks.pytorch_tests test/test_torch.py --only TestTorchDeviceTypeCUDA

The files are not part of a torch wheel, and nothing is fetched here: they are in PyTorch's repository, in the folder
`test`, under the tag of the installed version. They need NumPy, expecttest and hypothesis as well. A file of an earlier
version runs too: decorators that its version had and the installed one has not do nothing.

The exit code is 1 if a test failed that `KNOWN` does not name.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import io
import pathlib
import signal
import sys
import time
import traceback
import unittest
from collections.abc import Iterator

# Test (without the name of its class; a beginning will do) -> why it fails.
KNOWN: dict[str, str] = {
    "test_nondeterministic_alert": "the CPU's kernels are deterministic, so no operator is refused",
    "test_scatter_reduce_multiply_unsupported_dtypes": "the CPU has a kernel for these dtypes, CUDA has none",
    "test_invalid_shapes_grid_sampler": "calls aten::cudnn_grid_sampler, which exists for CUDA alone",
    "test_cdist_cuda_backward": "too much arithmetic for a CPU in the time",
    "test_conv_transposed_large": "too much arithmetic for a CPU in the time",
    "test_masked_scatter_large_tensor": "too much arithmetic for a CPU in the time",
    "test_multinomial_deterministic": "too much arithmetic for a CPU in the time",
    "test_index_copy_deterministic": "too much arithmetic for a CPU in the time",
    "test_scatter_add_one_dim_deterministic": "too much arithmetic for a CPU in the time",
    "test_cublas_config_nondeterministic_alert": "starts a process for each configuration, which takes too long",
    "test_dtypetensor_warnings": "the typed names of torch.cuda do not warn",
    "test_set_default_tensor_type_warnings": "the typed names of torch.cuda do not warn",
    "test_gradient_": "fails on a plain CPU as well: np.gradient gives a tuple since NumPy 2",
    "test_cpp_warnings_have_python_context": "the file of 2.4 fails on a plain CPU as well",
    "test_cuda_vitals_gpu_only": "torch.read_vitals of 2.4 is gone",
    "test_data_parallel_complex": "before 2.7, DataParallel left complex numbers as pairs of real ones",
}


class TooSlow(Exception):
    """A test took longer than it may."""


def add_missing_names(path: pathlib.Path) -> list[str]:
    """Give PyTorch's test harness the decorators that the file imports and the installed version lacks."""
    added = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.testing."):
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names if not hasattr(module, alias.name)):
                setattr(module, name, lambda *args, **_: args[0] if args and callable(args[0]) else lambda test: test)
                added.append(name)
    return added


def tests_of(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Every test of a suite that is about GPUs: the harness makes a class per kind of device."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from tests_of(test)
        elif not type(test).__name__.endswith(("CPU", "META", "MPS", "XPU")):
            yield test


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TooSlow in the block when its time is up."""

    def stop(*_) -> None:
        raise TooSlow(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def outcome(test: unittest.TestCase, seconds: int) -> tuple[str, str]:
    """("passed" | "failed" | "skipped", the last line of the error)."""
    result = unittest.TestResult()
    try:
        with at_most(seconds), contextlib.redirect_stderr(io.StringIO()):
            test.run(result)
    except TooSlow as error:
        return "failed", f"TooSlow: {error}"
    if result.errors or result.failures:
        lines = (result.errors + result.failures)[0][1].strip().splitlines()
        errors = [line for line in lines if line[:1].isalpha() and ":" in line and not line.startswith("To execute")]
        return "failed", next((line for line in errors if not line.startswith("Traceback")), lines[-1])
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return "passed", ""


def reason(name: str) -> str | None:
    """Why a test is known to fail."""
    return next((text for known, text in KNOWN.items() if name.startswith(known)), None)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pytorch_tests", description=__doc__.split("\n")[0])
    parser.add_argument("file", type=pathlib.Path, help="a file of PyTorch's folder `test`")
    parser.add_argument("--gpus", type=int, default=4, help="how many virtual GPUs (4)")
    parser.add_argument("--only", default="", help="a part of Class.test")
    parser.add_argument("--seconds", type=int, default=60, help="the most that one test may take (60)")
    parser.add_argument("--verbose", action="store_true", help="print every test")
    given = parser.parse_args()

    from virtual_gpus import virtual_gpus

    sys.argv = [str(given.file)]
    sys.path.insert(0, str(given.file.resolve().parent))
    counts: dict[str, int] = {"passed": 0, "failed": 0, "skipped": 0}
    unexpected = []
    with virtual_gpus(given.gpus):
        if added := add_missing_names(given.file):
            print("Not in the installed version, and left out:", ", ".join(added))
        spec = importlib.util.spec_from_file_location(given.file.stem, given.file)
        module = sys.modules[given.file.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for test in tests_of(unittest.defaultTestLoader.loadTestsFromModule(module)):
            name = f"{type(test).__name__}.{test._testMethodName}"
            if given.only not in name:
                continue
            began = time.monotonic()
            try:
                what, text = outcome(test, given.seconds)
            except Exception:  # the harness's own, outside of the test
                what, text = "failed", traceback.format_exc().strip().splitlines()[-1]
            counts[what] += 1
            known = reason(test._testMethodName)
            if what == "failed" and known is None:
                unexpected.append(name)
            if what == "failed" or given.verbose:
                print(
                    f"{what:8} {time.monotonic() - began:6.1f} s  {name}  {known or ''}\n         {text[:300]}",
                    flush=True,
                )
    run = counts["passed"] + counts["failed"]
    share = 100 * counts["passed"] / run if run else 0.0
    print(f"{counts['passed']} of {run} passed ({share:.1f} %), {counts['skipped']} skipped.")
    print(f"Failed for no known reason: {', '.join(unexpected) or 'none'}")
    return bool(unexpected)


if __name__ == "__main__":
    sys.exit(main())
