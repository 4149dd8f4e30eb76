"""Files that are written in one step."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under another name and rename it: a file that exists is complete. Text is written as UTF-8."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(unfinished, path)
