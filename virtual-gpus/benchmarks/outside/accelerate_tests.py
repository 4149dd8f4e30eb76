"""Accelerate's own scripts for several GPUs, as the installed package has them; writes docs/accelerate_tests.md.

python -m benchmarks.outside.accelerate_tests                  # needs accelerate, torchdata and pytest
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

DOCS = Path(__file__).resolve().parents[2] / "docs" / "accelerate_tests.md"
GPUS = 2
LIMIT_S = 900
# Each under torchrun, but for the one that starts its own processes, which is for pytest.
TORCHRUN = ("test_ops", "test_sync", "test_ddp_comm_hook", "test_distributed_data_loop", "test_merge_weights",
            "test_script", "test_cli", "external_deps/test_pippy")  # fmt: skip
PYTEST = ("test_notebook",)
KNOWN = {"external_deps/test_pippy": "torch.export does not know a class in the output of its model (`DynamicCache`)."}
INTRODUCTION = """# Accelerate's own tests on virtual GPUs

`python -m benchmarks.outside.accelerate_tests` writes this page. It runs the scripts that accelerate {version} contains
for its tests, unmodified, on {gpus} virtual GPUs under PyTorch {torch}. The other scripts of `external_deps` need
DeepSpeed, or models and data of a hub, and were not run.

| script | how | passes | reason |
|---|---|---|---|
"""


def run(name: str, folder: Path, work: str) -> bool:
    """Whether a script ends without an error."""
    script = str(folder / f"{name}.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(GPUS)]
    command += ["-m", "virtual_gpus", "--gpus", str(GPUS), script]
    if name in PYTEST:
        command = [sys.executable, "-m", "virtual_gpus", "--gpus", str(GPUS), "-m", "pytest", "-q", script]
    environment = os.environ | {"ACCELERATE_NUM_PROCESSES": str(GPUS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    errors = re.findall(r"^(?:\[rank\d+\]:)? *(\w*Error: .*)", done.stdout + done.stderr, re.MULTILINE)
    print(f"{name}: exit code {done.returncode}", *errors[:1], flush=True)
    return done.returncode == 0


def main() -> int:
    """The command. Its exit code is 1 if a script fails for no known reason."""
    spec = importlib.util.find_spec("accelerate")
    if spec is None or spec.origin is None:
        raise SystemExit("accelerate is not installed. Run: pip install accelerate torchdata")
    folder = Path(spec.origin).parent / "test_utils" / "scripts"
    version = importlib.metadata.version("accelerate")
    text = INTRODUCTION.format(version=version, gpus=GPUS, torch=torch.__version__.partition("+")[0])
    unknown = 0
    with tempfile.TemporaryDirectory() as work:
        for name in (*TORCHRUN, *PYTEST):
            passes, how = run(name, folder, work), "pytest" if name in PYTEST else "torchrun"
            why = "" if passes else KNOWN.get(name, "not known")
            unknown += why == "not known"
            text += f"| {name}.py | {how} | {'yes' if passes else 'no'} | {why} |\n"
    DOCS.write_text(text, encoding="utf-8")
    return bool(unknown)


if __name__ == "__main__":
    sys.exit(main())
