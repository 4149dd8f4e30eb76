"""`compile="modelled"`: the modelled time of what torch.compile fuses. Numbers and memory stay those of the program.

In compiled code and in backward passes, all operators are fused except matrix multiplications, convolutions, attention,
optimizers, and FSDP's copies. A fused operator takes the time to read its arguments. Its result is neither written nor
read again until an operator that is not fused needs it, and is then written once. Views cost nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from virtual_gpus.dispatch.operators import OpCall
from virtual_gpus.dispatch.timing import await_tensors
from virtual_gpus.follower import Charger
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.placement.storages import allocation_of, nbytes, tensors_in
from virtual_gpus.settings import Settings
from virtual_gpus.threads import OfEachThread, this_thread

runs_compiled = OfEachThread(False)  # while a function runs that torch.compile gave back, with `compile="modelled"`


def check_settings(settings: Settings) -> None:
    """See `features`."""
    if settings.compile not in ("eager", "modelled"):
        raise ValueError(f'compile must be "eager" or "modelled", not {settings.compile!r}.')


class Fusion(Charger[VirtualGPU]):
    """The results of fused operators that nothing has written yet. One per machine, once it runs compiled code."""

    def __init__(self) -> None:
        self._unwritten: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # allocations, by id

    def takes(self, call: OpCall, result: object) -> bool:
        """Charge an operator if it is fused."""
        if not (runs_compiled.value or this_thread.in_backward):
            return False
        if call.op.is_view or not call.op.row.cost.is_fusible:
            return call.op.is_view
        self._charge(call.gpu, call.op.base, call.tensors, unwritten=False)
        for allocation in filter(None, map(allocation_of, tensors_in(result))):
            self._unwritten[id(allocation)] = allocation
        return True

    def before(self, gpu: VirtualGPU, tensors: Iterable[torch.Tensor]) -> None:
        """Charge the writing of what an operator that is not fused reads, if it is not written yet."""
        self._charge(gpu, "fused", tensors, unwritten=True)

    def _charge(self, gpu: VirtualGPU, name: str, tensors: Iterable[torch.Tensor], unwritten: bool) -> None:
        tensors, sizes = list(tensors), dict[int, int]()  # by the id of the allocation
        for tensor in tensors:
            key = id(allocation_of(tensor))
            if (key in self._unwritten) == unwritten:
                sizes[key] = nbytes(tensor)
        clock = gpu.machine.clock
        await_tensors(gpu, tensors)
        seconds = gpu.spec.seconds_to_move(sum(sizes.values()))
        if seconds:
            clock.launch(gpu.slot, gpu.stream, seconds, 0.0 if unwritten else clock.host.kernel, name)
        if unwritten:
            for key in sizes:
                del self._unwritten[key]
