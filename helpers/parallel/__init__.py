"""Several ranks or GPUs at one job: functions and programs in processes, and the pipeline in one process."""

from helpers.parallel.launching import RankError, launch, run_hosts
from helpers.parallel.pipeline import Pipeline, Slot, Task, bubble, gpipe, most_kept, one_f_one_b, simulate

__all__ = ["Pipeline", "RankError", "Slot", "Task", "bubble", "gpipe", "launch", "most_kept", "one_f_one_b",
           "run_hosts", "simulate"]  # fmt: skip
