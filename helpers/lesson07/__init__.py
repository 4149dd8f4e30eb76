"""What lesson 07 alone needs, to choose a method.

methods   every method on the same job: memory, modelled time, utilisation, the largest batch
scaling   a step of DDP on any number of GPUs, Amdahl's law
nets      what the formulas know of a net
advice    formulas of memory and time, and `advise`
pictures  the tables and pictures of all this
waiting   steps in which GPUs wait, for the second exercise
"""

from helpers.lesson07.advice import advise, peak_bytes, step_seconds
from helpers.lesson07.methods import BERT, PYRAMIDNET, TrainStep, compare, measure
from helpers.lesson07.nets import NETS
from helpers.lesson07.pictures import describe_guide, guide_picture, scaling_picture, table
from helpers.lesson07.scaling import Cluster, amdahl, efficiency, rank_step
from helpers.lesson07.waiting import JOBS, record_job

__all__ = [
    "BERT",
    "JOBS",
    "NETS",
    "PYRAMIDNET",
    "Cluster",
    "TrainStep",
    "advise",
    "amdahl",
    "compare",
    "describe_guide",
    "efficiency",
    "guide_picture",
    "measure",
    "peak_bytes",
    "rank_step",
    "record_job",
    "scaling_picture",
    "step_seconds",
    "table",
]
