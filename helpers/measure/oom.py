"""Explains why a GPU ran out of memory: which request failed, what was there, and what would have helped.

The allocator knows the blocks, Python's gc knows the tensors, and both know the block's address. The line that made a
block is known if PyTorch's memory history has the stack of the allocation: in the block of code, or from
`torch.cuda.memory._record_memory_history()` on.
"""

import gc
import linecache
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from helpers.engine import MEMORY_KINDS, kind_of, owned
from helpers.gpus import block_address, require_gpu
from helpers.measure.memory import in_use, segments_of
from helpers.measure.readings import LINE
from helpers.measure.refusal import Refusal, describe_oom, free_frames, read_refusal
from helpers.sizes import format_bytes

_FOREIGN = (str(Path(torch.__file__).parent), "<frozen", "<string>", "??")
_STDLIB = sysconfig.get_path("stdlib")
_STATES = ("parameters", "gradients", "optimizer state")  # of `MEMORY_KINDS`
_NO_GRAPH, _GONE = "results without a graph", "freed since the failure"
_CACHED, _FREE = "cached by PyTorch", "free"
_MOST_ROWS = 5


@contextmanager
def _memory_history() -> Iterator[None]:
    """Let PyTorch keep the stack of each allocation in the block. If somebody records already, that goes on."""
    torch.cuda.init()
    already = torch._C._cuda_isHistoryEnabled()
    if not already:
        torch.cuda.memory._record_memory_history("state", context="alloc", stacks="python")
    try:
        yield
    finally:
        if not already:
            torch.cuda.memory._record_memory_history(None)


def _blocks_by_kind() -> Iterator[tuple[int, int | None, str]]:
    """Yield (GPU, address, kind) for each block that contains a parameter, a gradient, or optimizer state."""
    # By `isinstance`, because the type of a sharded parameter is DTensor.
    parameters = [tensor for tensor in _objects_of(Tensor) if isinstance(tensor, nn.Parameter)]
    for kind, tensor in owned(parameters + _objects_of(Optimizer)):
        if tensor.is_cuda and tensor.layout is torch.strided:
            yield tensor.get_device(), block_address(tensor), kind


def _objects_of(kind: type) -> list[Any]:
    """Return the objects of this class that Python's gc knows, by `type`, as `__class__` may be overridden."""
    objects = gc.get_objects()
    wanted = {cls for cls in set(map(type, objects)) if issubclass(cls, kind)}
    return [thing for thing in objects if type(thing) in wanted]


class Block(NamedTuple):
    """A block in use: its bytes, its kind as in `Explanation.by_kind`, and its shape, kind and line as text."""

    size: int
    kind: str
    text: str


class Advice(NamedTuple):
    """What to do, and the bytes that it saves. at_most: it may save less, because that depends on the program."""

    saves: int
    text: str
    at_most: bool = False


def _live_blocks(gpu: int) -> list[Block]:
    """Return each block in use on GPU number `gpu`."""
    kinds = {address: kind for index, address, kind in _blocks_by_kind() if index == gpu}
    tensors = _tensors_by_address(gpu)
    blocks = [block for segment in segments_of(gpu) for block in segment["blocks"] if in_use(block)]
    # Under torch.no_grad(), no tensor has a graph. During training, a few have none, and others have one.
    results = "activations" if any(tensor.grad_fn is not None for tensor in tensors.values()) else _NO_GRAPH
    return [_describe(block, kinds.get(block["address"]), tensors.get(block["address"]), results) for block in blocks]


def _tensors_by_address(gpu: int) -> dict[int | None, Tensor]:
    """Return one tensor for each block on GPU number `gpu` that Python knows: of several, the first that gc lists, and
    preferably one with a graph."""
    tensors = [tensor for tensor in _objects_of(Tensor) if tensor.device == torch.device("cuda", gpu)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    tensors = sorted(reversed(tensors), key=lambda tensor: tensor.requires_grad)
    return {block_address(tensor): tensor for tensor in tensors if tensor.layout is torch.strided}


def _describe(block: dict[str, Any], kind: str | None, tensor: Tensor | None, results: str) -> Block:
    """Return the snapshot's `block` in words. Without a `kind`, the stack of its allocation says it. `results` is the
    kind of what modules compute."""
    frames = block.get("frames", [])
    what = "held by autograd or a library"
    if tensor is not None:
        what = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if kind is None:
        made_before = tensor is not None and not frames
        kind = "other" if made_before else kind_of((frame["filename"], frame["name"]) for frame in frames)
        kind = results if kind == "activations" else kind
    return Block(block["size"], kind, f"{what}, {kind}: {describe_origin(frames)}")


def describe_origin(frames: list[dict[str, Any]]) -> str:
    """Describe the innermost of `frames` (innermost first, as in a snapshot) outside PyTorch and Python, for example
    "`x = net(x)` in train (scripts/train.py:12)". A line in a notebook cell is described without its file name.

    Without such a frame, the block is older than the memory history, or a thread of PyTorch made it: on real GPUs, the
    backward pass runs in such threads.
    """
    for frame in frames:
        file = frame["filename"]
        if not file or file.startswith(_FOREIGN) or (file.startswith(_STDLIB) and "site-packages" not in file):
            continue
        code = linecache.getline(file, frame["line"]).strip() or frame["name"]
        code = code if len(code) <= 60 else f"{code[:57]}..."
        inside = "" if frame["name"] == "<module>" else f" in {frame['name']}"
        in_a_cell = "ipykernel" in file or file.startswith("<")
        return f"`{code}`{inside}" + ("" if in_a_cell else f" ({'/'.join(Path(file).parts[-2:])}:{frame['line']})")
    return "made before the memory history began, or by a thread of PyTorch"


@dataclass(repr=False)
class Explanation:
    """The memory of a GPU when it ran out, in bytes. Print it.

    It is false if memory did not run out, or if the error has no figures. `by_kind` and `advice` then raise
    RuntimeError.

    reserved: what PyTorch's allocator had taken. outside: memory in use outside it. blocks: those in use, after the
    failed operation has freed its own. happened: what happened, in one line.
    """

    refused: Refusal | None = None
    capacity: int = 0
    reserved: int = 0
    outside: int = 0
    blocks: list[Block] = field(default_factory=list)
    happened: str = "The block has not ended yet."

    def __bool__(self) -> bool:
        return self.refused is not None

    def _refused(self) -> Refusal:
        if self.refused is None:
            raise RuntimeError(f"There is nothing to explain. {self.happened}")
        return self.refused

    def by_kind(self) -> dict[str, int]:
        """Bytes per kind: those of `MEMORY_KINDS`, then what modules computed without a graph, for example under
        torch.no_grad(), and memory that is gone, cached, used by others, or free.

        While any tensor has a graph, such as a loss that is still named, results without one count as activations.
        Autograd keeps tensors without a graph, too, such as the masks of dropout, and nothing tells them apart.
        """
        sizes, refused = Counter[str](), self._refused()
        for size, kind, _ in self.blocks:
            sizes[kind] += size
        gone = refused.allocated - sizes.total()  # what the failed operation, or the line that it is in, has let go
        if gone > 0.01 * refused.allocated:  # the figures of PyTorch's error text are rounded
            sizes[_GONE] = gone
        sizes[_CACHED] = max(0, self.reserved - sizes.total())
        sizes["context and other programs"] = self.outside
        sizes[_FREE] = max(0, self.capacity - self.reserved - self.outside)
        return {kind: sizes[kind] for kind in (*MEMORY_KINDS, *sizes) if sizes[kind] or kind == _FREE}

    def advice(self) -> list[Advice]:
        """What would have helped, the largest saving first. Advice that saves less than 2 % of the
        allocated memory is left out.

        A job with gradients or optimizer state counts as training, to which torch.inference_mode() is no answer. What
        is enough for the request that failed may be too little for later ones, which are not known.
        """
        kinds, refused = self.by_kind(), self._refused()
        gone, cached = kinds.get(_GONE, 0), kinds.get(_CACHED, 0)
        activations = kinds.get("activations", 0) + gone  # for example those of a replica of DataParallel
        states = {kind: kinds[kind] for kind in _STATES if kind in kinds}
        half = f"half of {format_bytes(activations)}" + (", with what was freed" if gone else "")
        # No checkpoint frees what stands outside the model's blocks, which is mostly the logits and their gradient.
        logits = sum(sorted(block.size for block in self.blocks if block.kind == "activations")[-2:])
        logits = logits if logits > activations / 2 else 0
        inner = activations - logits
        halve = "Halve the batch and accumulate the gradients of both halves"
        checkpoint = "Put torch.utils.checkpoint around the model's blocks"
        autocast = "Use autocast to bfloat16, if the job computes in float32"
        collect = "Use smaller batches, and move the results that you keep to the CPU."
        advice = [
            Advice(activations // 2, f"{halve}: {half}.", at_most=gone > 0),
            Advice(inner // 2, f"{checkpoint}: half of {format_bytes(inner)} or more.", at_most=True),
            Advice(activations // 2, f"{autocast}: up to {half}.", at_most=True),
            Advice(kinds.get(_NO_GRAPH, 0), collect, at_most=True),
        ]
        if states:
            size = sum(states.values())
            words = " and ".join(states).replace(" and ", ", ", len(states) - 2)
            text = f"Divide {words} between two GPUs (fully_shard), or make them bfloat16 if they are "
            advice.append(Advice(size // 2, f"{text}float32: half of {format_bytes(size)}."))
        if states.keys() <= {"parameters"}:
            text = "If this is no training: torch.inference_mode(), which keeps nothing for backward."
            advice.append(Advice(activations, text, at_most=True))
        if logits:
            text = f"One or two tensors hold {format_bytes(logits)} of the activations. If they come from the logits, "
            text += "compute the loss in chunks (torch.nn.functional.linear_cross_entropy, from PyTorch 2.15 on)."
            advice.append(Advice(logits, text, at_most=True))
        if refused.requested > refused.room + refused.reserved:
            text = "Make that tensor smaller: this one request is larger than all that PyTorch may take."
            advice.append(Advice(refused.requested, text))
        if cached >= refused.over:
            text = f"{format_bytes(cached)} are cached, but in several gaps. One gap of that size would be enough. "
            if cached < refused.requested:
                text = f"{format_bytes(cached)} are cached in segments that are partly in use. "
            text += "Start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or create the large tensors first."
            advice.append(Advice(cached, text))
        useful = [line for line in advice if line.saves > 0.02 * refused.allocated]
        return sorted(useful, key=lambda line: -line.saves)

    def __repr__(self) -> str:
        happened = fill(self.happened, LINE)
        if not self:
            return happened
        kinds = [f"  {kind:<30}{format_bytes(size):>10}" for kind, size in self.by_kind().items()]
        lines = [happened, "", "what is there", *kinds]
        if self.blocks:
            lines += ["", "the largest, and the line that made them", *self._largest()]
        advice = self._advice_lines()
        if advice:
            lines += ["", "what would have helped this request (later ones are not known)", *advice]
        return "\n".join(lines)

    def _largest(self) -> list[str]:
        """A line for each of the largest groups of blocks with the same text, and one for all others."""
        sizes = defaultdict[str, list[int]](list)
        for block in self.blocks:
            sizes[block.text].append(block.size)
        groups = sorted(sizes.items(), key=lambda group: (-sum(group[1]), group[0]))
        lines = []
        for text, group in groups[:_MOST_ROWS]:
            number = f"{len(group)} x " if len(group) > 1 else ""
            lines.append(_line(sum(group), f"{number}{text}"))
        others = [size for _, group in groups[_MOST_ROWS:] for size in group]
        if others:
            lines.append(_line(sum(others), f"in {len(others)} others"))
        return lines

    def _advice_lines(self) -> list[str]:
        lines = []
        for size, text, at_most in self.advice():
            lacking = self._refused().over - size
            enough = "may be enough" if at_most else "enough"
            if lacking > 0:
                enough = f"not enough: {format_bytes(lacking)} are missing"
            lines.append(_line(size, f"{text} ({enough})"))
        return lines


def _line(size: int, text: str) -> str:
    """Return a size with a text, which continues below itself if it is too long for a line, but not within code."""
    text = re.sub("`.*`", lambda code: code[0].replace(" ", "\xa0"), text)
    return fill(f"  {format_bytes(size):>9}  {text}", LINE, subsequent_indent=" " * 13).replace("\xa0", " ")


@contextmanager
def explain_oom() -> Iterator[Explanation]:
    """Run the block. If it runs out of memory, explain what was in use, what was requested, what would have helped.

    The explanation is filled when the block ends. The program continues after the block, and the failed block's tensors
    are not kept alive. Other errors are passed on. Raises RuntimeError if there is no GPU.
    """
    require_gpu()
    explanation = Explanation()
    with _memory_history():
        try:
            yield explanation
            explanation.happened = "Memory did not run out."
        except torch.OutOfMemoryError as error:  # while it is alive, so are the frames and their variables
            explanation.refused = refused = read_refusal(error)
            explanation.happened = describe_oom(error)
            if refused is not None:
                free, explanation.capacity = torch.cuda.mem_get_info(refused.gpu)
                explanation.reserved = torch.cuda.memory_reserved(refused.gpu)
                explanation.outside = max(0, explanation.capacity - free - explanation.reserved)
                with torch._C.DisableTorchFunctionSubclass():  # a subclass may refuse even to be looked at
                    explanation.blocks = _live_blocks(refused.gpu)
            free_frames(error)
        except BaseException as error:
            explanation.happened = f"The block ended with another error: {type(error).__name__}."
            raise
