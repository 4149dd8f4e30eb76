"""Why tests of PyTorch fail on virtual GPUs: the beginning of a test's name -> the reason."""

from __future__ import annotations

# They look at the inside of CUDA.
INSIDES: dict[str, str] = {}
# Their own age, or what virtual GPUs do otherwise.
OTHERS: dict[str, str] = {}


def reason(test: str, reasons: dict[str, str]) -> str | None:
    """Why `test` ("Class.test_name") fails, if that is known."""
    name = test.rpartition(".")[2]
    return next((text for known, text in reasons.items() if name.startswith(known)), None)
