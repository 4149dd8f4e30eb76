"""What lesson 07 shows: methods as a table and as bars, scaling curves, the advice as a picture and as a panel.

Each picture has a function that says the same in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from helpers.gpus import GPU_KINDS, NETWORKS
from helpers.lesson07.advice import Advice, advise
from helpers.lesson07.methods import Row
from helpers.lesson07.nets import NETS
from helpers.lesson07.scaling import Cluster, amdahl, amdahl_seconds, efficiency
from helpers.measure import GiB
from helpers.show.panel import Panel, control
from helpers.show.style import COLOURS, OVER, WIDTH, bar_style, set_alt_text

Found = Mapping[tuple[str, str], Sequence[Row]]  # (name of the cluster, name of the job): rows
Curves = Mapping[str, Mapping[int, float]]  # name: {GPUs: seconds of a step}

# ---- methods ---------------------------------------------------------------------------------------------------------


def table(found: Found, clusters: Mapping[str, Cluster]) -> str:
    """A part per cluster and job, in it a line per method: batch, GiB on the fullest GPU ("!": does not fit) and on the
    emptiest, modelled ms of a step, samples per second, the busy share of the GPUs from least to most, and the largest
    batch that was found to fit."""
    lines = [f"{'':15} batch  GiB, fullest  least      ms samples/s       busy   most"]
    for (name, job), rows in found.items():
        lines += ["", f"{job}, {name}, {clusters[name].room / GiB:.1f} GiB each"]
        for row in rows:
            low, high = (f"{100 * share:.0f}" for share in (min(row.utilisation), max(row.utilisation)))
            busy = f"{low} %" if low == high else f"{low} to {high} %"
            fullest = f"{max(row.peaks) / GiB:.2f}" + (" " if row.fits(clusters[name]) else "!")
            lines.append(
                f"{row.method:15} {row.batch:5} {fullest:>13} {min(row.peaks) / GiB:6.2f} {1e3 * row.seconds:7.0f} "
                f"{row.samples_per_second:9.0f} {busy:>10} {row.largest or '':>6}"
            )
    return "\n".join(lines)


def methods_picture(found: Found, clusters: Mapping[str, Cluster]) -> Figure:
    """Per job two rows, speed with the mean busy share, and memory with the largest batch; a column per cluster.

    What does not fit is hatched, in another colour: its speed is that of a GPU with more memory.
    """
    names, jobs = list(dict.fromkeys(name for name, _ in found)), list(dict.fromkeys(job for _, job in found))
    size = WIDTH, 2.1 * 2 * len(jobs)
    figure, axes = plt.subplots(
        2 * len(jobs), len(names), figsize=size, sharey=True, layout="constrained", squeeze=False
    )
    for (name, job), rows in found.items():
        upper, lower = axes[2 * jobs.index(job) :, names.index(name)][:2]
        room = clusters[name].room / GiB
        busy = [f"{100 * sum(row.utilisation) / len(row.utilisation):.0f} %" for row in rows]
        most = [f"{row.largest:,}" if row.largest else "" for row in rows]
        peaks = [max(row.peaks) / GiB for row in rows]
        _bars(upper, rows, clusters[name], [row.samples_per_second for row in rows], ",.0f", busy)
        _bars(lower, rows, clusters[name], peaks, ".1f", most)
        upper.set_title(f"{job}, {name}", fontsize=10)
        upper.set_xlabel("samples/s | share busy; modelled", fontsize=8)
        lower.set_xlabel("GiB, fullest | largest batch", fontsize=8)
        if room < 1.6 * max(peaks):
            lower.axvline(room, color="0.3", linestyle=":", zorder=0.5)
    axes[0, 0].invert_yaxis()
    set_alt_text(figure, describe_methods(found, clusters))
    return figure


def _bars(axes: Axes, rows: Sequence[Row], cluster: Cluster, values: list[float], form: str, more: list[str]) -> None:
    for place, (row, value, words) in enumerate(zip(rows, values, more, strict=True)):
        axes.barh(place, value, **(bar_style(0) if row.fits(cluster) else OVER))
        said = f"{value:{form}}" + (f" | {words}" if words else "")
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
        over = [row.method for row in rows if row not in fitting]
        best = max(fitting, key=lambda row: row.samples_per_second, default=None)
        said = "nothing fits" if best is None else f"{best.method} is fastest, {best.samples_per_second:,.0f} samples/s"
        lines.append(f"{job}, {name}: {said} (modelled)" + (f"; too large: {', '.join(over)}" if over else ""))
    return "\n".join(lines)


# ---- scaling ---------------------------------------------------------------------------------------------------------


def scaling_picture(
    curves: Curves, weak: bool = False, law: bool = True, title: str = "", how: str = "modelled"
) -> Figure:
    """Speed-up (strong) or time (weak), and efficiency, against GPUs.

    law: draw Amdahl's law as fitted to each strong curve, dotted. how: the times are "modelled", or "measured".
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.0), layout="constrained")
    for place, (name, seconds) in enumerate(curves.items()):
        look = {"color": COLOURS[place], "marker": "osD^vPX"[place], "label": name}
        gpus, shares, one = sorted(seconds), efficiency(seconds, weak), seconds[min(seconds)]
        left.plot(gpus, [1e3 * seconds[n] if weak else n * shares[n] for n in gpus], **look)
        right.plot(gpus, [100 * shares[n] for n in gpus], **look)
        if law and not weak:
            serial = amdahl(seconds)
            left.plot(gpus, [one / amdahl_seconds(one, serial, n) for n in gpus], ":", color=COLOURS[place])
    ticks = sorted({n for seconds in curves.values() for n in seconds})
    if not weak:
        left.plot(ticks, ticks, color="0.6", linewidth=0.8, label="ideal")
        left.set_yscale("log", base=2)
        left.set_yticks(ticks, ticks)
    left.set_ylabel(f"ms per step, {how}" if weak else f"times as fast, {how}")
    left.set_ylim(*((0, None) if weak else (0.9, None)))
    right.set_ylabel("efficiency in %")
    right.set_ylim(0, 105)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, ticks)
        axes.set(xlabel="GPUs")
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    set_alt_text(figure, describe_scaling(curves, weak))
    return figure


def describe_scaling(curves: Curves, weak: bool = False) -> str:
    """The picture in words: per curve the efficiency at each number of GPUs, and Amdahl's serial share."""
    lines = []
    for name, seconds in curves.items():
        shares = ", ".join(f"{n}: {100 * each:.0f} %" for n, each in efficiency(seconds, weak).items())
        law = "" if weak else f"; Amdahl's serial share {100 * amdahl(seconds):.1f} %"
        lines.append(f"{name}: efficiency by GPUs {shares}{law}")
    return "\n".join(lines)


# ---- advice ----------------------------------------------------------------------------------------------------------

_GPUS = (1, 2, 4, 8, 16, 32, 64)
_LOOKS = {
    "one GPU": bar_style(5),
    "DDP": bar_style(0),
    "pipeline": bar_style(1, 1),
    "sharding": bar_style(2, 2),
    "more GPUs": OVER,
}


def _advices(cluster: Cluster, batch: int) -> dict[str, dict[int, Advice]]:
    usable = [n for n in _GPUS if n <= cluster.per_machine or n % cluster.per_machine == 0]
    return {name: {n: advise(net, batch, n, cluster) for n in usable} for name, net in NETS.items()}


def guide_picture(cluster: Cluster, batch: int = 256) -> Figure:
    """A field per net and number of GPUs with the method that `advise` names, and over how many pieces gradients are
    accumulated. batch: samples of a step."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.2), layout="constrained")
    for y, advices in enumerate(_advices(cluster, batch).values()):
        for x, (n, advice) in enumerate(advices.items()):
            axes.add_patch(Rectangle((x, y), 1, 1, **_LOOKS[advice.method] | {"linewidth": 2}))
            on = f" on {advice.gpus}" if advice.gpus < n and advice.method != "more GPUs" else ""
            said = advice.method + on + (f"\n{advice.micro_batches} pieces" if advice.micro_batches > 1 else "")
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axes.text(x + 0.5, y + 0.5, said, ha="center", va="center", fontsize=7.5, bbox=box)
        columns = list(advices)
    axes.set_xticks([x + 0.5 for x in range(len(columns))], columns)
    axes.set_yticks([y + 0.5 for y in range(len(NETS))], list(NETS))
    machines = f"{cluster.gpu.name}, {cluster.per_machine} per machine"
    axes.set(xlim=(0, len(columns)), ylim=(0, len(NETS)), xlabel=machines)
    axes.set_title(f"batch {batch}, float32; pieces: micro-batches whose gradients are added up", fontsize=9)
    set_alt_text(figure, describe_guide(cluster, batch))
    return figure


def describe_guide(cluster: Cluster, batch: int = 256) -> str:
    """The picture in words: a line per net."""
    lines = []
    for name, advices in _advices(cluster, batch).items():
        runs: list[list] = []  # [what is said, of the fewest GPUs, to the most]
        for n, advice in advices.items():
            fewer = advice.gpus < n and advice.method != "more GPUs"
            said = f"{advice.method} on {advice.gpus} of" if fewer else f"{advice.method} on"
            if runs and runs[-1][0] == said:
                runs[-1][2] = n
            else:
                runs.append([said, n, n])
        lines.append(f"{name}: " + ", ".join(f"{said} {a}" + (f" to {b}" if b > a else "") for said, a, b in runs))
    return "\n".join(lines)


def explore_advice(
    net: str = "BERT of the article",
    batch: int = 200,
    gpus: int = 4,
    kind: str = "TITAN Xp",
    per_machine: int = 4,
    network: str = "Ethernet 100",
) -> Panel:
    """The advice with a control for each argument; end a cell with it.

    net: a name of `NETS`. batch: samples of a step on all GPUs. gpus: 1, 2, 4, ... 64, of a `kind`. per_machine: how
    many share a machine; network: between machines. Raises ValueError for a value that is none of the choices.
    """
    kind = Cluster(kind).gpu.kind
    choices = {
        "net": (list(NETS), net),
        "batch": (sorted({*(2**power for power in range(13)), batch}), batch),
        "gpus": (list(_GPUS), gpus),
        "kind": (list(GPU_KINDS), kind),
        "per_machine": ([1, 2, 4, 8], per_machine),
        "network": (list(NETWORKS), network),
    }
    return Panel(_look, {name: control(name.replace("_", " "), *each) for name, each in choices.items()})


def _look(net: str, batch: int, gpus: int, kind: str, per_machine: int, network: str) -> tuple[str, Figure]:
    cluster = Cluster(kind, per_machine, network=network)
    advice = advise(NETS[net], batch, gpus, cluster)
    return f"{net}, batch {batch}, {gpus} x {cluster.gpu.name}\n{advice}", _advice_picture(advice, cluster)


def _advice_picture(advice: Advice, cluster: Cluster) -> Figure:
    """A bar per method: memory of the fullest GPU against the room on each, and the rough time of a step."""
    figure = Figure(figsize=(WIDTH, 1.2 + 0.3 * len(advice.peaks)), layout="constrained")
    axes, room = figure.subplots(), cluster.room / GiB
    length = max(room, min(max(advice.peaks.values()) / GiB, 2 * room))
    for row, (method, peak) in enumerate(advice.peaks.items()):
        chosen, end = method == advice.method, min(peak / GiB, 2 * room)
        axes.barh(row, min(end, room), 0.6, **bar_style(0) if chosen else {"color": "0.55"})
        axes.barh(row, max(0, end - room), 0.6, left=room, **OVER)
        said = f" {peak / GiB:,.1f} GiB, {1e3 * advice.seconds[method]:,.0f} ms"
        axes.text(end, row, said, va="center", fontsize=9, weight="bold" if chosen else "normal")
    axes.axvline(room, color="black", linestyle=":")
    axes.set_yticks(range(len(advice.peaks)), list(advice.peaks))
    axes.set(xlim=(0, 1.4 * length), ylim=(len(advice.peaks) - 0.5, -0.5))
    note = f"memory in GiB; dotted: the {room:.1f} GiB that a GPU has. Whole batch at once; times are rough"
    axes.set_xlabel(note, fontsize=9)
    axes.set_title(advice.headline, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
