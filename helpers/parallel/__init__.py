"""Several ranks or GPUs at one job: launch and ranks, the parallel loss, the pipeline."""

import importlib

_HOMES = {
    "DataParallelCriterion": "helpers.parallel.loss",
    "DataParallelModel": "helpers.parallel.loss",
    "LossInForward": "helpers.parallel.loss",
    "Pipeline": "helpers.parallel.pipeline",
    "bubble": "helpers.parallel.pipeline",
    "connect": "helpers.parallel.ranks",
    "count_labels": "helpers.parallel.loss",
    "disconnect": "helpers.parallel.ranks",
    "explore_pipeline": "helpers.parallel.pipeline",
    "from_all": "helpers.parallel.ranks",
    "gpipe": "helpers.parallel.pipeline",
    "launch": "helpers.parallel.launching",
    "layers_of": "helpers.parallel.pipeline",
    "local_device": "helpers.parallel.ranks",
    "one_f_one_b": "helpers.parallel.pipeline",
    "rank": "helpers.parallel.ranks",
    "rank_loader": "helpers.parallel.ranks",
    "simulate": "helpers.parallel.pipeline",
    "split": "helpers.parallel.pipeline",
    "total": "helpers.parallel.loss",
}
__all__ = list(_HOMES)


def __getattr__(name):
    """The names above, imported when they are first asked for."""
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(importlib.import_module(_HOMES[name]), name)
