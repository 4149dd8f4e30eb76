"""PyTorch's own tests of torch.distributed on virtual GPUs; writes docs/distributed_tests.md. Nothing is downloaded.

python -m benchmarks.outside.distributed_tests                 # the tests that are part of every torch wheel
python -m benchmarks.outside.distributed_tests --from FOLDER   # every test_*.py of FOLDER
python -m benchmarks.outside.distributed_tests --check         # do all that passed pass again? Writes nothing

FOLDER holds files of PyTorch's repository, from the folder `test/distributed` under the tag of the installed version:
`_composable/fsdp` (fully_shard), `tensor/parallel` and `pipelining`. The packages expecttest and hypothesis are needed.
The processes of a test are forked instead of spawned, which is the same test in a tenth of the time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from types import ModuleType

from benchmarks.outside.pytorch_tests import add_missing_names, outcome, tests_of

HERE = Path(__file__).parent
RESULTS = HERE / "distributed_tests.json"
DOCS = HERE.parent.parent / "docs" / "distributed_tests.md"
INSTALLED = "distributed_test.py (backend nccl)"
INTRODUCTION = """
# PyTorch's own tests of torch.distributed

`python -m benchmarks.outside.distributed_tests` writes this page from its latest run of each test. `--help` says where
to get the files.

- `distributed_test.py` is part of the installed PyTorch 2.15.
- The other files are copies of other versions, because we could not get those of 2.15. They come from
  Ascend/pytorch at 9e73e70. The names of its devices and helpers were changed back to those of CUDA.
- `test_fully_shard_init.py`, `_memory.py`, `_mixed_precision.py` and `_overlap.py` are the exception. They are from
  PyTorch 2.4, as copied in MetaX-MACA/mcPytorch at b3db5ee. The names of modules were changed to the present ones.

The tests of `fully_shard` ran with two GPUs, except `test_clip_grad_norm_2d`, which ran with four. Skipped tests are
for other backends or for more GPUs.
"""
_OLD = "It is from another version of PyTorch."
_SLOW = "did not finish within"
_ROOT = f"{_OLD} In 2.15, `fully_shard` gathers the root once more in the backward pass."
_MESH = f"{_OLD} It reads a private attribute of DeviceMesh that no longer exists."
_PLAIN = f"{_OLD} It fails without virtual GPUs too."
_NAMES = "The profiler shows gloo's names."
_MORE = f"{_OLD} In 2.15, the all-gather takes one more argument."
# The beginning of a test's name -> why it fails.
KNOWN = {
    "test_monitored_barrier_allreduce_hang": "The timeout of a collective has gloo's message. `monitored_barrier` "
    "itself works.",
    "test_ddp_profiling": _NAMES,
    "test_send_recv_nccl_": _NAMES,
    "test_ddp_compile": "It compiles DistributedDataParallel for a GPU.",
    "test_nccl_high_priority_stream": "It makes a ProcessGroupNCCL itself, which is refused by name.",
    "test_ddp_apply_optim_in_backward": f"It trains ResNet-50s and {_SLOW} a minute on two busy cores.",
    "test_all_irecv_dispatched_individually": _PLAIN,
    "test_all_isend_dispatched_individually": _PLAIN,
    "test_mixed_ops_use_batch": _PLAIN,
    "test_ddp_uneven_inputs": f"It {_SLOW} 500 s on two busy cores.",
    "test_all_gather_extension_outer_size_stride": f"{_OLD} Its tensors lack an argument that 2.15 has.",
    "test_all_gather_fp32": _MORE,
    "test_reduce_scatter_fp": f"{_OLD} In 2.15, the reduction takes one argument less.",
    "test_share_comm_context": _MORE,
    "test_dp_state_dict_cpu_offload": "If the local tensor of a DTensor moves to the CPU, the device of the DTensor "
    "becomes the CPU. In PyTorch, it stays.",
    "test_fully_shard_backward_prefetch": _ROOT,
    "test_fully_shard_communication_count": _ROOT,
    "test_fully_shard_multi_module_backward_prefetch": _ROOT,
    "test_set_modules_to_": _ROOT,
    "test_1d_process_group_init": _MESH,
    "test_2d_process_group_init": _MESH,
    "test_invalid_mesh_ndim": f"{_OLD} It expects another error message.",
    "test_managed_": "It is from PyTorch 2.4 and expects other managed modules.",
    "test_shard_dtensor_parameters": f"{_OLD} For this placement, 2.15 has `_StridedShard`.",
    "test_compute_dtype": "It is from PyTorch 2.4. The data type of a reduction differs. We did not look further.",
    "test_norm_modules_": "Batch norm with statistics of another data type raises an error with the CPU's message.",
    "test_fully_shard_training_overlap": "It delays functions of PyTorch 2.4 that 2.15 no longer calls. We did not "
    "look further.",
    "test_fully_shard_training_memory": "With CPU offload, it allows 3.5 blocks in the backward pass. The code of 2.15 "
    "holds four.",
}


def _forked(case) -> None:
    import torch

    case._start_processes(torch.multiprocessing.get_context("fork").Process)


def _prepare(seconds: int) -> None:
    """Fork, and give up early: a test that hangs would take five minutes."""
    from torch.testing._internal import common_distributed

    common_distributed.MultiProcessTestCase._spawn_processes = _forked
    common_distributed.TIMEOUT_DEFAULT = seconds
    common_distributed.TIMEOUT_OVERRIDE.clear()


def _installed() -> ModuleType:
    """What PyTorch's test_distributed_spawn.py makes of the tests in the wheel."""
    folder = tempfile.mkdtemp(prefix="distributed-test-")
    os.environ.update(BACKEND="nccl", WORLD_SIZE="2", TEMP_DIR=folder)
    for name in ("barrier", "test_dir", "init_dir"):
        (Path(folder) / name).mkdir()
    from torch.testing._internal.distributed import distributed_test

    distributed_test.PROFILING_SUPPORTED_BACKENDS = []  # events of the profiler carry gloo's names

    class TestWithNccl(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

    found = ModuleType("installed")
    vars(found)["TestWithNccl"] = TestWithNccl
    return found


def _load(path: Path) -> ModuleType:
    add_missing_names(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hold(name: str, module: ModuleType, only: str, seconds: int, check: bool) -> list[str]:
    """Run the tests of a module, and keep what became of each. Returns the names of those that no longer pass.

    check: run those that passed the last time, and keep nothing.
    """
    lost = []
    for test in tests_of(unittest.defaultTestLoader.loadTestsFromModule(module)):
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        before = results.setdefault(name, {}).get(test._testMethodName)
        if only not in test._testMethodName or (check and before != "passed"):
            continue
        word, why = outcome(test, seconds + 30)
        print(f"{word:8} {name}: {test._testMethodName} {why}", flush=True)
        if before == "passed" != word:
            lost.append(test._testMethodName)
        results[name][test._testMethodName] = word
        if not check:
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    return lost


def write() -> None:
    """docs/distributed_tests.md: how many tests of each file pass, and which fail for which reason."""
    results = json.loads(RESULTS.read_text())
    lines = INTRODUCTION.strip().splitlines() + ["", "| file | passed | failed | skipped |", "|---|---|---|---|"]
    every = [word for tests in results.values() for word in tests.values()]
    failed: dict[tuple[str, str], list[str]] = {}
    for name, words in [*((name, [*tests.values()]) for name, tests in sorted(results.items())), ("all files", every)]:
        lines.append(f"| {name} | {words.count('passed')} | {words.count('failed')} | {words.count('skipped')} |")
    for name, tests in sorted(results.items()):
        for test in sorted(test for test, word in tests.items() if word == "failed"):
            why = next(
                (reason for start, reason in KNOWN.items() if test.startswith(start)), "The reason is not known yet."
            )
            failed.setdefault((name.partition(" ")[0], why), []).append(f"`{test}`")
    lines += ["", "## Why tests fail", "", "| file | tests | reason for each of them |", "|---|---|---|"]
    lines += [f"| {name} | {', '.join(tests)} | {why} |" for (name, why), tests in failed.items()]
    DOCS.write_text("\n".join(lines) + "\n")


def main() -> int:
    """The command. Its exit code is 1 if a test that passed does not pass any more."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outside.distributed_tests")
    parser.add_argument("--check", action="store_true", help="run the tests that passed, and write nothing")
    parser.add_argument("--from", dest="folder", type=Path, help="a folder with test_*.py of PyTorch's repository")
    parser.add_argument("--only", default="", help="a part of the name of a test")
    parser.add_argument("--gpus", type=int, help="how many virtual GPUs (4 with --from, else 2)")
    parser.add_argument("--seconds", type=int, default=60, help="the most that one test may take (60)")
    given = parser.parse_args()
    sys.argv = sys.argv[:1]

    from virtual_gpus import virtual_gpus

    files = sorted(given.folder.resolve().glob("test_*.py")) if given.folder else []
    for path in files:
        sys.path.insert(0, str(path.parent))
    with virtual_gpus(given.gpus or (4 if files else 2)):
        _prepare(given.seconds)
        modules = {path.name: _load(path) for path in files} or {INSTALLED: _installed()}
        lost = [t for name, m in modules.items() for t in hold(name, m, given.only, given.seconds, given.check)]
    if not given.check:
        write()
    print("Passed before, and do not pass now:", ", ".join(lost) or "none")
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
