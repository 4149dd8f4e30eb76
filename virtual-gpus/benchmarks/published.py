"""Modelled beside published speeds: over a hundred training jobs on 1 to 512 GPUs, half of them held apart.

    python -m benchmarks.published                          # all rows: some five minutes
    python -m benchmarks.published --only mpt fms           # sources whose names begin so
    python -m benchmarks.published --save results.json      # keep what was modelled
    python -m benchmarks.published --read results.json --plot docs/images/published.png
    python -m benchmarks.published --memory                 # what Llama 3.1 8B reserves, beside torchtitan's figures

`published.json` has the rows with their sources, and docs/accuracy.md the rule by which they were chosen. Of the rows
that nobody had compared before, the first, the third and so on are there to fit constants to, together with all rows
that had been compared (`seen`). The others are held apart, except those to which a constant was fitted nevertheless
(`fitted`). `published_jobs` builds the jobs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from virtual_gpus import record_training, virtual_gpus
from virtual_gpus.clock.links import NETWORKS
from virtual_gpus.gpus import spec

from benchmarks.published_jobs import JOBS, seconds_of, selective
from benchmarks.scale import LENGTH, build, step

ROWS = Path(__file__).with_suffix(".json")
UNITS = ("tokens/s per GPU", "samples/s", "s")  # samples/s of all GPUs; s: of a step
HOW = ("eager", "fused", "compiled")
_NEEDED = {"source": str, "name": str, "kind": str, "job": str, "gpu": str, "gpus": int, "measured": (int, float),
           "unit": str, "how": str, "settings": dict}  # fmt: skip
H100 = {"kind": "H100", "memory": "94 GiB", "network": "InfiniBand NDR", "adapters": 8}
RESERVED = {8: 82.4, 128: 67.0}  # GPUs -> GiB: benchmarks/llama3_h100_202412_torchtitan.md in pytorch/torchtitan
GIB = 2**30


@dataclass(frozen=True)
class Compared:
    """A row, its half ("fit" or "held"), its modelled speed in the row's unit, and the GPU's busy part of the step."""

    row: dict[str, Any]
    half: str
    modelled: float
    busy: float

    @property
    def error(self) -> float:
        """Of the speed. Positive: the model is too fast."""
        ratio = self.modelled / self.row["measured"]
        return (1 / ratio if self.row["unit"] == "s" else ratio) - 1


def checked(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file. Raises ValueError that names the row and what is wrong with it."""
    for number, row in enumerate(content["rows"], start=1):
        where = f"Row {number} ({row.get('source')}, {row.get('name')})"
        for name, kind in _NEEDED.items():
            if not isinstance(row.get(name), kind):  # type: ignore[arg-type]
                raise ValueError(f"{where} needs {name!r}, but it is {row.get(name)!r}.")
        choices = {"source": content["sources"], "job": JOBS, "unit": UNITS, "how": HOW}
        for name, known in choices.items():
            if row[name] not in known:
                raise ValueError(f"{where} has the {name} {row[name]!r}. Choose one of {', '.join(known)}.")
        if row.get("network", ["Ethernet 100", 1])[0] not in NETWORKS:
            raise ValueError(f"{where} has the network {row['network'][0]!r}. Choose one of {', '.join(NETWORKS)}.")
        if row["measured"] <= 0 or row["gpus"] < 1:
            raise ValueError(f"{where} needs a measured figure above 0 and at least one GPU.")
        spec(row["gpu"])
    return content["rows"]


def halves(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The half of each row, in the order of the file."""
    found, new = [], 0
    for row in rows:
        new += not row.get("seen")
        found.append("fit" if row.get("seen") or row.get("fitted") or new % 2 else "held")
    return found


def speed(row: dict[str, Any], seconds: float) -> float:
    """What a step of so many seconds is in the row's unit."""
    if row["unit"] == "s":
        return seconds
    settings = row["settings"]
    each = settings["batch"] * settings.get("parts", 1) / seconds  # samples of a rank per second
    if row["unit"] == "samples/s":
        return each * row["gpus"]
    return each * settings["length"] / settings.get("tensor", 1)


def figure(number: float) -> str:
    """A speed or a time with three digits or more."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def table(compared: list[Compared]) -> list[str]:
    """All rows in Markdown."""
    lines = ["| source | job | GPUs | run | published | modelled | error | half |", "|---|---|---|---|---|---|---|---|"]
    for each in compared:
        row = each.row
        cells = (row["source"], row["name"], f"{row['gpus']} {row['gpu']}", row["how"],
                 f"{figure(row['measured'])} {row['unit']}", figure(each.modelled), f"{100 * each.error:+.0f} %",
                 "seen" if row.get("seen") else each.half)  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def summary(compared: list[Compared]) -> list[str]:
    """Errors by half and by kind of job."""
    kinds = sorted({each.row["kind"] for each in compared})
    groups = [("all", compared), *((how, [c for c in compared if c.row["how"] == how]) for how in HOW)]
    groups += [("torchtitan", [c for c in compared if c.row["source"].startswith("titan")])]
    groups += [("the GPU waits for the host", [c for c in compared if c.busy < 0.6])]
    groups += [(kind, [c for c in compared if c.row["kind"] == kind]) for kind in kinds]
    lines = ["| rows | fit: number | median | within 20 % | held apart: number | median | within 20 % |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, group in groups:
        cells = []
        for half in ("fit", "held"):
            errors = [abs(each.error) for each in group if each.half == half]
            close = sum(error <= 0.2 for error in errors)
            cells.append(str(len(errors)))
            cells += (
                [f"{100 * statistics.median(errors):.0f} %", f"{100 * close / len(errors):.0f} %"]
                if errors
                else ["", ""]
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def memory() -> None:
    """Print what torchtitan's Llama reserves: as one rank of 8 and of 128, with every second multiplication kept."""
    print("| Llama 3.1 8B | reserved, GiB | published | error |\n|---|---|---|---|")
    for gpus, gib in RESERVED.items():
        with virtual_gpus(8, shapes_only=True, rank=0, world_size=gpus, **H100), record_training() as recorded:
            model = build("8B", gpus, lambda block: checkpoint_wrapper(block, context_fn=selective))
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            words = torch.zeros(2, LENGTH, dtype=torch.long, device="cuda")
            for _ in range(3):
                step(model, optimizer, words)
        reserved = recorded.report().reserved_bytes / GIB
        print(f"| {gpus} H100 | {reserved:.1f} | {gib} | {100 * (reserved / gib - 1):+.0f} % |", flush=True)


def arguments() -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published")
    parser.add_argument("--only", nargs="+", metavar="SOURCE", help="sources whose names begin so")
    parser.add_argument("--save", type=Path, help="a file for what was modelled")
    parser.add_argument("--read", type=Path, help="such a file, instead of running the jobs")
    parser.add_argument("--plot", type=Path, help="a picture of all rows")
    parser.add_argument("--memory", action="store_true", help="only the memory of Llama 3.1 8B")
    return parser.parse_args()


def main() -> None:
    """Print the tables."""
    options = arguments()
    if options.memory:
        memory()
        return
    rows = checked(json.loads(ROWS.read_text(encoding="utf-8")))
    known = json.loads(options.read.read_text()) if options.read else {}
    compared = []
    for number, (row, half) in enumerate(zip(rows, halves(rows), strict=True)):
        if options.only and not row["source"].startswith(tuple(options.only)):
            continue
        seconds, busy = known[str(number)] if str(number) in known else seconds_of(row)
        known[str(number)] = seconds, busy
        compared.append(Compared(row, half, speed(row, seconds), busy))
        print(table(compared[-1:])[-1], flush=True)
        if options.save:
            options.save.write_text(json.dumps(known))
    print("\n" + "\n".join(summary(compared)))
    if options.plot:
        from benchmarks.published_plot import drawn  # matplotlib, which only the picture needs

        drawn(compared).savefig(options.plot, dpi=150)


if __name__ == "__main__":
    main()
