"""The variables of functions, read without keeping them alive.

Up to Python 3.12 `frame.f_locals` fills a dict that the frame then keeps: whoever looks at a running function so would
keep each of its tensors alive until it returns, even those that it deletes.
"""

import inspect
import sys
from collections.abc import Iterator
from types import FrameType


def running_frames() -> Iterator[FrameType]:
    """The frames of all threads, innermost first, without this package's. gc does not know what they refer to."""
    here = __file__.rpartition("frames.py")[0]
    for frame in list(sys._current_frames().values()):
        while frame is not None:
            if not frame.f_code.co_filename.startswith(here):
                yield frame
            frame = frame.f_back


def variables(frame: FrameType) -> dict[str, object]:
    """The local variables of a function by name; none for a module's frame, whose variables are a module's own."""
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return {}
    found = frame.f_locals
    copied = dict(found)
    if type(found) is dict:  # a snapshot, not the variables themselves
        found.clear()
    return copied
