"""Messages from rank to rank on the clock: the sender tells the receiver at which modelled time it sent the tensor.

A message begins after the collectives of its group too, and collectives after the messages. What a rank sends and what
it receives do not wait for each other, because links carry both directions at once. Those in one direction share one.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from virtual_gpus.features.distributed import groups
from virtual_gpus.features.distributed.arrivals import Arrival, Lane, begins, gpu_bytes, lane_of, note, occupy
from virtual_gpus.features.nccl.traffic import message_seconds
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.threads import below

_CLOCK_TAG = 1 << 20  # messages about the time go beside those of the program
_PATIENCE = timedelta(seconds=30)  # real time for a sender's time to arrive, once its tensor is here
_LEAVES_AFTER_S = 5.0  # real time for a receiver to take such times, before a process ends
_NOT_TOLD = (
    f"A tensor has arrived on a GPU, but its sender did not tell within {_PATIENCE.seconds} s at which modelled time "
    "it sent it. It has ended, or it sent a tensor of the CPU. Send from a GPU what a GPU receives. Gloo has closed "
    "the connections of the group."
)
# (work, tensor) of times that may be on their way: gloo does not say which are, and hangs if their memory goes.
on_their_way: deque[Any] = deque(maxlen=1024)
_sent: deque[Any] = deque(maxlen=1024)  # the same of times that this process sends


def send_or_receive(
    kind: str, gpu: VirtualGPU, group: Any, tensors: list[torch.Tensor], peer: int | None, tag: int
) -> None:
    """Put a message on the clock. kind: "send" or "recv"."""
    state = groups.state_of(group)
    state.first_gpu = state.first_gpu or gpu
    sends, lane, nbytes = kind == "send", lane_of(group, kind), gpu_bytes(tensors)
    began = begins(gpu, lane, tensors)
    if groups.is_fake_group(group):  # the other side is ready when this one is
        ranks = torch.distributed.get_process_group_ranks(group)
        other = ranks[(group.rank() + 1) % group.size() if peer is None else peer]  # any: the next is as good as others
        here, there = (groups.place_of_rank(gpu.machine.settings, rank) for rank in (ranks[group.rank()], other))
        end = began + message_seconds(gpu.machine.topology, here, there, nbytes, groups.fake_links(gpu, group).across)
    else:
        end = _tell_or_ask(sends, gpu, group, lane, began, nbytes, peer, tag)
    if not callable(end):
        occupy(gpu, lane, began, end, nbytes if sends else 0)
    arrival = Arrival(gpu, end)
    note(tensors, arrival)
    gpu.machine.follower.queued(gpu, lane.queue, kind, *((tensors, []) if sends else ([], tensors)), arrival)


def _tell_or_ask(
    sends: bool, gpu: VirtualGPU, group: Any, lane: Lane, began: float, nbytes: int, peer: int | None, tag: int
) -> float | Callable[[], float]:
    """Tell the receiver when this message begins. Returns its end; for the receiver, a function that waits for it."""
    with below(), torch._C._DisableTorchDispatch(), torch.no_grad():
        message = torch.tensor([began, *groups.host_and_slot(gpu)], dtype=torch.float64, device="cpu")
        gloo: Any = groups.gloo_group(group)
        work = (gloo.send if sends else gloo.recv)([message], peer, tag + _CLOCK_TAG)
    (_sent if sends else on_their_way).append((work, message))
    here, topology = groups.host_and_slot(gpu), gpu.machine.topology
    if sends and peer is not None:  # as good a guess as any: where the rank would be
        return began + message_seconds(topology, here, (here[0], peer % len(gpu.machine.slots)), nbytes)

    def ask() -> float:
        try:
            work.wait(_PATIENCE)  # gloo's messages never say is_completed() before a wait
        except RuntimeError as error:
            raise torch.distributed.DistNetworkError(_NOT_TOLD) from error
        sent, host, slot = message.tolist()
        seconds = message_seconds(topology, (int(host), int(slot)), here, nbytes)
        end = max(began, sent) + seconds
        occupy(gpu, lane, end - seconds, end, 0)
        return end

    return ask


def until_times_have_arrived() -> None:
    """Wait until the times of this process's messages are received. Gloo sends nothing of a process that has ended."""
    end = time.monotonic() + _LEAVES_AFTER_S
    while _sent:
        with contextlib.suppress(RuntimeError):  # the other process has ended, or does not receive
            _sent.popleft()[0].wait(timedelta(seconds=max(end - time.monotonic(), 1e-3)))
