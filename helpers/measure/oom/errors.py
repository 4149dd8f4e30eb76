"""Lets go of what the last error keeps alive.

After an error Python keeps it (`sys.last_value`), it keeps its traceback, that keeps the frames of all functions on the
way, and they keep their variables: the tensors of a training step that ran out of memory. IPython keeps it a second
time, and has looked at every frame to show it, which up to Python 3.12 makes a frame keep a copy of its variables.
"""

import gc
import sys
import traceback
from types import TracebackType

import torch

from helpers.measure.oom.frames import variables

NAMES = ("last_exc", "last_value", "last_traceback", "last_type")


def forget_error() -> int:
    """Free what the last error that ended a cell, or a line at a prompt, keeps. Returns the bytes that came back on
    all GPUs. Does nothing where there was none; an error that your own variable names stays."""
    before = _allocated()
    for trace in _kept():
        for frame, _ in traceback.walk_tb(trace):
            variables(frame)  # reading them empties the copy
        traceback.clear_frames(trace)
    for name in NAMES:
        if hasattr(sys, name):
            delattr(sys, name)
    shown = _ipython_shown()
    if shown is not None:
        shown.tb = None
    gc.collect()  # older errors lie in circles
    return before - _allocated()


def _kept() -> list[TracebackType]:
    found = [getattr(sys, "last_traceback", None), getattr(_ipython_shown(), "tb", None)]
    return [trace for trace in found if isinstance(trace, TracebackType)]


def _ipython_shown():
    """What shows IPython's errors, and keeps the last one; None outside of IPython."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return getattr(shell, "InteractiveTB", None)


def _allocated() -> int:
    return sum(torch.cuda.memory_allocated(gpu) for gpu in range(torch.cuda.device_count()))
