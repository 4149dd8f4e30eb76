"""Faults on purpose in a training on several ranks: tried, survived, told, lost.

    python -m tests.benchmarks.faults           # about a minute

survived: it ends with the weights of the undisturbed training. told: it ends with an error that says what to do, in
time, and no process is left. lost: anything else.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.faults import FAULTS


def outcome(fault) -> str:
    """ "survived", "told", or "lost: " and why."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return fault(Path(folder))
        except Exception as error:  # whatever it is, this fault was neither survived nor told
            return f"lost: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def table() -> list[str]:
    """A row per fault, and the sum."""
    outcomes = {name: outcome(fault) for name, fault in FAULTS.items()}
    count = Counter(found.split(":")[0] for found in outcomes.values())
    return [
        "| fault | outcome |",
        "|---|---|",
        *(f"| {name} | {found} |" for name, found in outcomes.items()),
        "",
        f"{len(FAULTS)} faults tried: {count['survived']} survived, {count['told']} told with what to do, "
        f"{count['lost']} lost",
    ]


def main() -> None:
    """Print the table; exit with 1 if anything was lost."""
    lines = table()
    print("\n".join(lines))
    sys.exit(not lines[-1].endswith(" 0 lost"))


if __name__ == "__main__":
    main()
