"""Which line of a program took memory: PyTorch's memory history keeps the stack of every allocation.

`remember_origins()` switches it on. An origin is shown as the innermost line that does not belong to PyTorch.
"""

import linecache
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

MOST_EVENTS = 200_000  # per GPU, about a kilobyte each on the host; of a longer history the end is kept
UNKNOWN = "made before remember_origins() was called"
_TORCH = str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_path("stdlib")


def remember_origins() -> None:
    """Keep, from here on, the stack of every allocation on every GPU, and the history that PyTorch's viewer draws.

    Costs some microseconds per allocation. Raises RuntimeError without any GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("There is no GPU to watch. Call use_gpus first: `from helpers import use_gpus`.")
    torch.cuda.init()
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=MOST_EVENTS)


@contextmanager
def origins_remembered() -> Iterator[None]:
    """Origins are remembered inside, and afterwards only if they were before."""
    already = torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled()
    if not already:
        remember_origins()
    try:
        yield
    finally:
        if not already:
            torch.cuda.memory._record_memory_history(None)


def origin(frames: Sequence[dict]) -> str:
    """The innermost of `frames` (innermost first, as in a snapshot) that is not PyTorch's or Python's, in words:
    "`x = net(x)` in train (scripts/train.py:12)". The file of a notebook's cell has no name that says anything."""
    for frame in frames:
        file = frame["filename"]
        foreign = file in ("", "<string>") or file.startswith((_TORCH, "<frozen", "??"))
        if foreign or (file.startswith(_STDLIB) and "site-packages" not in file):
            continue
        code = linecache.getline(file, frame["line"]).strip() or frame["name"]
        code = code if len(code) <= 60 else f"{code[:57]}..."
        inside = "" if frame["name"] == "<module>" else f" in {frame['name']}"
        in_a_cell = "ipykernel" in file or file.startswith("<")
        return f"`{code}`{inside}" + ("" if in_a_cell else f" ({'/'.join(Path(file).parts[-2:])}:{frame['line']})")
    return UNKNOWN
