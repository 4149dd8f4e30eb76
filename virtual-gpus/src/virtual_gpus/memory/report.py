"""What the caching allocator says: segments as `torch.cuda.memory_snapshot` lists them, and its out-of-memory error.

Sizes are bytes. No torch is imported.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from virtual_gpus.memory.blocks import FREE, UNMAPPED, WAITING, Block
from virtual_gpus.memory.stats import format_size

_STATES = {FREE: "inactive", WAITING: "active_pending_free"}  # all others: "active_allocated"


def segment_entries(blocks: Iterable[Block], device: int) -> list[dict[str, Any]]:
    """The segments of all `blocks` by address, as PyTorch lists them: an expandable one by its ranges with memory."""
    heads = (block for block in blocks if block.prev is None or block.prev.state == UNMAPPED)
    return [_segment_entry(head, device) for head in sorted(heads, key=lambda block: block.address)]


def _segment_entry(head: Block, device: int) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    block: Block | None = head
    while block is not None and block.state != UNMAPPED:
        state, requested = _STATES.get(block.state, "active_allocated"), block.requested if block.state else 0
        blocks.append({"address": block.address, "size": block.size, "requested_size": requested, "state": state,
                       "frames": []})  # fmt: skip
        block = block.next
    active = [entry for entry in blocks if entry["state"] != "inactive"]
    return {
        "device": device,
        "address": head.address,
        "total_size": sum(entry["size"] for entry in blocks),
        "allocated_size": sum(entry["size"] for entry in active if entry["state"] == "active_allocated"),
        "active_size": sum(entry["size"] for entry in active),
        "requested_size": sum(entry["requested_size"] for entry in active),
        "stream": head.pool.stream,
        "segment_type": "small" if head.pool.small else "large",
        "segment_pool_id": (0, 0),  # that of the usual pools
        "is_expandable": head.arena is not None,
        "frames": [],
        "blocks": blocks,
    }


@dataclass(eq=False)
class OutOfMemory(Exception):
    """An allocation found no memory, even after the cache was emptied. All sizes are in bytes.

    requested: the segment that was requested from the GPU.
    capacity, free: the total and the free memory of the GPU.
    used: the memory of this process, including its context.
    allowed: the limit of `set_fraction`, or None.
    allocated, reserved: the memory in used blocks and in segments.
    others: (process id, bytes) of each other process on the GPU.
    """

    requested: int
    capacity: int
    free: int
    used: int
    allowed: int | None
    allocated: int
    reserved: int
    others: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        left = f"{format_size(self.free)} of {format_size(self.capacity)}"
        return f"Tried to allocate {format_size(self.requested)}, but only {left} is free."


def oom_message(error: OutOfMemory, gpu_index: int) -> str:
    """PyTorch's own text for an `OutOfMemory` on GPU `gpu_index`. That of 2.11 was compared with a real H200.

    The order in which a driver lists the other processes is not documented.
    """
    if error.requested >= 1 << 60:
        return "CUDA out of memory. Tried to allocate more than 1EB memory."
    allowed = "" if error.allowed is None else f"{format_size(error.allowed)} allowed; "
    others = "".join(f"Process {pid} has {format_size(used)} memory in use. " for pid, used in error.others)
    return (
        f"CUDA out of memory. Tried to allocate {format_size(error.requested)}. GPU {gpu_index} has a total"
        f" capacity of {format_size(error.capacity)} of which {format_size(error.free)} is free."
        f" {others}Including non-PyTorch memory, this process has {format_size(error.used)} memory in use. {allowed}"
        f"Of the allocated memory {format_size(error.allocated)} is allocated by PyTorch, and"
        f" {format_size(error.reserved - error.allocated)} is reserved by PyTorch but unallocated."
        " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        " to avoid fragmentation.  See documentation for Memory Management "
        " (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )
