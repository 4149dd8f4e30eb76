"""The known limits that `help("virtual_gpus")` lists: another test shows what each says, or a program that is true."""

import re
from pathlib import Path

import pytest
import torch
import virtual_gpus as package
from measuring import recorded, rows_of_features, table
from virtual_gpus import virtual_gpus

LISTED = re.split(r"^- ", package.__doc__.partition("Known limits")[2], flags=re.MULTILINE)[1:]
LISTED = [" ".join(text.split()) for text in LISTED]
LIMITS = table("limits") | dict(rows_of_features("limits"))
PROGRAMS = [text for text in LIMITS.values() if "(" in text]


def test_every_known_limit_has_its_test():
    unknown = [text for text in LISTED if not any(text.startswith(begin) for begin in LIMITS)]
    gone = [begin for begin in LIMITS if not any(text.startswith(begin) for text in LISTED)]
    assert unknown == gone == []
    for place in {*LIMITS.values()} - {*PROGRAMS}:
        name, _, test = place.partition("::")
        path = next(Path(__file__).parent.rglob(name), Path(name)) if test else Path(__file__).parents[1] / name
        assert path.exists() and (not test or f"def {test}" in path.read_text(encoding="utf-8")), place


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_known_limit(program):
    with virtual_gpus(1):
        assert eval(program, {"torch": torch, "pytest": pytest, "recorded": recorded})
