"""PyTorch's own memory viewer, written to a file that a browser opens."""

import os
from pathlib import Path

import torch
from torch.cuda import _memory_viz

KINDS = {"trace": _memory_viz.trace_plot, "segments": _memory_viz.segment_plot}


def write_viewer(path: str | Path, kind: str = "trace") -> Path:
    """Write a web page with all GPUs' memory: "trace" (allocated memory over time) or "segments" (the blocks of now).

    It holds what was recorded since `remember_places()`; point at a block in it to see the stack that made it. The
    page loads its drawing code from the network. Without one, `torch.cuda.memory._dump_snapshot("memory.pickle")`
    writes the file that https://docs.pytorch.org/memory_viz reads. Returns the path. Raises ValueError for another
    `kind`, RuntimeError where no history was recorded.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: give one of {', '.join(map(repr, KINDS))}.")
    snapshot = torch.cuda.memory._snapshot()
    if kind == "trace" and not any(snapshot["device_traces"]):
        raise RuntimeError("No history was recorded: call remember_places() before the run that you want to see.")
    path = Path(path)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(KINDS[kind](snapshot), encoding="utf-8")
    os.replace(unfinished, path)
    return path
