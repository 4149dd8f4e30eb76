"""Checks of arguments in PyTorch's own Python, which read values. Without these, all are taken to be right."""

from torch.distributions import Distribution
from torch.nn import functional

from virtual_gpus.dispatch.valueless import assuming
from virtual_gpus.patches.table import Patch

_GAUSSIAN, _OF_DISTRIBUTIONS = "gaussian_nll_loss", ("__init__", "_validate_sample")


def patches() -> list[Patch]:
    """What asks whether anything is wrong is told no, and what asks whether all is right is told yes."""
    gaussian: Patch = (functional, _GAUSSIAN, assuming(False)(vars(functional)[_GAUSSIAN]))
    return [gaussian, *((Distribution, name, assuming(True)(vars(Distribution)[name])) for name in _OF_DISTRIBUTIONS)]
