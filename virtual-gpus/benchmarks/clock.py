"""The modelled clock against a real H200 (tests/data/h200), printed as tables. Half a minute.

    python -m benchmarks.clock                       # every training step: GPU-busy and wall seconds
    python -m benchmarks.clock resnet18_cifar_b64    # only that one
    python -m benchmarks.clock --operators           # single operators and copies
    python -m benchmarks.clock --kernels gpt_small_b8    # the kernels of a step, operator by operator
    python -m benchmarks.clock --measured mine.json      # the same for a file of `python -m virtual_gpus measure`
    python -m benchmarks.clock --leave-one-out           # kernels of all sets, by rates fitted without the case
    python -m benchmarks.clock --plot clock.png      # steps as a picture

Kernels: the seconds of all kernels of a step, of the run that timed operator by operator. Profiler: the sum that the
other run reported, in which the optimizer counts twice (see reference/timing.py), modelled in the same way. The
wall time is the median of 15 steps; where the host is the bottleneck, it moved by 1.6 x between two runs of one day.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

import torch
from virtual_gpus import record_timeline, virtual_gpus
from virtual_gpus.measure import prepared

from benchmarks import clock_plot
from benchmarks.reference import measure, second, timing
from benchmarks.reference.cases import CASES

_MS, _US = 1e3, 1e6
# What the H200's profiler calls an operator, and what the dispatch mode sees.
_SAME = {"cudnn_convolution": "convolution", "cudnn_batch_norm": "native_batch_norm", "clamp_min_": "relu_",
         "cudnn_batch_norm_backward": "native_batch_norm_backward", "clamp_min": "relu", "gather": "embedding",
         "_conv_depthwise2d": "convolution",
         "_efficient_attention_forward": "_scaled_dot_product_efficient_attention",
         "_efficient_attention_backward": "_scaled_dot_product_efficient_attention_backward",
         "_cudnn_attention_forward": "_scaled_dot_product_cudnn_attention",
         "_cudnn_attention_backward": "_scaled_dot_product_cudnn_attention_backward"}  # fmt: skip


def percent(part: float) -> str:
    """'  +1.2 %': eight wide."""
    return f"{100 * part:+6.1f} %"


def table_of_steps(measured: dict, modelled: dict) -> list[str]:
    """Per case: kernels, the profiler's sum and the wall time, measured, modelled and the error."""
    width = max(map(len, modelled))
    figures = ("kernels", "annotated", "wall")
    heading = "".join(f"{name + ', ms':^29}" for name in ("kernels", "profiler's sum", "wall"))
    lines = [f"{'':{width}} {heading}".rstrip(), f"{'':{width}} " + "    real  modelled     error" * 3 + "  fastest"]
    for name, case in modelled.items():
        real = measured[name]
        cells = "".join(f"{real[f] * _MS:8.2f}  {case[f] * _MS:8.2f}  {percent(timing.error(real[f], case[f])):>9}"
                        for f in figures)  # fmt: skip
        lines.append(f"{name:{width}} {cells} {real['fastest'] * _MS:8.2f}")
    medians = (f"{name} {100 * timing.median_error(measured, modelled, f):.1f} %"
               for f, name in zip(figures, ("kernels", "profiler's sum", "wall"), strict=True))  # fmt: skip
    return [*lines, "", "Median error: " + ", ".join(medians)]


def table_of_operators(rows) -> list[str]:
    """Per operator of ops.json: measured, modelled, error."""
    lines = [f"{'operator':14} {'type':8} {'size':>20}  real, us  modelled, us     error"]
    for op, dtype, size, real, modelled in rows:
        kind, size = dtype.removeprefix("torch."), " x ".join(map(str, size)) if isinstance(size, list) else f"{size:,}"
        numbers = f"{real * _US:9.1f} {modelled * _US:13.1f}  {percent(timing.error(real, modelled)):>9}"
        lines.append(f"{op:14} {kind:8} {size:>20} {numbers}")
    off = [abs(timing.error(real, modelled)) for *_, real, modelled in rows]
    within = sum(e <= timing.OPERATORS_EACH for e in off)
    limit = f"{100 * timing.OPERATORS_EACH:.0f} %"
    return [*lines, "", f"{within} of {len(off)} within {limit}, largest error {100 * max(off):.0f} %"]


def kernels_of(name: str) -> tuple[dict[str, float], dict[str, float], dict[str, int]]:
    """Operator -> measured seconds of a step, modelled seconds, calls; of a case of any set."""
    real, modelled, calls = defaultdict(float), defaultdict(float), defaultdict(int)
    folder = "" if name in CASES else "third/" if name in second.THIRD else "second/"
    for op, _, count, seconds in measure.load(f"{folder}operator_seconds.json.gz")[name]:
        op = op.removeprefix("aten::")
        real[_SAME.get(op, op)] += seconds
        calls[_SAME.get(op, op)] += count
    version = measure.load("steps.json")["meta"]["torch"]
    for span in measure.on_virtual_gpu(lambda: timing.timeline_of(name), version).spans:
        if span.gpu is not None:
            modelled[span.name] += span.end - span.start
    return real, modelled, calls


def kernels_of_file(file: Path) -> tuple[dict[str, float], dict[str, float], dict[str, int]]:
    """The same of the rows of `python -m virtual_gpus measure`, on the kind of GPU that it measured."""
    real, modelled, calls = defaultdict(float), defaultdict(float), defaultdict(int)
    content = json.loads(file.read_text(encoding="utf-8"))
    with virtual_gpus(1, kind=content["gpu"], shapes_only=True):
        for row in content["rows"]:
            if row["seconds"] is None:
                continue
            act, count = prepared(row["operator"], row["arguments"], "cuda"), row.get("calls", 1)
            with record_timeline() as timeline:
                act()
            name = row["operator"].removeprefix("aten.").partition(".")[0]
            real[name] += count * row["seconds"]
            modelled[name] += count * timeline.busy_seconds(0, copies=True)
            calls[name] += count
    return real, modelled, calls


def table_of_kernels(real, modelled, calls) -> list[str]:
    """Each operator: calls, measured and modelled microseconds, the largest difference first."""
    names = sorted({*real, *modelled}, key=lambda op: -abs(real[op] - modelled[op]))
    lines = [f"{'operator':50} calls  real, us  modelled, us"]
    return lines + [f"{op:50} {calls[op]:5} {real[op] * _US:9.1f} {modelled[op] * _US:13.1f}" for op in names]


# The classes whose rate is fitted anew for each case; everything else is one class more.
_CLASSES = {"conv": "convolution", "mm": "product", "bmm": "product", "addmm": "product", "native_": "normalization",
            "_foreach": "list", "_fused": "list", "_cudnn_rnn": "recurrent", "_scaled_dot": "attention"}  # fmt: skip


def by_class(seconds: dict[str, float]) -> dict[str, float]:
    """The seconds of each class of operators."""
    found = defaultdict(float)
    for op, part in seconds.items():
        found[next((kind for start, kind in _CLASSES.items() if op.startswith(start)), "other")] += part
    return found


def leave_one_out() -> list[tuple[str, float, float, float]]:
    """(case, measured seconds, error as modelled, error with each class's rate fitted to all other cases)."""
    cases = {name: [by_class(part) for part in kernels_of(name)[:2]] for name in timing.BUILDS}
    rows = []
    for name, (real, modelled) in cases.items():
        others = [case for other, case in cases.items() if other != name]
        predicted = 0.0
        for kind, seconds in modelled.items():
            known = [sum(case[which][kind] for case in others) for which in (0, 1)]
            predicted += seconds * (known[0] / known[1] if all(known) else 1.0)
        whole = sum(real.values())
        rows.append((name, whole, timing.error(whole, sum(modelled.values())), timing.error(whole, predicted)))
    return rows


def table_of_leave_one_out() -> list[str]:
    """One line per case of all sets, and the medians."""
    rows = leave_one_out()
    lines = [f"{'kernels of a step':24} real, ms   as modelled   without the case"]
    lines += [f"{name:24} {ms * _MS:8.2f}     {percent(own)}          {percent(out)}" for name, ms, own, out in rows]
    medians = [statistics.median(abs(row[column]) for row in rows) for column in (2, 3)]
    return [*lines, "", f"Median error: {100 * medians[0]:.1f} % and {100 * medians[1]:.1f} %"]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clock", description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help=f"only these training steps, of: {', '.join(CASES)}")
    parser.add_argument("--operators", action="store_true", help="single operators and copies")
    parser.add_argument("--kernels", metavar="CASE", choices=list(timing.BUILDS), help="the kernels of one step")
    parser.add_argument("--measured", metavar="FILE", type=Path, help="the operators that you measured, on their GPU")
    parser.add_argument("--leave-one-out", action="store_true", help="the kernels of all sets, each case left out once")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the steps (.png, .svg, .pdf)")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in CASES]:
        parser.error(f"unknown: {', '.join(unknown)}. There are: {', '.join(CASES)}")
    return options


def main() -> None:
    """Print what was asked for."""
    options, meta = arguments(), measure.load("steps.json")["meta"]
    if options.measured:
        print("\n".join(table_of_kernels(*kernels_of_file(options.measured))))
        return
    print(f"real: {meta['gpu']}, torch {meta['torch']}; modelled: torch {torch.__version__}\n")
    if options.operators:
        print("\n".join(table_of_operators(timing.operators())))
    elif options.leave_one_out:
        print("\n".join(table_of_leave_one_out()))
    elif options.kernels:
        print("\n".join(table_of_kernels(*kernels_of(options.kernels))))
    else:
        measured, modelled = timing.measured_steps(), timing.steps(options.names or list(CASES))
        print("\n".join(table_of_steps(measured, modelled)))
        if options.plot:
            clock_plot.steps(measured, modelled, meta).savefig(options.plot, dpi=150)
            print(f"\nDrawn: {options.plot}")


if __name__ == "__main__":
    main()
