"""Tensors that C++ makes on the way, and how they are told from the program's own.

Code in C++ asks for helpers of its own ("zeros with the options of this input"). For C++, the input is on the
CPU, so they arrive there. They are known by the Python instruction that was running when they were made: the same one
that runs when they meet a tensor on a GPU. They are then *adopted*: given a block on that GPU. The program's own
`torch.zeros(3)` is another instruction, and stays where it is.
"""

import threading
from collections.abc import Sequence

import torch

from virtual_gpus.entrance import calling_frame, is_entrance
from virtual_gpus.placement.storages import HostStorage, gpu_of, storages
from virtual_gpus.threads import this_thread

Site = tuple[int, int] | str
ANY_TIME = "any time"  # of what is made once and filled later, as a backward pass does with zeros


def calling_site() -> Site:
    """A key for the Python instruction that is calling into PyTorch now."""
    frame = calling_frame()
    if is_entrance(frame.f_code):
        return f"thread {threading.get_ident()}"  # gloo's, in which no Python instruction is running
    return id(frame), frame.f_lasti


def record_creation_site(result: object, inputs: Sequence[torch.Tensor], site: Site) -> None:
    """Note that C++ made `result` for itself, unless one of `inputs` is the program's. Numbers (0-dim) do not count."""
    if not isinstance(result, torch.Tensor):
        return
    if inputs:
        sized = [tensor for tensor in inputs if tensor.dim()] or inputs
        sites = {storage._record.creation_site for tensor in sized for storage in storages(tensor)}
        if None in sites:
            forget_creation_site(result)
        if None in sites or not (site in sites or (sites and this_thread.in_backward)):
            return
    for storage in storages(result):
        if storage._record.gpu is None:
            storage._record = HostStorage(ANY_TIME if this_thread.in_backward else site, storage._record.pinned)


def forget_creation_site(tensor: torch.Tensor) -> None:
    """Make it a CPU tensor like any other from now on."""
    for storage in storages(tensor):
        if storage._record.creation_site is not None:
            storage._record = HostStorage(None, storage._record.pinned)


def may_be_adopted(tensor: torch.Tensor, site: Site) -> bool:
    """True if C++ made `tensor` during the very call that now wants it on a GPU."""
    parts = storages(tensor)
    return bool(parts) and all(part._record.creation_site in (ANY_TIME, site) for part in parts)


def was_made_in_cpp(tensor: object) -> bool:
    """True for a tensor that C++ made and that no GPU has adopted."""
    if not isinstance(tensor, torch.Tensor) or gpu_of(tensor) is not None:
        return False
    return any(storage._record.creation_site is not None for storage in storages(tensor))
