"""The programs of docs/bugs.md: each fails on virtual GPUs as the page says, and runs once it is mended."""

from pathlib import Path

import bugs
import pytest


@pytest.mark.parametrize("program", bugs.programs(), ids=lambda program: program.__name__)
def test_a_public_bug_is_found_and_its_mend_passes(program):
    with pytest.raises(Exception, match=".") as raised:
        bugs.run(program, "before")
    assert program.ERROR in f"{raised.typename}: {raised.value}"
    bugs.run(program, "after")
    page = Path(bugs.__file__).parents[1] / "docs" / "bugs.md"
    assert program.__doc__.split("Thread: ")[1].split()[0] in page.read_text(encoding="utf-8")
