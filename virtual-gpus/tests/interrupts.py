"""Interrupting code at a chosen moment: the worst that garbage collection and signals can do."""

import inspect
import sys


def press():
    """Ctrl-C."""
    raise KeyboardInterrupt


def interrupted_at(moment, action, interrupt, is_ours, unit="opcode"):
    """Run `action`, calling `interrupt` before the bytecode or line number `moment` of what `is_ours(code)`.
    unit: "opcode" or "line". Returns the name of the function that was interrupted, "" if there was no such moment."""
    count, place = 0, ""

    def trace(frame, event, _):
        nonlocal count, place
        if place:
            return None
        if not is_ours(frame.f_code):
            return trace
        frame.f_trace_opcodes = unit == "opcode"
        if event == unit:
            count += 1
            if count == moment:
                place = frame.f_code.co_name
                interrupt()
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # else Python 3.12 reports no opcodes the first time
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        assert interrupt is press
    finally:
        sys.settrace(before)
    return place


def interrupted_at_call(moment, action):
    """Run `action` with Ctrl-C at this moment of those in our code that a signal can hit, at none for -1. Those are the
    beginning of a function and the return of a call into C. Unlike a signal it hits the same places in every run.
    Returns the place, "" if there was no such moment, and how many moments there were."""
    count, place = 0, ""

    def note(frame, event, _):
        nonlocal count, place
        if event not in ("call", "c_return") or "virtual_gpus" not in frame.f_code.co_filename:
            return
        if event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR:
            return  # Python may be closing it, which is a call for a profile function, but no moment for a signal
        count += 1
        if count == moment:
            sys.setprofile(None)
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            press()

    before = sys.getprofile()
    try:
        sys.setprofile(note)
        action()
    except KeyboardInterrupt:
        assert place
    finally:
        sys.setprofile(before)
    return place, count
