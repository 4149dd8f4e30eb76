"""Interrupting code at a chosen moment: the worst that garbage collection and signals can do."""

import sys


def press():
    """Ctrl-C."""
    raise KeyboardInterrupt


def interrupted_at(moment, action, interrupt, is_ours, unit="opcode"):
    """Run `action`, calling `interrupt` before the bytecode or line number `moment` of what `is_ours(code)`.

    unit: "opcode" or "line". Returns the name of the function that was interrupted, "" if there was no such moment.
    """
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
