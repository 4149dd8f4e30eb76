"""Reading what `notebooks/scripts/scaling.py` printed: part of `helpers.scaling`."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict

_LINE = re.compile(r"\bgpus=(\d+) batch=(\d+) step_ms=([\d.]+)")


def read_log(text: str) -> dict[int, float]:
    """{GPUs: seconds of a step}; the median where there are several runs. Other lines are passed over.

    Raises ValueError where no line is a measurement.
    """
    found = defaultdict(list)
    for gpus, _, milliseconds in _LINE.findall(text):
        found[int(gpus)].append(float(milliseconds) / 1e3)
    if not found:
        raise ValueError("no line like 'gpus=4 batch=256 step_ms=123.4' is in this text: is it scaling.py's output?")
    return {gpus: statistics.median(times) for gpus, times in sorted(found.items())}
