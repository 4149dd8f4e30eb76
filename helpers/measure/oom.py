"""Explains why a GPU ran out of memory: which request failed, what was there, and what would have helped.

The allocator knows the blocks, Python's gc knows the tensors, and both know the block's address. The line that made a
block is known if PyTorch's memory history has the stack of the allocation: in the block of code, or from
`torch.cuda.memory._record_memory_history()` on.
"""

import gc
import linecache
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from helpers.gpus import MEMORY_KINDS, block_address, kind_of, owned
from helpers.measure.memory import gpu_indices
from helpers.measure.readings import LINE, Refusal, describe_oom, format_bytes, read_refusal

_FOREIGN = (str(Path(torch.__file__).parent), "<frozen", "<string>", "??")
_STDLIB = sysconfig.get_path("stdlib")
_MOST_ROWS = 5
_MOST_EVENTS = 1_000_000  # per GPU; each takes a few hundred bytes of host memory
_place_of = itemgetter("filename", "name")  # of a frame in a snapshot


@contextmanager
def memory_history() -> Iterator[None]:
    """Let PyTorch record each allocation with its stack in the block. If somebody records already, that goes on."""
    torch.cuda.init()
    already = torch._C._cuda_isHistoryEnabled()
    if not already:
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=_MOST_EVENTS)
    try:
        yield
    finally:
        if not already:
            torch.cuda.memory._record_memory_history(None)


def blocks_by_kind() -> Iterator[tuple[int, int | None, str]]:
    """Yield (GPU, address, kind) for each block that contains a parameter, a gradient, or optimizer state."""
    for kind, tensor in owned(objects_of(nn.Parameter, Optimizer)):
        if tensor.is_cuda and tensor.layout is torch.strided:
            yield tensor.get_device(), block_address(tensor), kind


def objects_of(*kinds: type) -> list[Any]:
    """Return the objects of these classes that Python's gc knows, by `type`, as `__class__` may be overridden."""
    objects = gc.get_objects()
    wanted = {each for each in set(map(type, objects)) if issubclass(each, kinds)}
    return [each for each in objects if type(each) in wanted]


def live_blocks(gpu: int) -> list[tuple[int, str, str]]:
    """Return (bytes, kind, shape and kind and line as text) of each block in use on GPU number `gpu`."""
    kinds = {address: kind for each, address, kind in blocks_by_kind() if each == gpu}
    known = [tensor for tensor in objects_of(Tensor) if tensor.device == torch.device("cuda", gpu)]
    known += [tensor.grad for tensor in known if tensor.is_leaf and tensor.grad is not None]
    tensors = {block_address(tensor): tensor for tensor in reversed(known) if tensor.layout is torch.strided}
    found = []
    for segment in torch.cuda.memory_snapshot(include_traces=False):
        for block in segment["blocks"] if segment["device"] == gpu else ():
            if block["state"].startswith("active"):
                frames, tensor = block.get("frames", []), tensors.get(block["address"])
                made = kind_of(map(_place_of, frames)) if frames or tensor is None else "other"
                kind, what = kinds.get(block["address"], made), "held by autograd or a library"
                if tensor is not None:
                    what = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
                found.append((block["size"], kind, f"{what}, {kind}: {origin(frames)}"))
    return found


def origin(frames: list[dict[str, Any]]) -> str:
    """Describe the innermost of `frames` (innermost first, as in a snapshot) outside PyTorch and Python, for example
    "`x = net(x)` in train (scripts/train.py:12)". A line in a notebook cell is described without its file name."""
    for frame in frames:
        file = frame["filename"]
        if not file or file.startswith(_FOREIGN) or (file.startswith(_STDLIB) and "site-packages" not in file):
            continue
        code = linecache.getline(file, frame["line"]).strip() or frame["name"]
        code = code if len(code) <= 60 else f"{code[:57]}..."
        inside = "" if frame["name"] == "<module>" else f" in {frame['name']}"
        in_a_cell = "ipykernel" in file or file.startswith("<")
        return f"`{code}`{inside}" + ("" if in_a_cell else f" ({'/'.join(Path(file).parts[-2:])}:{frame['line']})")
    return "made before the memory history began"


@dataclass
class Explanation:
    """The memory of a GPU when it ran out, in bytes. Print it.

    It is false if memory did not run out, or if the error has no figures.

    outside: memory in use outside PyTorch's allocator. said: what happened, in one line.
    """

    refused: Refusal | None = None
    capacity: int = 0
    reserved: int = 0
    outside: int = 0
    blocks: list[tuple[int, str, str]] = field(default_factory=list)
    said: str = "The block has not ended yet."

    def __bool__(self) -> bool:
        return self.refused is not None

    def _refused(self) -> Refusal:
        if self.refused is None:
            raise RuntimeError(f"There is nothing to explain. {self.said}")
        return self.refused

    def by_kind(self) -> dict[str, int]:
        """Bytes per kind: those of `MEMORY_KINDS`, then memory that is gone, cached, used by others, or free."""
        found, refused = Counter[str](), self._refused()
        for size, kind, _ in self.blocks:
            found[kind] += size
        gone = refused.allocated - found.total()  # the failed operation has freed its own blocks since the failure
        if gone > 0.01 * refused.allocated:  # the figures of PyTorch's error text are rounded
            found["inside the failed operation"] = gone
        found["cached by PyTorch"] = max(0, self.reserved - found.total())
        found["context and other programs"] = self.outside
        found["free"] = max(0, self.capacity - self.reserved - self.outside)
        return {kind: found[kind] for kind in (*MEMORY_KINDS, *found) if found[kind] or kind == "free"}

    def advice(self) -> list[tuple[int, str]]:
        """(bytes saved, what to do) pairs, largest first. Advice that saves less than 2 % is left out."""
        kinds, refused = self.by_kind(), self._refused()
        graph, cached = kinds.get("activations", 0), kinds.get("cached by PyTorch", 0)
        checkpoint = "Put torch.utils.checkpoint around the model's blocks, or use autocast to bfloat16: half of "
        found = [
            (graph, "For validation: torch.inference_mode(), which keeps nothing for backward."),
            (graph // 2, "Halve the batch and accumulate the gradients of both halves: half of the activations."),
            (graph // 2, f"{checkpoint}{format_bytes(graph)} or more."),
        ]
        if refused.requested > self.capacity - self.outside:
            found.append(
                (refused.requested, "Make that tensor smaller: this one request is larger than the whole GPU.")
            )
        if cached >= refused.over:
            text = f"{format_bytes(cached)} are cached, but in several gaps. One gap of that size would be enough. "
            found.append((cached, text + "Set expandable_segments:True, or create the large tensors first."))
        return sorted((each for each in found if each[0] > 0.02 * refused.allocated), key=lambda each: -each[0])

    def __str__(self) -> str:
        if not self:
            return self.said
        sizes = defaultdict(list)
        for size, _, text in self.blocks:
            sizes[text].append(size)
        groups = sorted(sizes.items(), key=lambda group: (-sum(group[1]), group[0]))
        lines = [self.said, "", "what is there"]
        lines += [f"  {kind:<30}{format_bytes(size):>10}" for kind, size in self.by_kind().items()]
        lines += ["", "the largest, and the line that made them"]
        for text, each in groups[:_MOST_ROWS]:
            lines.append(f"  {format_bytes(sum(each)):>9}  {f'{len(each)} x ' if len(each) > 1 else ''}{text}")
        others = [size for _, each in groups[_MOST_ROWS:] for size in each]
        lines += [f"  {format_bytes(sum(others)):>9}  in {len(others)} others"] if others else []
        advice = self.advice()
        lines += ["", "what would have helped"] if advice else []
        for size, text in advice:
            lacking = self._refused().over - size
            enough = f"not enough: {format_bytes(lacking)} are missing" if lacking > 0 else "enough"
            told = f"{format_bytes(size):>9}  {text} ({enough})"
            lines.append(fill(told, LINE, initial_indent="  ", subsequent_indent=" " * 13))
        return "\n".join(lines)


@contextmanager
def explain_oom() -> Iterator[Explanation]:
    """Run the block. If it runs out of memory, explain what was in use, what was requested, what would have helped.

    The explanation is filled when the block ends. The program continues after the block, and the failed block's tensors
    are not kept alive. Other errors are passed on. Raises RuntimeError if there is no GPU.
    """
    gpu_indices()
    found = Explanation()
    with memory_history():
        try:
            yield found
            found.said = "Memory did not run out."
        except torch.OutOfMemoryError as error:  # while it is alive, so are the frames and their variables
            found.refused = refused = read_refusal(error)
            found.said = describe_oom(error)
            if refused is not None:
                free, found.capacity = torch.cuda.mem_get_info(refused.gpu)
                found.reserved = torch.cuda.memory_reserved(refused.gpu)
                found.outside = max(0, found.capacity - free - found.reserved)
                found.blocks = live_blocks(refused.gpu)
            error.__traceback__ = None  # its frames form a reference cycle, which only gc frees
