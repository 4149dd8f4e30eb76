"""Rows in words and as a picture: part of `helpers.lesson07.methods`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from helpers.lesson07.methods.measure import Row
from helpers.lesson07.scaling import Cluster
from helpers.measure import GiB
from helpers.show.style import OVER, WIDTH, bar_style, set_alt_text

_HEADING = f"{'':15} {'batch':>5} {'GiB, fullest':>13} {'least':>6} {'ms':>7} {'samples/s':>9} {'busy':>10} {'most':>6}"


Found = Mapping[tuple[str, str], Sequence[Row]]  # (name of the cluster, name of the job): rows


def table(found: Found, clusters: Mapping[str, Cluster]) -> str:
    """A part per cluster and job, in it a line per method: batch, GiB on the fullest GPU ("!": does not fit the card)
    and on the emptiest, modelled ms of a step, samples per second, the busy share of the GPUs from least to most, and
    the largest batch that was found to fit."""
    lines = [_HEADING]
    for (name, job), rows in found.items():
        lines += ["", f"{job}, {name}, {clusters[name].room / GiB:.1f} GiB each"]
        lines += [_line(row, clusters[name]) for row in rows]
    return "\n".join(lines)


def _line(row: Row, cluster: Cluster) -> str:
    low, high = (f"{100 * share:.0f}" for share in (min(row.utilisation), max(row.utilisation)))
    busy = f"{low} %" if low == high else f"{low} to {high} %"
    full = f"{max(row.peaks) / GiB:.2f}" + (" " if row.fits(cluster) else "!")
    most = "" if row.largest is None else row.largest
    return (
        f"{row.method:15} {row.batch:5} {full:>13} {min(row.peaks) / GiB:6.2f} {1e3 * row.seconds:7.0f} "
        f"{row.samples_per_second:9.0f} {busy:>10} {most:>6}"
    )


def methods_picture(found: Found, clusters: Mapping[str, Cluster]):
    """Per job two rows, speed with the busy share, and memory with the largest batch; a column per cluster.

    Hatched in another colour: does not fit the card, so that the modelled speed is of a card with more memory. Returns
    the figure.
    """
    names, jobs = list(dict.fromkeys(name for name, _ in found)), list(dict.fromkeys(job for _, job in found))
    size = WIDTH, 2.1 * 2 * len(jobs)
    figure, axes = plt.subplots(
        2 * len(jobs), len(names), figsize=size, sharey=True, layout="constrained", squeeze=False
    )
    for (name, job), rows in found.items():
        row, column = 2 * jobs.index(job), names.index(name)
        _speed(axes[row, column], rows, clusters[name], f"{job}, {name}")
        _memory(axes[row + 1, column], rows, clusters[name])
    axes[0, 0].invert_yaxis()
    set_alt_text(figure, describe_methods(found, clusters))
    return figure


def _speed(axes: Axes, rows: Sequence[Row], cluster: Cluster, name: str) -> None:
    axes.set_title(name, fontsize=10)
    speeds = [row.samples_per_second for row in rows]
    busy = [sum(row.utilisation) / len(row.utilisation) for row in rows]
    said = [f"{speed:,.0f} | {100 * share:.0f} %" for speed, share in zip(speeds, busy, strict=True)]
    _bars(axes, rows, cluster, speeds, said)
    axes.set_xlabel("samples/s | share busy; modelled", fontsize=8)


def _memory(axes: Axes, rows: Sequence[Row], cluster: Cluster) -> None:
    peaks = [max(row.peaks) / GiB for row in rows]
    most = ["" if row.largest is None else f" | {row.largest:,}" for row in rows]
    _bars(axes, rows, cluster, peaks, [f"{peak:.1f}{each}" for peak, each in zip(peaks, most, strict=True)])
    axes.set_xlabel("GiB, fullest | largest batch", fontsize=8)
    if cluster.room / GiB < 1.6 * max(peaks):
        axes.axvline(cluster.room / GiB, color="0.3", linestyle=":", zorder=0.5)


def _bars(axes: Axes, rows: Sequence[Row], cluster: Cluster, values: Sequence[float], words: Sequence[str]) -> None:
    for place, (row, value, said) in enumerate(zip(rows, values, words, strict=True)):
        axes.barh(place, value, **(bar_style(0) if row.fits(cluster) else OVER))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axes.text(1.02 * value, place, said, va="center", fontsize=7.5, bbox=box)
    axes.set_yticks(range(len(rows)), [row.method for row in rows], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlim(0, 1.75 * max(values))
    axes.spines[["top", "right"]].set_visible(False)


def describe_methods(found: Found, clusters: Mapping[str, Cluster]) -> str:
    """The picture in words: per job and cluster the fastest method that fits, and which do not fit."""
    lines = []
    for (name, job), rows in found.items():
        fitting = [row for row in rows if row.fits(clusters[name])]
        over = [row.method for row in rows if not row.fits(clusters[name])]
        best = max(fitting, key=lambda row: row.samples_per_second, default=None)
        said = "nothing fits" if best is None else f"{best.method} is fastest, {best.samples_per_second:,.0f} samples/s"
        lines.append(f"{job}, {name}: {said} (modelled)" + (f"; too large: {', '.join(over)}" if over else ""))
    return "\n".join(lines)
