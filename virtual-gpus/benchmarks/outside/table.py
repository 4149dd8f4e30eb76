"""The page docs/programs.md, made from the results that the runs left in results.json."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from virtual_gpus import __version__

from benchmarks.outside import examples, frameworks, repositories
from benchmarks.outside.programs import OUT_OF_SCOPE, RACES, SOURCES, Program

PROGRAMS: list[Program] = [*examples.PROGRAMS, *repositories.PROGRAMS, *frameworks.PROGRAMS]

RESULTS = Path(__file__).parent / "results.json"
PAGE = Path(__file__).parents[2] / "docs" / "programs.md"

HEAD = """\
# Public programs on virtual GPUs

`python -m benchmarks.outside --from FOLDER` runs public programs unmodified and writes this page. It downloads nothing.
`python -m benchmarks.outside --had` lists what FOLDER must contain.

Each program runs twice with the same small data and the same seed. One run is on virtual GPUs, and never changes the
program's source. The other is the reference, on the CPU. If a program refuses the CPU, the reference runs on another
number of virtual GPUs, or on the CPU with other names of devices in the source.

Both runs record every loss on which the program calls `backward`. The losses are then compared step by step. If a
program draws random numbers on its GPU, the virtual GPU draws the same numbers as the CPU in the reference. The
table names the exceptions.

| losses | meaning |
|---|---|
| equal | All losses are the same numbers. |
| within a difference | This is the largest relative difference of a loss. It may be up to 1e-5, because the two \
runs may add numbers in another order. Some programs have a larger limit. The table then gives the reason. |
| differ by | The largest relative difference is larger than the limit. |
| none | The program does not call `backward`. |
| not comparable | The runs have different numbers of losses, or a loss is not a number. |

`python -m benchmarks.outside --from FOLDER --check-races` runs each program once more, with races checked and without a
reference. A race is two uses of the same memory, at least one of them a write, of which neither waits for the other.

FakeGPU is another package that lets PyTorch programs run without a GPU. An empty cell in its column means that the
program was not tried on it.
"""


def keep(program: Program, row: dict[str, object], column: str = "ours") -> None:
    """Store a program's result."""
    results = stored()
    results["made with"] = f"virtual-gpus {__version__} and PyTorch {torch.__version__.split('+')[0]}"
    results["programs"].setdefault(program.name, {})[column] = row
    results["programs"] = {p.name: results["programs"][p.name] for p in PROGRAMS if p.name in results["programs"]}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def stored() -> dict:
    """The results of all runs so far: by program, `ours`, `races` and `FakeGPU`."""
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
        return "the reference failed"
    if distance is None:
        return "none; both runs pass"
    if distance == 0:
        return "equal"
    if not math.isfinite(distance):
        return "not comparable"
    if distance > program.within:
        return f"differ by {_size(distance)}, and the limit is {_size(program.within)}"
    return f"within {_size(distance)}" + (f": {program.note}" if program.note else "")


def _size(difference: float) -> str:
    return f"{difference:.0e}".replace("e-0", "e-") if difference < 0.001 else f"{100 * difference:.1f} %"


def _ran(row: dict[str, object] | None) -> str:
    if row is None:
        return "not tried"
    return "yes" if row["runs"] else f"no: `{str(row['why']).replace('|', '/')}`"


def _races(row: dict[str, object] | None) -> str:
    if row is None:
        return ""
    return f"`{row['race']}`" if row["race"] else "none" if row["runs"] else _ran(row)


def page() -> str:
    """The text of the page, from the stored results."""
    results = stored()
    rows = [(program, results["programs"].get(program.name, {})) for program in PROGRAMS]
    tried = [(program, row) for program, row in rows if "ours" in row]
    ours = sum(good(program, row["ours"]) for program, row in tried)
    lines = [HEAD, f"Made with {results['made with']}. ", ""]
    share = f"{ours} of {len(tried)} programs ({100 * ours / max(len(tried), 1):.1f} %)"
    lines[1] += f"{share} run with losses that are equal or within the program's limit."
    beside = [(program, row["FakeGPU"]) for program, row in rows if "FakeGPU" in row]
    if beside:
        theirs = sum(good(program, row) for program, row in beside)
        lines[1] += f" On FakeGPU, {theirs} of the {len(beside)} that were tried do."
    checked = [row["races"] for _, row in rows if "races" in row]
    if checked:
        clean, found = (sum(_races(row).startswith(start) for row in checked) for start in ("none", "`"))
        lines[1] += f" With races checked, {clean} of {len(checked)} run without a race, and {found} have one."
    lines += ["| program | what it uses | runs | losses | races | FakeGPU |", "|---|---|---|---|---|---|"]
    for program, row in tried:
        fake = row.get("FakeGPU")
        other = "" if fake is None else (_losses(program, fake) or _ran(fake))
        cells = program.name, program.uses, _ran(row["ours"]), _losses(program, row["ours"]), _races(row.get("races"))
        lines.append(f"| {' | '.join(cells)} | {other} |")
    rest = [program.name for program, row in rows if "ours" not in row]
    if rest:
        lines += ["", f"Not run yet: {'; '.join(rest)}."]
    lines += ["", "## Where to get the programs", ""]
    lines += [f"- {source.had}" for source in SOURCES.values()]
    lines += ["", "## Races", "", "| program | what nothing orders |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in RACES.items()]
    lines += ["", "## Out of scope", "", "| program | reason |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in OUT_OF_SCOPE.items()]
    return "\n".join(lines) + "\n"


def write() -> None:
    """Write the page."""
    PAGE.write_text(page())
