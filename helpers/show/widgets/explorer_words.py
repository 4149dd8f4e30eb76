"""The explorer's words: what a step takes on every GPU, whether it fits, and what the fullest GPU holds then."""

from __future__ import annotations

from collections.abc import Sequence

from helpers.measure import GiB, format_bytes
from helpers.show.widgets.bert_fits import Verdict
from helpers.show.widgets.bert_memory import GPUMemory, Job

_LEAST = 0.005  # of the peak: what is less is not worth a word


def words(job: Job, gpus: Sequence[GPUMemory], verdicts: Sequence[Verdict]) -> str:
    """The picture in words, three lines: what every GPU allocates, whether it fits, and what the fullest one holds."""
    needs = ", ".join(_need(run) for run in _runs(gpus))
    return f"{_job(job)}: {needs}.\n{_fits(job, gpus, verdicts)}\n{_held(gpus)}"


def headline(job: Job, verdicts: Sequence[Verdict]) -> str:
    """The job and whether it fits."""
    return f"{_job(job)}: {Verdict.FITS if set(verdicts) == {Verdict.FITS} else Verdict.OVER}"


def _job(job: Job) -> str:
    on = "" if job.method == "one GPU" else " on one GPU" if job.gpus == 1 else f" on {job.gpus} GPUs"
    return f"{job.method}{on}, {job.optimizer}, batch {job.batch}"


def _runs(gpus: Sequence[GPUMemory]) -> list[list[GPUMemory]]:
    """Neighbours whose figures read the same."""
    runs: list[list[GPUMemory]] = []
    for gpu in gpus:
        if runs and format_bytes(runs[-1][0].peak) == format_bytes(gpu.peak):
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return runs


def _need(run: Sequence[GPUMemory]) -> str:
    if run[0].peak == 0:
        return f"{_names(run)} {'have' if len(run) > 1 else 'has'} nothing to do"
    size = format_bytes(run[0].peak)
    return f"{_names(run)} " + (f"allocate up to {size} each" if len(run) > 1 else f"allocates up to {size}")


def _names(run: Sequence[GPUMemory]) -> str:
    first, last = run[0].index, run[-1].index
    if len(run) == 1:
        return f"GPU {first}"
    return f"GPUs {first} {'and' if last == first + 1 else 'to'} {last}"


def _fits(job: Job, gpus: Sequence[GPUMemory], verdicts: Sequence[Verdict]) -> str:
    card = job.card
    has = f"The card ({card.name}, {format_bytes(card.capacity)}) has room for {format_bytes(card.room)}"
    full = max(gpus, key=lambda gpu: gpu.peak)
    if Verdict.OVER in verdicts:
        return f"{has}. The job does not fit: GPU {full.index} is {format_bytes(full.peak - card.room)} over."
    if Verdict.PIECES in verdicts:
        index = verdicts.index(Verdict.PIECES)
        rest = f"on GPU {index} the peak would, but what is free is in pieces, none large enough (fragmentation)"
        return f"{has}. The job does not fit: {rest}."
    return f"{has}. The job fits."


def _held(gpus: Sequence[GPUMemory]) -> str:
    full = max(gpus, key=lambda gpu: gpu.peak)
    unit = "GiB" if full.peak >= 2 * GiB else "MiB"
    held = sorted(full.at_peak.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{kind} {format_bytes(size, unit)}" for kind, size in held if size > _LEAST * full.peak)
    return f"GPU {full.index} is fullest in {full.moment}, with {parts}."
