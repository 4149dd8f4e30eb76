"""What keeps a tensor alive: the names that lead to it, and the last error, which keeps the variables of all functions
on its way."""

import gc
import sys
import traceback
from collections import deque
from types import CellType, FrameType, FunctionType, TracebackType

import torch

from helpers.measure.oom.blocks import all_frames, running_frames, variables

_MOST_NAMES, _MOST_SEARCHES = 3, 60  # each search asks every object of the program


def holders(thing: object) -> list[str]:
    """Up to three names that keep `thing` alive, those with the shortest way first; none if C++ alone does.

    `out`, `history['losses'][3]`, "`x` of train(), which ended in an error that is kept": Python's gc is asked who
    refers to it, then who refers to those, until variables of modules or functions are reached.
    """
    names, waiting, seen = [], deque([(thing, "")]), {id(thing), *map(id, all_frames())}
    for _ in range(_MOST_SEARCHES):
        if not waiting or len(names) >= _MOST_NAMES:
            break
        each, path = waiting.popleft()
        found = [_variable(frame, each, path) for frame in running_frames()]
        for holder in gc.get_referrers(each):
            if id(holder) not in seen:
                seen.add(id(holder))
                name, further = _step(each, holder, path)
                found.append(name)
                if further is not None:
                    waiting.append((holder, further))
        names += [name for name in dict.fromkeys(found) if name and name not in names]
    return names[:_MOST_NAMES]


def _step(thing: object, holder: object, path: str) -> tuple[str, str | None]:
    """(name, None) where `holder` gives `thing` a name, or ("", what follows the name that `holder` may have)."""
    if isinstance(holder, FrameType):
        return _variable(holder, thing, path, ", which ended in an error that is kept"), None
    if isinstance(holder, dict):
        keys = [key for key, value in list(holder.items()) if value is thing] or ["..."]
        key = min(keys, key=lambda key: str(key).startswith("_"))  # IPython has names of its own for results
        module = holder.get("__name__")
        if isinstance(module, str) and module in sys.modules and vars(sys.modules[module]) is holder:
            return f"`{key}{path}`" + ("" if module == "__main__" else f" of the module {module}"), None
        return "", f"[{key!r}]{path}"
    if isinstance(thing, CellType) or isinstance(holder, (CellType, FunctionType)):  # what a function closes over
        return "", path
    if isinstance(holder, (list, tuple)):
        return "", f"[{next((i for i, value in enumerate(holder) if value is thing), '...')}]{path}"
    values = getattr(holder, "__dict__", {})
    if values is thing:  # `path` begins with the key in it
        name, _, rest = path.removeprefix("['").partition("']")
        return "", f".{name}{rest}"
    name = next((name for name, value in values.items() if value is thing), None)
    return "", f".{name}{path}" if name else f" (in a {type(holder).__name__}){path}"


def _variable(frame: FrameType, thing: object, path: str, what: str = "") -> str:
    """The name of `thing` in a function; "" if it has none there."""
    name = next((name for name, value in variables(frame).items() if value is thing), None)
    return f"`{name}{path}` of {frame.f_code.co_name}(){what}" if name else ""


def forget_error() -> int:
    """Free what the last error that ended a cell, or a line at a prompt, keeps. Returns the bytes that came back on
    all GPUs. Does nothing where there was none; an error that your own variable names stays.

    Python keeps the error (`sys.last_value`), the error its traceback, that the frames of all functions on the way,
    and the frames their variables: the tensors of a training step that ran out of memory. IPython keeps it a second
    time, and has looked at every frame to show it.
    """
    before = _allocated()
    ipython = sys.modules.get("IPython")
    shown = getattr(ipython and ipython.get_ipython(), "InteractiveTB", None)  # what shows IPython's errors
    for trace in (getattr(sys, "last_traceback", None), getattr(shown, "tb", None)):
        if isinstance(trace, TracebackType):
            for frame, _ in traceback.walk_tb(trace):
                variables(frame)  # empties the copy that Python up to 3.12 made when IPython looked
            traceback.clear_frames(trace)
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        vars(sys).pop(name, None)
    if shown is not None:
        shown.tb = None
    gc.collect()  # older errors lie in reference cycles
    return before - _allocated()


def _allocated() -> int:
    return sum(torch.cuda.memory_allocated(gpu) for gpu in range(torch.cuda.device_count()))
