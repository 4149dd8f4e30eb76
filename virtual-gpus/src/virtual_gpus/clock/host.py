"""What it costs the host to issue work. No torch here."""

from __future__ import annotations

from typing import NamedTuple

from virtual_gpus import figures


class HostCosts(NamedTuple):
    """Seconds that one host thread needs to issue work, in Python and C++ together: `figures/host.toml`.

    view: an operator that starts no kernel.
    operator: an operator that starts a kernel and creates a tensor.
    in_place: an operator that starts a kernel and creates no tensor.
    product, convolution: the additional time of a library that chooses the kernel.
    kernel: each additional kernel of an operator.
    training: the additional time per operator for modules, nodes and gradients, while autograd records or runs.
    tensor: each tensor in a list of tensors, as in an optimizer.
    copy: a copy between devices. pageable_copy: a copy through the driver's buffer.
    wait: the time until the host notices that a GPU is done.
    pageable: bytes per second of the host's copies between pageable and pinned memory, the only rate here.
    """

    view: float
    operator: float
    in_place: float
    product: float
    convolution: float
    kernel: float
    training: float
    tensor: float
    copy: float
    pageable_copy: float
    wait: float
    pageable: float


HOST = HostCosts(**figures.read("host.toml"))
