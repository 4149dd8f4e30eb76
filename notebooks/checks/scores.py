"""What a learner has reached, kept from one session to the next in files that git ignores.

    add("solved", "lesson03", "combine")     # the names under "lesson03" in .progress/solved.json, with this one

Nothing is read, written or counted where the environment says COURSE_PROGRESS=off: stored lessons depend on no reader.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / ".progress"
_here: dict[str, dict[str, Any]] = {}  # of this process, by file


def read(name: str) -> dict[str, Any]:
    """The content of a file, by keys. A missing file is empty; a damaged one is set aside under another name."""
    found = _here.setdefault(name, {})
    path = FOLDER / f"{name}.json"
    if not is_off() and path.exists():
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            found.update(stored)
        except (ValueError, TypeError, OSError):
            with suppress(OSError):
                os.replace(path, path.with_suffix(".damaged"))
    return found


def write(name: str, content: dict[str, Any]) -> None:
    """Replace the file in one step. A folder that cannot be written to costs the score, not the lesson."""
    _here[name] = content
    if is_off():
        return
    unfinished = FOLDER / f"{name}.json.{os.getpid()}"
    with suppress(OSError):
        FOLDER.mkdir(exist_ok=True)
        unfinished.write_text(json.dumps(content, indent=1, sort_keys=True), encoding="utf-8")
        os.replace(unfinished, FOLDER / f"{name}.json")


def add(name: str, key: str, value: str) -> set[str]:
    """Add `value` to the names under `key`, and return them."""
    content = read(name)
    names = set(content.get(key, [])) | {value}
    write(name, content | {key: sorted(names)})
    return names


def is_off() -> bool:
    """Whether the environment says COURSE_PROGRESS=off."""
    return os.environ.get("COURSE_PROGRESS", "").lower() == "off"
