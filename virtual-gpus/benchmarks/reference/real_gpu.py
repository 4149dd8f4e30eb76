"""Measure a real GPU as the H200 of tests/data/h200 was measured, to compare and to keep."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import torch
from virtual_gpus.gpus import kinds, spec

from benchmarks.reference import measure


def description() -> dict:
    """torch, GPU, bytes and cuDNN of this machine's GPU 0. Raises RuntimeError where there is none."""
    if not torch.cuda.is_available():
        raise RuntimeError("this machine has no real GPU that PyTorch can use: nothing to measure")
    properties = torch.cuda.get_device_properties(0)
    return {
        "torch": torch.__version__,
        "gpu": properties.name,
        "total": properties.total_memory,
        "cudnn": torch.backends.cudnn.version(),
        "capability": [properties.major, properties.minor],
    }


def measure_cases(builds: dict[str, Callable]) -> dict:
    """All of them on GPU 0, in the format of steps.json without its seconds: {"cases": ..., "meta": ...}."""
    meta = description()
    cases = {}
    for name, build in builds.items():
        cases[name] = measure.emptied(partial(measure.training_steps, build))
    return {"cases": cases, "meta": meta}


def kind_of(meta: dict) -> str:
    """The kind of virtual GPU for a measured card: that of its name, else the newest that is not newer than it.

    Of several with the same compute capability, it is the one with most memory.
    """
    name = meta["gpu"].lower()
    named = [kind for kind in kinds() if re.search(r"\s*".join(kind.lower()) + r"(?![0-9a-z])", name)]
    exact = [kind for kind in kinds() if spec(kind).name == meta["gpu"]]
    if exact or named:
        return max(exact or named, key=len)
    capability = tuple(meta.get("capability", (0, 0)))
    ordered = sorted(kinds(), key=lambda kind: (spec(kind).capability, spec(kind).memory))
    return [ordered[0], *(kind for kind in ordered if spec(kind).capability <= capability)][-1]
