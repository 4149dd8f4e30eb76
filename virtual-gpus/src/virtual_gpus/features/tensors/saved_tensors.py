"""torch.autograd.graph.save_on_cpu with shapes_only: the computer's memory gets a tensor without values as well.

What is packed away comes back unread, so its values may stay unknown; a copy by `.cpu()` would refuse integers
(the words of an embedding) and fill the rest with nan.
"""

from __future__ import annotations

import torch

from virtual_gpus.placement.storages import gpu_of

_raw_save_on_cpu = torch.autograd.graph.save_on_cpu


class save_on_cpu(_raw_save_on_cpu):
    """Within it, what autograd saves is moved to the computer's memory until the backward pass asks for it."""

    def __init__(self, pin_memory: bool = False, device_type: str = "cuda"):
        super().__init__(pin_memory, device_type)
        with_values = self.pack_hook

        def pack(tensor):
            gpu = gpu_of(tensor)
            if gpu is None or not gpu.machine.shapes_only:
                return with_values(tensor)
            return tensor.device, torch.empty_like(tensor, device="meta")

        self.pack_hook = pack


def patches():
    """See `features`."""
    return [(torch.autograd.graph, "save_on_cpu", save_on_cpu)]
