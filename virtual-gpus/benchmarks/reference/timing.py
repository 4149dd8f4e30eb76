"""The modelled clock against a real H200: the same programs, timed on a virtual GPU. Seconds throughout.

    timed = steps(["mlp_adamw_b256"])["mlp_adamw_b256"]      # kernels, annotated, wall
    measured = measured_steps()["mlp_adamw_b256"]             # the same of the H200
    operators()                                               # [(name, type, size, measured, modelled), ...]

Two figures of the H200 say how long the GPU was busy in a step. `operator_seconds.json.gz` has the kernels of each
operator; their sum is `kernels`. `steps.json` has "gpu_busy_seconds" from another run: the sum over all events that
PyTorch's profiler puts on the GPU. Among those is the range that the profiler draws around `optimizer.step()` on the
GPU's row, as long as from its first kernel's start to its last one's end, so the optimizer counts twice
(pytorch issue 130730). `annotated` is that sum, with the range. The step with the smallest optimizer, the LSTM's,
shows that the two runs agree: there the two figures differ by 1 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
from virtual_gpus import record_timeline

from benchmarks.reference import measure, second
from benchmarks.reference.cases import CASES

BUSY_EACH, BUSY_MEDIAN = 0.25, 0.12  # the goal for every step, and for the median of all
WALL_WHERE_BUSY, WALL_ELSEWHERE = 0.25, 0.60
MOSTLY_BUSY = 0.60  # share of the wall time, as measured
OPERATORS_EACH = 0.30
_REPEATS = 30
_LARGE = 32 << 20  # bytes of a copy to the host, which has to be filled: each takes as long as the one before
BUILDS = CASES | second.TIMED | second.THIRD
_DTYPES = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16, "float32": torch.float32}


def error(measured: float, modelled: float) -> float:
    """+0.01: the clock says 1 % more."""
    return modelled / measured - 1


# ---- training steps ----------------------------------------------------------------------------------------------


def measured_steps() -> dict[str, dict[str, float]]:
    """Case -> what the H200 measured: kernels, annotated, wall (the median), fastest, share (annotated of wall)."""
    kernels, found = measure.load("operator_seconds.json.gz"), {}
    for name, case in measure.load("steps.json")["cases"].items():
        busy, wall = case["gpu_busy_seconds"], case["step_seconds"]
        own = sum(seconds for *_, seconds in kernels[name])
        found[name] = {"kernels": own, "annotated": busy, "wall": wall, "fastest": case["step_seconds_min"],
                       "share": busy / wall}  # fmt: skip
    return found


def steps(names, shapes_only: bool = True) -> dict[str, dict[str, float]]:
    """Case -> kernels, annotated and wall of its third step on a fresh virtual H200."""
    torch_version = measure.load("steps.json")["meta"]["torch"]
    return {name: measure.on_virtual_gpu(lambda n=name: _step(n), torch_version, shapes_only) for name in names}


def timeline_of(name: str):
    """The recorded third step of a case, on the virtual GPU that is on."""
    step = BUILDS[name]("cuda")
    step()
    step()
    with record_timeline() as timeline:
        step()
    return timeline


def _step(name: str) -> dict[str, float]:
    timeline = timeline_of(name)
    optimizer = [span for span in timeline.spans if span.kind == "step"]
    drawn = max(span.end for span in optimizer) - min(span.start for span in optimizer)
    busy = timeline.busy_seconds(0, copies=True)
    return {"kernels": busy, "annotated": busy + drawn, "wall": timeline.seconds}


def median_error(measured: dict, modelled: dict, figure: str) -> float:
    """The median of the sizes of the errors in a figure."""
    return statistics.median(abs(error(measured[name][figure], modelled[name][figure])) for name in modelled)


def wall_limit(measured: dict[str, float]) -> float:
    """How far the wall time may be off: where the GPU waits for the host, the real figure itself is not steady."""
    return WALL_WHERE_BUSY if measured["share"] > MOSTLY_BUSY else WALL_ELSEWHERE


# ---- single operators --------------------------------------------------------------------------------------------


def operators() -> list[tuple[str, str, object, float, float]]:
    """(operator, dtype, size, measured, modelled) of everything in ops.json."""
    rows = measure.load("ops.json")
    version = measure.load("steps.json")["meta"]["torch"]
    modelled = measure.on_virtual_gpu(lambda: [_seconds(row) for row in rows], version)
    return [(r["op"], r["dtype"], r["size"], r["seconds"], m) for r, m in zip(rows, modelled, strict=True)]


def _seconds(row: dict) -> float:
    act = _program(row)
    act()
    if row["op"].startswith("host_"):
        return _on_the_host(act)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    repeats = 3 if row["op"].startswith("d2h") and row["size"] > _LARGE else _REPEATS
    for _ in range(repeats):
        act()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def _on_the_host(act: Callable) -> float:
    with record_timeline() as timeline:
        for _ in range(_REPEATS):
            act()
    return timeline.seconds / _REPEATS


def _program(row: dict) -> Callable:
    """What was timed: `op` on numbers of `dtype`; size: of a matrix, elements, bytes, or (batch, in, pixels, out)."""
    op, size, dtype = row["op"], row["size"], _DTYPES.get(row["dtype"])
    if op == "matmul":
        x = torch.empty(size, size, dtype=dtype, device="cuda")
        return lambda: x @ x
    if op == "conv3x3":
        batch, channels, pixels, out = size
        x = torch.empty(batch, channels, pixels, pixels, device="cuda")
        conv = torch.nn.Conv2d(channels, out, 3, padding=1, bias=False).to("cuda").requires_grad_(False)
        return lambda: conv(x)
    if op.startswith(("h2d_", "d2h_")):
        return _copy(op, size)
    x = torch.empty(size, dtype=dtype or torch.float32, device="cuda")
    linear = torch.nn.Linear(1, 1).to("cuda").requires_grad_(False)
    y = torch.empty_like(x)
    return {"add": lambda: x + 1, "sum": lambda: x.sum(), "relu_": lambda: x.relu_(), "copy": lambda: y.copy_(x),
            "host_relu": lambda: x.relu(), "host_add": lambda: x + 1, "host_linear": lambda: linear(x),
            "host_item": lambda: x.sum().item() if math.prod(x.shape) > 1 else x.item()}[op]  # fmt: skip


def _copy(op: str, nbytes: int) -> Callable:
    here = torch.empty(nbytes // 4)
    here = here.pin_memory() if op.endswith("pinned") else here
    there = here.to("cuda")
    pinned = op.endswith("pinned")
    if op.startswith("h2d"):
        return lambda: there.copy_(here, non_blocking=pinned)
    return lambda: here.copy_(there, non_blocking=pinned)
