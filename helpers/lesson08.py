"""Lesson 08: a transfer around the ring, the programs under torchrun, and the pictures."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from helpers.gpus import data_sheet, is_virtual, merged
from helpers.measure.timeline import Timeline
from helpers.parallel.hosts import TORCHRUN, run_hosts
from helpers.show.programs import SCRIPTS
from helpers.show.style import WIDTH, bar_style, legend_below, open_frame, series_style, set_alt_text

_ROWS = {
    "computing": {"forward": bar_style(0), "backward": bar_style(5, 1), "step": bar_style(2, 2)},
    "all-gather": {"all_gather": bar_style(1)},
    "reduce-scatter": {"reduce_scatter": bar_style(3)},
}


def exchange(outgoing: Tensor) -> Tensor:
    """Send a tensor to the next rank. Returns the tensor that arrives from the previous rank, as in lesson 04."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    incoming = torch.empty_like(outgoing)
    to_next = dist.P2POp(dist.isend, outgoing, (rank + 1) % ranks)
    from_previous = dist.P2POp(dist.irecv, incoming, (rank - 1) % ranks)
    for transfer in dist.batch_isend_irecv([to_next, from_previous]):
        transfer.wait()
    return incoming


def report(name: str, results: Sequence[Tensor]) -> None:
    """Print the mean over the ranks of what each one returned.

    results: for each rank the losses of its steps, (steps,), or rows of loss and norm of the gradients, (steps, 2).
    """
    mean = torch.stack(list(results)).mean(dim=0)
    columns = mean.T if mean.dim() == 2 else [mean]
    parts = [
        f"{what} {'  '.join(f'{value:.3f}' for value in column)}"
        for what, column in zip(("losses", "norms"), columns, strict=False)
    ]
    print(f"{name:24} {'   '.join(parts)}")


def torchrun(program: str, ranks: int) -> None:
    """Run a program of notebooks/scripts for ten steps on so many ranks, as lesson 04 does, and print its output."""
    virtual = ["-m", "virtual_gpus", "--gpus", str(ranks)] if is_virtual() else []
    script = [SCRIPTS / f"{program}.py", "--max-steps", 10, "--workers", 0]
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", ranks, *virtual, *script]
    print(run_hosts({program: command}, real_gpus=True)[program])


def exchange_picture(timeline: Timeline) -> Figure:
    """Draw one GPU's step in three rows: what it computes, its all-gathers, and its reduce-scatters."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.1), layout="constrained")
    for row, looks in enumerate(_ROWS.values()):
        for name, look in looks.items():
            spans = [(w.start, w.end) for w in timeline.work if name in (w.kind, w.name)]
            for start, end in spans if row else merged(spans, 1e-4):  # each collective is a bar
                ax.barh(row, 1e3 * (end - start), 0.8, 1e3 * start, **look | {"linewidth": 0.8})
    ax.set(xlim=(0, 1e3 * timeline.seconds), ylim=(2.5, -0.5), xlabel="modelled time in ms")
    ax.set_yticks(range(3), _ROWS)
    open_frame(ax, "x")
    legend_below(figure, [Patch(label=name, **look) for name, look in _ROWS["computing"].items()])
    set_alt_text(
        figure,
        "Three rows over the time of one step. The GPU computes most of the time. The all-gather of a block runs while "
        "the block before computes, and its reduce-scatter while the next block of the backward pass computes.",
    )
    return figure


def jobs_picture(jobs: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw the peak and the time of each job. A job is what `figures` returns: GiB by kind, and seconds."""
    figure, (memory, time) = plt.subplots(
        1, 2, figsize=(WIDTH, 1.5 + 0.26 * len(jobs)), sharey=True, layout="constrained"
    )
    names = [name for name in next(iter(jobs.values())) if name not in ("GiB", "seconds", "waiting")]
    kinds = [name for name in names if any(job[name] > 0.5 for job in jobs.values())]
    before = [0.0] * len(jobs)
    for place, kind in enumerate(kinds):
        bars = memory.barh(list(jobs), [job[kind] for job in jobs.values()], left=before, **series_style(place))
        bars.set_label(kind)
        before = [bar.get_x() + bar.get_width() for bar in bars]
    memory.axvline(data_sheet("H100").memory / 2**30, color="black", linestyle=":", label="an H100")
    memory.set(xlabel="GiB at the peak", xlim=(0, max(90, 1.05 * max(before))))
    computing = [job["seconds"] - job["waiting"] for job in jobs.values()]
    waiting = [job["waiting"] for job in jobs.values()]
    time.barh(list(jobs), computing, **bar_style(5), label="computing")
    time.barh(list(jobs), waiting, left=computing, **bar_style(4, 1), label="waiting")
    time.set(xlabel="modelled seconds of a step")
    memory.invert_yaxis()
    open_frame(memory, "x")
    open_frame(time, "x")
    legend_below(figure, [*memory.get_legend_handles_labels()[0], *time.get_legend_handles_labels()[0]])
    set_alt_text(figure, "Bars of peak memory and of the time of a step for each job, as in the table below")
    return figure


def figures(report) -> dict[str, float]:
    """The GiB at the peak, in all and by kind, the seconds of a step, and those of waiting, from a report."""
    memory = {"GiB": report.peak_bytes / 2**30} | {kind: size / 2**30 for kind, size in report.by_kind.items()}
    return memory | {"seconds": report.step_seconds, "waiting": report.exposed_seconds}


def full_job(run: Callable, shape: Mapping[str, int], *arguments: Any, **options: Any) -> dict[str, float]:
    """Return the `figures` of `run(shape, *arguments, **options)`, extrapolated from models of 3 and 6 blocks.

    All blocks of `shape` (the arguments of `Llama`) are alike, so each one adds the same memory and the same time. With
    fewer than 3 blocks, the peak would lie at another moment of the step.
    """
    few, more = (figures(run({**shape, "layers": layers}, *arguments, **options)) for layers in (3, 6))
    return {name: value + (more[name] - value) / 3 * (shape["layers"] - 3) for name, value in few.items()}


def jobs_table(jobs: Mapping[str, Mapping[str, float]]) -> str:
    """Return the peak and the time of each job as lines of text. A job is what `figures` returns."""
    width = max(24, *map(len, jobs))
    lines = [f"{'':{width}}   GiB  seconds  of it waiting"]
    for name, job in jobs.items():
        lines.append(f"{name:{width}} {job['GiB']:5.1f} {job['seconds']:8.2f} {job['waiting']:14.2f}")
    return "\n".join(lines)
