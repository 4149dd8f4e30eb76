"""What a feature is told that follows all work on the GPUs, charges for some of it, or fills tensors late.

`GPU` is a `VirtualGPU`, whose module is of a higher layer, as those of an `OpCall` and a `StorageAllocation` are.
"""

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import torch

GPU = TypeVar("GPU")
Tensors = Iterable[torch.Tensor]


class Charger(Generic[GPU]):
    """Charges some operators in another way than `dispatch.timing.charge_op`. A feature overrides both."""

    def takes(self, call: Any, result: object) -> bool:
        """Charge an operator, or leave it (False). call: an `OpCall`. result: what it returned."""
        return False

    def before(self, gpu: GPU, tensors: Tensors, is_fusible: bool = False) -> None:
        """An operator that it left is about to be charged. tensors: what it reads. is_fusible: see `OperatorClass`."""


class LateTensors(dict[int, Any], Generic[GPU]):
    """The storages on a GPU that are filled later than its streams would have it, by the ids of their records.

    None here. A feature that fills some, as `torch.distributed` does, overrides `hold`.
    """

    def hold(self, gpu: GPU, tensors: Tensors) -> None:
        """Work of the current stream on some tensors is coming: it waits until they are filled."""


class QueuedWork:
    """Work in a queue beside the streams, which is waited for. past: of a follower's.

    given: whether the program was given what it has to wait for; else C++ waits.
    """

    given = False
    past: Any = None


class Follower(Generic[GPU]):
    """Told of work in the order in which the host issues it. A feature overrides what it wants to know of."""

    def follow(self, call: Any) -> Any:
        """Run an operator by its route, and return what it returned. call: an `OpCall`."""
        return call.op.route(call)

    def kernel(self, name: str, reads: Tensors, writes: Tensors) -> None:
        """Work on tensors, on the current streams, that the dispatch mode does not see."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, blocking: bool) -> None:
        """A copy between two devices. blocking: whether the program asked the host to wait for it."""

    def queued(self, gpu: GPU, queue: str, name: str, reads: Tensors, writes: Tensors, work: QueuedWork) -> None:
        """Work in a queue beside the streams, behind what the current stream was given so far."""

    def stream_waits(self, gpu: GPU, work: QueuedWork | None) -> None:
        """The current stream waits for work in a queue."""

    def stream_waits_for(self, gpu: GPU, tensors: Tensors) -> None:
        """The current stream waits for the work in queues that fills some tensors."""

    def host_waits(self, gpu: GPU) -> None:
        """The host waits for the current stream."""

    def used_by(self, allocation: Any, slot: int, stream: int) -> None:
        """`record_stream`: the allocator waits for this stream before the memory is used again."""

    def freed(self, key: int) -> None:
        """A storage gave its block back. key: the id of its allocation."""


NO_FOLLOWER = Follower[Any]()
