"""An animated picture of a recorded timeline: what each GPU does and holds, and what travels between the GPUs.

    with record_timeline(memory=True) as timeline:
        step()
    animate(timeline, title="A step of DataParallel")       # at the end of a notebook's cell

The picture is an SVG that plays by itself, without a script.
"""

import base64
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import NamedTuple, Protocol, TypeVar

from virtual_gpus.clock.clock import Span
from virtual_gpus.timeline import svg
from virtual_gpus.timeline.spans import busy_seconds, merged

_MOMENTS = 150  # the picture tells so many moments apart
_STEADY, _READ = 2, 9  # moments for which a word and a sentence stay at least
_SHORTEST = 0.035  # of the time: a block travels at least so long, so that it can be seen
_LEVEL = 0.02  # of the highest peak: smaller changes of the memory are not shown
_COMPUTING = ("forward", "backward", "step", "compute")
_FROM_ONE, _TO_ONE = ("broadcast", "scatter"), ("reduce", "gather")  # collectives; others go around a ring
_State = TypeVar("_State")
Curve = Sequence[tuple[float, int]]  # (second, allocated bytes), in order


class Recording(Protocol):
    """What a picture of a timeline needs. It may come from another recorder, which measures (`modelled` is False)."""

    @property
    def seconds(self) -> float: ...

    @property
    def modelled(self) -> bool: ...

    @property
    def spans(self) -> Sequence[Span]: ...

    @property
    def memory(self) -> Mapping[int, Curve]: ...


Recorded = Recording | Sequence[Recording]  # of one process, or of each rank


def gpus_of(spans: Iterable[Span]) -> list[int]:
    """The indices of the GPUs that did something, in ascending order."""
    return sorted({s.gpu for s in spans if s.gpu is not None})


def describe(recording: Recording) -> str:
    """Describe a recording in one line: its length, modelled or measured, and how busy each GPU is."""
    ms, spans = 1e3 * recording.seconds, recording.spans
    length = f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
    shares = {gpu: busy_seconds(spans, gpu) / (recording.seconds or 1) for gpu in gpus_of(spans)}
    busy = ", ".join(f"cuda:{gpu} {100 * share:.0f} %" for gpu, share in shares.items())
    return f"{'modelled' if recording.modelled else 'measured'} {length} | busy: {busy}"


@dataclass
class Animation:
    """An animated picture. `svg`: its text. `words`: what it shows. The latter is also `str(animation)`."""

    svg: str
    words: str

    def __str__(self) -> str:
        return self.words

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
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


# ---- what is shown ---------------------------------------------------------------------------------------------------


class _ShownWork(NamedTuple):
    """A span on a GPU. kind: the word that the picture shows. label: "3" of a name such as "addmm F3" (`name_work`)."""

    gpu: int
    start: float
    end: float
    kind: str
    label: str
    name: str


@dataclass
class _Panel:
    """A recording of all ranks."""

    seconds: float
    modelled: bool
    spans: list[Span]
    work: list[_ShownWork]
    memory: dict[int, Curve]


class _Travel(NamedTuple):
    """Something that travels from GPU `source` to GPU `target` in the seconds `start` to `end`."""

    start: float
    end: float
    source: int
    target: int
    kind: str
    label: str = ""


def _joined(recorded: Recorded) -> _Panel:
    ranks = recorded if isinstance(recorded, Sequence) else [recorded]
    spans, work = [span for rank in ranks for span in rank.spans], list[_ShownWork]()
    for span in spans:
        if span.gpu is not None:
            label = "".join(re.findall(r" [A-Z]([0-9a-z]{1,3})$", span.name))
            work.append(_ShownWork(span.gpu, span.start, span.end, _word(span), label, span.name))
    if {w.kind for w in work}.isdisjoint(("backward", "step")):  # no training
        work = [w._replace(kind="compute") if w.kind == "forward" else w for w in work]
    memory = {gpu: rank.memory[gpu] for rank in ranks for gpu in gpus_of(rank.spans) if rank.memory.get(gpu)}
    longest = max((rank.seconds for rank in ranks), default=0.0)
    return _Panel(longest, all(rank.modelled for rank in ranks), spans, work, memory)


def _word(span: Span) -> str:
    """The word for what a GPU does, such as "forward", "copy" or "reduce-scatter"."""
    if span.kind != "collective":
        return span.kind
    name = span.name.split()[0].rstrip(",")
    return "receive" if name == "recv" else name.replace("_", "-")


def _travels(panel: _Panel) -> list[_Travel]:
    travels = set[_Travel]()
    collectives = defaultdict[tuple[str, float], list[_ShownWork]](list)
    after = dict(_ring(gpus_of(panel.spans)))
    for w in panel.work:
        if w.kind == "send":
            travels.add(_Travel(w.start, w.end, w.gpu, after[w.gpu], "send", w.label))
        elif w.kind == "copy":
            ends = [int(number) for number in re.findall(r"cuda:(\d+)", w.name)]
            if len(ends) == 2:  # otherwise a copy from or to the CPU
                travels.add(_Travel(w.start, w.end, ends[0], ends[1], "copy", w.label))
        elif w.kind not in (*_COMPUTING, "receive"):
            collectives[w.kind, round(w.end, 9)].append(w)
    for (kind, _), members in collectives.items():
        first, *rest = gpus = sorted({w.gpu for w in members})
        ways = _ring(gpus)
        if kind in (*_FROM_ONE, *_TO_ONE):
            ways = [(first, gpu) if kind in _FROM_ONE else (gpu, first) for gpu in rest]
        start, end = max(w.start for w in members), members[0].end
        travels.update(_Travel(start, end, source, target, kind) for source, target in ways if source != target)
    return sorted(travels)


def _ring(gpus: list[int]) -> list[tuple[int, int]]:
    """Each GPU with the one that it sends to."""
    return list(zip(gpus, [*gpus[1:], gpus[0]], strict=True))


def _states(work: Sequence[_ShownWork], moment: float) -> list[str]:
    """What a GPU does in each moment: the kind that takes most of it, computing before transfers."""
    shares = [defaultdict[str, float](float) for _ in range(_MOMENTS)]
    for w in work:
        weight = 1.0 if w.kind in _COMPUTING else 0.3
        for number in range(int(w.start / moment), min(_MOMENTS - 1, int(w.end / moment)) + 1):
            covered = min(w.end, (number + 1) * moment) - max(w.start, number * moment)
            shares[number][w.kind] += weight * max(0.0, covered)
    kinds = [max(share, key=share.__getitem__) if sum(share.values()) > 0.1 * moment else "waits" for share in shares]
    return _lasting(kinds, _STEADY)


def _lasting(states: Sequence[str], least: int) -> list[str]:
    """The states, each for at least `least` moments, so that it can be read. "" lasts as what was before."""
    lasting, since = list(states), 0
    for number in range(1, len(lasting)):
        if lasting[number] in ("", lasting[number - 1]) or number - since < least:
            lasting[number] = lasting[number - 1]
        else:
            since = number
    return lasting


def _runs(states: Sequence[_State]) -> Iterator[tuple[float, float, _State]]:
    """(begin, end, state) of each run of equal states, as shares of the time."""
    number = 0
    for state, run in groupby(states):
        begin, number = number, number + len(list(run))
        yield begin / _MOMENTS, number / _MOMENTS, state


def _peak(curve: Curve) -> int:
    return max(size for _, size in curve)


def _size(count: int) -> str:
    """Bytes in three digits, for which a GPU's card has room: "19.9 GiB", "7.80 GiB"."""
    value, unit = (count / 2**30, "GiB") if count >= 2**30 else (count / 2**20, "MiB")
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


# ---- the picture -----------------------------------------------------------------------------------------------------


class _Picture:
    """Writes the SVG of several recordings. `parts`: its elements, from back to front."""

    def __init__(self, panels: Mapping[str, _Panel], story: Mapping[str, str]):
        self.panels, self.story, self.parts = panels, story, list[str]()
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
        self.parts.append(svg.VEIL.format(y=top, high=y - top))  # over what is yet to come
        self._add_axis_and_legend(y)
        how = "modelled" if all(panel.modelled for panel in self.panels.values()) else "measured"
        words, body, still = self._words(title), "".join(self.parts), self._telling_moment() / self.seconds
        return Animation(svg.whole(title, words, how, self.kinds, body, y + 44, still), words)

    def _words(self, title: str) -> str:
        said = [f"{title}.", *self.story.values()]
        for name, panel in self.panels.items():
            parts = [describe(panel)]
            if panel.memory:
                peaks = [f"cuda:{gpu} {_size(_peak(panel.memory[gpu]))}" for gpu in sorted(panel.memory)]
                parts.append("peak: " + ", ".join(peaks))
            if travels := Counter(t.kind for t in self.travels[name]):
                parts.append("what travels: " + ", ".join(f"{count} × {kind}" for kind, count in travels.items()))
            said.append((f"{name}: " if name else "") + " | ".join(parts) + ".")
        return "\n".join(said)

    def _telling_moment(self) -> float:
        """The second at which most travels; of several, the one closest to the middle."""
        travels = [t for panel in self.travels.values() for t in panel]
        middles = [(t.start + t.end) / 2 for t in travels] or [self.seconds / 2]
        return max(middles, key=lambda m: (sum(t.start <= m <= t.end for t in travels), -abs(m - self.seconds / 2)))

    def _x(self, second: float) -> float:
        return svg.LEFT + svg.WIDE * second / self.seconds

    def _add_clock_and_story(self) -> None:
        decimals = 0 if self.seconds >= 0.1 else 1 if self.seconds >= 0.01 else 2
        clock = [f"{1e3 * self.seconds * number / (_MOMENTS - 1):,.{decimals}f} ms" for number in range(_MOMENTS)]
        self.parts += [svg.text(746, 22, words, svg.shown(begin, end, "c")) for begin, end, words in _runs(clock)]
        sentences = []
        for at in [(number + 0.5) * self.moment for number in range(_MOMENTS)]:
            now = {w.kind for panel in self.panels.values() for w in panel.work if w.start <= at <= w.end}
            sentences.append(next((sentence for kind, sentence in self.story.items() if kind in now), ""))
        for begin, end, sentence in _runs(_lasting(sentences, _READ)):
            self.parts.append(svg.text(12, 49, sentence, svg.shown(begin, end, "s")))

    def _add_panel(self, name: str, y: float) -> float:
        """Add a recording from `y` on: a row for each GPU, and what travels. Returns where it ends."""
        panel, least = self.panels[name], _SHORTEST * self.seconds
        latest = dict[tuple[object, ...], float]()
        if name:
            self.parts.append(svg.text(12, y + 14, name, 'class="b s"'))
            y += 22
        rows = {}
        for gpu in gpus_of(panel.spans):
            rows[gpu] = y + 17  # the middle of its upper line
            high = 62 if gpu in panel.memory else 40
            self.parts.append(f'<g transform="translate(0 {y:g})">{self._row(panel, gpu, high)}</g>')
            y += high + 6
        wires = "".join(f"M{188 + 17 * column} {min(rows.values())}V{max(rows.values())}" for column in range(4))
        self.parts.append(f'<path d="{wires}" stroke="var(--line)" stroke-width="3"/>')
        for t in self.travels[name]:
            if t.start >= latest.get(t[2:], -least) + least:  # so that the two can be told apart
                latest[t[2:]] = t.start
                self._add_travel(t, rows, max(t.end, t.start + least))
        return y + 4

    def _row(self, panel: _Panel, gpu: int, high: float) -> str:
        """The card of a GPU, its work, and its memory."""
        work = [w for w in panel.work if w.gpu == gpu]
        parts = [svg.CARD.format(high=high, gpu=gpu)]
        for begin, end, kind in _runs(_states(work, self.moment)):
            parts.append(f'<use href="#pill-{kind}" x="72" y="6" {svg.shown(begin, end)}/>')
        rows = defaultdict[tuple[bool, str, str], list[tuple[float, float]]](list)
        for w in work:
            computes = w.kind in _COMPUTING
            rows[computes, w.kind, w.label if computes else ""].append((self._x(w.start), self._x(w.end)))
        for (computes, kind, label), pieces in sorted(rows.items()):
            for start, end in merged(pieces, 8 if label else 1.2):
                wide = max(0.7, end - start - bool(label))
                parts.append(svg.box(start, 4 if computes else 25, wide, 19 if computes else 10, kind))
                if label and wide > 6 * len(label) + 1:
                    parts.append(svg.text((start + end) / 2, 17, label, f'class="k" fill="{svg.look(kind)[1]}"'))
        return "".join(parts) + (self._memory(panel.memory[gpu]) if gpu in panel.memory else "")

    def _memory(self, curve: Curve) -> str:
        """The bar with what the GPU holds now, and below its work the curve of the whole time."""
        times, peak, sizes = [at for at, _ in curve], _peak(curve), list[int]()
        for number in range(_MOMENTS):
            first, last = (bisect_right(times, edge * self.moment) for edge in (number, number + 1))
            highest = _peak(curve[max(0, first - 1) : last] or curve[:1])
            close = sizes and highest != peak and abs(highest - sizes[-1]) <= _LEVEL * self.most
            sizes.append(sizes[-1] if close else highest)
        steps = levels = ""
        for begin, end, size in _runs(sizes):
            steps += f"V{60 - 22 * size / self.most:.1f}H{svg.LEFT + svg.WIDE * end:.1f}"
            wide = 140 * size / self.most
            levels += svg.LEVEL.format(when=svg.shown(begin, end), wide=wide, size=_size(size))
        return svg.MEMORY.format(steps=steps, levels=levels, mark=20 + 140 * peak / self.most, peak=_size(peak))

    def _add_travel(self, t: _Travel, rows: Mapping[int, float], until: float) -> None:
        """Add the block that travels between two rows, and for a copy between GPUs the line across the timeline."""
        begin, end, order = rows[t.source], rows[t.target], list(rows)
        near, far = sorted((order.index(t.source), order.index(t.target)))
        x = 180 + 17 * ((near if far - near == 1 else far) % 4)
        if t.kind == "copy":
            line = f"M{self._x(t.start):.1f} {begin + 13:g}L{self._x(t.end):.1f} {end + 13:g}"
            self.parts.append(f'<path d="{line}" stroke="{svg.look(t.kind)[0]}"/>')
        when = svg.shown(t.start / self.seconds, min(until / self.seconds, 0.999), "m", f";--y:{end - begin:g}px")
        label = svg.text(x + 8, begin + 4, t.label, 'class="k b n"') if t.label else ""
        self.parts.append(f'<g {when}><use href="#block-{t.kind}" x="{x}" y="{begin:g}"/>{label}</g>')

    def _add_axis_and_legend(self, y: float) -> None:
        step = next(s for e in range(-7, 4) for s in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if self.seconds / s <= 8)
        ticks = [tick * step for tick in range(int(self.seconds / step) + 1)]
        self.parts += [svg.text(self._x(tick), y + 10, f"{1e3 * tick:,.6g}", 'class="d k"') for tick in ticks]
        self.parts.append(svg.text(226, y + 10, "ms", 'class="d"'))
        x = 12
        for kind in self.kinds:
            self.parts += [svg.box(x, y + 22, 12, 12, kind), svg.text(x + 16, y + 32, kind, 'class="d"')]
            x += 32 + 6 * len(kind)
        if self.most:
            self.parts.append(f'<rect x="{x}" y="{y + 25:g}" width="12" height="7" fill="var(--memory)"/>')
            self.parts.append(svg.text(x + 16, y + 32, "memory in use", 'class="d"'))
