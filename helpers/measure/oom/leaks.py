"""What a piece of a program leaves behind on a GPU, and what keeps it there.

    with find_leaks() as leaks:
        train_one_epoch()
    print(leaks)

Blocks of one kind, shape and origin are counted before and after: what there is more of has leaked, or is meant to
stay (an optimizer's state after its first step). For a tensor that Python can reach, gc says who refers to it. For what
autograd keeps, nobody in Python does; then the tensors whose graph is still alive are listed, the largest graph first.
"""

import gc
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import nlargest

import torch
from torch import Tensor

from helpers.gpus import block_address
from helpers.measure.memory import read_memory
from helpers.measure.oom.blocks import KINDS, Block, gpu_tensors, live_blocks, objects_of
from helpers.measure.oom.explain import Group
from helpers.measure.oom.holders import holders
from helpers.measure.oom.origins import origins_remembered
from helpers.measure.sizes import format_bytes

_MOST_GRAPHS, _MOST_NODES, _MOST_ROWS = 3, 100_000, 6


@dataclass
class Leaks:
    """What is on `gpu` at the end of the block and was not at its beginning. False if there is nothing.

    grown     [(group, names)]: what there is more of, and the names that keep one of it (`holders`)
    graphs    [(names, nodes)]: new graphs of autograd that are still alive; nodes are counted up to 100,000
    cycles    bytes that only gc.collect() gave back: objects that refer to one another in a cycle
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
    """Compare what is on one GPU (a number, "cuda:1", a device) before and after the block.

    The result is filled when the block ends, also when it fails. Raises what `read_memory` raises.
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
    """What there is more of, with the new blocks, the largest first."""
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
    return [tensor for tensor in objects_of(Tensor) if tensor.grad_fn is not None]


def _graphs(before: set[int]) -> list[tuple[str, int]]:
    """The new graphs that a name keeps, the largest first; of graphs of one size the first in the alphabet."""
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
