"""Training on several GPUs: `launch`, the pipeline."""

from helpers.parallel.launching import RankError, interface, launch
from helpers.parallel.pipeline import (
    Pipeline,
    bubble,
    gpipe,
    one_f_one_b,
    simulate,
)
