"""The parts that only lesson 07 needs, in which you choose a method.

methods   measures every method on the same job: memory, modelled time, utilisation, the largest batch
scaling   computes a step of DDP on any number of GPUs, and fits Amdahl's law
nets      the models' figures on which the formulas are based
advice    formulas for memory and time, and `advise`
pictures  tables and pictures of the results
waiting   steps in which GPUs wait, for the second exercise
"""

from helpers.lesson07.advice import advise, peak_bytes, step_seconds
from helpers.lesson07.methods import BERT, PYRAMIDNET, TrainStep, compare, measure
from helpers.lesson07.nets import NETS
from helpers.lesson07.pictures import describe_guide, guide_picture, scaling_picture, table
from helpers.lesson07.scaling import Cluster, amdahl, efficiency, rank_step
from helpers.lesson07.waiting import JOBS, record_job
