"""Where in a program memory was taken: PyTorch's memory history keeps the stack of every allocation.

`remember_places()` switches it on. A place is shown as the innermost line that is not PyTorch's own.
"""

import linecache
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

MOST_EVENTS = 200_000  # per GPU, about a kilobyte each on the host; of a longer history the end is kept
UNKNOWN = "made before places were remembered"
_TORCH = str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_path("stdlib")


def remember_places() -> None:
    """Keep, from here on, the stack of every allocation on every GPU, and the history that PyTorch's viewer draws.

    Costs some microseconds per allocation. Raises RuntimeError without any GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("There is no GPU to watch. Call use_gpus first: `from helpers import use_gpus`.")
    torch.cuda.init()
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=MOST_EVENTS)


def forget_places() -> None:
    """Stop `remember_places`; without it, do nothing."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.memory._record_memory_history(None)


@contextmanager
def remembered() -> Iterator[None]:
    """Places are remembered inside, and afterwards only if they were before."""
    already = torch.cuda.is_available() and torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled()
    if not already:
        remember_places()
    try:
        yield
    finally:
        if not already:
            forget_places()


def place(frames: Sequence[dict]) -> str:
    """The innermost of `frames` (innermost first, as in a snapshot) that is not PyTorch's or Python's, in words."""
    for frame in frames:
        if not _is_foreign(frame["filename"]):
            code = linecache.getline(frame["filename"], frame["line"]).strip() or frame["name"]
            code = code if len(code) <= 60 else f"{code[:57]}..."
            inside = "" if frame["name"] == "<module>" else f" in {frame['name']}"
            return f"`{code}`{inside}{_file(frame)}"
    return UNKNOWN


def _is_foreign(filename: str) -> bool:
    own = filename.startswith((_TORCH, "<frozen", "??")) or filename in ("", "<string>")
    return own or (filename.startswith(_STDLIB) and "site-packages" not in filename)


def _file(frame: dict) -> str:
    """ " (helpers/models.py:12)"; nothing for a cell of a notebook, whose file has a name that nobody knows."""
    if "ipykernel" in frame["filename"] or frame["filename"].startswith("<"):
        return ""
    return f" ({'/'.join(Path(frame['filename']).parts[-2:])}:{frame['line']})"
