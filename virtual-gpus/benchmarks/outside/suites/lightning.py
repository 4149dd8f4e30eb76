"""Lightning's own tests of FSDP on several GPUs, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

from benchmarks.outside.suites import Case, python_path, virtual
from benchmarks.outside.suites._collected import collected

NEEDS = "what lightning needs (`pip install lightning`; the checkout's own code runs) and pytest"
GPUS = 2
FILES = ("tests_fabric/strategies/test_fsdp_integration.py", "tests_pytorch/strategies/test_fsdp.py")
KNOWN: dict[str, str] = {}


def about() -> str:
    """What was run, for the page."""
    return (
        "Lightning's tests of FSDP that ask for several GPUs and start their ranks themselves (its marker "
        f"`standalone`), on {GPUS} virtual GPUs. Each ran in a pytest of its own, as Lightning's own CI does it, with "
        "the first of its sets of parameters. Tests that Lightning skips for this PyTorch are left out. Of those of "
        "ModelParallel, which are no part of this suite, test_tensor_parallel was tried: it ends with a warning of "
        "PyTorch 2.15 (`torch.distributed.nn.functional.all_gather` is deprecated), which Lightning's settings of "
        "pytest make an error."
    )


def cases(folder: Path | None, work: Path) -> list[Case]:
    """A case for each test of a checkout."""
    if folder is None or not (folder / "tests" / "tests_fabric").is_dir():
        raise SystemExit(f"FOLDER must be a checkout of Lightning, and these be installed: {NEEDS}.")
    settings = {"PL_RUN_STANDALONE_TESTS": "1", "PYTHONPATH": python_path(folder / "src", folder / "tests")}
    command = virtual(GPUS, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    found: dict[str, Case] = {}
    for file in FILES:
        place = folder / "tests" / file.partition("/")[0]
        for test in collected([str(folder / "tests" / file)], place, GPUS, settings):
            name = test.removeprefix("tests/").partition("[")[0]  # pytest names tests from the checkout's root
            found.setdefault(name, Case(name, [*command, str(folder / test)], place, settings))
    return list(found.values())
