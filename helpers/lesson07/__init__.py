"""What lesson 07 alone needs: methods compared, scaling, advice, waiting GPUs."""

import importlib

_HOMES = {
    "BERT": "helpers.lesson07.methods",
    "Cluster": "helpers.lesson07.scaling",
    "JOBS": "helpers.lesson07.waiting",
    "NETS": "helpers.lesson07.advice",
    "PYRAMIDNET": "helpers.lesson07.methods",
    "TrainStep": "helpers.lesson07.methods",
    "advise": "helpers.lesson07.advice",
    "amdahl": "helpers.lesson07.scaling",
    "amdahl_seconds": "helpers.lesson07.scaling",
    "compare": "helpers.lesson07.methods",
    "describe_guide": "helpers.lesson07.advice",
    "describe_methods": "helpers.lesson07.methods",
    "describe_scaling": "helpers.lesson07.scaling",
    "explore_advice": "helpers.lesson07.advice",
    "guide_picture": "helpers.lesson07.advice",
    "measure": "helpers.lesson07.methods",
    "methods_picture": "helpers.lesson07.methods",
    "peak_bytes": "helpers.lesson07.advice",
    "rank_step": "helpers.lesson07.scaling",
    "read_log": "helpers.lesson07.scaling",
    "record_job": "helpers.lesson07.waiting",
    "scaling_picture": "helpers.lesson07.scaling",
    "step_seconds": "helpers.lesson07.advice",
    "table": "helpers.lesson07.methods",
}
__all__ = list(_HOMES)


def __getattr__(name):
    """The names above, imported when they are first asked for."""
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(importlib.import_module(_HOMES[name]), name)
