"""Training on several GPUs: `launch`, the parallel loss, the pipeline."""

from helpers.parallel.launching import RankError, interface, launch
from helpers.parallel.loss import (
    DataParallelCriterion,
    DataParallelModel,
    LossInForward,
    count_labels,
    count_samples,
    total,
)
from helpers.parallel.pipeline import (
    Pipeline,
    bubble,
    gpipe,
    one_f_one_b,
    simulate,
)
