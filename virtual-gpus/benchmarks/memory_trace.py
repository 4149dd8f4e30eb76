"""Every allocation of a training step, real and virtual side by side: `python -m benchmarks.memory --trace CASE`.

Both are lists of requested bytes in the order of the requests; the longest sequences that they share are laid together.
What is left over on one side or both is a difference. It gets a name: where in the step it is (the virtual operators
around it), and whether the block is scratch (given back before the next request), passing or kept to the end.
"""

from __future__ import annotations

import difflib
from typing import NamedTuple

import torch
from virtual_gpus import active_machine
from virtual_gpus.dispatch.operators import OpCall
from virtual_gpus.memory_model import round_size

from benchmarks.reference import measure
from benchmarks.reference.cases import CASES

MIB = 1 << 20


class Request(NamedTuple):
    """One allocation: bytes asked for, how long the block lived, the operator (of virtual ones), its place in time."""

    nbytes: int
    life: str  # "scratch", "passing" or "kept"
    operator: str = ""


class Event(NamedTuple):
    """What the allocator was asked: +bytes or -bytes at an address."""

    nbytes: int
    address: int
    operator: str = ""


class Operators:
    """Knows the ATen operator that runs at the moment, for whoever asks.

    Not a dispatch mode of its own: with a second mode on, autograd adds gradients up otherwise.
    """

    name = "-"

    def __enter__(self):
        begin = self._begin = OpCall.__init__

        def note(call, func, args, kwargs):
            begin(call, func, args, kwargs)
            self.name = call.op.base

        OpCall.__init__ = note
        return self

    def __exit__(self, *error):
        OpCall.__init__ = self._begin


def real_events(case: str) -> list[Event]:
    """What the H200's allocator recorded for the step after the first."""
    signs = {"alloc": 1, "free_completed": -1}
    recorded = measure.load("allocations.json.gz")[case]
    return [Event(signs[what] * nbytes, address) for what, nbytes, address in recorded if what in signs]


def virtual_events(case: str) -> list[Event]:
    """The same on the virtual GPU that is on: one step, then every request of the next."""
    step = CASES[case]("cuda")
    step()
    allocator, running, found = active_machine().gpus[0].allocator, Operators(), []
    sizes, drain = {}, torch.cuda.memory_allocated  # blocks are freed when somebody looks next
    drain()

    def malloc(nbytes, *args, **kwargs):
        block = ask(nbytes, *args, **kwargs)
        if block.size:
            sizes[block.address] = nbytes
            found.append(Event(nbytes, block.address, running.name))
        return block

    def heard(event, address, size):
        if event == "free":
            found.append(Event(-sizes.pop(address, size), address, running.name))

    ask, allocator.malloc = allocator.malloc, malloc
    allocator.observers.append(heard)
    with running:
        step()
        drain()
    return found


def requests(events: list[Event]) -> list[Request]:
    """The allocations among them, with their lives."""
    freed, lives = {}, {}
    for place in range(len(events) - 1, -1, -1):
        nbytes, address, _ = events[place]
        if nbytes < 0:
            freed[address] = place
        else:
            lives[place] = _life(events, place, freed.pop(address, None))
    return [Request(events[place].nbytes, lives[place], events[place].operator) for place in sorted(lives)]


def _life(events: list[Event], born: int, died: int | None) -> str:
    if died is None:
        return "kept"
    return "passing" if any(event.nbytes > 0 for event in events[born + 1 : died]) else "scratch"


def rise(events: list[Event]) -> int:
    """How far allocated memory climbs above its start, in bytes, without unsplit tails."""
    now = highest = 0
    for event in events:
        now += round_size(event.nbytes) if event.nbytes > 0 else -round_size(-event.nbytes)
        highest = max(highest, now)
    return highest


def size(nbytes: int) -> str:
    """Bytes, and MiB beside them where they are many."""
    return f"{nbytes:13,d} B" + (f" {nbytes / MIB:9.2f} MiB" if nbytes >= MIB // 100 else " " * 14)


def sides(real: list[Request], virtual: list[Request], everything: bool = True) -> list[str]:
    """The requests of one stretch, in two columns; without `everything` only the first twelve lines."""
    lines, rows = [], max(len(real), len(virtual))
    shown = rows if everything else min(rows, 12)
    for row in range(shown):
        left = f"{size(real[row].nbytes)}  {real[row].life:8}" if row < len(real) else ""
        right = ""
        if row < len(virtual):
            right = f"{size(virtual[row].nbytes)}  {virtual[row].life:8} {virtual[row].operator}"
        lines.append(f"  {left:40}| {right}".rstrip())
    return lines + [f"  ... and {rows - shown} lines more (--all shows them)"] * (rows > shown)


def name_of(real: list[Request], virtual: list[Request], before: str, after: str) -> str:
    """A difference in words."""
    place = f"in {before}" if before == after else f"between {before} and {after}"
    if not virtual:
        return f"only real, {_lives(real)}, {place}"
    where = ", ".join(dict.fromkeys(request.operator for request in virtual))
    if not real:
        return f"only virtual, {_lives(virtual)}, in {where}"
    if sorted(r.nbytes for r in real) == sorted(v.nbytes for v in virtual):
        return f"another order, in {where}"
    more = sum(round_size(v.nbytes) for v in virtual) - sum(round_size(r.nbytes) for r in real)
    return f"other sizes ({more / MIB:+.2f} MiB virtual), in {where}"


def _lives(blocks: list[Request]) -> str:
    return " and ".join(dict.fromkeys(request.life for request in blocks))


def side_by_side(real: list[Request], virtual: list[Request], everything: bool) -> list[str]:
    """The aligned lists; without `everything` only the differences, each under its name."""
    key = [[round_size(request.nbytes) for request in side] for side in (real, virtual)]
    matcher = difflib.SequenceMatcher(None, *key, autojunk=False)
    lines, differences = [], {}
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            lines += sides(real[a:b], virtual[c:d]) if everything else []
            continue
        before = virtual[c - 1].operator if c else "the start"
        after = virtual[d].operator if d < len(virtual) else "the end"
        name = name_of(real[a:b], virtual[c:d], before, after)
        differences[name] = differences.get(name, 0) + 1
        lines += [f"* {name}", *sides(real[a:b], virtual[c:d], everything)]
    agree = sum(block.size for block in matcher.get_matching_blocks())
    counted = [f"{count:5} x {name}" for name, count in sorted(differences.items(), key=lambda item: -item[1])]
    total = f"{len(real)} allocations real, {len(virtual)} virtual, {agree} agree in size and order"
    return [*lines, "", total, *counted]


def report(case: str, meta: dict, everything: bool = False, shapes_only: bool = True) -> list[str]:
    """The comparison of one case as lines of text."""
    real = real_events(case)
    virtual = measure.on_virtual_gpu(lambda: virtual_events(case), meta["torch"], shapes_only)
    heading = f"  {'real':40}| virtual"
    highest = [f"{rise(events) / MIB:.2f} MiB" for events in (real, virtual)]
    lines = side_by_side(requests(real), requests(virtual), everything)
    climbs = f"Allocated memory climbs {highest[0]} above its start (real), {highest[1]} (virtual)."
    return [f"{case}, the second step", "", heading, *lines, "", climbs]
