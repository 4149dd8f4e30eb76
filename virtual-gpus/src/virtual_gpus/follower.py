"""What a feature is told that follows all work on the GPUs, as the search for races does. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Follower:
    """Told of work in the order in which the host issues it. A feature overrides what it wants to know of."""

    def follow(self, call: Any) -> Any:
        """Run an operator by its route, and return what it returned. call: an `OpCall`."""
        return call.op.route(call)

    def kernel(self, name: str, reads: Iterable[Any], writes: Iterable[Any]) -> None:
        """Work on tensors, on the current streams, that the dispatch mode does not see."""

    def copy(self, source: Any, target: Any, blocking: bool) -> None:
        """A copy between two devices. blocking: whether the program asked the host to wait for it."""

    def collective(
        self, gpu: Any, queue: str, name: str, reads: Iterable[Any], writes: Iterable[Any], arrival: Any
    ) -> None:
        """A collective or message in a queue of its group, behind what the current stream was given so far."""

    def stream_waits(self, gpu: Any, arrival: Any) -> None:
        """The current stream waits for a collective."""

    def stream_waits_for(self, gpu: Any, tensors: Iterable[Any]) -> None:
        """The current stream waits for the collectives that fill some tensors."""

    def host_waits(self, gpu: Any) -> None:
        """The host waits for the current stream."""

    def used_by(self, allocation: Any, slot: int, stream: int) -> None:
        """`record_stream`: the allocator waits for this stream before the memory is used again."""

    def freed(self, key: int) -> None:
        """A storage gave its block back. key: the id of its allocation."""


NO_FOLLOWER = Follower()
