"""PyTorch's own tests of torch.distributed on virtual GPUs; writes docs/distributed_tests.md. Nothing is downloaded.

python -m benchmarks.outside.distributed_tests                 # the tests that are part of every torch wheel
python -m benchmarks.outside.distributed_tests --from FOLDER   # every test_*.py of FOLDER

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

`python -m benchmarks.outside.distributed_tests` makes this page from its latest run of each test. Its help says where
the files are had. Here `distributed_test.py` is that of the installed PyTorch 2.15. The other files are copies of other
versions, since those of 2.15 could not be had. `test_fully_shard_init.py`, `_memory.py`, `_mixed_precision.py` and
`_overlap.py` are PyTorch 2.4's, from MetaX-MACA/mcPytorch at b3db5ee, with the present names of modules. The rest is
from Ascend/pytorch at 9e73e70, with the names of its devices and helpers put back to CUDA's. The tests of fully_shard
ran with two GPUs, except test_clip_grad_norm_2d with four. Skipped tests are for other backends or for more GPUs.
"""
_ROOT = "of another version: 2.15 gathers the root once more in backward"
# The beginning of a test's name -> why it fails.
KNOWN = {
    "test_monitored_barrier_allreduce_hang": "a collective's timeout has gloo's words; monitored_barrier itself works",
    "test_ddp_profiling": "the profiler shows gloo's names",
    "test_send_recv_nccl_": "the profiler shows gloo's names",
    "test_ddp_compile": "compiles DistributedDataParallel for a GPU",
    "test_nccl_high_priority_stream": "makes a ProcessGroupNCCL itself, which is refused by name",
    "test_ddp_apply_optim_in_backward": "not done within a minute on two busy cores; trains ResNet-50s",
    "test_all_irecv_dispatched_individually": "of another version: fails without virtual GPUs too",
    "test_all_isend_dispatched_individually": "of another version: fails without virtual GPUs too",
    "test_mixed_ops_use_batch": "of another version: fails without virtual GPUs too",
    "test_ddp_uneven_inputs": "not done within 500 s on two busy cores",
    "test_all_gather_extension_outer_size_stride": "of another version: its tensors miss an argument of PyTorch 2.15's",
    "test_all_gather_fp32": "of another version: 2.15's all-gather has one argument more",
    "test_reduce_scatter_fp": "of another version: 2.15's reduction has one argument less",
    "test_share_comm_context": "of another version: 2.15's all-gather has one argument more",
    "test_dp_state_dict_cpu_offload": "a DTensor's device follows its local tensor to the CPU; in PyTorch it stays",
    "test_fully_shard_backward_prefetch": _ROOT,
    "test_fully_shard_communication_count": _ROOT,
    "test_fully_shard_multi_module_backward_prefetch": _ROOT,
    "test_set_modules_to_": _ROOT,
    "test_1d_process_group_init": "of another version: reads a private attribute of DeviceMesh that is gone",
    "test_2d_process_group_init": "of another version: reads a private attribute of DeviceMesh that is gone",
    "test_invalid_mesh_ndim": "of another version: expects other words",
    "test_managed_": "of PyTorch 2.4: expects other managed modules",
    "test_shard_dtensor_parameters": "of another version: 2.15 has _StridedShard for this placement",
    "test_compute_dtype": "of PyTorch 2.4: the type of a reduction; not looked into further",
    "test_norm_modules_": "the error for batch norm with statistics of another type has the CPU's words",
    "test_fully_shard_training_overlap": "delays functions of 2.4 that 2.15 no longer calls; not looked into further",
    "test_fully_shard_training_memory": "allows 3.5 blocks in backward with CPU offload, where 2.15's code holds four",
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


def hold(name: str, module: ModuleType, only: str, seconds: int) -> None:
    """Run the tests of a module, and keep what became of each."""
    for test in tests_of(unittest.defaultTestLoader.loadTestsFromModule(module)):
        if only not in test._testMethodName:
            continue
        word, why = outcome(test, seconds + 30)
        print(f"{word:8} {name}: {test._testMethodName} {why}", flush=True)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results.setdefault(name, {})[test._testMethodName] = word
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def write() -> None:
    """docs/distributed_tests.md: how many tests of each file pass, and which fail for which reason."""
    results = json.loads(RESULTS.read_text())
    lines = INTRODUCTION.strip().splitlines() + ["", "| file | passed | failed | skipped |", "|---|---|---|---|"]
    failed = []
    for name, tests in sorted(results.items()):
        words = list(tests.values())
        lines.append(f"| {name} | {words.count('passed')} | {words.count('failed')} | {words.count('skipped')} |")
        failed += [test for test, word in sorted(tests.items()) if word == "failed"]
    lines += ["", "| a test that fails | because |", "|---|---|"]
    for test in failed:
        why = next((reason for start, reason in KNOWN.items() if test.startswith(start)), "not known yet")
        lines.append(f"| {test} | {why} |")
    DOCS.write_text("\n".join(lines) + "\n")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outside.distributed_tests")
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
        for path in files:
            hold(path.name, _load(path), given.only, given.seconds)
        if not files:
            hold(INSTALLED, _installed(), given.only, given.seconds)
    write()


if __name__ == "__main__":
    main()
