"""Lesson 08: a transfer around the ring, the programs under torchrun, and the pictures."""

import subprocess
import sys
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from helpers.gpus import data_sheet, is_virtual
from helpers.measure.timeline import Timeline, merged
from helpers.show.programs import SCRIPTS
from helpers.show.style import WIDTH, bar_style, legend_below, open_frame, set_alt_text

__all__ = ["exchange", "exchange_picture", "jobs_picture", "torchrun"]

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


def torchrun(program: str, ranks: int) -> None:
    """Run a program of notebooks/scripts for ten steps on so many ranks, as lesson 04 does, and print its output."""
    virtual = ["-m", "virtual_gpus", "--gpus", str(ranks)] if is_virtual() else []
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    arguments = ["--max-steps", "10", "--workers", "0"]
    ended = subprocess.run(
        [*command, *virtual, str(SCRIPTS / f"{program}.py"), *arguments], capture_output=True, text=True
    )
    print(ended.stdout if ended.returncode == 0 else ended.stderr)


def exchange_picture(timeline: Timeline) -> Figure:
    """Draw one GPU's step in three rows: what it computes, its all-gathers, and its reduce-scatters."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.1), layout="constrained")
    for row, looks in enumerate(_ROWS.values()):
        for name, look in looks.items():
            spans = [(w.start, w.end) for w in timeline.work if name in (w.kind, w.name)]
            for start, end in merged(spans, 0.0 if row else 1e-4):  # separate bars for neighbouring collectives
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


def jobs_picture(jobs: Mapping[str, Sequence[float]]) -> Figure:
    """Draw the peak and the time of each job. A job is its peak in GiB, and its seconds: all, computing, waiting."""
    figure = plt.figure(figsize=(WIDTH, 1.3 + 0.26 * len(jobs)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    peaks, _, computing, waiting = ([float(values[place]) for values in jobs.values()] for place in range(4))
    memory.bar_label(memory.barh(list(jobs), peaks, **bar_style(0)), fmt=" %.1f", fontsize=8)
    memory.axvline(data_sheet("H100").memory / 2**30, color="black", linestyle=":")
    memory.set(xlabel="GiB at the peak; dotted: an H100", xlim=(0, max(95, 1.15 * max(peaks))))
    time.barh(list(jobs), computing, **bar_style(0), label="computing")
    time.barh(list(jobs), waiting, left=computing, **bar_style(1, 1), label="waiting for collectives")
    time.set(xlabel="seconds of a step, modelled")
    memory.invert_yaxis()
    open_frame(memory, "x")
    open_frame(time, "x")
    legend_below(figure, time.get_legend_handles_labels()[0])
    set_alt_text(figure, "Bars of peak memory and of the time of a step for each job, as in the table below")
    return figure
