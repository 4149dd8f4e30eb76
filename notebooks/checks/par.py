"""Scores of puzzles: the peak of the fullest GPU and the time of a step, beside a naive answer and a par.

    you = measured(lambda: learners_step(model, batch))
    return compare_with_par("03 the loss", naive=measured(naive_step), par=measured(par_step), you=you)

The learner's best answer to each puzzle is kept by `notebooks.checks.scores`.
"""

import gc
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from helpers.gpus import gpu_indices, is_virtual
from helpers.measure import format_bytes, record_timeline
from helpers.measure.memory import reset_peaks
from helpers.show.style import WIDTH, bar_style, open_frame, set_alt_text
from notebooks.checks import scores

OUT = "out of memory"
_EQUAL = 0.005  # a smaller difference, as a share of par, is none


@dataclass(frozen=True)
class Score:
    """peak: bytes on the fullest GPU. seconds: time of a step. None, None: it ran out of memory.

    A figure that is None in par does not count in the puzzle.
    """

    peak: int | None
    seconds: float | None

    def __str__(self) -> str:
        said = [] if self.seconds is None else [format_seconds(self.seconds)]
        return ", ".join(said + ([] if self.peak is None else [format_bytes(self.peak)])) or OUT

    def against(self, par: "Score") -> float:
        """The product of both figures as shares of par's. Below 1 is better than par."""
        return _share(self.peak, par.peak) * _share(self.seconds, par.seconds)


def measured(step: Callable[[], object], gpus=None, steps: int = 2) -> Score:
    """Run `step()` so many times and return the score of the last time.

    gpus: a device, an index or a list of them; None for all. peak: the most that `torch.cuda.max_memory_allocated` says
    of one of them, in bytes. seconds: until all GPUs are done; modelled on virtual GPUs, measured on real ones.
    """
    indices = gpu_indices(gpus)
    for _ in range(steps - 1):
        step()
    gc.collect()  # what earlier answers left behind in cycles
    reset_peaks(indices)
    if is_virtual():
        with record_timeline() as timeline:
            step()
        seconds = timeline.seconds
    else:  # torch.profiler would slow the step down
        seconds = _wall_time(step)
    return Score(max(torch.cuda.max_memory_allocated(index) for index in indices), seconds)


def _wall_time(step: Callable[[], object]) -> float:
    def wait() -> float:
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
        return time.perf_counter()

    start = wait()
    step()
    return wait() - start


def compare_with_par(puzzle: str, *, naive: Score, par: Score, you: Score, unit_note: str = "") -> str:
    """Draw the three scores, keep the learner's best, and return the sentence about them.

    puzzle: a name that no other puzzle of the course has. unit_note: stands behind the first time instead of "modelled"
    or "measured". A figure that is None in par is not compared.
    """
    note = unit_note or ("modelled" if is_virtual() else "measured")
    first = re.sub(r"^([\d.,]+ m?s)\b", rf"\1 ({note})", str(you))
    said = [f"You: {first}. Par: {par}. Naive: {naive}.", _verdict(you, par)]
    best = _best(puzzle, you, par)
    if best.against(par) < you.against(par) * (1 - _EQUAL):
        said.append(f"Your best so far: {best}.")
    text = " ".join(said)
    draw_scores(puzzle, {"naive": naive, "par": par, "you": you}, note, text)
    return text


def draw_scores(title: str, rows: dict[str, Score], note: str, alt: str) -> Figure:
    """Draw a bar for each score, in one plot for the times and one for the peaks. The last two rows are par and you."""
    *_, par, you = rows.values()
    kinds = {f"time of a step, {note}": ("seconds", format_seconds), "peak of the fullest GPU": ("peak", format_bytes)}
    kinds = {name: each for name, each in kinds.items() if getattr(par, each[0]) is not None}
    figure, axes = plt.subplots(1, len(kinds), figsize=(WIDTH, 1.8), sharey=True, squeeze=False, layout="constrained")
    for ax, (name, (field, words)) in zip(axes[0], kinds.items(), strict=True):
        values = [getattr(score, field) for score in rows.values()]
        most, goal = max(value or 0 for value in values) or 1, getattr(par, field)
        for row, value in enumerate(values):
            ax.barh(row, value or 0, 0.7, **bar_style(row, row))
            mark = f", {_word(value, goal)}" if values[row] is not None and row == len(values) - 1 else ""
            text = OUT if value is None else words(value) + mark
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            ax.text((value or 0) + 0.03 * most, row, text, va="center", fontsize=9, bbox=box)
        ax.axvline(goal, color="0.3", linestyle=":", linewidth=1, zorder=0.5)
        ax.set(xlim=(0, 1.8 * most), xticks=[])
        ax.set_title(name, loc="left", fontsize=10)
        open_frame(ax, "x")
        ax.spines["bottom"].set_visible(False)
    axes[0, 0].set_yticks(range(len(rows)), rows)
    axes[0, 0].invert_yaxis()
    set_alt_text(figure, title, alt)
    return figure


def format_seconds(seconds: float) -> str:
    """Format seconds with three digits: "1.24 s", "412 ms" or "41.2 ms"."""
    value, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def _share(value: float | None, of: float | None) -> float:
    return value / of if value is not None and of else 1.0


def _word(value: float, par: float) -> str:
    share = _share(value, par)
    return "as par" if abs(share - 1) <= _EQUAL else "better than par" if share < 1 else "over par"


def _verdict(you: Score, par: Score) -> str:
    words = {}
    for name, value, of in (("memory", you.peak, par.peak), ("time", you.seconds, par.seconds)):
        if value is not None and of is not None:
            words.setdefault(_word(value, of), []).append(name)
    parts = {"better than par": "You beat par in", "as par": "You reach par in", "over par": "You are over par in"}
    return " ".join(f"{said} {' and '.join(words[key])}." for key, said in parts.items() if key in words)


def _best(puzzle: str, you: Score, par: Score) -> Score:
    """The better one of `you` and the score that is kept, which is `you` afterwards if that is the better one."""
    kept = scores.read("par")
    with suppress(KeyError, TypeError, ValueError):
        before = Score(*(None if value is None else float(value) for value in kept[puzzle]))
        if before.against(par) <= you.against(par):
            return before
    scores.write("par", kept | {puzzle: [you.peak, you.seconds]})
    return you
