"""Python's garbage collector while a process of ours imports PyTorch.

Modules live as long as the process, PyTorch's have half a million objects, and gc goes through them several times while
they are imported and again when Python ends, which takes a fourth of the whole start and end.
"""

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def passing_over_torch() -> Iterator[None]:
    """No collection in the block, and later ones pass over what exists at its end. For a block that imports PyTorch.

    Does nothing if PyTorch has been imported before, or to a program that has switched gc off or frozen objects itself.
    """
    if "torch._C" in sys.modules or not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
