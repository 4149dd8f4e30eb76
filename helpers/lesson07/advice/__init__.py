"""The decision guide: from a net, its batch, the GPUs and their links to a method, with its reasons and numbers.

    advice = advise(NETS["BERT of the article"], batch=200, gpus=4, cluster=Cluster("TITAN Xp"))
    advice.method, advice.reasons, advice.peaks["DDP"]
    explore_advice()                                   # the panel
    guide_picture(Cluster("A100", 8))                  # nets against GPUs, a method in each field

    nets      what is told of a net: its layers in runs of like ones; the nets that are known
    measured  `net_of`, the same of your own net
    costs     what a card takes for each layer
    stages    where a pipeline is cut
    sizes     memory per GPU, by formula
    times     rough times, by formula
    rules     `advise`
    guide     the picture
    panel     the panel

Nothing is run and no GPU is needed, but for `net_of`. Lesson 07 uses this.
"""

from helpers.lesson07.advice.guide import describe_guide, guide_picture
from helpers.lesson07.advice.measured import net_of
from helpers.lesson07.advice.nets import NETS, OPTIMIZERS, Layers, Net, layers_alike
from helpers.lesson07.advice.panel import explore_advice
from helpers.lesson07.advice.rules import Advice, advise
from helpers.lesson07.advice.sizes import peak_bytes
from helpers.lesson07.advice.times import METHODS, step_seconds

__all__ = [
    "METHODS",
    "NETS",
    "OPTIMIZERS",
    "Advice",
    "Layers",
    "Net",
    "advise",
    "describe_guide",
    "explore_advice",
    "guide_picture",
    "layers_alike",
    "net_of",
    "peak_bytes",
    "step_seconds",
]
