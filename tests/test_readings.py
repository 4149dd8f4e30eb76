"""Readings as a table in text and in HTML, on cards of another size; sizes in words and back."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from helpers.measure.memory.readings import GiB, MiB, Reading, Readings, Refusal, format_bytes, to_bytes, with_capacity

TWO = Readings(
    Reading(
        index=i, name="Card <X>", capacity=16 * GiB, allocated=3 * MiB + i, peak_allocated=5 * MiB,
        reserved=20 * MiB, peak_reserved=22 * MiB, driver_used=(500 + i) * MiB, driver_total=16 * GiB + MiB,
        driver_load=0.25, driver_index=i,
    )
    for i in range(2)
)  # fmt: skip
LARGEST = Reading(0, "GPU", *[900 * GiB] * 7, driver_load=1.0, driver_index=11)


def changed(readings, **fields) -> Readings:
    return Readings(replace(reading, **fields) for reading in readings)


class Table(HTMLParser):
    """The cells of a table, row by row, as (tag, attributes, text); the tags that are open; the caption."""

    def __init__(self, html: str):
        super().__init__()
        self.rows, self.open, self.texts = [], [], {}
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append((tag, dict(attributes), ""))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + text
        if self.open[-1] in ("td", "th"):
            tag, attributes, _ = self.rows[-1][-1]
            self.rows[-1][-1] = (tag, attributes, text)


def test_the_text_says_where_the_figures_come_from():
    assert (
        str(TWO)
        == repr(TWO)
        == (
            "Memory in MiB: 2 x Card <X>\n"
            "     ------------------- PyTorch (torch.cuda) -------------------  - driver (GPUtil) -\n"
            "GPU  allocated  peak allocated  reserved  peak reserved  capacity   used   total  load\n"
            "  0       3.00            5.00     20.00          22.00    16,384  500.0  16,385   25%\n"
            "  1       3.00            5.00     20.00          22.00    16,384  501.0  16,385   25%"
        )
    )


def test_html_and_text_hold_the_same_figures():
    table = Table(TWO._repr_html_())
    assert [[cell for _, _, cell in row] for row in table.rows[1:]] == [
        ["allocated", "peak allocated", "reserved", "peak reserved", "capacity", "used", "total", "load"],
        ["0", "3.00", "5.00", "20.00", "22.00", "16,384", "500.0", "16,385", "25%"],
        ["1", "3.00", "5.00", "20.00", "22.00", "16,384", "501.0", "16,385", "25%"],
    ]
    assert table.texts["caption"] == "Memory in MiB: 2 x Card <X>" and table.open == []


def test_html_headings_belong_to_their_columns():
    table = Table(TWO._repr_html_())
    groups = [(cell, attributes["scope"], attributes.get("colspan")) for _, attributes, cell in table.rows[0]]
    assert groups == [
        ("GPU", "col", None), ("PyTorch (torch.cuda)", "colgroup", "5"), ("driver (GPUtil)", "colgroup", "3"),
    ]  # fmt: skip
    assert all(tag == "th" and attributes["scope"] == "col" for tag, attributes, _ in table.rows[1])
    for row in table.rows[2:]:
        assert row[0][0] == "th" and row[0][1]["scope"] == "row"
        assert all(tag == "td" and attributes["style"] == "text-align: right" for tag, attributes, _ in row[1:])


def test_colgroups_span_the_columns_there_are():
    for readings in (TWO, changed(TWO, driver_load=None), changed(TWO, driver_index=7)):
        html = readings._repr_html_()
        spans = [int(part.split('"')[0]) for part in html.split('<colgroup span="')[1:]]
        assert sum(spans) == len(Table(html).rows[-1])


def test_a_load_that_nobody_knows_has_no_column():
    assert "load" not in str(changed(TWO, driver_load=None))
    one = Readings([replace(TWO[0], driver_load=None), TWO[1]])
    assert [line.split()[-1] for line in str(one).splitlines()[2:]] == ["load", "-", "25%"]


def test_another_number_of_the_driver_has_a_column():
    other = changed(TWO, driver_index=3)
    assert "capacity  GPU   used" in str(other) and str(other).splitlines()[-1].split()[-4:-2] == ["3", "501.0"]
    assert str(TWO).count("GPU ") == 1 and str(other).count("GPU ") == 2


def test_without_driver_figures_its_columns_are_dashes():
    bare = changed(TWO, driver_used=None, driver_total=None, driver_load=None, driver_index=None)
    assert all(line.split()[-2:] == ["-", "-"] for line in str(bare).splitlines()[3:])
    assert "driver (GPUtil)" in str(bare)


@pytest.mark.parametrize("readings", [TWO, Readings([LARGEST] * 3, "a rather long sentence about this " * 9)])
def test_the_text_fits_into_a_cell(readings):
    lines = str(readings).splitlines()
    assert max(map(len, lines)) <= 88
    start = next(place for place, line in enumerate(lines) if line.startswith("GPU"))
    table = lines[start : start + 1 + len(readings)]
    assert len({len(line) for line in table}) == 1  # right-aligned down to the last column


def test_a_wide_table_has_headings_of_two_lines():
    """What two cards of a cluster that counts others show, below each other in 700 pixels."""
    readings = changed(TWO, driver_index=3, driver_total=80_000 * MiB)
    first, second = str(readings).splitlines()[2:4]
    assert first.split() == ["peak", "peak"] and second.split()[:5] == ["GPU", *["allocated"] * 2, *["reserved"] * 2]
    assert first.index("peak") + 4 == second.index("allocated", 10 + second.index("allocated")) + 9
    assert "peak allocated" in str(TWO)


def test_no_readings_yet():
    assert str(Readings()) == "No readings yet." and Readings()._repr_html_() == "<p>No readings yet.</p>"


def test_a_slice_is_a_table_too():
    readings = Readings([Reading(i, "Card", GiB, 1, 1, 1, 1) for i in range(3)], "a note")
    assert isinstance(readings[1:], Readings) and "<0.01" in str(readings[1:])


def test_the_same_figures_on_other_cards():
    smaller = with_capacity(Readings(TWO, "a note"), "12 GiB")
    assert smaller == changed(TWO, capacity=12 * GiB, driver_total=12 * GiB) and smaller.note == "a note"
    assert with_capacity(TWO, 12 * GiB) == smaller and with_capacity(TWO, None) is TWO
    assert with_capacity(changed(TWO, driver_total=None), GiB)[0].driver_total is None
    assert TWO[0].capacity == 16 * GiB


def test_a_run_that_stopped_is_not_moved_to_other_cards():
    stopped = changed(TWO, refused=Refusal(1, GiB, 16 * GiB, 0, 15 * GiB, 16 * GiB))
    with pytest.raises(ValueError, match="GPU 0 ran out of memory, so what this run needs is not known.*of 24.0 GiB"):
        with_capacity(stopped, "24 GiB")


def test_each_figure_has_its_own_edge():
    assert TWO[0].edge("driver_used") == 16 * GiB + MiB and TWO[0].edge("peak_reserved") == 16 * GiB
    assert replace(TWO[0], driver_total=None).edge("driver_used") == 16 * GiB


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0.00 MiB"), (512, "<0.01 MiB"), (1.25 * MiB, "1.25 MiB"), (12.34 * MiB, "12.3 MiB"),
        (1000 * MiB, "1,000 MiB"), (16.3 * GiB, "16.3 GiB"), (139.8 * GiB, "140 GiB"), (None, "unknown"),
    ],
)  # fmt: skip
def test_bytes_in_words(count, text):
    assert format_bytes(count) == text


def test_bytes_in_a_given_unit():
    assert format_bytes(2 * GiB, "MiB") == "2,048 MiB" and format_bytes(512 * MiB, "GiB") == "0.50 GiB"


@pytest.mark.parametrize(
    "text, count",
    [("12 GiB", 12 * GiB), ("11.91gib", round(11.91 * GiB)), ("12 GB", 12 * 10**9), ("512 bytes", 512),
     (" 1 KiB ", 1024), (7, 7)],
)  # fmt: skip
def test_words_in_bytes(text, count):
    assert to_bytes(text) == count


@pytest.mark.parametrize(
    "size, error", [("twelve", ValueError), ("12", ValueError), ("12 cards", ValueError), ("-1 GiB", ValueError),
                    (0, ValueError), (1.5, TypeError), (True, TypeError), (None, TypeError)],
)  # fmt: skip
def test_what_is_no_size_is_refused(size, error):
    with pytest.raises(error, match="GiB|less than one byte"):
        to_bytes(size)
