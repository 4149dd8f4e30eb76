"""Training loops on one GPU, with DataParallel and with DDP, and their checkpoints."""

import importlib

_HOMES = {
    "DataParallelTrainer": "helpers.train.loops",
    "DistributedTrainer": "helpers.train.loops",
    "Trainer": "helpers.train.loops",
    "load_checkpoint": "helpers.train.checkpoints",
    "save_checkpoint": "helpers.train.checkpoints",
}
__all__ = list(_HOMES)


def __getattr__(name):
    """The names above, imported when they are first asked for."""
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(importlib.import_module(_HOMES[name]), name)
