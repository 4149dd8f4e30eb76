"""Every way to use several GPUs on one and the same job: memory, modelled time, utilisation, largest batch.

    gpus = use_gpus(4, kind="K80", memory="64 GiB", shapes_only=True)
    row = measure(PYRAMIDNET, "DataParallel", gpus, Cluster("K80"))
    row.seconds, row.utilisation, row.peaks       # modelled s, 0 to 1 per GPU, bytes per GPU

Times are *modelled* (`record_timeline`), so this needs virtual GPUs. A step is measured with the optimizer's state in
place. The memory of the GPUs is best set larger than any method needs: what does not fit a card can then still be
compared, and `Row.fits` says so.

DDP is measured as one rank's step in this process; what its collectives take on several GPUs is worked out after
`helpers.lesson07.scaling`, whose docstring says how near that comes to real ranks. Lesson 07 uses this.
"""

from helpers.lesson07.methods.compare import MEMORY, compare
from helpers.lesson07.methods.cuts import balanced_cuts, stages_of
from helpers.lesson07.methods.jobs import BERT, PYRAMIDNET, Job, micro_batches_on
from helpers.lesson07.methods.measure import METHODS, Row, TrainStep, measure
from helpers.lesson07.methods.table import describe_methods, methods_picture, table

__all__ = [
    "BERT",
    "MEMORY",
    "METHODS",
    "PYRAMIDNET",
    "Job",
    "Row",
    "TrainStep",
    "balanced_cuts",
    "compare",
    "describe_methods",
    "measure",
    "methods_picture",
    "micro_batches_on",
    "stages_of",
    "table",
]
