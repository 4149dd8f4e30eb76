"""A picture of boxes, lines and texts that is drawn twice from one description: as SVG within a millisecond, for panels
that change while one looks, and as PNG, for the notebook's file.

    scene = Scene(700, 120, words="GPU 0 holds 3 GiB")
    scene.box(10, 10, 300, 20, Look("#0072B2", "////"))
    scene.text(315, 24, "3.00 GiB")
    scene.svg(), scene.png()

Coordinates are pixels, y downwards. Why not matplotlib alone: a picture of eight GPUs takes it 0.1 to 0.2 s on a quiet
laptop, and five times that on a busy one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from io import BytesIO

_numbers = itertools.count()  # hatches need names that no other picture of the page has
_FONT = "DejaVu Sans, Verdana, Arial, sans-serif"
_TILE = 8  # pixels after which a hatch repeats
_STRIPES = {
    "////": "M-2,2 L2,-2 M0,8 L8,0 M6,10 L10,6",
    "\\\\\\\\": "M-2,6 L2,10 M0,0 L8,8 M6,-2 L10,2",
    "xxxx": "M0,0 L8,8 M0,8 L8,0",
    "----": "M0,2 H8 M0,6 H8",
    "||||": "M2,0 V8 M6,0 V8",
    "++++": "M0,4 H8 M4,0 V8",
    "....": "M2,2 h.01 M6,6 h.01",  # ends that are round make dots of lines without length
}


@dataclass(frozen=True)
class Look:
    """A box's colour, its white hatch (matplotlib's letters, four times), and the colour of its edge."""

    colour: str
    hatch: str = ""
    edge: str = "none"


@dataclass(frozen=True)
class _Box:
    x: float
    y: float
    width: float
    height: float
    look: Look


@dataclass(frozen=True)
class _Line:
    xs: Sequence[float]
    ys: Sequence[float]
    colour: str
    width: float
    dotted: bool


@dataclass(frozen=True)
class _Text:
    x: float
    y: float
    text: str
    size: float
    anchor: str
    bold: bool
    halo: bool


@dataclass
class Scene:
    """A picture of `width` x `height` pixels; `words` say the same, for those who cannot see it."""

    width: float
    height: float
    words: str = ""
    _parts: list = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, look: Look) -> None:
        """A filled rectangle; its upper left corner is (x, y)."""
        if width > 0 and height > 0:
            self._parts.append(_Box(x, y, width, height, look))

    def line(self, xs: Sequence[float], ys: Sequence[float], colour="black", width=1.0, dotted=False) -> None:
        """A line through points."""
        self._parts.append(_Line(tuple(xs), tuple(ys), colour, width, dotted))

    def text(self, x: float, y: float, text: str, size=12, anchor="start", bold=False, halo=False) -> None:
        """A text whose base line begins, ends or has its middle ("start", "end", "middle") at (x, y).

        `halo`: on white, where it may lie on something.
        """
        self._parts.append(_Text(x, y, text, size, anchor, bold, halo))

    def svg(self) -> str:
        """The picture as an <svg> element, with `words` as its label."""
        number = next(_numbers)
        looks = dict.fromkeys(p.look for p in self._parts if isinstance(p, _Box) and p.look.hatch)
        names = {look: f"hatch-{number}-{place}" for place, look in enumerate(looks)}
        patterns = "".join(_pattern(look, name) for look, name in names.items())
        parts = "".join(_svg(part, names) for part in self._parts)
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(self.words)}" '
            f'font-family="{_FONT}" style="display:block;max-width:100%;height:auto"><defs>{patterns}</defs>'
            f'<rect width="100%" height="100%" fill="white"/>{parts}</svg>'
        )

    def png(self) -> bytes:
        """The picture as a PNG file: the same bytes each time."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(self.width / 100, self.height / 100), dpi=100)
        FigureCanvasAgg(figure)  # not pyplot's, which belongs to the main thread
        ax = figure.add_axes((0, 0, 1, 1))
        ax.set(xlim=(0, self.width), ylim=(self.height, 0))
        ax.axis("off")
        for order, part in enumerate(self._parts):
            _draw(ax, part, order)
        file = BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
        return file.getvalue()


def _pattern(look: Look, name: str) -> str:
    tile = f'id="{name}" width="{_TILE}" height="{_TILE}" patternUnits="userSpaceOnUse"'
    width = 2.2 if look.hatch == "...." else 1
    return (
        f'<pattern {tile}><rect width="{_TILE}" height="{_TILE}" fill="{look.colour}"/>'
        f'<path d="{_STRIPES[look.hatch]}" stroke="white" stroke-width="{width}" stroke-linecap="round"/></pattern>'
    )


def _svg(part, names: dict[Look, str]) -> str:
    if isinstance(part, _Box):
        fill = f"url(#{names[part.look]})" if part.look in names else part.look.colour
        place = f'x="{part.x:.1f}" y="{part.y:.1f}" width="{part.width:.2f}" height="{part.height:.1f}"'
        return f'<rect {place} fill="{fill}" stroke="{part.look.edge}"/>'
    if isinstance(part, _Line):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(part.xs, part.ys, strict=True))
        dots = ' stroke-dasharray="2 3"' if part.dotted else ""
        return f'<polyline points="{points}" fill="none" stroke="{part.colour}" stroke-width="{part.width}"{dots}/>'
    weight = ' font-weight="bold"' if part.bold else ""
    halo = ' stroke="white" stroke-width="4" paint-order="stroke" stroke-linejoin="round"' if part.halo else ""
    place = f'x="{part.x:.1f}" y="{part.y:.1f}" font-size="{part.size:g}" text-anchor="{part.anchor}"'
    return f"<text {place}{weight}{halo}>{escape(part.text)}</text>"


def _draw(ax, part, order: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    if isinstance(part, _Box):
        look = part.look
        edge = "white" if look.hatch else look.edge  # matplotlib draws hatches in the colour of the edge
        style = {"facecolor": look.colour, "hatch": look.hatch, "edgecolor": edge, "zorder": order}
        width = 0 if edge in ("white", "none") else 0.72
        ax.add_patch(Rectangle((part.x, part.y), part.width, part.height, linewidth=width, **style))
    elif isinstance(part, _Line):
        style = (0, (2, 3)) if part.dotted else "-"
        ax.add_line(Line2D(part.xs, part.ys, color=part.colour, lw=0.72 * part.width, ls=style, zorder=order))
    else:
        align = {"start": "left", "end": "right", "middle": "center"}[part.anchor]
        effects = [withStroke(linewidth=2.9, foreground="white")] if part.halo else None
        ax.text(part.x, part.y, part.text, fontsize=0.72 * part.size, ha=align, va="baseline", zorder=order,
                fontweight="bold" if part.bold else "normal", path_effects=effects, parse_math=False)  # fmt: skip
