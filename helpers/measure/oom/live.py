"""What is on a GPU now, block by block: its kind, its shape, the line that made it.

The allocator knows the blocks, Python knows the tensors; they meet at the block's address. What nothing in Python
refers to is held by C++: activations that autograd keeps for backward, and workspaces of libraries.
"""

import gc
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from helpers.gpus import block_address
from helpers.measure.oom.frames import running_frames, variables
from helpers.measure.oom.places import UNKNOWN, place

CHUNK = 2_000  # objects whose referents are looked at together: a list of all of them would be millions long
KINDS = ("parameters", "gradients", "optimizer state", "buffers", "tensors in variables", "held by autograd")


@dataclass(frozen=True)
class Block:
    """A block in use: `size` bytes of the GPU, of which `requested` were asked for. `shape`: None if no tensor of
    Python's lies in it; `place`: the line that made it, in words."""

    address: int
    size: int
    requested: int
    kind: str
    shape: tuple[int, ...] | None
    dtype: str
    place: str


def all_objects(*kinds: type) -> list[list]:
    """Every object that Python's gc knows, by class: a list for each of `kinds`. Classes are asked, since objects may
    lie about theirs, and each class once: a notebook has half a million objects."""
    found, objects = [], gc.get_objects()
    classes = set(map(type, objects))
    for kind in kinds:
        # `objects` must be no variable of an inner function: its cell would be in it, and both alive in a circle.
        wanted = {each for each in classes if issubclass(each, kind)}
        found.append([each for each in objects if type(each) in wanted])
    return found


def gpu_tensors(gpu: int) -> dict[str, list[Tensor]]:
    """The tensors on GPU number `gpu`, by kind; one may be of several. Of the last kind are those that have been
    Python's objects once, and that now only C++ refers to."""
    found, held = defaultdict(list), _held_by_python()
    tensors, optimizers, modules = all_objects(Tensor, torch.optim.Optimizer, nn.Module)
    for tensor in tensors:
        known = KINDS[0] if issubclass(type(tensor), nn.Parameter) else KINDS[4 if id(tensor) in held else 5]
        found[known].append(tensor)
    for leaves in list(found.values()):  # Python may hold the parameter only, and C++ its gradient
        found["gradients"] += [t.grad for t in leaves if t.is_leaf and t.requires_grad and t.grad is not None]
    for optimizer in optimizers:
        values = [value for state in optimizer.state.values() for value in state.values()]
        found["optimizer state"] += [value for value in values if isinstance(value, Tensor)]
    for module in modules:
        found["buffers"] += [b for b in vars(module).get("_buffers", {}).values() if isinstance(b, Tensor)]
    return {kind: [t for t in found[kind] if _is_on(t, gpu)] for kind in KINDS}


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
    for start in range(0, len(objects), CHUNK):
        found |= tensors.intersection(map(id, gc.get_referents(*objects[start : start + CHUNK])))
    for frame in running_frames():
        found |= tensors.intersection(map(id, variables(frame).values()))
    return found


def _is_on(tensor: Tensor, gpu: int) -> bool:
    try:
        return tensor.layout is torch.strided and tensor.get_device() == gpu
    except RuntimeError:  # a tensor without storage, as functorch makes them
        return False


def live_blocks(gpu: int) -> list[Block]:
    """All blocks in use on GPU number `gpu`, the largest first."""
    return blocks_of(gpu, gpu_tensors(gpu))


def blocks_of(gpu: int, by_kind: dict[str, list[Tensor]]) -> list[Block]:
    """`live_blocks`, where the tensors are known already."""
    known = {}
    for kind, tensors in by_kind.items():
        for tensor in tensors:
            known.setdefault(block_address(tensor), (kind, tensor))
    blocks = [_described(block, known.get(block["address"])) for block in blocks_in_use(gpu)]
    return sorted(blocks, key=lambda block: (-block.size, block.address))


def segments_of(gpu: int) -> list[dict]:
    """The segments of GPU number `gpu`, in the order of their addresses."""
    segments = torch.cuda.memory_snapshot(include_traces=False)  # the history is long, and of no use here
    return sorted((each for each in segments if each["device"] == gpu), key=lambda each: each["address"])


def blocks_in_use(gpu: int) -> Iterable[dict]:
    """The blocks of a GPU's snapshot that are in use, or that another stream still uses."""
    return (b for segment in segments_of(gpu) for b in segment["blocks"] if b["state"].startswith("active"))


def _described(block: dict, known: tuple[str, Tensor] | None) -> Block:
    kind, tensor = known or (KINDS[-1], None)
    shape = None if tensor is None else tuple(tensor.shape)
    dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
    made = place(block["frames"]) if block.get("frames") else UNKNOWN
    return Block(block["address"], block["size"], block["requested_size"], kind, shape, dtype, made)
