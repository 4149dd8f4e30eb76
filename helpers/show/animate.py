"""Makes an animated SVG of a recorded timeline: what each GPU does and holds, and what travels between the GPUs.

    with record_timeline(memory=True) as timeline:
        step()
    animate(timeline, title="A step of DataParallel")       # at the end of a cell

The picture plays by itself, without a script. In its style sheet, the number --t runs from 0 to 1, and each part that
appears or travels has a number --a at which it begins and a number --b at which it ends. In print, and where motion is
switched off, --t keeps its value of the most telling moment.
"""

import base64
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import NamedTuple

from helpers.gpus import merged
from helpers.measure import format_bytes
from helpers.measure.timeline import Timeline, Work, describe_timeline
from helpers.show.style import COLOURS, SVG_PATTERNS, SVG_STYLE, WORK

_MOMENTS = 150  # the picture tells so many moments apart
_STEADY, _READ = 2, 9  # moments for which a word and a sentence stay at least
_SHORTEST = 0.035  # of the time: a block travels at least so long, otherwise nobody would see it
_LEVEL = 0.02  # of the highest peak: smaller changes of the memory are not shown
_LEFT, _WIDE = 250, 496  # where the time axis begins, and its length
Recorded = Timeline | Sequence[Timeline]  # of one process, or of each rank
_COMPUTING = ("forward", "backward", "step", "compute")

_SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {high:g}" role="img" aria-label="{title}">
<title>{title}</title><desc>{words}</desc><style>{style}</style><defs>{defs}</defs>
<rect width="760" height="{high:g}" rx="8" fill="var(--paper)"/>
<text x="12" y="22" class="b" style="font-size:15px">{title}</text>
<text x="652" y="22" class="d" text-anchor="end">{how} time</text>{body}</svg>"""
_CARD = """<rect x="12" width="156" height="{high}" rx="5" fill="var(--card)"/>
<text x="20" y="21" class="b">GPU {gpu}</text><rect x="250" width="496" height="{high}" fill="var(--card)"/>"""
_MEMORY = """<path d="M250 60{steps}V60Z" fill="var(--memory)" opacity=".6"/>
<rect x="20" y="33" width="140" height="8" fill="var(--idle)"/>{levels}
<path d="M{mark:.1f} 31v12" stroke="var(--ink)"/>
<text x="160" y="55" class="d" text-anchor="end">peak {peak}</text>"""
_LEVEL_NOW = """<g {when}><rect x="20" y="33" width="{wide:.1f}" height="8" fill="var(--memory)"/>
<text x="20" y="55" class="b">{size}</text></g>"""
_VEIL = """<svg x="250" y="{y:g}" width="498" height="{high:g}"><g class="t">
<rect width="496" height="{high:g}" class="v"/><rect x="-1" width="2" height="{high:g}" fill="var(--ink)"/></g></svg>"""
_PILL = """<g id="pill-{kind}">{box}<rect x="4" y="4" width="82" height="14" rx="3" fill="{colour}"/>
<text x="45" y="15" class="k" fill="{ink}">{kind}</text></g>"""
_BLOCK = """<g id="block-{kind}"><rect x="-1" y="-9" width="18" height="18" rx="3" fill="var(--ink)"/>{box}</g>"""


@dataclass
class Animation:
    """An animated picture. `svg`: its text. `words`: what it shows. The latter is also `str(animation)`."""

    svg: str
    words: str

    def __str__(self) -> str:
        return self.words

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        # As an image inside text/html, JupyterLab also shows it in a notebook that is not trusted yet.
        data = base64.b64encode(self.svg.encode()).decode()
        style = "width:100%;max-width:760px"
        image = f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(self.words)}" style="{style}">'
        return {"text/html": image, "text/plain": self.words}


def animate(timeline: Recorded | Mapping[str, Recorded], *, title: str, story: Mapping[str, str] = {}) -> Animation:
    """Return the animated picture of a recording.

    timeline: of one process; a list with that of each rank, if they began together; or several of either by name, which
    are drawn below each other. If recorded with `memory=True`, the picture also shows what each GPU holds. story: a
    sentence for each kind of work ("forward", "all-gather"), shown while it goes on, the first of several. Raises
    ValueError if there is nothing to draw.
    """
    named = timeline if isinstance(timeline, Mapping) else {"": timeline}
    panels = {name: _joined(each) for name, each in named.items()}
    if not panels or not all(panel.work for panel in panels.values()):
        raise ValueError("There is nothing to animate, because a timeline does not contain any work of a GPU.")
    return _Picture(panels, story).animation(title)


class _Travel(NamedTuple):
    """Something that travels from GPU `source` to GPU `target` in the seconds `start` to `end`."""

    start: float
    end: float
    source: int
    target: int
    kind: str
    label: str = ""


def _joined(ranks: Recorded) -> Timeline:
    """Return one timeline of all ranks, in which the kind of each work is the word that the picture shows for it."""
    ranks = [ranks] if isinstance(ranks, Timeline) else ranks
    work = [w._replace(kind=_word(w)) for rank in ranks for w in rank.work]
    if {w.kind for w in work}.isdisjoint(("backward", "step")):  # no training
        work = [w._replace(kind="compute") if w.kind == "forward" else w for w in work]
    memory = {gpu: rank.memory[gpu] for rank in ranks for gpu in rank.gpus if rank.memory.get(gpu)}
    longest = max((rank.seconds for rank in ranks), default=0.0)
    return Timeline(longest, work, all(rank.modelled for rank in ranks), memory)


def _word(work: Work) -> str:
    """Return the word for what a GPU does, such as "forward", "copy" or "reduce-scatter"."""
    if work.kind != "collective":
        return work.kind
    name = work.name.split()[0].rstrip(",").removesuffix("_coalesced").removesuffix("_tensor").replace("_", "-")
    return {"allgather": "all-gather", "allreduce": "all-reduce", "recv": "receive"}.get(name, name)


def _label(work: Work) -> str:
    """Return the end of the name that `name_work` gave, for example "3" of "addmm F3"."""
    return "".join(re.findall(r" [A-Z]([0-9a-z]{1,3})$", work.name))


def _travels(timeline: Timeline) -> list[_Travel]:
    found, collectives = set(), defaultdict(list)
    after = dict(zip(timeline.gpus, [*timeline.gpus[1:], timeline.gpus[0]], strict=True))
    for w in timeline.work:
        if w.kind == "send":
            found.add(_Travel(w.start, w.end, w.gpu, after[w.gpu], "send", _label(w)))
        elif w.kind == "copy":
            ends = [int(number) for number in re.findall(r"cuda:(\d+)", w.name)]
            if len(ends) == 2:  # otherwise a copy from or to the CPU
                found.add(_Travel(w.start, w.end, *ends, "copy", _label(w)))
        elif w.kind not in (*_COMPUTING, "receive"):
            collectives[w.kind, round(w.end, 9)].append(w)
    for (kind, _), members in collectives.items():
        first, *rest = gpus = sorted({w.gpu for w in members})
        ways = zip(gpus, [*rest, first], strict=True)  # around a ring
        if kind in ("broadcast", "scatter"):
            ways = [(first, gpu) for gpu in rest]
        elif kind in ("reduce", "gather"):
            ways = [(gpu, first) for gpu in rest]
        start, end = max(w.start for w in members), members[0].end
        found.update(_Travel(start, end, source, target, kind) for source, target in ways if source != target)
    return sorted(found)


class _Picture:
    """Writes the SVG of several timelines. `parts`: its elements, from back to front."""

    def __init__(self, panels: Mapping[str, Timeline], story: Mapping[str, str]):
        self.panels, self.story, self.parts = panels, story, []
        self.seconds = max(panel.seconds for panel in panels.values())
        self.moment = self.seconds / _MOMENTS
        self.travels = {name: _travels(panel) for name, panel in panels.items()}
        self.most = max((_peak(curve) for panel in panels.values() for curve in panel.memory.values()), default=0)
        kinds = {w.kind for panel in panels.values() for w in panel.work}
        self.kinds = [*(kind for kind in _COMPUTING if kind in kinds), *sorted(kinds.difference(_COMPUTING))]

    def animation(self, title: str) -> Animation:
        self._add_clock_and_story()
        top = y = 62.0 if self.story else 38.0
        for name in self.panels:
            y = self._add_panel(name, y)
        y = self._add_axis_and_legend(top, y)
        words = self._words(title)
        svg = _SVG.format(
            high=y, title=escape(title), words=escape(words), defs=self._definitions(), body="".join(self.parts),
            how="modelled" if all(panel.modelled for panel in self.panels.values()) else "measured",
            style=SVG_STYLE.replace("STILL", f"{self._telling_moment() / self.seconds:.3f}"),
        )  # fmt: skip
        return Animation(svg, words)

    def _words(self, title: str) -> str:
        said = [f"{title}.", *self.story.values()]
        for name, panel in self.panels.items():
            parts = [describe_timeline(panel)]
            if panel.memory:
                peaks = [f"cuda:{gpu} {format_bytes(_peak(panel.memory[gpu]))}" for gpu in sorted(panel.memory)]
                parts.append("peak: " + ", ".join(peaks))
            if travels := Counter(t.kind for t in self.travels[name]):
                parts.append("what travels: " + ", ".join(f"{count} × {kind}" for kind, count in travels.items()))
            said.append((f"{name}: " if name else "") + " | ".join(parts) + ".")
        return "\n".join(said)

    def _telling_moment(self) -> float:
        """Return the second at which most travels; of several, the one closest to the middle."""
        travels = [t for each in self.travels.values() for t in each]
        middles = [(t.start + t.end) / 2 for t in travels] or [self.seconds / 2]
        return max(middles, key=lambda m: (sum(t.start <= m <= t.end for t in travels), -abs(m - self.seconds / 2)))

    def _definitions(self) -> str:
        """Return for each kind of work the pill on a GPU's card and the block that travels."""
        found = [SVG_PATTERNS]
        for kind in [*self.kinds, "waits"]:
            colour, _, ink = _look(kind)
            found.append(_PILL.format(kind=kind, box=_box(0, 0, 90, 22, kind), colour=colour, ink=ink))
            found.append(_BLOCK.format(kind=kind, box=_box(0, -8, 16, 16, kind)))
        return "".join(found)

    def x(self, second: float) -> float:
        return _LEFT + _WIDE * second / self.seconds

    def _add_clock_and_story(self) -> None:
        decimals = 0 if self.seconds >= 0.1 else 1 if self.seconds >= 0.01 else 2
        clock = [f"{1e3 * self.seconds * number / (_MOMENTS - 1):,.{decimals}f} ms" for number in range(_MOMENTS)]
        self.parts += [_text(746, 22, text, _while(*span, "c")) for *span, text in _runs(clock)]
        told = []
        for at in [(number + 0.5) * self.moment for number in range(_MOMENTS)]:
            now = {w.kind for panel in self.panels.values() for w in panel.work if w.start <= at <= w.end}
            told.append(next((sentence for kind, sentence in self.story.items() if kind in now), ""))
        self.parts += [_text(12, 49, text, _while(*span, "s")) for *span, text in _runs(_lasting(told, _READ))]

    def _add_panel(self, name: str, y: float) -> float:
        """Add a timeline from `y` on: a row for each GPU, and what travels. Returns where it ends."""
        panel, least, latest = self.panels[name], _SHORTEST * self.seconds, {}
        if name:
            self.parts.append(_text(12, y + 14, name, 'class="b s"'))
            y += 22
        rows = {}
        for gpu in panel.gpus:
            rows[gpu] = y + 17  # the middle of its upper line
            row, high = self._row(panel, gpu)
            self.parts.append(f'<g transform="translate(0 {y:g})">{row}</g>')
            y += high + 6
        wires = "".join(f"M{188 + 17 * column} {min(rows.values())}V{max(rows.values())}" for column in range(4))
        self.parts.append(f'<path d="{wires}" stroke="var(--line)" stroke-width="3"/>')
        for t in self.travels[name]:
            if t.start >= latest.get(t[2:], -least) + least:  # otherwise nobody could tell the two apart
                latest[t[2:]] = t.start
                self._add_travel(t, rows, max(t.end, t.start + least))
        return y + 4

    def _row(self, panel: Timeline, gpu: int) -> tuple[str, int]:
        """Return the card of a GPU with its work, and its height."""
        work, memory = [w for w in panel.work if w.gpu == gpu], panel.memory.get(gpu)
        high = 62 if memory else 40
        parts = [_CARD.format(high=high, gpu=gpu)]
        for *span, kind in _runs(_states(work, self.moment)):
            parts.append(f'<use href="#pill-{kind}" x="72" y="6" {_while(*span)}/>')
        rows = defaultdict(list)
        for w in work:
            computes = w.kind in _COMPUTING
            rows[computes, w.kind, _label(w) if computes else ""].append((self.x(w.start), self.x(w.end)))
        for (computes, kind, label), spans in sorted(rows.items()):
            for start, end in merged(spans, 8 if label else 1.2):
                wide = max(0.7, end - start - bool(label))
                parts.append(_box(start, 4 if computes else 25, wide, 19 if computes else 10, kind))
                if label and wide > 6 * len(label) + 1:
                    parts.append(_text((start + end) / 2, 17, label, f'class="k" fill="{_look(kind)[2]}"'))
        return "".join([*parts, self._memory(memory)] if memory else parts), high

    def _memory(self, curve: Sequence[tuple[float, int]]) -> str:
        """Return the bar with what the GPU holds now, and below its work the curve of the whole time."""
        times, peak, sizes = [at for at, _ in curve], _peak(curve), []
        for number in range(_MOMENTS):
            first, last = (bisect_right(times, each * self.moment) for each in (number, number + 1))
            highest = _peak(curve[max(0, first - 1) : last] or curve[:1])
            close = sizes and highest != peak and abs(highest - sizes[-1]) <= _LEVEL * self.most
            sizes.append(sizes[-1] if close else highest)
        steps = levels = ""
        for begin, end, size in _runs(sizes):
            steps += f"V{60 - 22 * size / self.most:.1f}H{_LEFT + _WIDE * end:.1f}"
            levels += _LEVEL_NOW.format(when=_while(begin, end), wide=140 * size / self.most, size=format_bytes(size))
        return _MEMORY.format(steps=steps, levels=levels, mark=20 + 140 * peak / self.most, peak=format_bytes(peak))

    def _add_travel(self, t: _Travel, rows: Mapping[int, float], until: float) -> None:
        """Add the block that travels between two rows, and for a copy between GPUs the line across the timeline."""
        begin, end, order = rows[t.source], rows[t.target], list(rows)
        near, far = sorted((order.index(t.source), order.index(t.target)))
        x = 180 + 17 * ((near if far - near == 1 else far) % 4)
        if t.kind == "copy":
            line = f"M{self.x(t.start):.1f} {begin + 13:g}L{self.x(t.end):.1f} {end + 13:g}"
            self.parts.append(f'<path d="{line}" stroke="{_look(t.kind)[0]}"/>')
        when = _while(t.start / self.seconds, min(until / self.seconds, 0.999), "m", f";--y:{end - begin:g}px")
        label = _text(x + 8, begin + 4, t.label, 'class="k b n"') if t.label else ""
        self.parts.append(f'<g {when}><use href="#block-{t.kind}" x="{x}" y="{begin:g}"/>{label}</g>')

    def _add_axis_and_legend(self, top: float, y: float) -> float:
        """Add the veil over what is yet to come, with the cursor, the axis, and the legend. Returns where they end."""
        self.parts.append(_VEIL.format(y=top, high=y - top))
        step = next(s for e in range(-7, 4) for s in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if self.seconds / s <= 8)
        ticks = [tick * step for tick in range(int(self.seconds / step) + 1)]
        self.parts += [_text(self.x(tick), y + 10, f"{1e3 * tick:,.6g}", 'class="d k"') for tick in ticks]
        self.parts.append(_text(226, y + 10, "ms", 'class="d"'))
        x = 12
        for kind in self.kinds:
            self.parts += [_box(x, y + 22, 12, 12, kind), _text(x + 16, y + 32, kind, 'class="d"')]
            x += 32 + 6 * len(kind)
        if self.most:
            self.parts.append(f'<rect x="{x}" y="{y + 25:g}" width="12" height="7" fill="var(--memory)"/>')
            self.parts.append(_text(x + 16, y + 32, "memory in use", 'class="d"'))
        return y + 44


def _peak(curve: Sequence[tuple[float, int]]) -> int:
    return max(size for _, size in curve)


def _states(work: Sequence[Work], moment: float) -> list[str]:
    """Return what a GPU does in each moment: the kind that takes most of it, computing before transfers."""
    shares = [Counter() for _ in range(_MOMENTS)]
    for w in work:
        weight = 1.0 if w.kind in _COMPUTING else 0.3
        for number in range(int(w.start / moment), min(_MOMENTS - 1, int(w.end / moment)) + 1):
            covered = min(w.end, (number + 1) * moment) - max(w.start, number * moment)
            shares[number][w.kind] += weight * max(0.0, covered)
    kinds = [max(each, key=each.get) if each.total() > 0.1 * moment else "waits" for each in shares]
    return _lasting(kinds, _STEADY)


def _lasting(states: Sequence[str], least: int) -> list[str]:
    """Return the states, each for at least `least` moments, so that it can be read. "" lasts as what was before."""
    found, since = list(states), 0
    for number in range(1, len(found)):
        if found[number] in ("", found[number - 1]) or number - since < least:
            found[number] = found[number - 1]
        else:
            since = number
    return found


def _runs(states: Sequence) -> Iterator[tuple[float, float, object]]:
    """Yield (begin, end, state) of each run of equal states, as shares of the time."""
    number = 0
    for state, run in groupby(states):
        begin, number = number, number + len(list(run))
        yield begin / _MOMENTS, number / _MOMENTS, state


def _while(begin: float, end: float, look: str = "", more: str = "") -> str:
    """Return the attributes of an element that is visible between two shares of the time. After the end, it stays."""
    return f'class="{f"w {look}".strip()}" style="--a:{begin:.4g};--b:{2 if end >= 1 else end:.4g}{more}"'


def _look(kind: str) -> tuple[str, int, str]:
    """Return the colour of a kind of work, the number of its hatch, and the colour of text on it."""
    if kind == "waits":
        return "var(--idle)", 0, "var(--dim)"
    number = WORK.get(kind, WORK["reduce" if "reduce" in kind else "collective"])
    return COLOURS[number], number, "#fff" if number in (0, 2) else "#111"


def _text(x: float, y: float, text: str, look: str) -> str:
    return f'<text x="{x:.4g}" y="{y:g}" {look}>{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    colour, hatch, _ = _look(kind)
    fill = f"url(#h{hatch})" if hatch and width > 3 else colour
    return f'<rect x="{x:.4g}" y="{y:g}" width="{width:.3g}" height="{height:g}" fill="{fill}"/>'
