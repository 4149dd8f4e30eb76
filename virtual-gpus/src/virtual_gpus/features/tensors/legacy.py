"""The typed names from before PyTorch 0.4: torch.cuda.FloatTensor and its kin, and set_default_tensor_type.

PyTorch makes these types in C++ (torch/csrc/tensor/python_tensor.cpp), where each call asks the driver for a GPU.
"""

from __future__ import annotations

import torch

from virtual_gpus import errors
from virtual_gpus.entrance import entrance
from virtual_gpus.machine import active
from virtual_gpus.placement.storages import gpu_of

_raw_set_default = torch.set_default_tensor_type
_raw_new = torch.Tensor.__new__
_default_context: list[object] = []  # what set_default_tensor_type("torch.cuda...") put in; empty otherwise


class LegacyType(type):
    """The type of torch.cuda.FloatTensor: a dtype and a layout on the GPU, with the attributes of a `tensortype`."""

    dtype: torch.dtype
    layout: torch.layout

    def __instancecheck__(cls, instance) -> bool:
        return isinstance(instance, torch.Tensor) and instance.type() == f"{cls.__module__}.{cls.__name__}"

    @entrance
    def __call__(cls, *args, device=None):
        """A new tensor: of these sizes, with these values, or around this storage. `device` names another GPU."""
        errors.warn_once(
            "The torch.cuda.*DtypeTensor constructors are no longer recommended. It's best to use methods such as "
            "torch.tensor(data, dtype=*, device='cuda') to create tensors."
        )
        device = torch.device("cuda" if device is None else device)
        if device.type != "cuda":
            raise errors.legacy_constructor(device)
        if cls.layout is torch.sparse_coo:
            return _sparse(cls.dtype, device, args)
        if all(isinstance(size, int) for size in args) or (len(args) == 1 and isinstance(args[0], torch.Size)):
            return torch.empty(args[0] if args and isinstance(args[0], torch.Size) else args or (0,),
                               dtype=cls.dtype, device=device)  # fmt: skip
        data = args[0]
        if isinstance(data, torch.Tensor):
            if not isinstance(data, cls):
                raise TypeError(f"expected {cls.__module__}.{cls.__name__} (got {data.type()})")
            return torch.ops.aten.alias(data)
        if torch.is_storage(data):
            return torch.empty(0, dtype=cls.dtype, device=device).set_(data)
        return getattr(torch, cls.__name__)(*args).to(device)


def _sparse(dtype: torch.dtype, device: torch.device, args: tuple) -> torch.Tensor:
    """() and (size) make an empty tensor, (indices, values) and (indices, values, size) one with these values."""
    if args and isinstance(args[0], torch.Tensor):
        return torch.sparse_coo_tensor(*args, dtype=dtype, device=device)
    size = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
    indices = torch.empty(len(size), 0, dtype=torch.int64, device=device)
    return torch.sparse_coo_tensor(indices, torch.empty(0, dtype=dtype, device=device), size, is_coalesced=True)


def _legacy(original, module: str) -> LegacyType:
    layout = torch.sparse_coo if "sparse" in module else torch.strided
    facts = {"dtype": _dtype_of(original.__name__), "layout": layout, "is_cuda": True, "is_xpu": False,
             "is_sparse": layout is not torch.strided, "is_sparse_csr": False, "__module__": module}  # fmt: skip
    return LegacyType(original.__name__, (), facts)


def _dtype_of(name: str) -> torch.dtype:
    """FloatTensor -> torch.float32."""
    return getattr(torch, name).dtype


def parse_type(kind) -> tuple[torch.dtype, bool]:
    """The dtype that a name or class such as "torch.cuda.FloatTensor" means, and whether it is on a GPU.

    Raises ValueError, in PyTorch's words, for what is no such type.
    """
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
    *path, last = name.split(".")
    if name == "torch.Tensor" or kind is torch.Tensor:
        return torch.get_default_dtype(), bool(_default_context)
    if path not in (["torch"], ["torch", "cuda"]) or not last.endswith("Tensor") or not hasattr(torch, last):
        raise ValueError(f"invalid type: '{name}'")
    return _dtype_of(last), path[-1] == "cuda"


def is_cuda_type(kind) -> bool:
    """True for "torch.cuda.FloatTensor" and its kin, as text or as a class."""
    return isinstance(kind, LegacyType) or (isinstance(kind, str) and kind.startswith("torch.cuda."))


def set_default_tensor_type(t, /) -> None:
    """A CUDA type makes a GPU the default device, for torch.Tensor(...) too. Raises TypeError for other than floats."""
    if not is_cuda_type(t):
        _forget_default()
        _raw_set_default(t)
        return
    errors.warn_once(
        "torch.set_default_tensor_type() is deprecated as of PyTorch 2.1, please use torch.set_default_dtype() and "
        "torch.set_default_device() as alternatives."
    )
    dtype, _ = parse_type(t)
    if not dtype.is_floating_point:
        raise TypeError(f"only floating-point types are supported as the default type (got {dtype})")
    _forget_default()
    torch.set_default_dtype(dtype)
    torch.set_default_device("cuda")
    _default_context.append(torch._GLOBAL_DEVICE_CONTEXT.device_context)
    torch.Tensor.__new__ = staticmethod(_new)


def _forget_default() -> None:
    if _default_context:
        del torch.Tensor.__new__
        if _default_context.pop() is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None):
            torch.set_default_device(None)


def _new(cls, *args, **kwargs):
    """`torch.Tensor(2, 3)` while a CUDA type is the default. In place only then, since every tensor's class has it."""
    if (
        cls is not torch.Tensor
        or active() is None
        or (args and isinstance(args[0], torch.Tensor) and not gpu_of(args[0]))
    ):
        return _raw_new(cls, *args, **kwargs)
    return _of_default_dtype()(*args, **kwargs)


def _of_default_dtype() -> LegacyType:
    wanted = torch.get_default_dtype()
    return next(kind for kind in vars(torch.cuda).values() if isinstance(kind, LegacyType) and kind.dtype == wanted)


def forget() -> None:
    """Undo what `set_default_tensor_type` did. Called when the last virtual GPUs go off."""
    if _default_context:
        _forget_default()
        torch.set_default_dtype(torch.float32)


def patches():
    """See `features`."""
    rows = [
        (owner, name, _legacy(kind, owner.__name__))
        for owner in (torch.cuda, torch.cuda.sparse)
        for name, kind in vars(owner).items()
        if name.endswith("Tensor") and name[0] != "_"
    ]
    return [*rows, (torch, "set_default_tensor_type", set_default_tensor_type)]
