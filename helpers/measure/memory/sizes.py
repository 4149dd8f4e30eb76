"""Bytes in words and back: "16.3 GiB". GiB is 2^30 bytes, MiB 2^20, everywhere in the course."""

import re

MiB = 2**20
GiB = 2**30
UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": MiB, "GiB": GiB, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def unit_of(count: float) -> tuple[int, str]:
    """The unit in which figures and axes give `count` bytes: its bytes and its name, GiB from 1 GiB on, else MiB."""
    return (GiB, "GiB") if abs(count) >= GiB else (MiB, "MiB")


def format_bytes(count: float | None, unit: str | None = None) -> str:
    """`count` bytes with three digits or more and a unit: "1.25 MiB", "16.3 GiB"; in `unit` if given."""
    if count is None:
        return "unknown"
    unit = unit or unit_of(count)[1]
    value = count / {"GiB": GiB, "MiB": MiB}[unit]
    return f"{digits(value, 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2)} {unit}"


def digits(value: float, decimals: int) -> str:
    """`value` with so many decimals; one that would show as zero and is not: "<0.01"."""
    smallest = 10**-decimals
    return f"<{smallest:g}" if 0 < value < smallest / 2 else f"{value:,.{decimals}f}"


def to_bytes(size: int | str) -> int:
    """Bytes of a whole number of bytes, or of text such as "12 GiB" (2^30) or "12GB" (10^9).

    Raises ValueError for other text and for less than one byte, TypeError for other types.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f'{size!r} is no size: give a whole number of bytes, or text such as "12 GiB".')
    count = _read(size) if isinstance(size, str) else size
    if count < 1:
        raise ValueError(f"{size!r} is less than one byte.")
    return count


def _read(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    unit = {name.lower(): size for name, size in UNITS.items()}.get(match[2].lower()) if match else None
    if unit is None:
        raise ValueError(
            f'Cannot read {text!r} as a size: write a number and one of {", ".join(UNITS)}, as in "12 GiB".'
        )
    return round(float(match[1]) * unit)
