"""torch.profiler's trace, read as the work of each GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["BLOCK", "KINDS", "Work", "work_of"]

KINDS = ("forward", "backward", "step", "copy", "collective")


class Work(NamedTuple):
    """A kernel, copy or collective: on which GPU, from when to when (seconds from the block's beginning), its kind."""

    gpu: int
    start: float
    end: float
    kind: str
    name: str


BLOCK = "helpers.measure.timeline"
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_GPU = {"kernel": "", "gpu_memcpy": "copy", "gpu_memset": ""}


def work_of(events: Sequence[dict]) -> tuple[float, list[Work]]:
    """Seconds and work from the events of torch.profiler's trace.

    A kernel is the optimizer's where it was launched inside its step, backward's where another thread than the
    program's launched it (autograd has one per GPU), else forward's.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    block = next(e for e in spans if e["name"] == BLOCK and e.get("cat") == "user_annotation")
    begin, thread = block["ts"], block["tid"]
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in spans if e["name"].startswith("Optimizer.step")]
    launches = {e["args"]["correlation"]: e for e in spans
                if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", {})}  # fmt: skip
    work = []
    for event in spans:
        if event.get("cat") in _ON_GPU:
            launch = launches.get(event["args"].get("correlation"))
            kind = _ON_GPU[event["cat"]] or _phase(event["name"], launch, thread, steps)
            start = (event["ts"] - begin) / 1e6
            end = start + event["dur"] / 1e6
            work += [Work(gpu, start, end, kind, event["name"]) for gpu in _gpus(event["args"])]
    return block["dur"] / 1e6, sorted(work, key=lambda each: each.start)


def _gpus(args: dict) -> list[int]:
    """One, or for a copy between two GPUs both: it names its ends, and no "device"."""
    return [args["device"]] if "device" in args else sorted({args["fromDevice"], args["toDevice"]})


def _phase(name: str, launch: dict | None, thread, steps) -> str:
    if name.startswith("nccl"):
        return "collective"
    if launch is None:
        return "forward"
    if any(start <= launch["ts"] <= end for start, end in steps):
        return "step"
    return "forward" if launch["tid"] == thread else "backward"
