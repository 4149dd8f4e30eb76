"""Names that a real GPU has and a virtual one does not, and operators of the CPU alone (refused.toml): they raise."""

import functools
import sys
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch

from virtual_gpus import errors, figures
from virtual_gpus.clock.cost import READS_AND_WRITES
from virtual_gpus.dispatch.operators import CUDA, OpCall, Row
from virtual_gpus.patches.table import Patch, around

_LISTS: dict[str, dict[str, str]] = figures.beside(__file__)
_INSTEAD = {name: sentence for sentence, names in _LISTS["instead"].items() for name in names.split()}
_WITHOUT_KERNEL = _LISTS["operators"]["without_kernel"].split()


def _refuse(owner: object, name: str, path: str) -> Patch:
    """The patch that refuses `owner.name`. A class stays the type it is, since programs name it in annotations and
    ask isinstance; only making one is refused, of subclasses too."""
    original, refused = vars(owner)[name], errors.refusing(path, _INSTEAD.get(name, ""))
    if isinstance(original, type):
        # Bases of a CPU build are dummies whose __new__, in Python, raises something obscure before any __init__ runs.
        maker = next((base for base in original.__mro__ if isinstance(vars(base).get("__new__"), staticmethod)), None)
        return (original, "__init__", refused) if maker is None else (maker, "__new__", staticmethod(refused))
    return owner, name, functools.update_wrapper(refused, original)


def _on_cpu_only(error: Callable[[], Exception], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`original`, which refuses tensors and modules on a GPU, and a `device` that is one."""
    tensors, device = torch.utils._pytree.tree_leaves((args, kwargs)), kwargs.get("device")
    modules = [leaf for leaf in tensors if isinstance(leaf, torch.nn.Module)]
    tensors += [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    on_gpu = any(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in tensors)
    if on_gpu or (device is not None and torch.device(device).type == "cuda"):
        raise error()
    return original(*args, **kwargs)


def _refuse_kernel(call: OpCall) -> None:
    """Raise PyTorch's own error for an operator that it has no kernel of for CUDA. Other overloads may have one."""
    if call.op.name in _WITHOUT_KERNEL:
        call.func.redispatch(torch._C.DispatchKeySet(CUDA), *call.args, **call.kwargs)


OPERATORS = {name.partition(".")[0]: Row(READS_AND_WRITES, check=_refuse_kernel) for name in _WITHOUT_KERNEL}


def patches() -> list[Patch]:
    listed = [(path, name) for path, names in _LISTS["names"].items() if path in sys.modules for name in names.split()]
    there = [(path, name) for path, name in listed if name in vars(sys.modules[path])]  # not every version has all
    rows = [_refuse(sys.modules[path], name, f"{path}.{name}") for path, name in there]
    # The attributes of the manager are those of the current GPU's cache, which it asks for in this way.
    plans = errors.refusing("torch.backends.cuda.cufft_plan_cache")
    rows.append((torch.backends.cuda.cuFFTPlanCacheManager, "__getitem__", plans))
    # What all tracing calls. Sizes that are read become tensors then, and the accounting needs integers.
    traced, owners = errors.refusing("torch.jit.trace"), (torch._C, torch._C.ScriptModule)
    rows += [(owner, name, traced) for owner in owners for name in vars(owner) if "_create" in name and "_trac" in name]
    # Making such a function compiles nothing yet, and programs do that when they are imported.
    jitted = errors.refusing("functions of torch.cuda.jiterator")
    rows.append((torch.cuda.jiterator._JittedFunction, "__call__", jitted))
    paths = [(*path.rsplit(".", 1), what) for what, names in _LISTS["on_cpu_only"].items() for path in names.split()]
    only = [(resolve_name(owner), name, functools.partial(errors.not_modelled, what)) for owner, name, what in paths]
    only += [(torch.Tensor, name, functools.partial(TypeError, f"{name} is only implemented on CPU tensors"))
             for name in ("apply_", "map_")]  # a real GPU refuses them too  # fmt: skip
    return rows + [(owner, name, around(getattr(owner, name), functools.partial(_on_cpu_only, error)))
                   for owner, name, error in only if hasattr(owner, name)]  # fmt: skip
