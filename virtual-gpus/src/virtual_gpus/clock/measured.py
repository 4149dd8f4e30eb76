"""Measured seconds of operators, which win over the formulas of `cost` where there is a row. No torch here.

    measured = load("h200.json", "H200")
    measured.seconds('["aten.mm.default", ...]', 2e-5)      # what was measured, or else 2e-5

A file is JSON: {"gpu": "H200", "from": "who measured what", "rows": [{"operator": "aten.mm.default", "arguments": ...,
"seconds": 1.2e-5}, ...]}. A tensor among the arguments is {"shape": [...], "dtype": "float32", "strides": [...]}, so a
row is for these sizes, this type and this memory format. Seconds are those of the operator's kernels. Rows whose
seconds are null wait to be measured. `python -m virtual_gpus measure` writes such files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from virtual_gpus.gpus import spec


def key(operator: str, arguments: Any) -> str:
    """A row's operator and arguments as one text."""
    return json.dumps([operator, arguments])


class Measured:
    """The rows of one kind of GPU, and what a program asked for."""

    def __init__(self, rows: Mapping[str, float] | None = None):
        self.rows = dict(rows or {})
        self.asked: dict[str, int] = {}  # key -> calls

    def seconds(self, asked: str, formula: float) -> float:
        """The seconds of a row, or those of the formula if there is none."""
        self.asked[asked] = self.asked.get(asked, 0) + 1
        return self.rows.get(asked, formula)


def load(path: str, kind: str) -> Measured:
    """The rows for a kind of GPU in a file, or in all files *.json of a folder. Of equal rows, the last one counts.

    Raises ValueError if there is no such file, if a file is not of the form above, or if none has rows for this kind.
    """
    where = Path(path)
    files = sorted(where.glob("*.json")) if where.is_dir() else [where]
    found: dict[str, dict[str, float]] = {}
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"Cannot read measured operators from {str(file)!r}: {error}") from None
        gpu, rows = (content.get(name) for name in ("gpu", "rows")) if isinstance(content, dict) else (None, None)
        if gpu is None or not isinstance(rows, list):
            raise ValueError(f'{str(file)!r} holds no measured operators. It needs a "gpu" and a list of "rows".')
        target = found.setdefault(spec(gpu).kind, {})
        for number, row in enumerate(rows, start=1):
            target.update(_checked(row, f"Row {number} of {str(file)!r}"))
    if kind not in found:
        raise ValueError(f"{path!r} has measured operators of {', '.join(found) or 'no GPU'}, and none of {kind}.")
    return Measured(found[kind])


def _checked(row: Any, where: str) -> dict[str, float]:
    if not isinstance(row, dict) or not {"operator", "arguments", "seconds"} <= row.keys():
        raise ValueError(f'{where} needs "operator", "arguments" and "seconds", but it is {row!r}.')
    seconds = row["seconds"]
    if seconds is None:
        return {}
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise ValueError(f"{where} needs seconds above 0, or null where they were not measured, not {seconds!r}.")
    return {key(row["operator"], row["arguments"]): float(seconds)}
