"""Figures that are data, in TOML files: each with its unit and where it comes from. No torch here.

    read("kinds/H200.toml")["sheet"]["bandwidth"]      # 4.8e12: bytes per second

A figure is a table `{ value = 4_800, unit = "GB/s", source = "H200 data sheet" }`. In the result, it is a number in
base units: bytes, seconds, operations per second, or a fraction. A table can have one `source` for its numbers, and
their `units` by their names. Then a figure is only its number.

- kinds/*.toml: one GPU each. The name of the file is the name of the kind.
- architectures.toml: what all kinds of a compute capability have.
- links.toml: links between GPUs, and networks between machines.
- host.toml: what it costs the host to issue work.
- operators.toml: what operators take that several features have on the way.

What operators take is beside the feature that has them (`beside`), mostly in these terms. "Fitted" means to a real H200
(torch 2.11): to the kernels of nine training steps by operator, and to single operators. `python -m benchmarks.clock`
compares. "timm" is explained in features/conv/figures.toml. A "shortest kernel" is one of the GPU, and "the speed" that
at which an addition reads and writes. kernels: how many the host starts, 1 if a row does not say.
"""

import functools
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}  # fmt: skip
_TIMES = {unit: SIZES[unit] for unit in ("B", "KiB", "MiB", "GiB")}
_TIMES |= {"MB/s": 1e6, "GB/s": 1e9, "Gbit/s": 1e9 / 8, "TFLOP/s": 1e12, "SM": 1}
_PARTS = {"us": 1e6, "ns": 1e9}  # of a second
_FIGURE = {"value", "unit", "source"}


@functools.cache
def read(name: str) -> dict[str, Any]:
    """The tables of a file, by its path from this folder. They are not to be changed.

    Raises ValueError for a figure without a unit or a source, and for an unknown unit.
    """
    return _converted(tomllib.loads((FOLDER / name).read_text(encoding="utf-8")), name, {}, "")


def beside(module: str) -> dict[str, Any]:
    """The figures, or names, of a module, which gives its `__file__`: those of NAME.toml beside NAME.py, or else of
    `figures.toml` in its folder, which is a feature's. Raises as `read`."""
    own = Path(module).with_suffix(".toml")
    return read(str(own if own.exists() else own.with_name("figures.toml")))


def _converted(part: Any, where: str, units: dict[str, str], source: str) -> Any:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and "value" not in part:
        units, source = part.get("units", units), part.get("source", source)
        parts = ((key, value) for key, value in part.items() if key not in ("units", "source"))
        return {key: _converted(value, f"{where}: {key}", units, source) for key, value in parts}
    if not isinstance(part, dict):
        part = dict[str, Any](value=part, unit=units.get(where.rpartition(": ")[2], ""), source=source)
    if part.keys() != _FIGURE or not part["unit"] or not part["source"]:
        raise ValueError(f"{where}: a figure needs a value, a unit and a source, not {part}.")
    value, unit = part["value"], part["unit"]
    if unit in _PARTS:
        return value / _PARTS[unit]
    if unit in _TIMES:
        return value * _TIMES[unit]
    if not unit.startswith("of "):  # a fraction, or a number of something that the unit names
        raise ValueError(f"{where}: the unit {unit!r} is unknown. Use {', '.join([*_TIMES, *_PARTS])}, or 'of ...'.")
    return value
