"""What collectives cost: how long they run, and how much of that is not hidden behind computation.

with record_timeline() as t:
    step()
t.communication()["all"].exposed              # modelled seconds in which cuda:0 only communicates
t.communication(3)["all-gather, data"].sent   # bytes, of the groups of the mesh's dimension "data"
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from virtual_gpus.clock.clock import Span
from virtual_gpus.timeline.spans import seconds_covered

ALL = "all"


class Communication(NamedTuple):
    """The collectives of one kind and group on one GPU.

    calls: how many there are. sent: the bytes that the busiest member of each sends or receives, added up.
    seconds: modelled time in which at least one of them runs. Real processes also wait in it for the last one.
    exposed: the part of `seconds` in which no kernel runs on the GPU, so that the step gets longer.
    """

    calls: int
    sent: float
    seconds: float
    exposed: float


def communication(spans: Iterable[Span], gpu: int) -> dict[str, Communication]:
    """The collectives of a GPU by the name of their row ("all-gather", "reduce-scatter, data"), and "all" of them.

    Messages count as collectives. Rows that run at the same time are exposed at the same time, so their `exposed` may
    add up to more than that of "all".
    """
    rows: dict[str, list[Span]] = {ALL: []}
    kernels: list[tuple[float, float]] = []
    for span in spans:
        if span.gpu != gpu:
            continue
        if span.kind == "collective":
            rows[ALL].append(span)
            rows.setdefault(str(span.lane), []).append(span)
        elif span.kind != "copy":
            kernels.append((span.start, span.end))
    computing = seconds_covered(kernels)
    found = {}
    for name, row in rows.items():
        times = [(span.start, span.end) for span in row]
        exposed = max(0.0, seconds_covered(times + kernels) - computing)  # not below zero by rounding
        found[name] = Communication(len(row), sum(span.sent for span in row), seconds_covered(times), exposed)
    return found
