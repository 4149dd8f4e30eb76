"""Several ranks or GPUs at one job: functions and torchruns in processes, and the pipeline in one process."""

from helpers.parallel.launching import RankError, interface, launch, run_hosts
from helpers.parallel.pipeline import Pipeline, bubble, gpipe, one_f_one_b, simulate
