"""The versions of PyTorch that are supported. Does not import torch.

A new PyTorch begins here: ARCHITECTURE.md ("A new PyTorch") says how. A rule that changed has a name in the module that
follows it, with the version since which it holds: `git grep ': Version = '` finds them all.
"""

import re

Version = tuple[int, int]  # (major, minor)

OLDEST: Version = (2, 11)
NEWEST: Version = (2, 15)


def parse_version(text: str) -> Version:
    """The text "2.11", "2.11.0" or "2.11.0+cu130" as numbers. Raises ValueError if its memory rules are not known."""
    match = re.match(r"(\d+)\.(\d+)(?:[.+]|$)", str(text))
    version = match and (int(match[1]), int(match[2]))
    if not version or not OLDEST <= version <= NEWEST:
        oldest, newest = ("{}.{}".format(*v) for v in (OLDEST, NEWEST))
        raise ValueError(
            f"torch_version must be text from {oldest!r} to {newest!r}, for example '2.13', not {text!r}. "
            "The memory rules of other versions are not known."
        )
    return version
