"""What a feature is told that follows all work on the GPUs, as the search for races does, or that charges for it.

And which line of the program it is about: the first one outside PyTorch and this package.

`GPU` is a `VirtualGPU`, whose module is of a higher layer, as those of an `OpCall` and a `StorageAllocation` are.
"""

import functools
import linecache
import os
import pathlib
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
import typing_extensions

from virtual_gpus.clock.clock import Arrival

GPU = TypeVar("GPU")
Tensors = Iterable[torch.Tensor]
# PyTorch, what wraps its old functions, and this package.
_NOT_OF_PROGRAM = (str(pathlib.Path(torch.__file__).parent) + os.sep, typing_extensions.__file__,
                   str(pathlib.Path(__file__).parent) + os.sep, "<frozen")  # fmt: skip


class Charger(Generic[GPU]):
    """Charges some operators in another way than `dispatch.timing.charge_op`. A feature overrides both."""

    def takes(self, call: Any, result: object) -> bool:
        """Charge an operator, or leave it (False). call: an `OpCall`. result: what it returned."""
        return False

    def before(self, gpu: GPU, tensors: Tensors, is_fusible: bool = False) -> None:
        """An operator that it left is about to be charged. tensors: what it reads. is_fusible: see `OperatorClass`."""


class Follower(Generic[GPU]):
    """Told of work in the order in which the host issues it. A feature overrides what it wants to know of."""

    def follow(self, call: Any) -> Any:
        """Run an operator by its route, and return what it returned. call: an `OpCall`."""
        return call.op.route(call)

    def kernel(self, name: str, reads: Tensors, writes: Tensors) -> None:
        """Work on tensors, on the current streams, that the dispatch mode does not see."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, blocking: bool) -> None:
        """A copy between two devices. blocking: whether the program asked the host to wait for it."""

    def collective(self, gpu: GPU, queue: str, name: str, reads: Tensors, writes: Tensors, arrival: Arrival) -> None:
        """A collective or message in a queue of its group, behind what the current stream was given so far."""

    def stream_waits(self, gpu: GPU, arrival: Arrival | None) -> None:
        """The current stream waits for a collective."""

    def stream_waits_for(self, gpu: GPU, tensors: Tensors) -> None:
        """The current stream waits for the collectives that fill some tensors."""

    def host_waits(self, gpu: GPU) -> None:
        """The host waits for the current stream."""

    def used_by(self, allocation: Any, slot: int, stream: int) -> None:
        """`record_stream`: the allocator waits for this stream before the memory is used again."""

    def freed(self, key: int) -> None:
        """A storage gave its block back. key: the id of its allocation."""


NO_FOLLOWER = Follower[Any]()


def program_frame() -> FrameType:
    """The innermost frame of this thread outside PyTorch and this package; the outermost one if there is none."""
    frame = sys._getframe()
    while frame.f_back is not None and not is_of_program(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def quoted_line(file: str, line: int, names: dict[str, Any] | None = None) -> str:
    """ "train.py:12: loss.backward()". names: the module's globals, by which code outside files is found."""
    code = linecache.getline(file, line, names).strip()
    return f"{os.path.basename(file)}:{line}" + (f": {code}" if code else "")


@functools.cache
def is_of_program(filename: str) -> bool:
    """True for the code of a file outside PyTorch and this package."""
    return not filename.startswith(_NOT_OF_PROGRAM)
