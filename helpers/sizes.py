"""Bytes and numbers as text, and which integers are accepted. 1 GiB is 2^30 bytes and 1 MiB is 2^20 bytes."""

from numbers import Integral

MiB = 2**20
GiB = 2**30


def unit_of(count: float) -> tuple[int, str]:
    """Return the unit for `count` bytes, as its size in bytes and its name: GiB from 1 GiB on, otherwise MiB."""
    return (GiB, "GiB") if abs(count) >= GiB - MiB / 2 else (MiB, "MiB")


def format_bytes(count: float) -> str:
    """Format `count` bytes with at least three digits, in the unit of `unit_of`: "16.3 GiB"."""
    unit, name = unit_of(count)
    value = count / unit
    return f"{digits(value, 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2)} {name}"


def digits(value: float, decimals: int) -> str:
    """Format `value` with this number of decimals. A positive value that rounds to zero is "<0.01", others "0.00"."""
    if value > 0 and not round(value, decimals):
        return f"<{10**-decimals:g}"
    return f"{round(value, decimals) + 0:,.{decimals}f}"  # + 0, because -0.0 would keep its sign


def require_integer(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return `value`, an integer from `least` to `most`, as an int. Raises ValueError for others, and for a bool."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else least - 1
    if number < least or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise ValueError(f"{name}={value!r} must be an integer {bounds}.")
    return number


def number_of(count: int, things: str) -> str:
    """Return "1 GPU" or "2 GPUs" for "GPUs"."""
    return f"{count:,} {things.removesuffix('s') if count == 1 else things}"
