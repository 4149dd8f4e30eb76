"""The page docs/programs.md, made from the results that the runs left in results.json."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from virtual_gpus import __version__

from benchmarks.outside import examples, frameworks, repositories
from benchmarks.outside.programs import OUT_OF_SCOPE, SOURCES, Program

PROGRAMS: list[Program] = [*examples.PROGRAMS, *repositories.PROGRAMS, *frameworks.PROGRAMS]

RESULTS = Path(__file__).parent / "results.json"
PAGE = Path(__file__).parents[2] / "docs" / "programs.md"

HEAD = """\
# Programs from elsewhere on virtual GPUs

`python -m benchmarks.outside --from FOLDER` runs public programs unmodified and makes this page. It downloads nothing;
`--had` says what FOLDER must hold. Each program runs twice with the same small data and the same seed: on virtual GPUs,
and beside that on the CPU. A program that refuses the CPU runs beside that on another number of virtual GPUs, or on the
CPU with other names of devices in its source. On virtual GPUs its source is never changed.

A witness notes each loss on which a program calls `backward`. The losses of the two runs are compared step by step.
"Equal" means that all losses are the same number. Otherwise the table shows the largest relative difference. It is not
zero where sums are added in another order. Where a program draws random numbers on its GPU, the witness lets the GPU
draw the numbers that the CPU draws in the run beside it.
"""


def keep(program: Program, row: dict[str, object], column: str = "ours") -> None:
    """Store a program's result."""
    results = stored()
    results["made with"] = f"virtual-gpus {__version__} and PyTorch {torch.__version__.split('+')[0]}"
    results["programs"].setdefault(program.name, {})[column] = row
    results["programs"] = {p.name: results["programs"][p.name] for p in PROGRAMS if p.name in results["programs"]}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def stored() -> dict:
    """The results of all runs so far: by program, `ours` and `FakeGPU`."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"made with": "", "programs": {}}


def good(program: Program, row: dict[str, object] | None) -> bool:
    """Whether a program ran, with the losses of the run beside it."""
    if row is None or not row["runs"]:
        return False
    return not row["beside"] and (row["distance"] is None or row["distance"] <= program.within)


def _losses(program: Program, row: dict[str, object] | None) -> str:
    if row is None or not row["runs"]:
        return ""
    distance = row["distance"]
    if row["beside"]:
        return "the run beside it failed"
    if distance is None:
        return "none; both runs pass"
    if distance == 0:
        return "equal"
    if not math.isfinite(distance):
        return "other steps"
    size = f"{distance:.0e}".replace("e-0", "e-") if distance < 0.001 else f"{distance:.1%}".replace("%", " %")
    if distance > program.within:
        return f"differ by {size}"
    return f"within {size}" + (f": {program.note}" if program.note else "")


def _ran(row: dict[str, object] | None) -> str:
    if row is None:
        return "not tried"
    return "yes" if row["runs"] else f"no: `{str(row['why']).replace('|', '/')}`"


def page() -> str:
    """The text of the page, from the stored results."""
    results = stored()
    rows = [(program, results["programs"].get(program.name, {})) for program in PROGRAMS]
    tried = [(program, row) for program, row in rows if "ours" in row]
    ours = sum(good(program, row["ours"]) for program, row in tried)
    lines = [HEAD, f"Made with {results['made with']}. ", ""]
    share = f"{ours} of {len(tried)} = {ours / max(len(tried), 1):.1%}".replace("%", " %")
    lines[1] += f"{share} run with equal losses, or with losses within the difference that the table gives."
    beside = [(program, row["FakeGPU"]) for program, row in rows if "FakeGPU" in row]
    if beside:
        theirs = sum(good(program, row) for program, row in beside)
        lines[1] += f" On FakeGPU {theirs} of the {len(beside)} that were tried do."
    lines += ["| program | what it uses | runs | losses | FakeGPU |", "|---|---|---|---|---|"]
    for program, row in tried:
        fake = row.get("FakeGPU")
        other = "" if fake is None else (_losses(program, fake) or _ran(fake))
        lines.append(
            f"| {program.name} | {program.uses} | {_ran(row['ours'])} | {_losses(program, row['ours'])} | {other} |"
        )
    rest = [program.name for program, row in rows if "ours" not in row]
    if rest:
        lines += ["", f"Not run yet: {'; '.join(rest)}."]
    lines += ["", "## Where they are had", ""]
    lines += [f"- {source.had}" for source in SOURCES.values()]
    lines += ["", "## Out of scope", "", "| program | reason |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in OUT_OF_SCOPE.items()]
    return "\n".join(lines) + "\n"


def write() -> None:
    """Write the page."""
    PAGE.write_text(page())
