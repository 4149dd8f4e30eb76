"""The decision guide: from a net, its batch, the GPUs and their links to a method, with its reasons and numbers.

    advice = advise(NETS["BERT of the article"], batch=200, gpus=4, cluster=Cluster("TITAN Xp"))
    advice.method, advice.reasons, advice.peaks["DDP"]
    explore_advice()                                   # the panel
    guide_picture(Cluster("A100", 8))                  # nets against GPUs, a method in each field

    sizes   memory per GPU and rough times, by formula
    rules   `advise`
    guide   the picture
    panel   the panel

Nothing is run and no GPU is needed. Lesson 07 uses this.
"""

from helpers.advice.guide import describe_guide, guide_picture
from helpers.advice.panel import explore_advice
from helpers.advice.rules import Advice, advise
from helpers.advice.sizes import METHODS, NETS, OPTIMIZERS, Net, peak_bytes, step_seconds

__all__ = [
    "METHODS",
    "NETS",
    "OPTIMIZERS",
    "Advice",
    "Net",
    "advise",
    "describe_guide",
    "explore_advice",
    "guide_picture",
    "peak_bytes",
    "step_seconds",
]
