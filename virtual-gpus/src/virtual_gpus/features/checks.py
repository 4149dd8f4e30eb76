"""Checks of arguments in PyTorch's own Python, which read values. Without these, all are taken to be right."""

from torch.distributions import Distribution
from torch.nn import functional

from virtual_gpus.dispatch.valueless import assuming
from virtual_gpus.patches.table import Patch


def patches() -> list[Patch]:
    """What asks whether anything is wrong is told no, and what asks whether all is right is told yes."""
    of_loss: Patch = (functional, "gaussian_nll_loss", assuming(False)(functional.gaussian_nll_loss))
    methods = (Distribution.__init__, Distribution._validate_sample)
    return [of_loss, *((Distribution, method.__name__, assuming(True)(method)) for method in methods)]
