"""Finds what a block of code leaves behind on a GPU, and what keeps it alive.

    with find_leaks() as leaks:
        train_one_epoch()
    print(leaks)

Blocks of the same kind, shape and origin are counted before and after. Additional blocks have leaked or are meant to
stay, such as an optimizer's state after its first step. If Python can reach a tensor, gc finds what refers to it.
Nothing in Python refers to what autograd keeps. In this case, the tensors whose graph is still alive are listed, the
largest graph first. `forget_error()` frees the most frequent leak, which is the last error.
"""

import gc
import sys
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import nlargest
from types import CellType, FrameType, FunctionType, TracebackType

import torch
from torch import Tensor

from helpers.gpus import block_address
from helpers.measure.memory import read_memory
from helpers.measure.oom.blocks import (
    KINDS,
    Block,
    all_frames,
    gpu_tensors,
    live_blocks,
    objects_of,
    origins_remembered,
    running_frames,
    variables,
)
from helpers.measure.oom.explain import Group
from helpers.measure.sizes import format_bytes

_MOST_GRAPHS, _MOST_NODES, _MOST_ROWS = 3, 100_000, 6
_MOST_NAMES, _MOST_SEARCHES = 3, 60  # each search goes through every object of the program


@dataclass
class Leaks:
    """Blocks that GPU number `gpu` has at the end of the block of code, but not at its beginning. False if none.

    grown     [(group, names)]: additional blocks, and the names that keep one of them alive (`holders`)
    graphs    [(names, nodes)]: new autograd graphs that are still alive; nodes are counted up to 100,000
    cycles    bytes that only gc.collect() freed, because objects referred to each other in a cycle
    change    bytes by which the allocated memory has grown
    """

    gpu: int
    grown: list[tuple[Group, list[str]]] = field(default_factory=list)
    graphs: list[tuple[str, int]] = field(default_factory=list)
    cycles: int = 0
    change: int = 0

    def __bool__(self) -> bool:
        return bool(self.grown) or self.cycles > 0

    def __str__(self) -> str:
        if not self:
            return f"GPU {self.gpu}: nothing was left behind."
        more = f"{format_bytes(abs(self.change))} {'more' if self.change > 0 else 'less'}"
        lines = [f"GPU {self.gpu}: {more if self.change else 'nothing more'} allocated than before"]
        for group, names in self.grown[:_MOST_ROWS]:
            lines.append(f"  {group}")
            what = "kept by" if group.count == 1 else "one of them kept by"
            lines += [f"             {what} {name}" for name in names]
        lines += [f"             a graph of {nodes:,} nodes is alive: {names}" for names, nodes in self.graphs]
        if self.cycles:
            lines.append(f"  {format_bytes(self.cycles):>9}  came back only through gc.collect(): reference cycles")
        return "\n".join(lines)


@contextmanager
def find_leaks(gpu=0) -> Iterator[Leaks]:
    """Compare the blocks on one GPU (an index, "cuda:1", or a device) before and after the block of code.

    The result is filled when the block of code ends, even if it fails. Raises what `read_memory` raises.
    """
    found = Leaks(read_memory(gpu)[0].index)
    gc.collect()
    before, graphs = live_blocks(found.gpu), {id(each) for each in _with_graph()}
    with origins_remembered():
        try:
            yield found
        finally:
            _fill(found, before, graphs)


def _fill(found: Leaks, before: list[Block], graphs: set[int]) -> None:
    allocated = torch.cuda.memory_allocated(found.gpu)
    gc.collect()
    found.cycles = allocated - torch.cuda.memory_allocated(found.gpu)
    by_kind = gpu_tensors(found.gpu)
    after = live_blocks(found.gpu, by_kind)
    found.change = sum(block.size for block in after) - sum(block.size for block in before)
    tensors = {block_address(each): each for kind in KINDS[:-1] for each in by_kind[kind]}
    for group, new in _more(before, after):
        reachable = sorted(block.address for block in new if block.address in tensors)
        found.grown.append((group, holders(tensors[reachable[0]]) if reachable else []))
    if any(group.kind == KINDS[-1] for group, _ in found.grown):
        found.graphs = _graphs(graphs)


def _more(before: list[Block], after: list[Block]) -> list[tuple[Group, list[Block]]]:
    """Return the groups that have grown, each with its new blocks. The largest group comes first."""
    counts, known = Counter(map(_likeness, before)), {block.address for block in before}
    groups: dict[tuple, list[Block]] = defaultdict(list)
    for block in after:
        groups[_likeness(block)].append(block)
    found = []
    for key, blocks in groups.items():
        new = sorted(blocks, key=lambda block: block.address in known)[: max(0, len(blocks) - counts[key])]
        if new:
            found.append((Group(*key[:4], len(new), sum(block.size for block in new)), new))
    return sorted(found, key=lambda each: (-each[0].size, each[0].origin))


def _likeness(block: Block) -> tuple:
    return block.kind, block.shape, block.dtype, block.origin, block.requested


def _with_graph() -> list[Tensor]:
    return [tensor for tensor in objects_of(Tensor)[0] if tensor.grad_fn is not None]


def _graphs(before: set[int]) -> list[tuple[str, int]]:
    """Return the new graphs that a name keeps alive, largest first. Graphs of equal size are sorted by name."""
    new = [tensor for tensor in _with_graph() if id(tensor) not in before]
    found = nlargest(10, ((_nodes(tensor.grad_fn), tensor) for tensor in new), key=lambda each: each[0])
    named = sorted((-nodes, ", ".join(holders(tensor))) for nodes, tensor in found)
    return [(names, -size) for size, names in named if names][:_MOST_GRAPHS]


def _nodes(root) -> int:
    seen, waiting = {root}, deque([root])
    while waiting and len(seen) < _MOST_NODES:
        for node, _ in waiting.popleft().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return len(seen)


# ---- what keeps a tensor alive ---------------------------------------------------------------------------------------


def holders(thing: object) -> list[str]:
    """Return up to three names that keep `thing` alive, the shortest paths first, or none if only C++ refers to it.

    Examples are `out`, `history['losses'][3]` and "`x` of train(), which ended in an error that is kept". Python's gc
    gives the objects that refer to `thing`, then those that refer to them, up to variables of modules or functions.
    """
    names, waiting, seen = [], deque([(thing, "")]), {id(thing), *map(id, all_frames())}
    for _ in range(_MOST_SEARCHES):
        if not waiting or len(names) >= _MOST_NAMES:
            break
        each, path = waiting.popleft()
        found = [_variable(frame, each, path) for frame in running_frames()]
        for holder in gc.get_referrers(each):
            if id(holder) not in seen:
                seen.add(id(holder))
                name, further = _step(each, holder, path)
                found.append(name)
                if further is not None:
                    waiting.append((holder, further))
        names += [name for name in dict.fromkeys(found) if name and name not in names]
    return names[:_MOST_NAMES]


def _step(thing: object, holder: object, path: str) -> tuple[str, str | None]:
    """Return (name, None) if `holder` gives `thing` a name, otherwise ("", the path from `holder` to `thing`)."""
    if isinstance(holder, FrameType):
        return _variable(holder, thing, path, ", which ended in an error that is kept"), None
    if isinstance(holder, dict):
        keys = [key for key, value in list(holder.items()) if value is thing] or ["..."]
        key = min(keys, key=lambda key: str(key).startswith("_"))  # IPython adds names of its own for results
        module = holder.get("__name__")
        if isinstance(module, str) and module in sys.modules and vars(sys.modules[module]) is holder:
            return f"`{key}{path}`" + ("" if module == "__main__" else f" of the module {module}"), None
        return "", f"[{key!r}]{path}"
    if isinstance(thing, CellType) or isinstance(holder, (CellType, FunctionType)):  # a variable in a closure
        return "", path
    if isinstance(holder, (list, tuple)):
        return "", f"[{next((i for i, value in enumerate(holder) if value is thing), '...')}]{path}"
    values = getattr(holder, "__dict__", {})
    if values is thing:  # `path` begins with the key in it
        name, _, rest = path.removeprefix("['").partition("']")
        return "", f".{name}{rest}"
    name = next((name for name, value in values.items() if value is thing), None)
    return "", f".{name}{path}" if name else f" (in a {type(holder).__name__}){path}"


def _variable(frame: FrameType, thing: object, path: str, what: str = "") -> str:
    """Return the name of `thing` in a function, or "" if it has none there."""
    name = next((name for name, value in variables(frame).items() if value is thing), None)
    return f"`{name}{path}` of {frame.f_code.co_name}(){what}" if name else ""


def forget_error() -> int:
    """Free what the last error that ended a cell, or a line at a prompt, keeps alive. Returns the bytes freed on all
    GPUs. It does nothing if there was no error. An error that one of your own variables holds stays.

    Python keeps the last error (`sys.last_value`), and with it the traceback, the frames of all functions in it, and
    their variables, for example the tensors of a training step that ran out of memory. IPython keeps the error a second
    time, and has read the variables of every frame to display it.
    """
    before = _allocated()
    ipython = sys.modules.get("IPython")
    shown = getattr(ipython and ipython.get_ipython(), "InteractiveTB", None)  # displays IPython's errors
    for trace in (getattr(sys, "last_traceback", None), getattr(shown, "tb", None)):
        if isinstance(trace, TracebackType):
            for frame, _ in traceback.walk_tb(trace):
                variables(frame)  # empties the copy that Python up to 3.12 made for IPython
            traceback.clear_frames(trace)
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        vars(sys).pop(name, None)
    if shown is not None:
        shown.tb = None
    gc.collect()  # older errors are in reference cycles
    return before - _allocated()


def _allocated() -> int:
    return sum(torch.cuda.memory_allocated(gpu) for gpu in range(torch.cuda.device_count()))
