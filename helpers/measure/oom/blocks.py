"""What is on a GPU now, block by block: its kind, its shape, the line that made it.

The allocator knows the blocks and Python knows the tensors; both know the block's address. What nothing in Python
refers to is held by C++: activations that autograd keeps for backward, and workspaces of libraries. The line is known
where PyTorch's memory history, which `remember_origins()` switches on, has the stack of the allocation.
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
_CHUNK = 2_000  # objects whose referents are looked at together: a list of all of them would be millions long
MOST_EVENTS = 200_000  # per GPU, about a kilobyte each on the host; of a longer history the end is kept
UNKNOWN = "made before remember_origins() was called"
_TORCH = str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_path("stdlib")
_HERE = os.path.join(os.path.dirname(__file__), "")


@dataclass(frozen=True)
class Block:
    """A block in use: `size` bytes of the GPU, of which `requested` were asked for. `shape`: None if no tensor of
    Python's lies in it; `origin`: the line that made it, in words."""

    address: int
    size: int
    requested: int
    kind: str
    shape: tuple[int, ...] | None
    dtype: str
    origin: str


def live_blocks(gpu: int, by_kind: dict[str, list[Tensor]] | None = None) -> list[Block]:
    """All blocks in use on GPU number `gpu`, the largest first. by_kind: `gpu_tensors(gpu)`, where it is there."""
    known = {}
    for kind, tensors in (gpu_tensors(gpu) if by_kind is None else by_kind).items():
        for tensor in tensors:
            known.setdefault(block_address(tensor), (kind, tensor))
    found = []
    for block in (block for segment in segments_of(gpu) for block in segment["blocks"]):
        if block["state"].startswith("active"):  # also "active_pending_free": another stream may still use it
            kind, tensor = known.get(block["address"], (KINDS[-1], None))
            shape = None if tensor is None else tuple(tensor.shape)
            dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
            made = origin(block["frames"]) if block.get("frames") else UNKNOWN
            found.append(Block(block["address"], block["size"], block["requested_size"], kind, shape, dtype, made))
    return sorted(found, key=lambda block: (-block.size, block.address))


def segments_of(gpu: int) -> list[dict]:
    """The segments of GPU number `gpu`, in the order of their addresses."""
    segments = torch.cuda.memory_snapshot(include_traces=False)  # the history is long, and of no use here
    return sorted((each for each in segments if each["device"] == gpu), key=lambda each: each["address"])


def gpu_tensors(gpu: int) -> dict[str, list[Tensor]]:
    """The tensors on GPU number `gpu`, by kind; one may be of several. The last kind are those that have been objects
    of Python once, and that now only C++ refers to."""
    found, held = defaultdict(list), _held_by_python()
    tensors, optimizers, modules = objects_of(Tensor, torch.optim.Optimizer, nn.Module)
    for tensor in tensors:
        known = KINDS[0] if issubclass(type(tensor), nn.Parameter) else KINDS[4 if id(tensor) in held else 5]
        found[known].append(tensor)
    for leaves in list(found.values()):  # Python may hold the parameter only, and C++ its gradient
        found["gradients"] += [t.grad for t in leaves if t.is_leaf and t.requires_grad]
    for optimizer in optimizers:
        found["optimizer state"] += [value for state in optimizer.state.values() for value in state.values()]
    for module in modules:
        found["buffers"] += vars(module).get("_buffers", {}).values()
    return {kind: [each for each in found[kind] if _is_on(each, gpu)] for kind in KINDS}


def objects_of(*kinds: type) -> list[list]:
    """For each of `kinds`, every object of that class that Python's gc knows. gc knows half a million in a notebook, so
    they are gone through once for all kinds. Classes are asked, since objects may lie about theirs."""
    objects = gc.get_objects()
    wanted = {each for each in set(map(type, objects)) if issubclass(each, kinds)}
    objects = [each for each in objects if type(each) in wanted]
    return [[each for each in objects if issubclass(type(each), kind)] for kind in kinds]


def _is_on(value: object, gpu: int) -> bool:
    try:
        return isinstance(value, Tensor) and value.layout is torch.strided and value.get_device() == gpu
    except RuntimeError:  # a tensor without storage, as functorch makes them
        return False


def _held_by_python() -> set[int]:
    """The ids of all tensors that an object or a running function of Python refers to.

    gc knows the tensors that C++ alone keeps, too: a tensor's Python object lives as long as the tensor does.
    Modules are not asked, only their dicts: on Python 3.12 `_asyncio`, which runs in every notebook, gives out objects
    that are free already (its freelist), and giving them back ties the list into a ring that gc never leaves.
    """
    # Taken first: nothing that is made from here on is in it.
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
    """Keep, from here on, the stack of every allocation on every GPU, and the history that PyTorch's viewer draws.

    Costs some microseconds per allocation. Raises RuntimeError without any GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("There is no GPU to watch. Call use_gpus first: `from helpers import use_gpus`.")
    torch.cuda.init()
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=MOST_EVENTS)


@contextmanager
def origins_remembered() -> Iterator[None]:
    """Origins are remembered inside, and afterwards only if they were before."""
    already = torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled()
    if not already:
        remember_origins()
    try:
        yield
    finally:
        if not already:
            torch.cuda.memory._record_memory_history(None)


def origin(frames: Sequence[dict]) -> str:
    """The innermost of `frames` (innermost first, as in a snapshot) that is not PyTorch's or Python's, in words:
    "`x = net(x)` in train (scripts/train.py:12)". The file of a notebook's cell has no name that says anything."""
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


# ---- functions' variables, which gc does not know --------------------------------------------------------------------


def all_frames() -> Iterator[FrameType]:
    """The frames of the functions that run now, in all threads, innermost first."""
    for frame in list(sys._current_frames().values()):
        while frame is not None:
            yield frame
            frame = frame.f_back


def running_frames() -> Iterator[FrameType]:
    """The same without this package's."""
    return (frame for frame in all_frames() if not frame.f_code.co_filename.startswith(_HERE))


def variables(frame: FrameType) -> dict[str, object]:
    """The local variables of a function by name; none for a module's frame, whose variables are a module's own.

    Up to Python 3.12 `frame.f_locals` fills a dict that the frame then keeps, and with it each tensor until the
    function returns, even those that it deletes. So that dict is emptied here.
    """
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return {}
    found = frame.f_locals
    copied = dict(found)
    if type(found) is dict:  # a snapshot, not the variables themselves
        found.clear()
    return copied
