"""The programs of docs/bugs.md: each fails on virtual GPUs as the page says, and runs once it is mended."""

import bugs
import pytest


@pytest.mark.parametrize("program", bugs.programs(), ids=lambda program: program.__name__)
def test_a_public_bug_is_found_and_its_mend_passes(program):
    with pytest.raises(Exception, match=".") as raised:
        bugs.run(program, "before")
    assert program.ERROR in f"{raised.typename}: {raised.value}"
    bugs.run(program, "after")
