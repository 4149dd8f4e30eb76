"""The results of lesson 07: the methods as a table, scaling curves, and the decision guide as a picture.

For each picture, another function returns a description as text.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from helpers.lesson07.advice import Advice, advise
from helpers.lesson07.methods import Row
from helpers.lesson07.nets import NETS
from helpers.lesson07.scaling import Cluster, amdahl, amdahl_seconds, efficiency
from helpers.measure import GiB
from helpers.show.style import COLOURS, WIDTH, set_alt_text

Found = Mapping[tuple[str, str], Sequence[Row]]  # (name of the cluster, name of the job): rows
Curves = Mapping[str, Mapping[int, float]]  # name: {GPUs: seconds of a step}

# ---- methods ---------------------------------------------------------------------------------------------------------


def table(found: Found, clusters: Mapping[str, Cluster]) -> str:
    """Return a table for each cluster and job, with a line for each method: batch, GiB on the fullest GPU ("!" if it
    does not fit) and on the emptiest, modelled ms per step, samples per second, and the GPUs' range of utilisation."""
    lines = [f"{'':15} batch  GiB, fullest  least      ms samples/s       busy"]
    for (name, job), rows in found.items():
        lines += ["", f"{job}, {name}, {clusters[name].room / GiB:.1f} GiB each"]
        for row in rows:
            low, high = (f"{100 * share:.0f}" for share in (min(row.utilisation), max(row.utilisation)))
            busy = f"{low} %" if low == high else f"{low} to {high} %"
            fullest = f"{max(row.peaks) / GiB:.2f}" + (" " if row.fits(clusters[name]) else "!")
            lines.append(
                f"{row.method:15} {row.batch:5} {fullest:>13} {min(row.peaks) / GiB:6.2f} {1e3 * row.seconds:7.0f} "
                f"{row.samples_per_second:9.0f} {busy:>10}"
            )
    return "\n".join(lines)


# ---- scaling ---------------------------------------------------------------------------------------------------------


def scaling_picture(
    curves: Curves, weak: bool = False, law: bool = True, title: str = "", how: str = "modelled"
) -> Figure:
    """Draw the speed-up (with `weak`, the time of a step) and the efficiency for each number of GPUs.

    law: also draw Amdahl's law, fitted to each curve, as a dotted line (not with `weak`). how: "modelled" or "measured"
    times. Returns the figure.
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
    set_alt_text(figure, describe_scaling(curves, weak, law))
    return figure


def describe_scaling(curves: Curves, weak: bool = False, law: bool = True) -> str:
    """Describe each curve: the efficiency for each number of GPUs, and Amdahl's serial share."""
    lines = []
    for name, seconds in curves.items():
        shares = ", ".join(f"{n}: {100 * each:.0f} %" for n, each in efficiency(seconds, weak).items())
        share = f"; Amdahl's serial share {100 * amdahl(seconds):.1f} %" if law and not weak else ""
        lines.append(f"{name}: efficiency by GPUs {shares}{share}")
    return "\n".join(lines)


# ---- advice ----------------------------------------------------------------------------------------------------------

_GPUS = (1, 2, 4, 8, 16, 32, 64)
_FIELDS = {"one GPU": "#FBF6B8", "DDP": "#CCE3F2", "pipeline": "#FBE2B8", "sharding": "#CCECE2", "more GPUs": "#F7DCC8"}


def guide_picture(cluster: Cluster, batch: int = 256) -> Figure:
    """Draw a table of the methods that `advise` recommends, with a row for each model and a column for each number of
    GPUs. It also has the number of micro-batches. batch: samples per step. Returns the figure."""
    found = _advices(cluster, batch)
    words = [[_field(n, advice) for n, advice in advices.items()] for advices in found.values()]
    colours = [[_FIELDS[advice.method] for advice in advices.values()] for advices in found.values()]
    counts = ["1 GPU" if n == 1 else f"{n} GPUs" for n in next(iter(found.values()))]
    figure, axes = plt.subplots(figsize=(WIDTH, 3.2), layout="constrained")
    fields = axes.table(words, colours, "center", rowLabels=list(found), colLabels=counts, bbox=(0, 0, 1, 1))
    fields.auto_set_font_size(False)
    fields.set_fontsize(7.5)
    axes.set_axis_off()
    pieces = "pieces: micro-batches whose gradients are added up"
    figure.suptitle(f"{cluster.gpu.name}, {cluster.per_machine} per machine; batch {batch}; {pieces}", fontsize=9)
    set_alt_text(figure, describe_guide(cluster, batch))
    return figure


def describe_guide(cluster: Cluster, batch: int = 256) -> str:
    """Describe the picture, with one line for each model."""
    lines = []
    for name, advices in _advices(cluster, batch).items():
        runs = groupby(advices.items(), key=lambda item: _method_and_gpus(*item))
        said = []
        for words, items in runs:
            counts = [n for n, _ in items]
            said.append(f"{words} {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else ""))
        lines.append(f"{name}: {', '.join(said)}")
    return "\n".join(lines)


def _advices(cluster: Cluster, batch: int) -> dict[str, dict[int, Advice]]:
    usable = [n for n in _GPUS if n <= cluster.per_machine or n % cluster.per_machine == 0]
    return {name: {n: advise(net, batch, n, cluster) for n in usable} for name, net in NETS.items()}


def _method_and_gpus(n: int, advice: Advice) -> str:
    return f"{advice.method} on {advice.gpus} of" if advice.gpus < n else f"{advice.method} on"


def _field(n: int, advice: Advice) -> str:
    on = f" on {advice.gpus}" if advice.gpus < n else ""
    return advice.method + on + (f"\n{advice.micro_batches} pieces" if advice.micro_batches > 1 else "")
