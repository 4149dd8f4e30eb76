"""The decision guide as a panel: sliders and choices, the method with its reasons, memory per GPU of every method."""

from __future__ import annotations

from helpers.lesson07.advice.nets import NETS
from helpers.lesson07.advice.rules import Advice, advise
from helpers.lesson07.scaling import KINDS, NETWORKS, Cluster
from helpers.measure import GiB, format_bytes
from helpers.show.plots.palette import OVER
from helpers.show.widgets.panel import Panel, choice
from helpers.show.widgets.scene import Look, Scene

GPUS = (1, 2, 4, 8, 16, 32, 64)
BATCHES = tuple(2**power for power in range(13))
_WIDTH, _LEFT, _ROW, _TOP = 700, 110, 30, 34
_BEST, _OTHER, _OVER = Look("#0072B2"), Look("#8a8a8a"), Look(OVER["color"], OVER["hatch"])


class AdvicePanel(Panel):
    """The panel; its controls are the arguments of `explore_advice`."""

    _words_first = True

    def __init__(self, **chosen):
        options = {"net": list(NETS), "batch": sorted({*BATCHES, chosen["batch"]}), "gpus": GPUS, "kind": KINDS,
                   "per_machine": (1, 2, 4, 8), "network": list(NETWORKS)}  # fmt: skip
        super().__init__({name: choice(name.replace("_", " "), each, chosen[name]) for name, each in options.items()})

    def _look(self, net: str, batch: int, gpus: int, kind: str, per_machine: int, network: str) -> tuple[str, Scene]:
        cluster = Cluster(kind, per_machine, network=network)
        advice = advise(NETS[net], batch, gpus, cluster)
        words = f"{net}, batch {batch}, {gpus} x {cluster.name}\n{advice}"
        return words, draw(advice, cluster, words)


def draw(advice: Advice, cluster: Cluster, words: str) -> Scene:
    """A row per method: memory of the fullest GPU against the room on a card, and the rough time of a step."""
    scene = Scene(_WIDTH, _TOP + _ROW * len(advice.peaks) + 22, words)
    scene.text(8, 20, advice.headline, size=14, bold=True)
    pixels = (_WIDTH - _LEFT - 190) / max(cluster.room, min(max(advice.peaks.values()), 2 * cluster.room))
    for row, (method, peak) in enumerate(advice.peaks.items()):
        y = _TOP + _ROW * row
        chosen = method == advice.method
        over = max(0.0, peak - cluster.room)
        scene.text(_LEFT - 8, y + 18, method, anchor="end", bold=chosen)
        inside, beyond = min(peak, cluster.room), min(over, cluster.room)
        scene.box(_LEFT, y + 5, inside * pixels, 18, _BEST if chosen else _OTHER)
        scene.box(_LEFT + inside * pixels, y + 5, beyond * pixels, 18, _OVER)
        said = f"{format_bytes(round(peak))}, {1e3 * advice.seconds[method]:,.0f} ms"
        scene.text(_LEFT + (inside + beyond) * pixels + 6, y + 18, said, halo=True, bold=chosen)
    edge, bottom = _LEFT + cluster.room * pixels, _TOP + _ROW * len(advice.peaks)
    scene.line((edge, edge), (_TOP, bottom), width=1.6, dotted=True)
    room = f"dotted: the {cluster.room / GiB:.1f} GiB that a card has"
    note = f"{room}. Whole batch at once, a pipeline's in a micro-batch per GPU; modelled, rough times."
    scene.text(8, bottom + 15, note, size=11)
    return scene


def explore_advice(
    net: str = "BERT of the article",
    batch: int = 200,
    gpus: int = 4,
    kind: str = "TITAN Xp",
    per_machine: int = 4,
    network: str = "Ethernet 100",
) -> AdvicePanel:
    """The decision guide with a control for each argument; end a cell with it.

    net: a name of `NETS`. batch: samples of a step on all GPUs. gpus: 1, 2, 4, ... 64; kind: of all. per_machine: how
    many share a machine; network: between machines. Raises ValueError for a value that is none of the choices.
    """
    kind = next((each for each in KINDS if each.lower() == kind.replace(" ", "").lower()), kind)
    return AdvicePanel(net=net, batch=batch, gpus=gpus, kind=kind, per_machine=per_machine, network=network)
