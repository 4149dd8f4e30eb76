"""The decision guide as a picture: GPUs across, nets up, and what `advise` says in each field."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from helpers.lesson07.advice.nets import NETS
from helpers.lesson07.advice.rules import Advice, advise
from helpers.lesson07.scaling import Cluster
from helpers.show.style import OVER, WIDTH, bar_style, set_alt_text

GPUS = (1, 2, 4, 8, 16, 32, 64)
_LOOKS = {
    "one GPU": bar_style(5),
    "DDP": bar_style(0),
    "pipeline": bar_style(1, 1),
    "sharding": bar_style(2, 2),
    "more GPUs": OVER,
}


def _fields(cluster: Cluster, batch: int, gpus: Sequence[int]) -> dict[tuple[str, int], Advice]:
    usable = [n for n in gpus if n <= cluster.per_machine or n % cluster.per_machine == 0]
    return {(name, n): advise(net, batch, n, cluster) for name, net in NETS.items() for n in usable}


def guide_picture(cluster: Cluster, batch: int = 256, gpus: Sequence[int] = GPUS):
    """A field per net and number of GPUs with the method, and where gradients are accumulated over how many pieces.

    batch: samples of a step. Returns the figure.
    """
    figure, axes = plt.subplots(figsize=(WIDTH, 3.2), layout="constrained")
    found = _fields(cluster, batch, gpus)
    columns = sorted({n for _, n in found})
    for (name, n), advice in found.items():
        x, y = columns.index(n), list(NETS).index(name)
        axes.add_patch(Rectangle((x, y), 1, 1, **_LOOKS[advice.method] | {"linewidth": 2}))
        on = f" on {advice.gpus}" if advice.gpus < n and advice.method != "more GPUs" else ""
        said = advice.method + on + (f"\n{advice.micro_batches} pieces" if advice.micro_batches > 1 else "")
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(x + 0.5, y + 0.5, said, ha="center", va="center", fontsize=7.5, bbox=box)
    axes.set_xticks([x + 0.5 for x in range(len(columns))], columns)
    axes.set_yticks([y + 0.5 for y in range(len(NETS))], list(NETS))
    axes.set(xlim=(0, len(columns)), ylim=(0, len(NETS)), xlabel=f"{cluster.name}, {cluster.per_machine} per machine")
    axes.set_title(f"batch {batch}, float32; pieces: micro-batches whose gradients are added up", fontsize=9)
    set_alt_text(figure, describe_guide(cluster, batch, gpus))
    return figure


def describe_guide(cluster: Cluster, batch: int = 256, gpus: Sequence[int] = GPUS) -> str:
    """The picture in words: a line per net."""
    found = _fields(cluster, batch, gpus)
    lines = []
    for name in NETS:
        runs: list[list] = []
        for (other, n), advice in found.items():
            fewer = advice.gpus < n and advice.method != "more GPUs"
            said = f"{advice.method} on {advice.gpus} of" if fewer else f"{advice.method} on"
            if other == name and runs and runs[-1][0] == said:
                runs[-1][2] = n
            elif other == name:
                runs.append([said, n, n])
        said = ", ".join(f"{said} {a}" + (f" to {b}" if b > a else "") for said, a, b in runs)
        lines.append(f"{name}: {said}")
    return "\n".join(lines)
