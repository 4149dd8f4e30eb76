"""What lesson 07 shows: methods as a table, scaling curves, the advice as a picture and as a panel.

Each picture has a function that says the same in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

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


def describe_methods(found: Found, clusters: Mapping[str, Cluster]) -> str:
    """In words: per job and cluster the fastest method that fits, and which do not fit."""
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
    ticks = sorted({n for seconds in curves.values() for n in seconds})
    for (name, seconds), colour, marker in zip(curves.items(), COLOURS, "osD^vPX", strict=False):
        look = {"color": colour, "marker": marker, "label": name}
        shares, one = efficiency(seconds, weak), seconds[min(seconds)]
        left.plot(list(shares), [1e3 * seconds[n] if weak else n * shares[n] for n in shares], **look)
        right.plot(list(shares), [100 * share for share in shares.values()], **look)
        if law and not weak:
            serial = amdahl(seconds)
            left.plot(list(shares), [one / amdahl_seconds(one, serial, n) for n in shares], ":", color=colour)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, ticks)
        axes.spines[["top", "right"]].set_visible(False)
    if weak:
        left.set(xlabel="GPUs", ylabel=f"ms per step, {how}", ylim=(0, None))
    else:
        left.plot(ticks, ticks, color="0.6", linewidth=0.8, label="ideal")
        left.set_yscale("log", base=2)
        left.set_yticks(ticks, ticks)
        left.set(xlabel="GPUs", ylabel=f"times as fast, {how}", ylim=(0.9, None))
    right.set(xlabel="GPUs", ylabel="efficiency in %", ylim=(0, 105))
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
_FIELDS = {"one GPU": "#FBF6B8", "DDP": "#CCE3F2", "pipeline": "#FBE2B8", "sharding": "#CCECE2", "more GPUs": "#F7DCC8"}


def _advices(cluster: Cluster, batch: int) -> dict[str, dict[int, Advice]]:
    usable = [n for n in _GPUS if n <= cluster.per_machine or n % cluster.per_machine == 0]
    return {name: {n: advise(net, batch, n, cluster) for n in usable} for name, net in NETS.items()}


def guide_picture(cluster: Cluster, batch: int = 256) -> Figure:
    """A field per net and number of GPUs with the method that `advise` names, and over how many pieces gradients are
    accumulated. batch: samples of a step."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.2), layout="constrained")
    nets = _advices(cluster, batch)
    words = [[_field(n, advice) for n, advice in advices.items()] for advices in nets.values()]
    colours = [[_FIELDS[advice.method] for advice in advices.values()] for advices in nets.values()]
    counts = [f"{n} GPU" + "s" * (n > 1) for n in next(iter(nets.values()))]
    fields = axes.table(words, colours, "center", rowLabels=list(nets), colLabels=counts, bbox=(0, 0, 1, 1))
    fields.auto_set_font_size(False)
    fields.set_fontsize(7.5)
    axes.set_axis_off()
    pieces = "pieces: micro-batches whose gradients are added up"
    figure.suptitle(f"{cluster.gpu.name}, {cluster.per_machine} per machine; batch {batch}; {pieces}", fontsize=9)
    set_alt_text(figure, describe_guide(cluster, batch))
    return figure


def _field(n: int, advice: Advice) -> str:
    on = f" on {advice.gpus}" if advice.gpus < n and advice.method != "more GPUs" else ""
    return advice.method + on + (f"\n{advice.micro_batches} pieces" if advice.micro_batches > 1 else "")


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
    for method, peak in advice.peaks.items():
        look = OVER if peak > cluster.room else bar_style(0) if method == advice.method else {"color": "0.55"}
        bar = axes.barh(method, min(peak / GiB, 2 * room), 0.6, **look)
        axes.bar_label(bar, [f" {peak / GiB:,.1f} GiB, {1e3 * advice.seconds[method]:,.0f} ms"], fontsize=9)
    axes.axvline(room, color="black", linestyle=":")
    axes.margins(x=0.35)
    axes.invert_yaxis()
    note = f"memory in GiB; dotted: the {room:.1f} GiB that a GPU has. Whole batch at once; times are rough"
    axes.set_xlabel(note, fontsize=9)
    axes.set_title(advice.headline, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
