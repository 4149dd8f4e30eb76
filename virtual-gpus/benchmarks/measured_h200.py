"""The H200's measured operators as a file for `virtual_gpus(measured=...)`: benchmarks/measured/h200.json.

    python -m benchmarks.measured_h200          # from tests/data/h200, and how much of each step it covers

The H200 was measured by PyTorch's profiler, which names an operator and the shapes of its inputs. The same steps run on
a virtual H200, which knows their types and memory formats too. A row is an operator that both have. Operators with
lists of tensors are left out, because the profiler does not give their shapes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from virtual_gpus import active_machine, record_timeline, virtual_gpus
from virtual_gpus.clock.measured import Measured

from benchmarks.reference import measure
from benchmarks.reference.timing import BUILDS

OUT = Path(__file__).with_name("measured") / "h200.json"
SETS = ("", "second/", "third/")  # folders of tests/data/h200


def asked(build: Any) -> list[str]:
    """The keys of the operators in the third step of a case."""
    with virtual_gpus(1, shapes_only=True):
        machine = active_machine()
        assert machine is not None
        step = build("cuda")
        step()
        step()
        machine.measured = Measured()
        step()
        return list(machine.measured.asked)


def shapes(arguments: list[Any]) -> tuple | None:
    """The shapes of the tensors as the profiler gives them, without what comes after the last. None for lists."""
    found: list[tuple] = []
    for value in arguments[0]:
        if isinstance(value, list) and any(isinstance(part, dict) and "shape" in part for part in value):
            return None
        found.append(tuple(value["shape"]) if isinstance(value, dict) and "shape" in value else ())
    return _without_end(found)


def _without_end(found: list[tuple]) -> tuple:
    while found and not found[-1]:
        found = found[:-1]
    return tuple(found)


def collect(cases: dict[str, list], builds: dict[str, Any]) -> dict[str, list[tuple[float, int]]]:
    """Key -> (seconds, calls) in each case that has it. cases: [operator, shapes, calls, seconds] of each."""
    rows: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for name, measured in cases.items():
        profiled = {}
        for operator, sizes, calls, seconds in measured:
            sizes = json.loads(sizes) if isinstance(sizes, str) else sizes
            profiled[operator.removeprefix("aten::"), _without_end([tuple(size) for size in sizes])] = seconds, calls
        covered = set()
        for key in asked(builds[name]):
            operator, arguments = json.loads(key)
            where = operator.split(".")[1] if "." in operator else operator, shapes(arguments)
            if where in profiled:
                rows[key].append(profiled[where])
                covered.add(where)
        part = sum(profiled[where][0] for where in covered) / sum(seconds for seconds, _ in profiled.values())
        print(f"{name}: rows for {100 * part:.0f} % of the kernels' seconds")
    return rows


def check(file: Path, cases: dict[str, list]) -> None:
    """Print the kernel time of each step with the formulas and with the file, beside what was measured, `cases`."""
    print("| training step | measured, ms | formulas | error | with the file | error |\n|---|---|---|---|---|---|")
    for name, measured in cases.items():
        real = sum(seconds for *_, seconds in measured)
        cells = [f"{1e3 * real:.2f}"]
        for table in (None, file):
            with virtual_gpus(1, shapes_only=True, measured=table):
                step = BUILDS[name]("cuda")
                step()
                step()
                with record_timeline() as timeline:
                    step()
                    torch.cuda.synchronize()
                mine = timeline.busy_seconds(0, copies=True)
            cells += [f"{1e3 * mine:.2f}", f"{100 * (mine / real - 1):+.1f} %"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Write the file."""
    cases = {name: rows for part in SETS for name, rows in measure.load(f"{part}operator_seconds.json.gz").items()}
    found = collect(cases, BUILDS)
    lines = []
    for key, parts in sorted(found.items()):
        operator, arguments = json.loads(key)
        seconds = sum(each for each, _ in parts) / sum(calls for _, calls in parts)
        lines.append(json.dumps({"operator": operator, "arguments": arguments, "seconds": float(f"{seconds:.4g}")}))
    head = json.dumps({"gpu": "H200", "from": "tests/data/h200: NVIDIA H200, PyTorch 2.11, CUDA 13.0"})
    OUT.write_text(head[:-1] + ', "rows": [\n' + ",\n".join(lines) + "\n]}\n")
    print(f"{OUT.name}: {len(lines)} rows")
    check(OUT, cases)


if __name__ == "__main__":
    main()
