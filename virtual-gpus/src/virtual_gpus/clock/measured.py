"""Measured seconds of operators, which win over the formulas of `cost` where there is a row. No torch here.

    measured = load("h200.json", "H200")
    measured.seconds('["aten.mm.default", ...]', 2e-5)      # what was measured, or else 2e-5

A file is JSON: {"gpu": "H200", "from": "who measured what", "rows": [{"operator": "aten.mm.default", "arguments": ...,
"seconds": 1.2e-5}, ...]}. A tensor among the arguments is {"shape": [...], "dtype": "float32", "strides": [...]}, so a
row is for these sizes, this type and this memory format. Seconds are those of the operator's kernels. Rows whose
seconds are null wait to be measured. `python -m virtual_gpus measure` writes such files.
"""

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
    by_kind: dict[str, dict[str, float]] = {}
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            rows = [row for row in content["rows"] if row["seconds"] is not None]
            seconds = {key(row["operator"], row["arguments"]): float(row["seconds"]) for row in rows}
            if not all(number > 0 for number in seconds.values()):
                raise ValueError("a row's seconds are not above 0")
            by_kind.setdefault(spec(content["gpu"]).kind, {}).update(seconds)
        except (KeyError, OSError, TypeError, ValueError) as error:
            raise ValueError(f"Cannot read measured operators from {str(file)!r}: {error!r}") from None
    if kind not in by_kind:
        raise ValueError(f"{path!r} has measured operators of {', '.join(by_kind) or 'no GPU'}, and none of {kind}.")
    return Measured(by_kind[kind])
