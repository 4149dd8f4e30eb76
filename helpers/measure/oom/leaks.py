"""What a piece of a program leaves behind on a GPU, and what keeps it there.

    with find_leaks() as leaks:
        train_one_epoch()
    print(leaks)

Blocks of one kind, shape and origin are counted before and after: what there is more of has leaked, or is meant to
stay (an optimizer's state after its first step). For a tensor that Python can reach, gc says who refers to it. For what
autograd keeps, nobody in Python does; then the tensors whose graph is still alive are listed, the largest graph first.
"""

import gc
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import nlargest

import torch
from torch import Tensor

from helpers.measure.memory import format_bytes, read_memory
from helpers.measure.oom.live import KINDS, Block, all_objects, block_address, blocks_of, gpu_tensors, live_blocks
from helpers.measure.oom.places import remembered
from helpers.measure.oom.referrers import holders
from helpers.measure.oom.report import Group

MOST_GRAPHS, MOST_LOOKED_AT, MOST_NODES, MOST_ROWS = 3, 10, 100_000, 6


@dataclass
class Leaks:
    """What is on `gpu` at the end of the block and was not at its beginning. False if there is nothing.

    grown     [(group, holders)]: what there is more of, and the names that keep one of it (`helpers.measure.referrers`)
    graphs    [(name, nodes)]: new graphs of autograd that are still alive; nodes are counted up to 100,000
    cycles    bytes that only gc.collect() gave back: objects that refer to one another in a circle
    change    bytes by which what is allocated has grown
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
        lines = [f"GPU {self.gpu}: {_change(self.change)} allocated than before"]
        for group, names in self.grown[:MOST_ROWS]:
            lines.append(f"  {group}")
            what = "kept by" if group.count == 1 else "one of them kept by"
            lines += [f"             {what} {name}" for name in names]
        lines += [f"             a graph of {nodes:,} nodes is alive: {name}" for name, nodes in self.graphs]
        if self.cycles:
            lines.append(f"  {format_bytes(self.cycles):>9}  came back only through gc.collect(): reference cycles")
        return "\n".join(lines)

    __repr__ = __str__


@contextmanager
def find_leaks(gpu=0) -> Iterator[Leaks]:
    """Compare what is on one GPU (a number, "cuda:1", a device) before and after the block.

    The result is filled when the block ends, also when it fails. Raises what `read_memory` raises.
    """
    found = Leaks(read_memory(gpu)[0].index)
    gc.collect()
    before, graphs = live_blocks(found.gpu), {id(each) for each in _with_graph()}
    with remembered():
        try:
            yield found
        finally:
            _fill(found, before, graphs)


def _fill(found: Leaks, before: list[Block], graphs: set[int]) -> None:
    allocated = torch.cuda.memory_allocated(found.gpu)
    gc.collect()
    found.cycles = allocated - torch.cuda.memory_allocated(found.gpu)
    by_kind = gpu_tensors(found.gpu)
    after = blocks_of(found.gpu, by_kind)
    found.change = sum(block.size for block in after) - sum(block.size for block in before)
    tensors = {block_address(each): each for kind in by_kind.values() for each in kind}
    found.grown = [(group, _holders(group, new, tensors)) for group, new in _more(before, after)]
    if any(group.kind == KINDS[-1] for group, _ in found.grown):
        found.graphs = _graphs(graphs)


def _more(before: list[Block], after: list[Block]) -> list[tuple[Group, set[int]]]:
    """What there is more of, with the addresses of the new ones, the largest first."""
    counts, known = Counter(map(_likeness, before)), {block.address for block in before}
    groups: dict[tuple, list[Block]] = {}
    for block in after:
        groups.setdefault(_likeness(block), []).append(block)
    found = []
    for key, blocks in groups.items():
        extra = len(blocks) - counts[key]
        if extra > 0:
            blocks = sorted(blocks, key=lambda block: block.address in known)[:extra]  # the new ones first
            group = Group(*key[:4], extra, sum(block.size for block in blocks))
            found.append((group, {block.address for block in blocks}))
    return sorted(found, key=lambda each: (-each[0].size, each[0].place))


def _likeness(block: Block) -> tuple:
    return block.kind, block.shape, block.dtype, block.place, block.requested


def _holders(group: Group, addresses: set[int], tensors: dict[int, Tensor]) -> list[str]:
    """Who keeps the first of the blocks at `addresses`; nobody, where that is autograd."""
    known = sorted(addresses & tensors.keys())
    return holders(tensors[known[0]]) if known and group.kind != KINDS[-1] else []


def _with_graph() -> list[Tensor]:
    (tensors,) = all_objects(Tensor)
    return [tensor for tensor in tensors if tensor.grad_fn is not None]


def _graphs(before: set[int]) -> list[tuple[str, int]]:
    """The new graphs that a name keeps, the largest first; of graphs of one size the first in the alphabet."""
    new = [tensor for tensor in _with_graph() if id(tensor) not in before]
    found = nlargest(MOST_LOOKED_AT, ((_nodes(tensor.grad_fn), tensor) for tensor in new), key=lambda each: each[0])
    named = sorted((-nodes, ", ".join(holders(tensor))) for nodes, tensor in found)
    return [(names, -size) for size, names in named if names][:MOST_GRAPHS]


def _nodes(root) -> int:
    seen, waiting = {root}, deque([root])
    while waiting and len(seen) < MOST_NODES:
        for node, _ in waiting.popleft().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return len(seen)


def _change(size: int) -> str:
    if not size:
        return "nothing more"
    return f"{format_bytes(abs(size))} {'more' if size > 0 else 'less'}"
