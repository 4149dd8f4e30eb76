"""Accelerate's own scripts for several GPUs, as the installed package has them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from benchmarks.outside.suites import Case, torchrun, virtual

NEEDS = "accelerate, torchdata and pytest"
GPUS = 2
# Each under torchrun, but for the one that starts its own processes, which is for pytest.
TORCHRUN = ("test_ops", "test_sync", "test_ddp_comm_hook", "test_distributed_data_loop", "test_merge_weights",
            "test_script", "test_cli", "external_deps/test_pippy")  # fmt: skip
PYTEST = ("test_notebook",)
KNOWN = {
    "external_deps/test_pippy.py": "torch.export does not know a class in the output of its model (`DynamicCache`)."
}


def about() -> str:
    """What was run, for the page."""
    return (
        f"The scripts that accelerate {importlib.metadata.version('accelerate')} contains for its tests, on {GPUS} "
        "virtual GPUs. The other scripts of `external_deps` need DeepSpeed, or models and data of a hub, and were not "
        "run."
    )


def cases(folder: Path | None, work: Path) -> list[Case]:
    """Its scripts. `folder` is not needed."""
    spec = importlib.util.find_spec("accelerate")
    if spec is None or spec.origin is None:
        raise SystemExit(f"accelerate is not installed. Install {NEEDS}.")
    scripts = Path(spec.origin).parent / "test_utils" / "scripts"
    settings = {"ACCELERATE_NUM_PROCESSES": str(GPUS)}
    found = [Case(f"{name}.py", torchrun(GPUS, scripts / f"{name}.py"), work, settings) for name in TORCHRUN]
    for name in PYTEST:
        found.append(Case(f"{name}.py", virtual(GPUS, "-m", "pytest", "-q", scripts / f"{name}.py"), work, settings))
    return found
