"""The address of a tensor's block, as memory snapshots name it.

The bytes of a tensor on a virtual GPU lie in the host's memory, and `data_ptr()` says where. Its block on the modelled
card has another address, the one in `torch.cuda.memory._snapshot()`.
"""

import torch

from virtual_gpus.placement.storages import home_of


def block_address(tensor: torch.Tensor) -> int | None:
    """Where the block of a strided tensor begins on its virtual GPU; None if it is on none, or takes no memory."""
    home = home_of(tensor)
    return None if home is None or home.block is None else home.block.address
