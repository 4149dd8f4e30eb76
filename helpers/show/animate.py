"""Makes an animated SVG of a recorded timeline: what each GPU does and holds, and what travels between the GPUs.

    with record_timeline(memory=True) as timeline:
        step()
    animate(timeline, title="A step of DataParallel")       # at the end of a cell

The picture plays by itself, without a script, and begins again. A moment of it stands still where motion is switched off,
and in print. It is an image inside text/html, which JupyterLab also shows in a notebook that nobody has trusted yet.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from helpers.measure import format_bytes
from helpers.measure.timeline import Timeline, Work, describe_timeline, format_time
from helpers.show.style import COLOURS

CPU = -1  # in a `Travel`: the computer's memory
OTHERS = 1_000_000  # in a `Travel`: the GPUs of the job that are not in the recording
_SLOTS = 240  # moments that are told apart
_PLAYED = 0.93  # of the loop; then the end stands still
_SHORTEST = 0.035  # of the loop, that a block travels at least, or nobody would see it
_MOST_TRAVELS = 110
_WIDTH, _CARD, _BUS, _LEFT, _RIGHT = 760, (12, 168), (172, 240), 248, 746


class Travel(NamedTuple):
    """Something that travels in seconds `start` to `end` from GPU `source` to GPU `target`, `CPU` or `OTHERS`."""

    start: float
    end: float
    source: int
    target: int
    kind: str


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


# kind: (colour, hatch, word)
_LOOKS = {
    "forward": (COLOURS[0], 0, "forward"),
    "backward": (COLOURS[1], 1, "backward"),
    "step": (COLOURS[2], 2, "step"),
    "copy": (COLOURS[3], 3, "copy"),
    "gather": (COLOURS[5], 5, "all-gather"),
    "reduce": (COLOURS[6], 6, "reduce"),
    "collective": (COLOURS[5], 5, "collective"),
    "idle": ("var(--idle)", 0, "waits"),
}
_HATCHES = {1: "M0 6L6 0", 2: "M1 3h1.5M4 0h1.5", 3: "M0 6L6 0M0 0L6 6", 5: "M0 3H6", 6: "M0 3H6M3 0V6"}
_STYLE = """
svg{--paper:#fff;--ink:#1a1a1a;--dim:#666;--idle:#dcdcdc;--line:#e3e3e3;--card:#f4f4f4;--mem:#8f8f8f;--veil:#fff}
@media(prefers-color-scheme:dark){svg{--paper:#16181c;--ink:#eee;--dim:#aaa;--idle:#3a3d44;--line:#33363c;--card:#23262c;
--mem:#8a8f99;--veil:#16181c}}
text{font:12px system-ui,sans-serif;fill:var(--ink)}.b{font-weight:600}.d{fill:var(--dim);font-size:11px}
.c{font-size:17px;font-weight:600;font-variant-numeric:tabular-nums}.k{text-anchor:middle;font-size:11px}
.s{font-size:13px}.p{opacity:0}
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
    story: Mapping[str, str] | None = None,
) -> Animation:
    """Return the animated picture of a recording.

    timeline: of one process; a list with that of each rank, if they began together; or several of either by name, which
    are drawn below each other. gpus: which ones to draw; None for all. seconds: of one loop. memory: for each GPU
    (second, bytes), in order; None for what `record_timeline(memory=True)` recorded. travels: None for the copies and
    collectives of the recording; "send" goes to the next GPU. others: so many GPUs of the job are not in the recording.
    story: sentences by the name of a collective, a direction of copies ("to the GPU", "to the CPU", "copy") or a kind
    of work, shown while it runs. Raises ValueError if there is nothing to draw.
    """
    named = timeline if isinstance(timeline, Mapping) else {"": timeline}
    panels = [_Panel(name, each, gpus, memory, travels, others) for name, each in named.items()]
    if not panels or not all(panel.work for panel in panels):
        raise ValueError("There is nothing to animate, because a timeline does not contain any work of a GPU.")
    return _Drawing(panels, title, seconds, story or {}).animation()


class _Panel:
    """One recording, with all that is drawn of it. Times are in seconds."""

    def __init__(self, name, timeline, gpus, memory, travels, others):
        ranks = [timeline] if isinstance(timeline, Timeline) else list(timeline)
        self.name, self.others = name, others
        self.seconds = max(rank.seconds for rank in ranks)
        self.modelled = all(rank.modelled for rank in ranks)
        wanted = None if gpus is None else set(gpus)
        self.work = [w for rank in ranks for w in rank.work if wanted is None or w.gpu in wanted]
        self.gpus = sorted({w.gpu for w in self.work})
        held = memory if memory is not None else {gpu: curve for rank in ranks for gpu, curve in rank.memory.items()}
        self.memory = {gpu: held[gpu] for gpu in self.gpus if held.get(gpu)}
        self.travels = sorted(self._travels() if travels is None else travels)
        self.said = describe_timeline(Timeline(self.seconds, self.work, self.modelled))

    def _travels(self) -> list[Travel]:
        found = set()
        together: dict = {}
        for w in self.work:
            if w.kind == "collective":
                together.setdefault((w.name, round(w.end, 9)), []).append(w)
            elif w.kind == "copy":
                ends = [int(number) for number in re.findall(r"cuda:(\d+)", w.name)]
                source, target = ends if len(ends) == 2 else (CPU, w.gpu) if w.name == "to the GPU" else (w.gpu, CPU)
                found.add(Travel(w.start, w.end, source, target, "copy"))
        for (name, _), members in together.items():
            start, end = max(w.start for w in members), members[0].end
            pairs = self._ways(name, sorted({w.gpu for w in members}))
            found.update(Travel(start, end, source, target, _kind(members[0])) for source, target in pairs)
        return sorted(found)

    def _ways(self, name: str, members: list[int]) -> list[tuple[int, int]]:
        first, rest = members[0], members[1:]
        if self.others and len(members) == 1:
            ways = [] if "reduce_scatter" in name else [(OTHERS, first)]
            return ways + ([] if "gather" in name else [(first, OTHERS)])
        if name.startswith("recv"):  # drawn for "send"
            return []
        if name.startswith("send"):
            every = self.gpus
            return [(gpu, every[(every.index(gpu) + 1) % len(every)]) for gpu in members]
        if name in ("broadcast", "scatter"):
            return [(first, other) for other in rest]
        if name in ("reduce", "gather"):
            return [(other, first) for other in rest]
        return list(zip(members, rest + [first], strict=True)) if rest else []


def _kind(work: Work) -> str:
    if work.kind != "collective":
        return work.kind
    name = work.name
    return "reduce" if name in ("reduce", "reduce_scatter") else "gather" if "gather" in name else "collective"


def _merged(travels: Sequence[Travel], seconds: float) -> list[Travel]:
    """The travels, those of one kind on one way joined where nobody could tell them apart, and few enough."""
    gap = _SHORTEST * seconds / 3
    while True:
        open_, found = {}, []
        for t in travels:
            way = t.source, t.target, t.kind
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
    """What each GPU does in each of `_SLOTS` moments: the kind that takes most of it. Transfers count beside nothing."""
    length = seconds / _SLOTS
    shares = {gpu: [{} for _ in range(_SLOTS)] for gpu in panel.gpus}
    for w in panel.work:
        kind = _kind(w)
        weight = 0.2 if w.kind in ("copy", "collective") else 1.0
        for slot in range(int(w.start / length), min(_SLOTS - 1, int(w.end / length)) + 1):
            covered = min(w.end, (slot + 1) * length) - max(w.start, slot * length)
            each = shares[w.gpu][slot]
            each[kind] = each.get(kind, 0.0) + weight * max(0.0, covered)
    return {
        gpu: [
            max(each, key=lambda kind: (each[kind], kind)) if sum(each.values()) > 0.1 * length else "idle"
            for each in row
        ]
        for gpu, row in shares.items()
    }


def _runs(states: Sequence) -> list[tuple[int, object]]:
    """(first slot, state) of each run of equal states."""
    return [(i, state) for i, state in enumerate(states) if i == 0 or states[i - 1] != state]


class _Drawing:
    def __init__(self, panels: Sequence[_Panel], title: str, loop: float, story: Mapping[str, str]):
        self.panels, self.title, self.loop, self.story = panels, title, loop, story
        self.seconds = max(panel.seconds for panel in panels)
        self.body: list[str] = []
        self.frames: list[str] = []  # the keyframes
        self.rules: list[str] = []  # what stands still, by element
        self.count = 0

    # ---- time ----

    def x(self, second: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * min(second, self.seconds) / self.seconds

    def percent(self, second: float) -> str:
        return f"{100 * _PLAYED * min(max(second, 0.0), self.seconds) / self.seconds:.5g}%"

    def moving(self, frames: Iterable[tuple[str, str]], still: str, how: str = "linear") -> str:
        """The name of a new class whose elements go through the keyframes; `still` is its style without motion."""
        self.count += 1
        name = f"a{self.count}"
        self.frames.append(f"@keyframes {name}{{" + "".join(f"{at}{{{style}}}" for at, style in frames) + "}")
        self.rules.append(f".{name}{{{still}}}@media screen and (prefers-reduced-motion:no-preference){{.{name}{{"
                          f"animation:{name} {self.loop:g}s {how} infinite}}}}")  # fmt: skip
        return name

    # ---- the picture ----

    def animation(self) -> Animation:
        self.still = self._telling_moment()
        y = 62.0
        kinds = {state for panel in self.panels for row in self._all_states(panel).values() for state in row}
        kinds |= {t.kind for panel in self.panels for t in panel.travels}
        self._head(kinds)
        top = y
        for panel in self.panels:
            y = self._panel(panel, y)
        self._axis(top, y)
        height = y + 26
        words = self._words()
        name = f"g{hashlib.sha256(words.encode()).hexdigest()[:5]}"
        style = _STYLE + "".join(self.frames) + "".join(self.rules)
        body = "".join(self.body)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" role="img" '
            f'aria-label="{escape(self.title)}"><title>{escape(self.title)}</title><desc>{escape(words)}</desc>'
        )
        paper = f'<rect width="{_WIDTH}" height="{height:g}" rx="8" fill="var(--paper)"/>'
        patterns = "".join(
            f'<pattern id="h{n}" width="6" height="6" patternUnits="userSpaceOnUse"><path d="{d}" stroke="#fff" '
            f'stroke-opacity=".75"/></pattern>'
            for n, d in _HATCHES.items()
        )
        svg = f"{head}<style>{style}</style><defs>{patterns}</defs>{paper}{body}</svg>"
        svg = re.sub(r"(?<=[#.\s\"])(a\d+|h\d)(?=[{\")\s])", rf"{name}\1", svg)
        return Animation(svg, words)

    def _all_states(self, panel: _Panel) -> dict[int, list[str]]:
        return _states(panel, self.seconds)

    def _telling_moment(self) -> float:
        """When the fullest GPU is at its peak; without memory, when most is travelling."""
        curves = [curve for panel in self.panels for curve in panel.memory.values()]
        if curves:
            return max((max(curve, key=lambda p: p[1]) for curve in curves), key=lambda p: p[1])[0]
        travels = [t for panel in self.panels for t in panel.travels]
        middles = [(t.start + t.end) / 2 for t in travels] or [self.seconds / 2]
        return max(middles, key=lambda m: (sum(t.start <= m <= t.end for t in travels), -m))

    def _head(self, kinds: set[str]) -> None:
        self.body.append(f'<text x="12" y="22" class="b" style="font-size:15px">{escape(self.title)}</text>')
        how = "modelled" if self.panels[0].modelled else "measured"
        steps = 100
        texts = "".join(
            f'<text x="90" y="{18 + 24 * i}" class="c" text-anchor="end">{_ms(self.seconds * i / steps, self.seconds)}</text>'
            for i in range(steps + 1)
        )
        at = int(steps * self.still / self.seconds)
        name = self.moving(
            [("0%", "transform:none"), (f"{100 * _PLAYED:g}%,to", f"transform:translateY({-24 * steps}px)")],
            f"transform:translateY({-24 * at}px)", f"steps({steps})",
        )  # fmt: skip
        self.body.append(f'<text x="652" y="22" class="d" text-anchor="end">{how} time</text>')
        self.body.append(f'<svg x="656" y="4" width="92" height="24"><g class="{name}">{texts}</g></svg>')
        x = 12.0
        for kind, (_, _, word) in _LOOKS.items():
            if kind in kinds and kind != "idle":
                self.body.append(f'{_box(x, 38, 12, 12, kind)}<text x="{x + 16:g}" y="48" class="d">{word}</text>')
                x += 30 + 6.2 * len(word)

    def _panel(self, panel: _Panel, y: float) -> float:
        if panel.name:
            self.body.append(f'<text x="12" y="{y + 14:g}" class="b s">{escape(panel.name)}</text>')
            y += 20
        self.places = {}
        if any(CPU in (t.source, t.target) for t in panel.travels):
            self._edge(CPU, "CPU", y)
            y += 30
        most = max((size for curve in panel.memory.values() for _, size in curve), default=0)
        states = self._all_states(panel)
        for gpu in panel.gpus:
            height = 62 if panel.memory else 40
            self._lane(panel, gpu, states[gpu], y, height, most)
            y += height + 6
        if any(OTHERS in (t.source, t.target) for t in panel.travels):
            self._edge(OTHERS, f"{panel.others} other GPUs", y)
            y += 30
        self._packets(panel)
        return y + 4

    def _edge(self, key: int, name: str, y: float) -> None:
        left, right = _CARD
        self.body.append(f'<rect x="{left}" y="{y:g}" width="{right - left}" height="24" rx="5" fill="var(--card)"/>'
                         f'<text x="{left + 8}" y="{y + 16:g}" class="b">{name}</text>')  # fmt: skip
        self.places[key] = y + 12

    def _lane(self, panel: _Panel, gpu: int, states: list[str], y: float, height: float, most: int) -> None:
        left, right = _CARD
        self.places[gpu] = y + 17
        out = self.body.append
        out(f'<rect x="{left}" y="{y:g}" width="{right - left}" height="{height}" rx="5" fill="var(--card)"/>'
            f'<text x="{left + 8}" y="{y + 21:g}" class="b">GPU {gpu}</text>')  # fmt: skip
        kinds = sorted(set(states))
        strip = "".join(_pill(kind, 26 * i) for i, kind in enumerate(kinds))
        spots = [(self.percent(slot * self.seconds / _SLOTS), f"transform:translateY({-26 * kinds.index(kind)}px)")
                 for slot, kind in _runs(states)]  # fmt: skip
        now = states[min(_SLOTS - 1, int(_SLOTS * self.still / self.seconds))]
        name = self.moving(spots, f"transform:translateY({-26 * kinds.index(now)}px)", "step-end")
        out(f'<svg x="{left + 60}" y="{y + 6:g}" width="90" height="22"><g class="{name}">{strip}</g></svg>')
        # what it did
        out(f'<rect x="{_LEFT}" y="{y:g}" width="{_RIGHT - _LEFT}" height="{height}" fill="var(--card)"/>')
        for kind in _LOOKS:
            narrow = kind not in ("forward", "backward", "step")
            spans = [(self.x(w.start), self.x(w.end)) for w in panel.work if w.gpu == gpu and _kind(w) == kind]
            for start, end in _joined(spans):
                out(_box(start, y + (25 if narrow else 4), max(0.6, end - start), 10 if narrow else 19, kind))
        if gpu in panel.memory:
            self._memory(panel.memory[gpu], y, most)

    def _memory(self, curve: Sequence[tuple[float, int]], y: float, most: int) -> None:
        left, right = _CARD
        levels, at = [], 0
        level = curve[0][1]
        for slot in range(_SLOTS):
            end = (slot + 1) * self.seconds / _SLOTS
            highest = level
            while at < len(curve) and curve[at][0] <= end:
                level = curve[at][1]
                highest = max(highest, level)
                at += 1
            levels.append(highest)
        peak = max(size for _, size in curve)
        runs = [(slot, share) for slot, share in _runs([round(size / most, 2) for size in levels])]
        points = []
        for (slot, share), (next_slot, _) in zip(runs, [*runs[1:], (_SLOTS, 0)], strict=True):
            x0, x1 = (self.x(s * self.seconds / _SLOTS) for s in (slot, next_slot))
            points.append(f"{x0:.1f},{y + 60 - 22 * share:.1f} {x1:.1f},{y + 60 - 22 * share:.1f}")
        self.body.append(
            f'<polygon points="{_LEFT},{y + 60:g} {" ".join(points)} {_RIGHT},{y + 60:g}" fill="var(--mem)" opacity=".55"/>'
        )
        full = right - left - 16
        frames = [(self.percent(slot * self.seconds / _SLOTS), f"transform:scaleX({share:g})") for slot, share in runs]
        now = levels[min(_SLOTS - 1, int(_SLOTS * self.still / self.seconds))] / most
        name = self.moving(frames, f"transform:scaleX({now:.2f})", "step-end")
        x = left + 8
        self.body.append(
            f'<rect x="{x}" y="{y + 32:g}" width="{full}" height="8" rx="2" fill="var(--idle)"/>'
            f'<svg x="{x}" y="{y + 32:g}" width="{full}" height="8"><rect width="{full}" height="8" fill="var(--mem)" '
            f'class="{name}"/></svg><text x="{x}" y="{y + 54:g}" class="d">peak {format_bytes(peak)}</text>'
        )

    def _packets(self, panel: _Panel) -> None:
        shortest = _SHORTEST * self.seconds / _PLAYED
        lanes = list(self.places)
        for t in _merged(panel.travels, self.seconds):
            if t.source not in self.places or t.target not in self.places:
                continue
            away = t.target if t.source == min(lanes) or t.source in (CPU, OTHERS) else t.source
            x = _BUS[0] + 8 + 14 * (lanes.index(away) % 4)
            begin, end = self.places[t.source], self.places[t.target]
            until = max(t.end, t.start + shortest)
            if t.kind == "copy" and CPU not in (t.source, t.target):
                self.body.append(f'<path d="M{self.x(t.start):.1f} {begin + 13:g}L{self.x(t.end):.1f} {end + 13:g}" '
                                 f'stroke="{_LOOKS[t.kind][0]}" stroke-opacity=".8"/>')  # fmt: skip
            flies = t.start <= self.still <= until
            part = (self.still - t.start) / (until - t.start)
            still = f"opacity:1;transform:translateY({part * (end - begin):.0f}px)" if flies else "opacity:0"
            a, b = self.percent(t.start), self.percent(min(until, self.seconds))
            hop = f"transform:translateY({end - begin:g}px)"
            name = self.moving(
                [(f"0%,{a}", "opacity:0;transform:none"), (_later(a), "opacity:1"), (b, "opacity:1"),
                 (f"{_later(b)},to", "opacity:0;" + hop)], still)  # fmt: skip
            self.body.append(f'<g class="{name}">{_box(x, begin - 6, 12, 12, t.kind)}</g>')

    def _axis(self, top: float, bottom: float) -> None:
        step = next(s for e in range(-7, 4) for s in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if self.seconds / s <= 8)
        ticks = [i * step for i in range(int(self.seconds / step) + 1)]
        for tick in ticks:
            x = self.x(tick)
            self.body.append(f'<text x="{x:.1f}" y="{bottom + 14:g}" class="d k">{_ms(tick, self.seconds)}</text>')
        wide = _RIGHT - _LEFT
        here = self.x(self.still) - _LEFT
        frames = [("0%", "transform:none"), (f"{100 * _PLAYED:g}%,to", f"transform:translateX({wide}px)")]
        veil = self.moving(frames, f"transform:translateX({here:.1f}px)")
        self.body.append(
            f'<svg x="{_LEFT}" y="{top:g}" width="{wide + 2}" height="{bottom - top:g}"><g class="{veil}">'
            f'<rect width="{wide}" height="{bottom - top:g}" fill="var(--veil)" opacity=".72"/>'
            f'<rect x="-1" width="2" height="{bottom - top:g}" fill="var(--ink)"/></g></svg>'
        )

    def _words(self) -> str:
        said = []
        for panel in self.panels:
            parts = [panel.said]
            if panel.memory:
                peaks = {gpu: max(size for _, size in curve) for gpu, curve in panel.memory.items()}
                parts.append("peak " + ", ".join(f"cuda:{gpu} {format_bytes(size)}" for gpu, size in peaks.items()))
            said.append((f"{panel.name}: " if panel.name else "") + " | ".join(parts))
        return f"{self.title}. " + " ".join(f"{each}." for each in said)


def _later(percent: str) -> str:
    return f"{min(100.0, float(percent[:-1]) + 0.01):.5g}%"


def _ms(second: float, whole: float) -> str:
    decimals = 0 if whole >= 0.1 else 1 if whole >= 0.01 else 2
    return f"{1e3 * second:,.{decimals}f} ms"


def _joined(spans: list[tuple[float, float]], gap: float = 0.8) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    colour, hatch, _ = _LOOKS[kind]
    at = f'x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}"'
    lines = f'<rect {at} fill="url(#h{hatch})"/>' if hatch and width > 3 else ""
    return f'<rect {at} fill="{colour}"/>{lines}'


def _pill(kind: str, y: float) -> str:
    ink = "#fff" if kind in ("forward", "step") else "var(--dim)" if kind == "idle" else "#111"
    return (f'{_box(0, y, 90, 22, kind)}<text x="45" y="{y + 15:g}" class="k" style="fill:{ink}">{_LOOKS[kind][2]}</text>')  # fmt: skip
