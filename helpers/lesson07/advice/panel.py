"""The decision guide as a panel: sliders and choices, the method with its reasons, memory per GPU of every method."""

from matplotlib.figure import Figure

from helpers.lesson07.advice.nets import NETS
from helpers.lesson07.advice.rules import Advice, advise
from helpers.lesson07.scaling import KINDS, NETWORKS, Cluster
from helpers.measure import GiB
from helpers.show.panel import Panel, control
from helpers.show.style import OVER, WIDTH, bar_style

GPUS = (1, 2, 4, 8, 16, 32, 64)
BATCHES = tuple(2**power for power in range(13))


def explore_advice(
    net: str = "BERT of the article",
    batch: int = 200,
    gpus: int = 4,
    kind: str = "TITAN Xp",
    per_machine: int = 4,
    network: str = "Ethernet 100",
) -> Panel:
    """The decision guide with a control for each argument; end a cell with it.

    net: a name of `NETS`. batch: samples of a step on all GPUs. gpus: 1, 2, 4, ... 64; kind: of all. per_machine: how
    many share a machine; network: between machines. Raises ValueError for a value that is none of the choices.
    """
    kind = next((each for each in KINDS if each.lower() == kind.replace(" ", "").lower()), kind)
    choices = {
        "net": (list(NETS), net),
        "batch": (sorted({*BATCHES, batch}), batch),
        "gpus": (list(GPUS), gpus),
        "kind": (list(KINDS), kind),
        "per_machine": ([1, 2, 4, 8], per_machine),
        "network": (list(NETWORKS), network),
    }
    return Panel(_look, {name: control(name.replace("_", " "), *each) for name, each in choices.items()})


def _look(net: str, batch: int, gpus: int, kind: str, per_machine: int, network: str) -> tuple[str, Figure]:
    cluster = Cluster(kind, per_machine, network=network)
    advice = advise(NETS[net], batch, gpus, cluster)
    return f"{net}, batch {batch}, {gpus} x {cluster.name}\n{advice}", _draw(advice, cluster)


def _draw(advice: Advice, cluster: Cluster) -> Figure:
    """A row per method: memory of the fullest GPU against the room on each, and the rough time of a step."""
    figure = Figure(figsize=(WIDTH, 1.2 + 0.3 * len(advice.peaks)), layout="constrained")
    ax, room = figure.subplots(), cluster.room / GiB
    length = max(room, min(max(advice.peaks.values()) / GiB, 2 * room))
    for row, (method, peak) in enumerate(advice.peaks.items()):
        chosen, end = method == advice.method, min(peak / GiB, 2 * room)
        ax.barh(row, min(end, room), 0.6, **bar_style(0) if chosen else {"color": "0.55"})
        ax.barh(row, max(0, end - room), 0.6, left=room, **OVER)
        said = f" {peak / GiB:,.1f} GiB, {1e3 * advice.seconds[method]:,.0f} ms"
        ax.text(end, row, said, va="center", fontsize=9, weight="bold" if chosen else "normal")
    ax.axvline(room, color="black", linestyle=":")
    ax.set_yticks(range(len(advice.peaks)), list(advice.peaks))
    ax.set(xlim=(0, 1.4 * length), ylim=(len(advice.peaks) - 0.5, -0.5))
    ax.set_xlabel(
        f"memory in GiB; dotted: the {room:.1f} GiB that a GPU has. Whole batch at once; times are rough", fontsize=9
    )
    ax.set_title(advice.headline, loc="left", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    return figure
