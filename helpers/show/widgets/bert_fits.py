"""Does a step of the article's BERT fit? Its allocations are replayed in the model of PyTorch's caching allocator.

The peak alone does not say. PyTorch keeps what was freed, and hands it out again in pieces: a tensor may find no piece
that is large enough although enough is free in all (fragmentation). On virtual GPUs jobs were seen that need 1.3 times
their peak. So three steps are replayed on a card of this size, allocation by allocation, wherever the peak leaves that
in doubt: `CachingAllocator` is the model by which virtual GPUs run out of memory as well.
"""

from __future__ import annotations

from enum import StrEnum

from helpers.gpus import CachingAllocator, OutOfMemory
from helpers.show.widgets.bert_memory import GPUMemory, Job, own, step
from helpers.show.widgets.bert_sizes import Sizes
from helpers.show.widgets.cards import Card

STEPS = 3  # the first makes the optimizer's state, the second is cut from what the first left, and so on
SAFE = 1.6  # times the peak: with so much room a step fits without a look


class Verdict(StrEnum):
    """Whether a step fits on a GPU: yes; no, its peak is beyond the room; no, though the peak is not (PIECES)."""

    FITS = "fits"
    OVER = "does not fit"
    PIECES = "does not fit, for what is free is in pieces"


class Replay:
    """A `Ledger` whose tensors are blocks of an allocator. Raises OutOfMemory when there is no place for one."""

    def __init__(self, card: Card):
        self._allocator = CachingAllocator(card.capacity, card.context)
        self._blocks: dict[str, tuple] = {}
        self.doing = ""

    def take(self, kind: str, **sizes: int) -> None:
        """See `Ledger`."""
        for name, size in sizes.items():
            self._blocks[name] = kind, self._allocator.malloc(size)

    def give(self, *names: str) -> None:
        """See `Ledger`."""
        for name in names:
            self._allocator.free(self._blocks.pop(name)[1])

    def give_all(self, kind: str) -> None:
        """See `Ledger`."""
        self.give(*[name for name, (its, _) in self._blocks.items() if its == kind])

    def pass_through(self, *sizes: int) -> None:
        """See `Ledger`."""
        for block in [self._allocator.malloc(size) for size in sizes if size]:
            self._allocator.free(block)

    def holds(self, name: str) -> bool:
        """See `Ledger`."""
        return name in self._blocks


def judge(job: Job, gpus: list[GPUMemory]) -> list[Verdict]:
    """Whether the job fits, GPU by GPU; `gpus` is its `step_memory`."""
    known: dict[tuple, Verdict] = {}
    for gpu in gpus:
        work = _work(job, gpu)
        if work not in known:
            known[work] = _judge(job, gpu.peak, work)
    return [known[_work(job, gpu)] for gpu in gpus]


def _work(job: Job, gpu: GPUMemory) -> tuple[int, bool, bool]:
    return gpu.samples, gpu.index == 0, gpu.index == job.gathers


def _judge(job: Job, peak: int, work: tuple[int, bool, bool]) -> Verdict:
    if peak > job.card.room:
        return Verdict.OVER
    if SAFE * peak < job.card.room:
        return Verdict.FITS
    try:
        _replay(job, work)
    except OutOfMemory:
        return Verdict.PIECES
    return Verdict.FITS


def _replay(job: Job, work: tuple[int, bool, bool]) -> None:
    sizes = Sizes(job.vocabulary, job.hidden, job.layers, job.heads, job.length)
    replay, (samples, first, _) = Replay(job.card), work
    if first:
        own(replay, sizes)
    if samples:
        replay.take("other", workspaces=job.card.kept_workspaces)
    for number in range(STEPS):
        step(replay, job, sizes, *work, states=number > 0)
