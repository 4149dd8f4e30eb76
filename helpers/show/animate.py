"""Makes an animated SVG of a recorded timeline: what each GPU does and holds, and what travels between the GPUs.

    with record_timeline(memory=True) as timeline:
        step()
    animate(timeline, title="A step of DataParallel")       # at the end of a cell

The picture plays by itself, without a script, and begins again. One moment stands still in print, and where motion is
switched off. It is an image inside text/html, which JupyterLab also shows in a notebook that nobody trusts yet.
"""

import base64
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from helpers.measure import format_bytes
from helpers.measure.timeline import Timeline, Work, describe_timeline
from helpers.show.style import COLOURS

CPU = -1  # in a `Travel`: the computer's memory
OTHERS = 1_000_000  # in a `Travel`: the GPUs of the job that are not in the recording
_SLOTS = 240  # moments that are told apart
_PLAYED = 0.93  # of the loop; then the end stands still
_SHORTEST = 0.035  # of the loop, that a block travels at least, or nobody would see it
_MOST_TRAVELS = 110
_STEADY = 3  # moments that a word stands at least
_READ = 14  # moments that a sentence stands at least
_SLOW, _MOST_SLOW = 0.06, 12  # transfers shorter than this share are shown slowly, if there are not more
_MOST_LINES = 60
_LEVEL = 0.02  # of the fullest GPU's peak: smaller changes of the memory are not shown
_TICKS = 120  # of the clock
_WIDTH, _CARD, _BUS, _LEFT, _RIGHT = 760, (12, 168), 172, 250, 746


class Travel(NamedTuple):
    """Something that travels in seconds `start` to `end` from GPU `source` to GPU `target`, `CPU` or `OTHERS`."""

    start: float
    end: float
    source: int
    target: int
    kind: str
    label: str = ""


class Animation:
    """An animated picture. `svg`: its text. `str(animation)`: what it shows, in words."""

    def __init__(self, svg: str, text: str):
        self.svg, self.text = svg, text

    def __str__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        data = base64.b64encode(self.svg.encode()).decode()
        style = "width:100%;max-width:760px;height:auto"
        image = f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(self.text)}" style="{style}">'
        return {"text/html": image, "text/plain": self.text}


_COMPUTING = ("forward", "backward", "step", "compute")
# What a GPU does: (colour, hatch). Collectives have their own names; those that add numbers look different.
_LOOKS = {
    "forward": (COLOURS[0], 0),
    "backward": (COLOURS[1], 1),
    "step": (COLOURS[2], 2),
    "compute": (COLOURS[0], 0),
    "copy": (COLOURS[3], 3),
    "waits": ("var(--idle)", 0),
}
_MOVES, _ADDS = (COLOURS[5], 5), (COLOURS[6], 6)
_HATCHES = {1: "M0 6L6 0", 2: "M1 3h1.5M4 0h1.5", 3: "M0 6L6 0M0 0L6 6", 5: "M0 3H6", 6: "M0 3H6M3 0V6"}
_STYLE = """
svg{--paper:#fff;--ink:#1a1a1a;--dim:#666;--idle:#dcdcdc;--line:#e3e3e3;--card:#f4f4f4;--mem:#8f8f8f;--veil:#fff}
@media(prefers-color-scheme:dark){svg{--paper:#16181c;--ink:#eee;--dim:#aaa;--idle:#3a3d44;--line:#33363c;--card:#23262c;
--mem:#8a8f99;--veil:#16181c}}
text{font:12px system-ui,sans-serif;fill:var(--ink)}.b,.b text{font-weight:600}
.d{fill:var(--dim);font-size:11px}
.c text{font-size:17px;font-weight:600;text-anchor:end;font-variant-numeric:tabular-nums}
.k{text-anchor:middle;font-size:11px}.s,.s text{font-size:13px}.v{fill:var(--veil);opacity:.4}
.n{paint-order:stroke;stroke:#fff;stroke-width:3px;fill:#111}
"""


def animate(
    timeline: Timeline | Sequence[Timeline] | Mapping[str, Timeline | Sequence[Timeline]],
    *,
    title: str,
    gpus: Iterable[int] | None = None,
    seconds: float = 14,
    memory: Mapping[int, Sequence[tuple[float, int]]] | None = None,
    travels: Sequence[Travel] | None = None,
    others: int = 0,
    cells: Mapping[int, Sequence[Sequence[float]]] | None = None,
    story: Mapping[str, str] | None = None,
) -> Animation:
    """Return the animated picture of a recording.

    timeline: of one process; a list with that of each rank, if they began together; or several of either by name, which
    are drawn below each other. gpus: which ones to draw; None for all. seconds: of one loop. memory: for each GPU
    (second, bytes), in order; None for what `record_timeline(memory=True)` recorded. travels: None for the copies and
    collectives of the recording; "send" goes to the next GPU. others: so many GPUs of the job are not in the recording.
    cells: for each GPU the values of the pieces that it holds, at the beginning and after each "recv".
    story: sentences that stand while something goes on, the first of several: a kind of work ("forward", "waits"), the
    name of a collective ("all-gather"), "copy", "to the GPU", "to the CPU", or copies "from GPU 0" and "to GPU 0".
    Raises ValueError if there is nothing to draw, or if the number of cells does not fit.
    """
    named = timeline if isinstance(timeline, Mapping) else {"": timeline}
    panels = [_Panel(name, each, gpus, memory, travels, others, cells or {}) for name, each in named.items()]
    if not panels or not all(panel.work for panel in panels):
        raise ValueError("There is nothing to animate, because a timeline does not contain any work of a GPU.")
    return _Drawing(panels, title, seconds, story or {}).animation()


class _Panel:
    """One recording, with all that is drawn of it. Times are in seconds."""

    def __init__(self, name, timeline, gpus, memory, travels, others, cells):
        ranks = [timeline] if isinstance(timeline, Timeline) else list(timeline)
        self.name, self.others = name, others
        self.seconds = max(rank.seconds for rank in ranks)
        self.modelled = all(rank.modelled for rank in ranks)
        wanted = None if gpus is None else set(gpus)
        self.work = [w for rank in ranks for w in rank.work if wanted is None or w.gpu in wanted]
        if {w.kind for w in self.work}.isdisjoint(("backward", "step")):  # no training
            self.work = [w._replace(kind="compute") if w.kind == "forward" else w for w in self.work]
        self.gpus = sorted({w.gpu for w in self.work})
        own = {gpu: rank.memory[gpu] for rank in ranks for gpu in rank.gpus if gpu in rank.memory}
        held = own if memory is None else memory
        self.memory = {gpu: held[gpu] for gpu in self.gpus if held.get(gpu)}
        self.travels = sorted(self._travels() if travels is None else travels)
        self.cells = {gpu: self._filled(gpu, states) for gpu, states in cells.items() if gpu in self.gpus}
        self.said = describe_timeline(Timeline(self.seconds, self.work, self.modelled))

    def _travels(self) -> list[Travel]:
        found, together = set(), {}
        for w in self.work:
            if w.kind == "collective":
                together.setdefault((_kind(w), round(w.end, 9)), []).append(w)
            elif w.kind == "copy":
                ends = [int(number) for number in re.findall(r"cuda:(\d+)", w.name)]
                one = (CPU, w.gpu) if w.name.startswith("to the GPU") else (w.gpu, CPU)
                found.add(Travel(w.start, w.end, *(ends if len(ends) == 2 else one), "copy", _label(w)))
        for (kind, _), members in together.items():
            start, end = max(w.start for w in members), members[0].end
            pairs = self._ways(kind, sorted({w.gpu for w in members}))
            found.update(Travel(start, end, source, target, kind) for source, target in pairs)
        return sorted(found | self._messages())

    def _filled(self, gpu: int, states: Sequence[Sequence[float]]) -> list[tuple[float, Sequence[float]]]:
        """(second, values of the pieces): a piece that arrives counts when the kernel that follows has used it."""
        mine = sorted((w for w in self.work if w.gpu == gpu), key=lambda w: w.end)
        arrived = [w.end for w in mine if _kind(w) == "receive"]
        if len(states) != 1 + len(arrived):
            raise ValueError(
                f"GPU {gpu} receives {len(arrived)} messages, so {len(states)} states of its cells do not fit."
            )
        kernels = [w for w in mine if w.kind in _COMPUTING]
        used = [next((w.end for w in kernels if w.start >= end - 1e-12), end) for end in arrived]
        return list(zip([0.0, *used], states, strict=True))

    def _messages(self) -> set[Travel]:
        """Those between ranks: the first that a GPU sends is the first that the next one receives, and so on."""
        found: set[Travel] = set()
        for gpu, after in zip(self.gpus, [*self.gpus[1:], *self.gpus[:1]], strict=True):
            if gpu == after:
                break
            sent = [w for w in self.work if w.gpu == gpu and _kind(w) == "send"]
            arrived = [w.end for w in self.work if w.gpu == after and _kind(w) == "receive"]
            ends = arrived if len(arrived) == len(sent) else [w.end for w in sent]
            found |= {Travel(w.start, end, gpu, after, "send", _label(w)) for w, end in zip(sent, ends, strict=True)}
        return found

    def _ways(self, kind: str, members: list[int]) -> list[tuple[int, int]]:
        """(source, target) of what a collective moves. Rings are drawn as they are: from each GPU to the next."""
        first, rest = members[0], members[1:]
        if self.others and len(members) == 1:
            arrives = [] if kind in ("reduce-scatter", "send") else [(OTHERS, first)]
            return arrives + ([] if kind in ("all-gather", "receive") else [(first, OTHERS)])
        if kind in ("send", "receive"):
            return []
        if kind in ("broadcast", "scatter"):
            return [(first, other) for other in rest]
        if kind in ("reduce", "gather"):
            return [(other, first) for other in rest]
        return list(zip(members, [*rest, first], strict=True)) if rest else []


def _kind(work: Work) -> str:
    """The word for what a GPU does: "forward", "copy" or "reduce-scatter"."""
    if work.kind != "collective":
        return work.kind
    word = work.name.split()[0].removesuffix("_coalesced").removesuffix("_tensor").replace("_", "-")
    return {"allgather": "all-gather", "allreduce": "all-reduce", "recv": "receive"}.get(word, word)


def _label(work: Work) -> str:
    """The end of the name that `name_work` gave: "3" of "addmm F3", "a" of "send Pa"."""
    found = re.search(r" [A-Z](\w{1,3})$", work.name)
    return found.group(1) if found else ""


def _look(kind: str) -> tuple[str, int]:
    return _LOOKS.get(kind, _ADDS if "reduce" in kind else _MOVES)


def _merged(travels: Sequence[Travel], seconds: float) -> list[Travel]:
    """The travels, those of one kind on one way joined where nobody could tell them apart, and few enough."""
    gap = _SHORTEST * seconds / 3
    while True:
        open_, found = {}, []
        for t in travels:
            way = t.source, t.target, t.kind, t.label
            before = open_.get(way)
            if before is not None and t.start - found[before].start < 3 * gap and t.start <= found[before].end + gap:
                found[before] = found[before]._replace(end=max(found[before].end, t.end))
            else:
                open_[way] = len(found)
                found.append(t)
        if len(found) <= _MOST_TRAVELS:
            return found
        gap *= 1.5


def _states(panel: _Panel, seconds: float) -> dict[int, list[str]]:
    """What each GPU does in each of `_SLOTS` moments: the kind that takes most of it, computing before transfers."""
    length = seconds / _SLOTS
    shares: dict = {gpu: [{} for _ in range(_SLOTS)] for gpu in panel.gpus}
    for w in panel.work:
        kind, weight = _kind(w), 1.0 if w.kind in _COMPUTING else 0.3
        for slot in range(int(w.start / length), min(_SLOTS - 1, int(w.end / length)) + 1):
            covered = min(w.end, (slot + 1) * length) - max(w.start, slot * length)
            each = shares[w.gpu][slot]
            each[kind] = each.get(kind, 0.0) + weight * max(0.0, covered)
    return {
        gpu: _lasting(
            [max(each, key=each.get) if sum(each.values()) > 0.1 * length else "waits" for each in row], _STEADY
        )
        for gpu, row in shares.items()
    }


def _runs(states: Sequence) -> list[tuple[int, object]]:
    """(first slot, state) of each run of equal states."""
    return [(i, state) for i, state in enumerate(states) if i == 0 or states[i - 1] != state]


class _Drawing:
    """Writes the picture. `still`: the moment that stands still where nothing moves, in seconds."""

    def __init__(self, panels: Sequence[_Panel], title: str, loop: float, story: Mapping[str, str]):
        self.panels, self.title, self.loop, self.story = panels, title, loop, story
        self.seconds = max(panel.seconds for panel in panels)
        self.slot = self.seconds / _SLOTS
        self.moved = [_merged(panel.travels, self.seconds) for panel in panels]
        self.states = [_states(panel, self.seconds) for panel in panels]
        self.played = self._pace()
        self.still = self._telling_moment()
        self.body: list[str] = []
        self.frames: list[str] = []
        self.rules: list[str] = []
        self.plays: list[str] = []
        self.words = self._words()
        # Several pictures may end up in one document, so that their names must differ.
        self.prefix = f"g{hashlib.sha256(self.words.encode()).hexdigest()[:4]}"
        self.blocks = sorted({t.kind for moved in self.moved for t in moved})

    # ---- time ----

    def _pace(self) -> list[float]:
        """The share of the loop that is over at the beginning of each slot. Few short transfers are shown slowly."""
        weights = [1.0] * _SLOTS
        short = [t for moved in self.moved for t in moved if t.end - t.start < _SLOW * self.seconds]
        spots = _joined([(t.start, t.end) for t in short], _SLOW * self.seconds / 8)
        for start, end in spots if len(spots) <= _MOST_SLOW else ():
            slots = range(int(start / self.slot), min(_SLOTS - 1, int(end / self.slot)) + 1)
            for slot in slots:
                weights[slot] = max(1.0, _SLOW * _SLOTS / len(slots))
        ends = [0.0, *itertools.accumulate(weights)]
        return [_PLAYED * end / ends[-1] for end in ends]

    def share(self, second: float) -> float:
        """The share of the loop, from 0 to 1, at which a modelled second is reached."""
        place = min(max(second / self.slot, 0.0), _SLOTS - 1e-9)
        before, after = self.played[int(place)], self.played[int(place) + 1]
        return before + (place - int(place)) * (after - before)

    def percent(self, second: float) -> str:
        return f"{100 * self.share(second):.5g}%"

    def at(self, slot: int) -> str:
        return f"{100 * self.played[slot]:.5g}%"

    def x(self, second: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * min(second, self.seconds) / self.seconds

    def _telling_moment(self) -> float:
        """When most is travelling; of several such moments, when the GPUs hold most, or the one in the middle."""
        moved = [t for each in self.moved for t in each]
        curves = [curve for panel in self.panels for curve in panel.memory.values()]
        if not moved:
            return max((point for curve in curves for point in curve), key=lambda point: point[1])[0] if curves else 0.0

        def held(moment: float) -> int:
            return sum(next((size for at, size in reversed(curve) if at <= moment), 0) for curve in curves)

        middles = sorted((t.start + t.end) / 2 for t in moved)
        middle = self.seconds / 2
        return max(middles, key=lambda m: (sum(t.start <= m <= t.end for t in moved), held(m), -abs(m - middle)))

    @property
    def still_slot(self) -> int:
        return min(_SLOTS - 1, int(self.still / self.slot))

    def moving(self, frames: Iterable[tuple[str, str]], still: str, how: str = "linear") -> str:
        """The name of a new class whose elements go through the keyframes; `still` is their style without motion."""
        name = f"{self.prefix}a{len(self.rules)}"
        self.frames.append(f"@keyframes {name}{{" + "".join(f"{at}{{{style}}}" for at, style in frames) + "}")
        self.rules.append(f".{name}{{{still}}}")
        timing = "" if how == "linear" else f";animation-timing-function:{how}"
        self.plays.append(f".{name}{{animation-name:{name}{timing}}}")
        return f"m {name}"

    def strip(
        self,
        box: tuple[float, float, float, float],
        parts: Sequence[str],
        spots: Sequence[tuple[int, int]],
        look: str = "",
    ) -> None:
        """Show one of `parts` in the box (x, y, width, height) from a slot on: (slot, number of part)."""
        x, y, width, height = box
        pitch = height + 4
        now = next(part for slot, part in reversed(spots) if slot <= self.still_slot)
        name = self.moving(
            [(self.at(slot), f"transform:translateY({-pitch * part:g}px)") for slot, part in spots],
            f"transform:translateY({-pitch * now:g}px)", "step-end",
        )  # fmt: skip
        placed = []
        for i, part in enumerate(parts):
            if part.startswith("<text"):
                placed.append(part.replace(' y="', f' y="{pitch * i:g}" dy="', 1))  # shorter than a group for each
            else:
                placed.append(f'<g transform="translate(0 {pitch * i:g})">{part}</g>')
        self.body.append(f'<svg x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{look}">'
                         f'<g class="{name}">{"".join(placed)}</g></svg>')  # fmt: skip

    # ---- the picture ----

    def animation(self) -> Animation:
        self._head()
        top = y = 62.0 if self.story else 38.0
        for number in range(len(self.panels)):
            y = self._panel(number, y)
        y = self._axis(top, y)
        plays = f".m{{animation:{self.loop:g}s linear infinite}}.v{{opacity:.72}}{''.join(self.plays)}"
        used = f"@media screen and (prefers-reduced-motion:no-preference){{{plays}}}"
        style = _STYLE + "".join(self.rules) + used + "".join(self.frames)
        looks = {hatch: colour for colour, hatch in (*_LOOKS.values(), _MOVES, _ADDS) if hatch}
        patterns = "".join(
            f'<pattern id="{self.prefix}h{hatch}" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<rect width="6" height="6" fill="{colour}"/>'
            f'<path d="{_HATCHES[hatch]}" stroke="#fff" stroke-opacity=".75"/></pattern>'
            for hatch, colour in looks.items()
        )
        blocks = [f'<g id="{self.prefix}b{n}"><rect x="-1" y="-9" width="18" height="18" rx="3" fill="var(--ink)"/>'
                  f'{_box(0, -8, 16, 16, kind)}</g>' for n, kind in enumerate(self.blocks)]  # fmt: skip
        title = escape(self.title)
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y:g}" role="img" aria-label="{title}">'
            f"<title>{title}</title><desc>{escape(self.words)}</desc><style>{style}</style>"
            f"<defs>{patterns}{''.join(blocks)}</defs>"
            f'<rect width="{_WIDTH}" height="{y:g}" rx="8" fill="var(--paper)"/>{"".join(self.body)}</svg>'
        )
        return Animation(svg.replace("url(#h", f"url(#{self.prefix}h"), self.words)

    def _head(self) -> None:
        self.body.append(f'<text x="12" y="22" class="b" style="font-size:15px">{escape(self.title)}</text>')
        how = "modelled" if all(panel.modelled for panel in self.panels) else "measured"
        self.body.append(f'<text x="652" y="22" class="d" text-anchor="end">{how} time</text>')
        ticks = [_ms(tick * self.seconds / _TICKS, self.seconds) for tick in range(_TICKS + 1)]
        texts = [f'<text x="90" y="18">{tick}</text>' for tick in ticks]
        spots = [(round(tick * _SLOTS / _TICKS), tick) for tick in range(_TICKS + 1)]
        self.strip((656, 4, 92, 24), texts, spots, "c")
        if self.story:
            keys = list(self.story)
            sentences = ["", *(f'<text y="15">{escape(each)}</text>' for each in self.story.values())]
            told = [next((keys.index(key) + 1 for key in keys if key in now), None) for now in self._topics()]
            self.strip(
                (12, 34, 736, 20), sentences, [(at, part or 0) for at, part in _runs(_lasting(told, _READ))], "s"
            )

    def _topics(self) -> list[set[str]]:
        """What goes on in each slot: the kinds of work and of transfers, and copies by their ends."""
        found = [{row[slot] for states in self.states for row in states.values()} for slot in range(_SLOTS)]
        for moved, panel in zip(self.moved, self.panels, strict=True):
            for t in moved:
                names = {t.kind}
                if t.kind == "copy":
                    first = panel.gpus[0]
                    ends = {t.source: "from", t.target: "to"}
                    names = {"to the GPU"} if t.source == CPU else {"to the CPU"} if t.target == CPU else {"copy"}
                    names |= {f"{ends[first]} GPU {first}"} if first in ends and CPU not in ends else set()
                for slot in range(int(t.start / self.slot), min(_SLOTS - 1, int(t.end / self.slot)) + 1):
                    found[slot] |= names
        return found

    def _panel(self, number: int, y: float) -> float:
        panel, states = self.panels[number], self.states[number]
        if panel.name:
            self.body.append(f'<text x="12" y="{y + 14:g}" class="b s">{escape(panel.name)}</text>')
            y += 22
        ends = {end for t in self.moved[number] for end in (t.source, t.target)}
        places: dict[int, float] = {}
        wires = len(self.body)
        self.body.append("")
        if CPU in ends:
            y = self._edge(places, CPU, "CPU", y)
        most = max((size for panel in self.panels for curve in panel.memory.values() for _, size in curve), default=0)
        for gpu in panel.gpus:
            curve = 0 if not panel.memory else 22 if len(panel.gpus) > 2 else 80
            height = 40 + curve if panel.memory or not panel.cells else 62
            places[gpu] = y + 17
            self._lane(panel, gpu, states[gpu], y, height)
            if gpu in panel.memory:
                self._memory(panel.memory[gpu], y, most, curve)
            if gpu in panel.cells:
                self._cells(panel.cells[gpu], y + 32)
            y += height + 6
        if OTHERS in ends:
            y = self._edge(places, OTHERS, f"{panel.others} other GPUs", y)
        if len(places) > 1:
            low, high = min(places.values()), max(places.values())
            self.body[wires] = "".join(
                f'<path d="M{_BUS + 16 + 17 * column} {low:g}V{high:g}" stroke="var(--line)" stroke-width="3"/>'
                for column in range(4 if len(places) > 2 else 1)
            )
        self._packets(self.moved[number], places)
        return y + 4

    def _edge(self, places: dict[int, float], key: int, name: str, y: float) -> float:
        left, right = _CARD
        self.body.append(f'<rect x="{left}" y="{y:g}" width="{right - left}" height="24" rx="5" fill="var(--card)"/>'
                         f'<text x="{left + 8}" y="{y + 16:g}" class="b">{name}</text>')  # fmt: skip
        places[key] = y + 12
        return y + 30

    def _lane(self, panel: _Panel, gpu: int, states: list[str], y: float, height: float) -> None:
        left, right = _CARD
        self.body.append(
            f'<rect x="{left}" y="{y:g}" width="{right - left}" height="{height}" rx="5" fill="var(--card)"/>'
            f'<text x="{left + 8}" y="{y + 21:g}" class="b">GPU {gpu}</text>'
            f'<rect x="{_LEFT}" y="{y:g}" width="{_RIGHT - _LEFT}" height="{height}" fill="var(--card)"/>'
        )
        kinds = sorted(set(states))
        spots = [(slot, kinds.index(kind)) for slot, kind in _runs(states)]
        self.strip((left + 60, y + 6, 90, 22), [_pill(kind) for kind in kinds], spots)
        rows: dict[tuple[str, str], list] = {}
        for w in panel.work:
            if w.gpu == gpu:
                label = _label(w) if w.kind in _COMPUTING else ""
                rows.setdefault((_kind(w), label), []).append((self.x(w.start), self.x(w.end)))
        for (kind, label), spans in sorted(rows.items(), key=lambda row: row[0][0] in _COMPUTING):
            large = kind in _COMPUTING
            for start, end in _joined(spans, 8 if label else 1.2):
                wide = end - start - (1 if label else 0)
                self.body.append(_box(start, y + (4 if large else 25), max(0.7, wide), 19 if large else 10, kind))
                if label and wide > 6 * len(label) + 3:
                    place = f'x="{(start + end) / 2:.1f}" y="{y + 17:g}" style="fill:{_ink(kind)}"'
                    self.body.append(f'<text {place} class="k">{label}</text>')

    def _memory(self, curve: Sequence[tuple[float, int]], y: float, most: int, high: float) -> None:
        """The bar with what lies in the memory now, and the curve below the work."""
        left, right = _CARD
        base = y + 38 + high
        levels, at, level = [], 0, curve[0][1]
        peak = max(size for _, size in curve)
        for slot in range(_SLOTS):
            highest = level
            while at < len(curve) and curve[at][0] <= (slot + 1) * self.slot:
                level = curve[at][1]
                highest = max(highest, level)
                at += 1
            shown = levels[-1] if levels else -most
            levels.append(highest if abs(highest - shown) > _LEVEL * most or highest == peak else shown)
        runs = [(slot, size / most) for slot, size in _runs(levels)]
        ends = [*(slot for slot, _ in runs[1:]), _SLOTS]
        points = "".join(
            f"V{base - high * share:.1f}H{self.x(end * self.slot):.1f}"
            for (_, share), end in zip(runs, ends, strict=True)
        )
        self.body.append(f'<path d="M{_LEFT},{base:g}{points}V{base:g}Z" fill="var(--mem)" opacity=".6"/>')
        full, x = right - left - 16, left + 8
        frames = [(self.at(slot), f"transform:scaleX({share:.3g})") for slot, share in runs]
        name = self.moving(frames, f"transform:scaleX({levels[self.still_slot] / most:.3g})", "step-end")
        mark = x + full * peak / most
        self.body.append(
            f'<rect x="{x}" y="{y + 33:g}" width="{full}" height="8" fill="var(--idle)"/>'
            f'<svg x="{x}" y="{y + 33:g}" width="{full}" height="8"><rect width="{full}" height="8" fill="var(--mem)" '
            f'class="{name}"/></svg><path d="M{mark:.1f} {y + 31:g}v12" stroke="var(--ink)"/>'
            f'<text x="{right - 8}" y="{y + 55:g}" class="d" text-anchor="end">peak {format_bytes(peak)}</text>'
        )
        texts = list(dict.fromkeys(format_bytes(size) for size in levels))
        spots = [(slot, texts.index(format_bytes(size))) for slot, size in _runs(levels)]
        self.strip((x, y + 43, 66, 16), [f'<text y="12">{text}</text>' for text in texts], spots, "b")

    def _cells(self, states: Sequence[tuple[float, Sequence[float]]], y: float) -> None:
        """The pieces that a GPU holds, each filled as far as its value is of the largest."""
        left, right = _CARD
        count, most = len(states[0][1]), max(max(values) for _, values in states) or 1
        wide = (right - left - 16) / count
        for piece in range(count):
            values = [values[piece] for _, values in states]
            parts = [
                f'<g><rect width="{wide - 3:.1f}" height="24" fill="var(--idle)"/>'
                f'<rect y="{24 - 24 * value / most:.1f}" width="{wide - 3:.1f}" height="{24 * value / most:.1f}" '
                f'fill="{COLOURS[5]}"/><text x="3" y="9" style="font-size:9px">{chr(97 + piece)}</text>'
                f'<text x="{wide / 2 - 1.5:.1f}" y="16" class="k b n">{value:g}</text></g>'
                for value in values
            ]
            spots = {min(_SLOTS - 1, round(second / self.slot)): n for n, (second, _) in enumerate(states)}
            self.strip((left + 8 + piece * wide, y, wide - 3, 24), parts, list(spots.items()))

    def _packets(self, moved: Sequence[Travel], places: Mapping[int, float]) -> None:
        lanes = list(places)
        lines = sum(t.kind == "copy" for t in moved) <= _MOST_LINES
        for t in moved:
            if t.source not in places or t.target not in places:
                continue
            near, far = sorted((lanes.index(t.source), lanes.index(t.target)))
            x = _BUS + 8 + 17 * ((near if far - near == 1 else far) % 4 if len(lanes) > 2 else 0)
            begin, end = places[t.source], places[t.target]
            if lines and t.kind == "copy" and CPU not in (t.source, t.target):
                self.body.append(f'<path d="M{self.x(t.start):.1f} {begin + 13:g}L{self.x(t.end):.1f} {end + 13:g}" '
                                 f'stroke="{_look(t.kind)[0]}"/>')  # fmt: skip
            first, last = self.share(t.start), self.share(t.end)
            last = max(last, min(first + _SHORTEST, 0.999))
            now = self.share(self.still)
            part = (now - first) / (last - first)
            still = f"opacity:1;transform:translateY({part * (end - begin):.0f}px)" if 0 <= part <= 1 else "opacity:0"
            a, b = (f"{100 * share:.5g}%" for share in (first, last))
            hop = f"transform:translateY({end - begin:g}px)"
            name = self.moving(
                [(f"0%,{a}", "opacity:0;transform:none"), (_later(a), "opacity:1"), (b, "opacity:1"),
                 (f"{_later(b)},to", "opacity:0;" + hop)], still)  # fmt: skip
            number = f'<text x="{x + 8}" y="{begin + 4:g}" class="k b n">{t.label}</text>' if t.label else ""
            block = f'<use href="#{self.prefix}b{self.blocks.index(t.kind)}" x="{x}" y="{begin:g}"/>'
            self.body.append(f'<g class="{name}">{block}{number}</g>')

    def _axis(self, top: float, y: float) -> float:
        """The veil over what has not happened yet, with the cursor; below, the axis and the legend. Returns the end."""
        wide, high = _RIGHT - _LEFT, y - top
        knots = [0, *(i for i in range(1, _SLOTS) if self._bends(i)), _SLOTS]
        frames = [(self.at(i), f"transform:translateX({wide * i / _SLOTS:.1f}px)") for i in knots]
        frames[-1] = frames[-1][0] + ",to", frames[-1][1]
        veil = self.moving(frames, f"transform:translateX({self.x(self.still) - _LEFT:.1f}px)")
        self.body.append(
            f'<svg x="{_LEFT}" y="{top:g}" width="{wide + 2}" height="{high:g}"><g class="{veil}">'
            f'<rect width="{wide}" height="{high:g}" class="v"/>'
            f'<rect x="-1" width="2" height="{high:g}" fill="var(--ink)"/></g></svg>'
        )
        step = next(s for e in range(-7, 4) for s in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if self.seconds / s <= 8)
        for tick in range(int(self.seconds / step) + 1):
            at = self.x(tick * step)
            self.body.append(f'<text x="{at:.1f}" y="{y + 10:g}" class="d k">{1e3 * tick * step:,.6g}</text>')
        self.body.append(f'<text x="{_LEFT - 6}" y="{y + 10:g}" class="d" text-anchor="end">ms</text>')
        kinds = {w for panel in self.panels for w in map(_kind, panel.work)} - {"receive"}
        order = [*_LOOKS, *sorted(kinds - _LOOKS.keys())]
        parts = [(kind, _box(0, 0, 12, 12, kind)) for kind in order if kind in kinds]
        if any(panel.memory for panel in self.panels):
            parts.append(("memory in use", '<rect y="3" width="12" height="7" fill="var(--mem)"/>'))
        x = 12.0
        for word, box in parts:
            self.body.append(
                f'<g transform="translate({x:g} {y + 22:g})">{box}<text x="16" y="10" class="d">{word}</text></g>'
            )
            x += 32 + 6.0 * len(word)
        return y + 44

    def _bends(self, slot: int) -> bool:
        before, here, after = self.played[slot - 1 : slot + 2]
        return abs(after - 2 * here + before) > 1e-9

    def _words(self) -> str:
        said = []
        for panel in self.panels:
            parts = [panel.said]
            if panel.memory:
                peaks = {gpu: max(size for _, size in curve) for gpu, curve in panel.memory.items()}
                parts.append("peak: " + ", ".join(f"cuda:{gpu} {format_bytes(size)}" for gpu, size in peaks.items()))
            if panel.travels:
                parts.append("what travels: " + ", ".join(_ways_in_words(panel.travels)))
            said.append((f"{panel.name}: " if panel.name else "") + " | ".join(parts) + ".")
        return "\n".join([f"{self.title}.", *self.story.values(), *said])


def _ways_in_words(travels: Sequence[Travel]) -> list[str]:
    """ "21 × broadcast from cuda:0 to 3 GPUs", for each kind."""
    names = {CPU: "the CPU", OTHERS: "the others"}
    groups: dict[tuple, list[Travel]] = {}
    for t in travels:
        groups.setdefault((t.kind, CPU in (t.source, t.target)), []).append(t)
    found = []
    for (kind, _), group in groups.items():
        ends = [sorted(set(each)) for each in zip(*((t.source, t.target) for t in group), strict=True)]
        said = [names.get(each[0], f"cuda:{each[0]}") if len(each) == 1 else f"{len(each)} GPUs" for each in ends]
        between = f"between {said[0]}" if len(ends[0]) > 1 and len(ends[1]) > 1 else f"from {said[0]} to {said[1]}"
        found.append(f"{len(group)} × {kind} {between}")
    return found


def _lasting(states: Sequence, least: int) -> list:
    """The states, each for at least so many moments, so that it can be read. None lasts as long as what was before."""
    found, since = list(states), 0
    for slot in range(1, len(found)):
        changes = found[slot] not in (None, found[slot - 1])
        if changes and slot - since >= least:
            since = slot
        else:
            found[slot] = found[slot - 1]
    return found


def _later(percent: str) -> str:
    return f"{min(100.0, float(percent[:-1]) + 0.01):.5g}%"


def _ms(second: float, whole: float) -> str:
    decimals = 0 if whole >= 0.1 else 1 if whole >= 0.01 else 2
    return f"{1e3 * second:,.{decimals}f} ms"


def _joined(spans: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    colour, hatch = _look(kind)
    fill = f"url(#h{hatch})" if hatch and width > 3 else colour
    return f'<rect x="{x:.4g}" y="{y:g}" width="{width:.3g}" height="{height:g}" fill="{fill}"/>'


def _ink(kind: str) -> str:
    return "#fff" if kind in ("forward", "compute", "step") else "var(--dim)" if kind == "waits" else "#111"


def _pill(kind: str) -> str:
    plain = f'<rect x="4" y="4" width="82" height="14" rx="3" fill="{_look(kind)[0]}"/>' if _look(kind)[1] else ""
    return f'{_box(0, 0, 90, 22, kind)}{plain}<text x="45" y="15" class="k" style="fill:{_ink(kind)}">{kind}</text>'
