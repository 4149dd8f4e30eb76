"""The typed names from before PyTorch 0.4, such as torch.cuda.FloatTensor.

PyTorch makes them in C++ (torch/csrc/tensor/python_tensor.cpp), where each call asks the driver for a GPU.
"""

from typing import Any

import torch

from virtual_gpus import errors
from virtual_gpus.patches.table import Patch, wrapped


class LegacyType(type):
    """The type of torch.cuda.FloatTensor: a dtype on the GPU, with the attributes of a `tensortype`."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.type() == f"{cls.__module__}.{cls.__name__}"

    def __call__(cls, *args: Any, device: torch.types.Device = None) -> torch.Tensor:
        """A new tensor, of these sizes or with these values. `device` names another GPU."""
        device = "cuda" if device is None else device
        if all(isinstance(size, int) for size in args) or isinstance(args[0], torch.Size):
            return torch.empty(args or (0,) if len(args) != 1 else args[0], dtype=cls.dtype, device=device)
        return torch.as_tensor(*args, dtype=cls.dtype, device=device)


def _legacy(name: str) -> LegacyType:
    facts = {"dtype": getattr(torch, name).dtype, "layout": torch.strided, "is_cuda": True, "is_xpu": False,
             "is_sparse": False, "is_sparse_csr": False, "__module__": "torch.cuda"}  # fmt: skip
    return LegacyType(name, (), facts)


def parse_type(kind: str | type) -> tuple[torch.dtype, bool]:
    """The dtype of "torch.cuda.FloatTensor" and the like, and if it is on a GPU. Raises PyTorch's ValueError."""
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
    *path, last = name.split(".")
    if name == "torch.Tensor" or kind is torch.Tensor:
        return torch.get_default_dtype(), False
    if path not in (["torch"], ["torch", "cuda"]) or not last.endswith("Tensor") or not hasattr(torch, last):
        raise ValueError(f"invalid type: '{name}'")
    return getattr(torch, last).dtype, path[-1] == "cuda"


def is_cuda_type(kind: object) -> bool:
    """True for "torch.cuda.FloatTensor" and its kin, as text or as a class."""
    return isinstance(kind, LegacyType) or (isinstance(kind, str) and kind.startswith("torch.cuda."))


def set_default_tensor_type(function: Any, t: str | type, /) -> None:
    """As PyTorch's, but for a CUDA type."""
    if is_cuda_type(t):
        instead = 'Use torch.set_default_dtype and torch.set_default_device("cuda").'
        raise errors.not_modelled("torch.set_default_tensor_type of a CUDA type", instead)
    function(t)


def _names(owner: object) -> list[str]:
    return [name for name in vars(owner) if name.endswith("Tensor") and name[0] != "_"]


def patches() -> list[Patch]:
    sparse, instead = torch.cuda.sparse, "Use torch.sparse_coo_tensor."
    rows = [(torch.cuda, name, _legacy(name)) for name in _names(torch.cuda)]
    rows += [(sparse, name, errors.refusing(f"torch.cuda.sparse.{name}", instead)) for name in _names(sparse)]
    return rows + wrapped(torch, set_default_tensor_type)
