"""Checks of lesson 12, slow steps and strange losses, and the five traces of its first exercise."""

import json
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from helpers.gpus import modelled_gpus
from helpers.parallel import launch
from notebooks.checks import compare
from notebooks.checks.core import call, exercise, require, show

_WIDTH, _LAYERS, _ROWS, _SAMPLES = 4096, 8, 4096, 100
_RIGHT = {"A": "slow rank", "B": "small kernels", "C": "slow link", "D": "copy", "E": "reads"}
_NAMES = ("copy", "reads", "small kernels", "one bucket", "slow rank", "slow link")


def five_traces() -> dict[str, list[list[dict[str, Any]]]]:
    """By letter: what the GPUs of four ranks do in two steps, as events of torch.profiler's trace."""
    alone = [_alone(rank, "BDE") | _alone(rank, "C", links="PCIe 3") for rank in range(4)]
    # Only with a late rank do ranks wait for each other. Forked now, they find the profiler's modules loaded.
    with modelled_gpus(4, "RTX 4090"):
        together = launch(_record, "A", ranks=4, show=False)
    return {letter: [(alone[rank] | together[rank])[letter] for rank in range(4)] for letter in _RIGHT}


def _alone(rank: int, letters: str, **settings: Any) -> dict[str, list[dict[str, Any]]]:
    with modelled_gpus(4, "RTX 4090", rank=rank, world_size=4, **settings):
        dist.init_process_group("nccl")
        torch.cuda.set_device(rank)
        return _record(rank, letters)


def _record(rank: int, letters: str) -> dict[str, list[dict[str, Any]]]:
    layers = [nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(_LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=64)
    _step("", model, rank)()  # after the first step, DDP arranges its buckets
    return {letter: _profiled(_step(_RIGHT[letter], model, rank)) for letter in letters}


def _step(disease: str, model: nn.Module, rank: int) -> Callable[[], object]:
    rows = _ROWS * 3 // 2 if disease == "slow rank" and rank == 2 else _ROWS
    inputs = torch.zeros(rows, _WIDTH, device="cpu")  # whatever the default device is
    on_gpu = inputs.cuda()

    def step():
        out = model((inputs.cuda() if disease == "copy" else on_gpu).bfloat16())
        if disease == "small kernels":
            loss = sum(row.norm() for row in out[:_SAMPLES])
        else:
            loss = out.sum()
        if disease == "reads":
            for row in out[:_SAMPLES]:
                row.norm().cpu()
        loss.backward()

    return step


def _profiled(step: Callable[[], object]) -> list[dict[str, Any]]:
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]


# What the traces show, if a disease is named that a trace does not have.
_INSTEAD = {
    "copy": "In trace {0}, no large copy from the host is among the steps.",
    "reads": "In trace {0}, nothing is copied to the host, so the program reads nothing.",
    "small kernels": "In trace {0}, the GPU hardly waits between kernels.",
    "one bucket": "In trace {0}, the first all-reduce begins while the backward pass goes on.",
    "slow rank": "In trace {0}, all ranks compute equally long.",
    "slow link": "In trace {0}, the all-reduces of rank 2 carry 22 GB/s, as these links allow.",
}
_WITH_READS = (
    "In trace E, the kernels are small, but what stands between them? Count the copies, and look at their names."
)


def _plain(name: object) -> str:
    """The name in small letters, with one space between words; empty if it is not text."""
    return " ".join(re.split(r"[\s_-]+", name.lower())).strip() if isinstance(name, str) else ""


@exercise
def diseases(answer):
    """Exercise 1: the disease of each of the five traces, by letter."""
    require(isinstance(answer, Mapping), f"{show(answer)} is not a dict. Give one such as {{'A': 'copy', ...}}.")
    require(set(answer) == set(_RIGHT), f"The letters are {show(list(answer))}. Name the diseases of A, B, C, D and E.")
    for letter in _RIGHT:
        named = answer[letter]
        require(_plain(named) in _NAMES, f"There is no disease {show(named)}.", f"The names are {', '.join(_NAMES)}.")
    for letter, right in _RIGHT.items():
        named = _plain(answer[letter])
        instead = _WITH_READS if (letter, named) == ("E", "small kernels") else _INSTEAD[named].format(letter)
        require(named == right, instead)
    return "Each has its own mark. The slow rank can only be told from a slow link with the traces of several ranks."


@exercise
def all_reduce_ms(answer):
    """Exercise 2: `answer(nbytes, ranks, busbw)` gives the milliseconds of an all-reduce."""
    for nbytes, ranks, busbw in ((2**30, 6, 350), (346_000_000, 4, 22), (2**28, 2, 50), (10**9, 64, 3.1)):
        right = 2 * (ranks - 1) / ranks * nbytes / busbw / 1e6
        mistakes = {
            nbytes / busbw / 1e6: "takes each rank to send the bytes once. A ring sends 2 (n − 1) / n times as much.",
            right / 2: "is half of it. A ring sends everything twice: to add the pieces, and to hand out the sums.",
            2 * nbytes / busbw / 1e6: "is without the factor (n − 1) / n.",
            right / 1e3: "is in seconds. Return milliseconds.",
            right * 1e3: "is in microseconds. Return milliseconds.",
            right * 8: "counts gigabits. The bandwidth is in gigabytes per second.",
            right * 1e9 / 2**30: "takes a GB for 2**30 bytes. Here it is 10**9.",
            right * ranks: "counts the traffic of all ranks. They send at the same time.",
        }
        case = f"For {nbytes:,} bytes, {ranks} ranks and {busbw} GB/s, "
        compare.number(call(answer, nbytes, ranks, busbw), right, "ms", 1e-3, mistakes, case)
    return "However many ranks there are, an all-reduce takes less than twice as long as sending the bytes once."


def _spike(losses: list[float]) -> int | None:
    """The first step whose loss is more than 3 times the median of the 10 before it."""
    steps = range(10, len(losses))
    return next((step for step in steps if losses[step] > 3 * statistics.median(losses[step - 10 : step])), None)


def _cases() -> list[tuple[str, list[float], int]]:
    calm = [5.0 * 0.97**step + 0.1 * (step % 3) for step in range(60)]
    flat = [2.0] * 60

    def put(losses, **at):  # step37=90.0 is that loss in that step
        return [at.get(f"step{step}", loss) for step, loss in enumerate(losses)]

    return [
        ("a spike in step 37", put(calm, step37=90.0, step38=40.0), 10),
        ("no spike", calm, 10),
        ("a spike in step 41", put(calm, step41=30.0), 20),
        ("a spike in step 44", put(calm, step44=30.0), 20),
        ("a spike in step 45", put(calm, step45=30.0), 20),
        ("a spike in step 10", put(calm, step10=200.0), 5),
        ("a high loss in step 0", put(calm, step0=100.0), 10),
        ("a high loss in step 9", put(calm, step9=100.0), 10),
        ("losses of 2.0 and one of 6.25 in step 30", put(flat, step30=6.25), 10),
        ("losses of 2.0 and one of 6.0 in step 30", put(flat, step30=6.0), 10),
        ("losses of 2.0 and one of 0.5 in step 30", put(flat, step30=0.5), 10),
        ("losses of 100 up to step 3, then of 2.0, and one of 8.0 in step 12", put([100.0] * 4 + flat, step12=8.0), 5),
        ("losses of 10, from step 20 on of 2.0, and one of 20 in step 25", put([10.0] * 20 + flat, step25=20.0), 5),
        ("losses of 2.0, from step 20 on of 5.0, and one of 12 in step 25", put(flat[:20] + [5.0] * 9, step25=12.0), 5),
        ("two spikes, in steps 25 and 50", put(calm, step25=50.0, step50=80.0), 5),
        ("losses of five steps", calm[:5], 10),
    ]


@exercise
def way_back(answer):
    """Exercise 3: `answer(losses, every)` gives the step of the checkpoint to go back to, or None."""
    require(callable(answer), f"{show(answer)} is not a function. Write way_back(losses, every).")
    for name, losses, every in _cases():
        spike = _spike(losses)
        given = list(losses)
        found = answer(given, every)
        require(found is not ..., "`way_back` still returns `...`. Replace the dots with your answer.")
        require(given == losses, "The function changes the list of losses. Leave it as it is.")
        case = f"With {name} and checkpoints every {every} steps, "
        if found is None:
            require(spike is None, f"{case}the function returns None, so it sees no spike.")
            continue
        step = compare.as_number(found)
        require(spike is not None, f"{case}there is no spike by the rule, and the function returns {step:g}.")
        require(step % every == 0, f"{case}there is no checkpoint of step {step:g}.")
        require(step <= spike, f"{case}step {step:g} comes after the spike.")
        late = f"{case}step {step:g} is less than 5 steps before the spike."
        require(step <= spike - 5, late, "Go back further.")
        early = f"{case}step {step:g} is too early. A later checkpoint is at least 5 steps before the spike."
        require(step > spike - 5 - every, early)
    return "The steps from there are taken again without the batches up to the spike."
