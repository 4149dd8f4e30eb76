"""Readings as a table, on cards of another size; sizes in words and back."""

from dataclasses import replace

from helpers.measure import GiB, MiB, Reading, Readings, format_bytes

TWO = Readings(
    Reading(
        index=i, name="Card <X>", capacity=16 * GiB, allocated=3 * MiB + i, peak_allocated=5 * MiB,
        reserved=20 * MiB, peak_reserved=22 * MiB, driver_used=(500 + i) * MiB, driver_total=16 * GiB + MiB,
    )
    for i in range(2)
)  # fmt: skip
LARGEST = Reading(0, "GPU", *[900 * GiB] * 7)


def test_the_text_says_where_the_figures_come_from():
    table = (
        "Memory in MiB: 2 x Card <X>\n"
        "     ------------------- PyTorch (torch.cuda) -------------------  - driver (GPUtil) -\n"
        "GPU  allocated  peak allocated  reserved  peak reserved  capacity         used   total\n"
        "  0       3.00            5.00     20.00          22.00    16,384        500.0  16,385\n"
        "  1       3.00            5.00     20.00          22.00    16,384        501.0  16,385"
    )
    assert str(TWO) == repr(TWO) == table and str(Readings()) == "No readings yet."
    bare = Readings(replace(reading, driver_used=None, driver_total=None) for reading in TWO)
    assert all(line.split()[-2:] == ["-", "-"] for line in str(bare).splitlines()[3:])


def test_the_text_fits_into_a_cell():
    lines = str(Readings([LARGEST] * 3, "a rather long sentence about this " * 9)).splitlines()
    assert max(map(len, lines)) <= 110
    assert len({len(line) for line in lines[2:6]}) == 1  # right-aligned down to the last column


def test_a_slice_is_a_table_too():
    readings = Readings([Reading(i, "Card", GiB, 1, 1, 1, 1) for i in range(3)], "a note")
    assert isinstance(readings[1:], Readings) and "<0.01" in str(readings[1:])


def test_bytes_in_words():
    sizes = [0, 512, 1.25 * MiB, 12.34 * MiB, 1000 * MiB, 16.3 * GiB, 139.8 * GiB, None]
    words = ["0.00 MiB", "<0.01 MiB", "1.25 MiB", "12.3 MiB", "1,000 MiB", "16.3 GiB", "140 GiB", "unknown"]
    assert list(map(format_bytes, sizes)) == words
    assert format_bytes(2 * GiB, "MiB") == "2,048 MiB" and format_bytes(512 * MiB, "GiB") == "0.50 GiB"
