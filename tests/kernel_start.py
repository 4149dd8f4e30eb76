"""Runs in the kernel of each lesson before its first cell, in the tests alone: gc passes over what that cell imports.

PyTorch and matplotlib have 400,000 objects. gc goes through them all several times during the imports, and whenever a
cell calls gc.collect() or measures memory, which takes 0.2 s each time. What later cells make it sees as always.
"""


def _until_torch_is_there(shell):
    import gc
    import sys

    def leave_out():
        if "torch" in sys.modules:
            shell.events.unregister("post_execute", leave_out)
            gc.freeze()
            gc.enable()

    gc.disable()
    shell.events.register("post_execute", leave_out)


_until_torch_is_there(get_ipython())  # noqa: F821
del _until_torch_is_there
