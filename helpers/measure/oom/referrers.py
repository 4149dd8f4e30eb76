"""Who keeps an object alive, in words: `out`, `history['losses'][3]`, "`x` of train(), which ended in an error".

Python's gc is asked who refers to the object, then who refers to those, level by level, until variables are reached.
"""

import gc
import sys
from collections.abc import Iterator
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType, TracebackType

from helpers.measure.oom.frames import running_frames, variables

DEPTH = 6
MOST = 3
WIDTH = 40  # objects of one level that are followed: each costs a comparison per reference in the whole program
ITERATORS = ("list_iterator", "dict_itemiterator", "dict_valueiterator", "dict_keyiterator")
Level = dict[int, tuple[object, str]]  # id -> (object, what follows its name on the way to the tensor)


def holders(thing: object, most: int = MOST) -> list[str]:
    """Up to `most` names that keep `thing` alive, those with the shortest way first; none if C++ alone does.

    Variables of modules and of functions, attributes, lists, dicts and closures are followed, six steps at most.
    Takes about a tenth of a second per step in a large program.
    """
    found, seen, level = [], {id(thing)}, {id(thing): (thing, "")}
    for _ in range(DEPTH):
        names, level = _up(level, seen)
        found += [name for name in names if name not in found]
        if not level or sum(not _is_from_history(name) for name in found) >= most:
            break
    return ([name for name in found if not _is_from_history(name)] or found)[:most]


def _up(level: Level, seen: set[int]) -> tuple[list[str], Level]:
    """The names that refer to an object of `level`, and the nameless objects that do."""
    names = [_variable(frame, thing, suffix) for frame in running_frames() for thing, suffix in level.values()]
    above: Level = {}
    objects = [thing for thing, _ in level.values()]
    seen |= {id(objects), id(level), id(above), *map(id, level.values())}  # this search is nobody's owner
    referrers = gc.get_referrers(*objects)
    seen.add(id(referrers))
    for holder in referrers:
        if id(holder) not in seen and not _is_passing(holder):
            seen.add(id(holder))
            for thing, suffix in _referred(holder, level):
                for name, further in _step(thing, holder, suffix):
                    names.append(name)
                    if further is not None and len(above) < WIDTH:
                        above[id(holder)] = holder, further
    return [name for name in names if name], above


def _referred(holder: object, level: Level) -> list[tuple[object, str]]:
    ids = dict.fromkeys(map(id, gc.get_referents(holder)))
    return [level[each] for each in ids if each in level]


def _step(thing: object, holder: object, suffix: str) -> Iterator[tuple[str, str | None]]:
    """(name, None) where `holder` gives `thing` a name, or ("", what follows the name that `holder` may have)."""
    if isinstance(holder, FrameType):
        yield _variable(holder, thing, suffix, ", which ended in an error that is kept"), None
    elif isinstance(holder, GeneratorType):
        yield _variable(holder.gi_frame, thing, suffix, ", a generator"), None
    elif isinstance(holder, dict):
        key = next((key for key, value in list(holder.items()) if value is thing), "...")
        module = _module_of(holder)
        if module is None:
            yield "", f"[{key!r}]{suffix}"
        else:
            yield f"`{key}{suffix}`" + ("" if module == "__main__" else f" of the module {module}"), None
    elif isinstance(thing, CellType):  # a function's tuple of what it closes over
        yield "", suffix
    elif isinstance(holder, (list, tuple)):
        yield "", f"[{next((i for i, value in enumerate(holder) if value is thing), '...')}]{suffix}"
    elif isinstance(holder, (CellType, FunctionType, TracebackType)):
        yield "", suffix
    elif not isinstance(holder, ModuleType):
        yield "", _attribute(thing, holder, suffix)


def _attribute(thing: object, holder: object, suffix: str) -> str:
    """How `holder` refers to `thing`: as ".name", or through its own dict, whose ["name"] stands in `suffix`."""
    values = getattr(holder, "__dict__", {})
    if values is thing:
        key, _, rest = suffix.removeprefix("['").partition("']")
        return f".{key}{rest}"
    name = next((name for name, value in values.items() if value is thing), None)
    return f".{name}{suffix}" if name else f" (in a {type(holder).__name__}){suffix}"


def _variable(frame: FrameType | None, thing: object, suffix: str, what: str = "") -> str:
    """The name of `thing` in a function; "" if it has none there."""
    values = variables(frame) if frame is not None else {}
    name = next((name for name, value in values.items() if value is thing), None)
    return f"`{name}{suffix}` of {frame.f_code.co_name}(){what}" if name else ""


def _is_passing(thing: object) -> bool:
    """What refers to things only while it looks at them, and functions that run, which are looked at apart."""
    frame = thing.gi_frame if isinstance(thing, GeneratorType) else thing
    if isinstance(frame, FrameType):
        own = frame.f_code.co_filename.startswith(__file__.rpartition("referrers.py")[0])
        return own or any(frame is each for each in _stack())
    return type(thing).__name__ in ITERATORS


def _stack() -> Iterator[FrameType]:
    frame = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module_of(values: dict) -> str | None:
    name = values.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    return name if module is not None and vars(module) is values else None


def _is_from_history(path: str) -> bool:
    """IPython's own names for results: `_`, `_12`, `Out[12]`."""
    return path.startswith(("`_", "`Out["))
