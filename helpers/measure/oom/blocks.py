"""Lists the blocks in use on a GPU, each with its kind, its shape, and the line of code that created it.

The allocator knows the blocks, Python knows the tensors, and both know the block's address. Blocks to which nothing in
Python refers are held by C++: activations that autograd keeps for the backward pass, and workspaces of libraries. The
line is known if PyTorch's memory history, which `remember_origins()` enables, has the stack of the allocation.
"""

import gc
import inspect
import linecache
import os
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType

import torch
from torch import Tensor, nn

from helpers.gpus import block_address

KINDS = ("parameters", "gradients", "optimizer state", "buffers", "tensors in variables", "held by autograd")
_CHUNK = 2_000  # objects whose referents are examined together, because a list for all would have millions of entries
MOST_EVENTS = 200_000  # per GPU, about 1 KB of host memory each; PyTorch keeps the most recent ones
UNKNOWN = "made before remember_origins() was called"
_TORCH = str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_path("stdlib")
_HERE = os.path.join(os.path.dirname(__file__), "")


@dataclass(frozen=True)
class Block:
    """A block in use, with its `size` and the size that was `requested`, in bytes. `shape` is None if the block
    contains no tensor that Python knows. `origin` is the line that created it, as text."""

    address: int
    size: int
    requested: int
    kind: str
    shape: tuple[int, ...] | None
    dtype: str
    origin: str


def live_blocks(gpu: int, by_kind: dict[str, list[Tensor]] | None = None) -> list[Block]:
    """Return all blocks in use on GPU number `gpu`, largest first. by_kind: `gpu_tensors(gpu)`, if already computed."""
    known = {}
    for kind, tensors in (gpu_tensors(gpu) if by_kind is None else by_kind).items():
        for tensor in tensors:
            known.setdefault(block_address(tensor), (kind, tensor))
    found = []
    for block in (block for segment in segments_of(gpu) for block in segment["blocks"]):
        if in_use(block):
            kind, tensor = known.get(block["address"], (KINDS[-1], None))
            shape = None if tensor is None else tuple(tensor.shape)
            dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
            made = origin(block["frames"]) if block.get("frames") else UNKNOWN
            found.append(Block(block["address"], block["size"], block["requested_size"], kind, shape, dtype, made))
    return sorted(found, key=lambda block: (-block.size, block.address))


def segments_of(gpu: int) -> list[dict]:
    """Return the segments of GPU number `gpu`, sorted by address."""
    segments = torch.cuda.memory_snapshot(include_traces=False)  # the history is long and not needed here
    return sorted((each for each in segments if each["device"] == gpu), key=lambda each: each["address"])


def in_use(block: dict) -> bool:
    """Return whether `block`, of a segment, is not free. Another stream may still use one that is "pending free"."""
    return block["state"].startswith("active")  # "active_allocated", "active_pending_free"


def gpu_tensors(gpu: int) -> dict[str, list[Tensor]]:
    """Return the tensors on GPU number `gpu` by kind. A tensor may have several kinds. The last kind contains tensors
    that have a Python object, and to which only C++ still refers."""
    found, held = defaultdict(list), _held_by_python()
    tensors, optimizers, modules = objects_of(Tensor, torch.optim.Optimizer, nn.Module)
    for tensor in tensors:
        known = KINDS[0] if issubclass(type(tensor), nn.Parameter) else KINDS[4 if id(tensor) in held else 5]
        found[known].append(tensor)
    for leaves in list(found.values()):  # Python may refer only to the parameter, and C++ to its gradient
        found["gradients"] += [t.grad for t in leaves if t.is_leaf and t.requires_grad]
    for optimizer in optimizers:
        found["optimizer state"] += [value for state in optimizer.state.values() for value in state.values()]
    for module in modules:
        found["buffers"] += vars(module).get("_buffers", {}).values()
    return {kind: [each for each in found[kind] if _is_on(each, gpu)] for kind in KINDS}


def objects_of(*kinds: type) -> list[list]:
    """For each of `kinds`, return the objects of that class that Python's gc knows. A notebook has half a million, so
    one pass serves all kinds. It tests `type(object)`, because `object.__class__` may be overridden."""
    objects = gc.get_objects()
    wanted = {each for each in set(map(type, objects)) if issubclass(each, kinds)}
    objects = [each for each in objects if type(each) in wanted]
    return [[each for each in objects if issubclass(type(each), kind)] for kind in kinds]


def _is_on(value: object, gpu: int) -> bool:
    try:
        return isinstance(value, Tensor) and value.layout is torch.strided and value.get_device() == gpu
    except RuntimeError:  # a tensor without storage, for example of functorch
        return False


def _held_by_python() -> set[int]:
    """Return the ids of all tensors to which a Python object or a running Python function refers.

    gc also knows the tensors that only C++ keeps, because a tensor's Python object lives as long as the tensor.
    Modules are skipped, but not their dicts. On Python 3.12 `_asyncio`, which runs in every notebook, returns objects
    from its list of free objects. Releasing them turns this list into a cycle, in which gc never ends.
    """
    # Listed first, so that it contains no object that is created below.
    objects = [each for each in gc.get_objects() if type(each) is not ModuleType]
    classes = {each for each in set(map(type, objects)) if issubclass(each, Tensor)}
    tensors = {id(each) for each in objects if type(each) in classes}
    found = set()
    for start in range(0, len(objects), _CHUNK):
        found |= tensors.intersection(map(id, gc.get_referents(*objects[start : start + _CHUNK])))
    for frame in running_frames():
        found |= tensors.intersection(map(id, variables(frame).values()))
    return found


# ---- the lines that made them ----------------------------------------------------------------------------------------


def remember_origins() -> None:
    """Record from now on the stack of every allocation on every GPU, and the history that PyTorch's viewer draws.

    This takes a few microseconds per allocation. Raises RuntimeError if there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("There is no GPU to watch. Call use_gpus first: `from helpers import use_gpus`.")
    torch.cuda.init()
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=MOST_EVENTS)


@contextmanager
def origins_remembered() -> Iterator[None]:
    """Remember origins inside the block. Afterwards, restore the previous state."""
    already = torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled()
    if not already:
        remember_origins()
    try:
        yield
    finally:
        if not already:
            torch.cuda.memory._record_memory_history(None)


def origin(frames: Sequence[dict]) -> str:
    """Describe the innermost of `frames` (innermost first, as in a snapshot) outside PyTorch and Python, for example
    "`x = net(x)` in train (scripts/train.py:12)". A line in a notebook cell is described without its file name."""
    for frame in frames:
        file = frame["filename"]
        foreign = file in ("", "<string>") or file.startswith((_TORCH, "<frozen", "??"))
        if foreign or (file.startswith(_STDLIB) and "site-packages" not in file):
            continue
        code = linecache.getline(file, frame["line"]).strip() or frame["name"]
        code = code if len(code) <= 60 else f"{code[:57]}..."
        inside = "" if frame["name"] == "<module>" else f" in {frame['name']}"
        in_a_cell = "ipykernel" in file or file.startswith("<")
        return f"`{code}`{inside}" + ("" if in_a_cell else f" ({'/'.join(Path(file).parts[-2:])}:{frame['line']})")
    return UNKNOWN


# ---- variables of functions, which gc does not know ------------------------------------------------------------------


def all_frames() -> Iterator[FrameType]:
    """Yield the frames of the running functions of all threads, innermost first."""
    for frame in list(sys._current_frames().values()):
        while frame is not None:
            yield frame
            frame = frame.f_back


def running_frames() -> Iterator[FrameType]:
    """Yield the same frames, except those of this package."""
    return (frame for frame in all_frames() if not frame.f_code.co_filename.startswith(_HERE))


def variables(frame: FrameType) -> dict[str, object]:
    """Return the local variables of a function by name, and none for a module's frame, which belong to the module.

    Up to Python 3.12, `frame.f_locals` fills a dict that the frame keeps. The dict would keep each tensor alive until
    the function returns, even a tensor that the function deletes. It is therefore emptied here.
    """
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return {}
    found = frame.f_locals
    copied = dict(found)
    if type(found) is dict:  # a snapshot, not the variables themselves
        found.clear()
    return copied
