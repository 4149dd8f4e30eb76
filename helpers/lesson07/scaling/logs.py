"""Reading what `notebooks/scripts/scaling.py` printed: part of `helpers.lesson07.scaling`."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict

_LINE = re.compile(r"\bgpus=(\d+) batch=(\d+) step_ms=([\d.]+)")


def read_log(text: str) -> dict[int, float]:
    """{GPUs: seconds of a step}; the median where there are several runs. Other lines are passed over.

    Raises ValueError where no line is a measurement, and where neither the batch is the same in all of them (strong
    scaling) nor the batch per GPU (weak).
    """
    found, whole, each = defaultdict(list), set(), set()
    for gpus, batch, milliseconds in _LINE.findall(text):
        found[int(gpus)].append(float(milliseconds) / 1e3)
        whole.add(int(batch))
        each.add(int(batch) / int(gpus))
    if not found:
        raise ValueError("no line like 'gpus=4 batch=256 step_ms=123.4' is in this text: is it scaling.py's output?")
    if len(whole) > 1 and len(each) > 1:
        raise ValueError(
            f"runs with batches of {', '.join(map(str, sorted(whole)))} are mixed here, neither a strong series nor a "
            "weak one: keep a file for each series"
        )
    return {gpus: statistics.median(times) for gpus, times in sorted(found.items())}
