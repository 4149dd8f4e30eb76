"""Memory on virtual GPUs against a real H200 (tests/data/h200), printed as tables. About a minute.

    python -m benchmarks.memory                        # every training step, with PyTorch's MemTracker beside
    python -m benchmarks.memory resnet18_cifar_b64     # only that one
    python -m benchmarks.memory --operators            # single operators and optimizers
    python -m benchmarks.memory --second               # the second and third set: three steps and seven operators
    python -m benchmarks.memory --leave-one-out        # each case by rules that were fitted without it
    python -m benchmarks.memory --margin               # how often a limit set to the estimate is too small
    python -m benchmarks.memory --trace gpt_small_b8   # every allocation of a step, real and virtual
    python -m benchmarks.memory --plot memory.png      # the peaks as a picture
    python -m benchmarks.memory --real-gpu here.json   # measure the real GPU of this machine, store, compare

The H200 was measured with torch 2.11; virtual GPUs are told to use memory as that does. It ran all steps one after the
other, and so do they; below the tables stands what comes out when each step has a card of its own. MemTracker
(torch.distributed._tools.mem_tracker) watches the same steps on the CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

import torch

from benchmarks import leave_one_out, memory_margin, memory_plot, memory_tables, memory_trace
from benchmarks.reference import measure, real_gpu, second, third
from benchmarks.reference.cases import CASES
from benchmarks.reference.further import FURTHER
from benchmarks.reference.operators import OPERATORS


def steps_in_order(names: list[str], meta: dict, numbers: bool) -> dict[str, dict]:
    """Case -> what the virtual GPU says after all cases that the H200 ran before."""
    order = list(CASES)
    needed = {name: CASES[name] for name in order[: max(map(order.index, names), default=-1) + 1]}
    found = measure.on_virtual_gpu(lambda: measure.steps_in_order(needed), meta["torch"], not numbers)
    return {name: found[name] for name in names}


def steps_on_fresh_gpus(names: list[str], meta: dict, numbers: bool) -> dict[str, dict]:
    """Case -> what a fresh virtual GPU says, with the memory of the torch version in `meta`."""
    builds = CASES | FURTHER
    acts = {name: functools.partial(measure.training_steps, builds[name]) for name in names}
    kind = real_gpu.kind_of(meta)
    return {name: measure.on_virtual_gpu(act, meta["torch"], not numbers, kind) for name, act in acts.items()}


def operators_on_virtual_gpu(names: list[str], meta: dict, numbers: bool) -> dict[str, dict]:
    """Operator -> what the virtual GPU says, all on one GPU and in order, as on the H200."""
    builds = {name: OPERATORS[name] for name in OPERATORS if name in names}
    return measure.on_virtual_gpu(lambda: measure.operators_in_order(builds), meta["torch"], not numbers)


def mem_tracker_peaks(names: list[str]) -> dict[str, int]:
    """Case -> the peak by PyTorch's own MemTracker, in bytes."""
    builds = CASES | FURTHER
    return {name: measure.mem_tracker_peak(builds[name]) for name in names}


def compare_steps(measured: dict, names: list[str], options) -> None:
    """Print the tables of training steps; draw them if asked to. A card measured here was empty before each."""
    fresh = steps_on_fresh_gpus(names, measured["meta"], options.numbers)
    virtual = fresh if options.real_gpu else steps_in_order(names, measured["meta"], options.numbers)
    tracker = {} if options.without_mem_tracker else mem_tracker_peaks(names)
    real = {name: measured["cases"][name] for name in names}
    print("\n".join(memory_tables.peaks(real, virtual, tracker)), end="\n\n")
    print("\n".join(memory_tables.steps(real, virtual)), end="\n\n")
    print("\n".join(memory_tables.summary(real, virtual, tracker)))
    if virtual is not fresh:
        print("\nEach step on a card of its own\n" + "\n".join(memory_tables.summary(real, fresh, {})))
    if options.plot:
        figure = memory_plot.predicted_against_measured(real, virtual, tracker, measured["meta"])
        figure.savefig(options.plot, dpi=150)
        print(f"\nDrawn: {options.plot}")


def compare_operators(names: list[str], options) -> None:
    """Print the table of single operators."""
    measured = measure.load("operator_memory.json")
    meta = measure.load("steps.json")["meta"]
    virtual = operators_on_virtual_gpu(names, meta, options.numbers)
    print("\n".join(memory_tables.operators({name: measured[name] for name in names}, virtual)))


def compare_second(options) -> None:
    """Print the tables of the second and third set.

    Which step ran before is not known: any will do. Before the operators, an LSTM with dropout left its random states.
    """
    measured, shapes_only = measure.load("second/steps.json"), not options.numbers
    torch_version = measured["meta"]["torch"]
    before = {"mlp_adamw_b256": CASES["mlp_adamw_b256"]}
    act = functools.partial(measure.steps_in_order, before | second.STEPS)
    virtual = measure.on_virtual_gpu(act, torch_version, shapes_only)
    virtual = {name: virtual[name] for name in second.STEPS}
    print("\n".join(memory_tables.peaks(measured["cases"], virtual, {})), end="\n\n")
    print("\n".join(memory_tables.steps(measured["cases"], virtual)), end="\n\n")
    builds = {"lstm_dropout": OPERATORS["lstm_dropout"]} | second.OPERATORS | third.OPERATORS
    operators = measure.on_virtual_gpu(lambda: measure.operators_in_order(builds), torch_version, shapes_only)
    measured = measure.load("second/operator_memory.json") | measure.load("third/operator_memory.json")
    print("\n".join(memory_tables.operators(measured, operators)))


def measure_real_gpu(names: list[str], options) -> None:
    """Measure this machine's GPU 0, store it as steps.json is stored, and print the comparison."""
    measured = real_gpu.measure_cases({name: (CASES | FURTHER)[name] for name in names})
    options.real_gpu.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    print(f"Stored: {options.real_gpu}\n")
    compare_steps(measured, list(measured["cases"]), options)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory",
        description=__doc__.split("\n\n")[0],
        epilog=f"Training steps: {', '.join(CASES)}. Only with --real-gpu: {', '.join(FURTHER)}.",
    )
    parser.add_argument("names", nargs="*", help="only these training steps (or operators, with --operators)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--operators", action="store_true", help="compare single operators and optimizers")
    what.add_argument("--second", action="store_true", help="compare the second and third set of steps and operators")
    what.add_argument("--leave-one-out", action="store_true", help="predict each case by rules fitted without it")
    what.add_argument("--margin", action="store_true", help="how often a limit set to the estimate is too small")
    what.add_argument("--trace", metavar="CASE", help="lay the allocations of one step side by side")
    what.add_argument("--real-gpu", metavar="FILE", type=Path, help="measure this machine's GPU 0 and store it")
    parser.add_argument("--all", action="store_true", help="with --trace: also the allocations that agree")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the peaks (.png, .svg, .pdf)")
    parser.add_argument("--numbers", action="store_true", help="compute real numbers; without, only shapes")
    parser.add_argument("--without-mem-tracker", action="store_true", help="leave PyTorch's MemTracker out")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch (default 2)")
    options = parser.parse_args()
    known = OPERATORS if options.operators else CASES | (FURTHER if options.real_gpu else {})
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}. There are: {', '.join(known)}")
    if options.trace and options.trace not in measure.load("allocations.json.gz"):
        parser.error(f"no trace of {options.trace}. There are: {', '.join(measure.load('allocations.json.gz'))}")
    options.names = options.names or list(known)
    return options


def main() -> None:
    """Print what was asked for."""
    options = arguments()
    torch.set_num_threads(options.threads)
    meta = measure.load("steps.json")["meta"]
    print(f"real: {meta['gpu']}, torch {meta['torch']}; virtual: torch {torch.__version__}\n" * (not options.real_gpu))
    if options.trace:
        print("\n".join(memory_trace.report(options.trace, meta, options.all, not options.numbers)))
    elif options.operators:
        compare_operators(options.names, options)
    elif options.second:
        compare_second(options)
    elif options.leave_one_out:
        print("\n".join(leave_one_out.table()))
    elif options.margin:
        print("\n".join(memory_margin.table()))
    elif options.real_gpu:
        measure_real_gpu(options.names, options)
    else:
        compare_steps(measure.load("steps.json"), options.names, options)


if __name__ == "__main__":
    main()
