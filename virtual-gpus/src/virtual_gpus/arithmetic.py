"""Whole numbers that rules of CUDA's kernels round: numbers of blocks, tiles and padded sizes."""


def ceil_div(n: int, unit: int) -> int:
    """How many units hold `n`."""
    return -(-n // unit)


def rounded_up(n: int, multiple: int) -> int:
    """`n` rounded up to a multiple."""
    return -(-n // multiple) * multiple


def power_of_2(n: int) -> int:
    """The largest power of 2 that is at most `n`; 1 if there is none."""
    return 1 << max(n.bit_length() - 1, 0)
