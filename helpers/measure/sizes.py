"""Bytes in words: "16.3 GiB". GiB is 2^30 bytes and MiB 2^20, everywhere in the course."""

MiB = 2**20
GiB = 2**30


def unit_of(count: float) -> tuple[int, str]:
    """The unit in which figures and axes give `count` bytes, as bytes and name: GiB from 1 GiB on, otherwise MiB."""
    return (GiB, "GiB") if abs(count) >= GiB else (MiB, "MiB")


def format_bytes(count: float | None, unit: str | None = None) -> str:
    """`count` bytes with three digits or more and a unit: "1.25 MiB", "16.3 GiB"; in `unit` if given."""
    if count is None:
        return "unknown"
    unit = unit or unit_of(count)[1]
    value = count / {"GiB": GiB, "MiB": MiB}[unit]
    return f"{digits(value, 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2)} {unit}"


def digits(value: float, decimals: int) -> str:
    """`value` with so many decimals. A value that would show as zero and is not zero is "<0.01"."""
    smallest = 10**-decimals
    return f"<{smallest:g}" if 0 < value < smallest / 2 else f"{value:,.{decimals}f}"
