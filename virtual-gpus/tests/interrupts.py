"""Ctrl-C at a chosen moment."""

import contextlib
import sys


def interrupted_at(moment, action, is_ours, unit="opcode"):
    """Run `action`, with Ctrl-C before the bytecode or line number `moment` of what `is_ours(code)`.

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
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # else Python 3.12 reports no opcodes the first time
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            action()
    finally:
        sys.settrace(before)
    return place
