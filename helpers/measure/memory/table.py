"""Memory readings as a table, in text and in HTML: what PyTorch knows and what the driver sees, side by side."""

from collections.abc import Sequence
from html import escape
from textwrap import fill
from typing import NamedTuple

from helpers.measure.memory.sizes import MiB, digits

WIDTH = 88  # characters of the text table at most, for readings of less than 1 TiB: a notebook of 700 pixels
_PYTORCH = (
    ("allocated", "allocated"),
    ("peak allocated", "peak_allocated"),
    ("reserved", "reserved"),
    ("peak reserved", "peak_reserved"),
    ("capacity", "capacity"),
)
_DRIVER = (("used", "driver_used"), ("total", "driver_total"))


class _Group(NamedTuple):
    """Columns under one heading, which says where their figures come from; each column's own heading is its first."""

    heading: str
    columns: list[list[str]]


def as_text(readings) -> str:
    """The table in plain text, at most `WIDTH` characters wide; the note below it."""
    if not readings:
        return "No readings yet."
    groups = _groups(readings)
    rows = _as_rows(groups)
    if max(map(len, rows)) > WIDTH:
        rows = _as_rows([_folded(group) for group in groups])
    return "\n".join([fill(_caption(readings), WIDTH), *rows, *([fill(readings.note, WIDTH)] if readings.note else [])])


def as_html(readings) -> str:
    """The table in HTML, its headings marked as such for screen readers (scope, caption); the note below it."""
    if not readings:
        return "<p>No readings yet.</p>"
    groups = _groups(readings)
    columns = "".join(f'<colgroup span="{len(group.columns)}"></colgroup>' for group in groups)
    tops = "".join(_top(group) for group in groups)
    heads, *rows = zip(*(column for group in groups for column in group.columns), strict=True)
    heads = "".join(f'<th scope="col" {_RIGHT}>{head}</th>' for head in heads[1:])
    body = "".join(_row(*row) for row in rows)
    note = f"<p>{escape(readings.note)}</p>" if readings.note else ""
    return (
        f"<table><caption>{escape(_caption(readings))}</caption>{columns}"
        f"<thead><tr>{tops}</tr><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{note}"
    )


def _caption(readings) -> str:
    names = [reading.name for reading in readings]
    return "Memory in MiB: " + ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _groups(readings) -> list[_Group]:
    groups = [
        _Group("", [["GPU", *(str(reading.index) for reading in readings)]]),
        _Group("PyTorch (torch.cuda)", _sizes(readings, _PYTORCH)),
        _Group("driver (GPUtil)", _sizes(readings, _DRIVER)),
    ]
    driver = groups[-1].columns
    if any(reading.driver_index not in (None, reading.index) for reading in readings):  # it counts other cards
        driver.insert(0, ["GPU", *("-" if r.driver_index is None else str(r.driver_index) for r in readings)])
    if any(reading.driver_load is not None for reading in readings):
        driver.append(["load", *("-" if r.driver_load is None else f"{r.driver_load:.0%}" for r in readings)])
    return groups


def _sizes(readings, fields: Sequence[tuple[str, str]]) -> list[list[str]]:
    return [[heading, *_in_mib([getattr(each, field) for each in readings])] for heading, field in fields]


def _in_mib(values: list[int | None]) -> list[str]:
    """One column with the same number of decimals throughout, so that the digits line up."""
    largest = max((value or 0 for value in values), default=0) / MiB
    decimals = 0 if largest >= 1000 else 1 if largest >= 100 else 2
    return ["-" if value is None else digits(value / MiB, decimals) for value in values]


def _as_rows(groups: Sequence[_Group]) -> list[str]:
    return ["  ".join(row).rstrip() for row in zip(*map(_as_lines, groups), strict=True)]


def _folded(group: _Group) -> _Group:
    """The same with headings of two lines: "peak" above "allocated"."""
    return group._replace(columns=[[*_two_lines(heading), *cells] for heading, *cells in group.columns])


def _two_lines(heading: str) -> tuple[str, str]:
    first, _, second = heading.rpartition(" ")
    return first, second


def _as_lines(group: _Group) -> list[str]:
    """The group's heading in a rule over its columns, and its rows, all of the same width."""
    columns = [[cell.rjust(max(map(len, column))) for cell in column] for column in group.columns]
    rows = ["  ".join(row) for row in zip(*columns, strict=True)]
    width = max(len(rows[0]), len(group.heading) + 4 if group.heading else 0)
    return [f" {group.heading} ".center(width, "-") if group.heading else " " * width, *(r.rjust(width) for r in rows)]


_RIGHT = 'style="text-align: right"'


def _top(group: _Group) -> str:
    if not group.heading:
        return f'<th scope="col" rowspan="2" {_RIGHT}>{group.columns[0][0]}</th>'
    return f'<th scope="colgroup" colspan="{len(group.columns)}" style="text-align: center">{group.heading}</th>'


def _row(first: str, *others: str) -> str:
    cells = "".join(f"<td {_RIGHT}>{escape(cell)}</td>" for cell in others)
    return f'<tr><th scope="row" {_RIGHT}>{first}</th>{cells}</tr>'
