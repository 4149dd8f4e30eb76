"""Checks of lesson 12, slow steps and strange losses, and the five traces of its first exercise. One starts ranks."""

import json
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.profiler import ProfilerActivity, profile

from helpers.gpus import modelled_gpus
from helpers.measure import record_timeline
from helpers.parallel import launch
from notebooks.checks import compare
from notebooks.checks.core import call, exercise, given, require, settings_of_pytorch, show, where
from notebooks.checks.gpus import in_ranks, plain
from notebooks.checks.par import Score, compare_with_par

_WIDTH, _LAYERS, _ROWS = 4096, 8, 4096
_SAMPLES = 250  # with fewer, the CPU is ahead of the GPU again in the second step
_RIGHT = {"A": "slow rank", "B": "small kernels", "C": "slow link", "D": "copy", "E": "reads"}
_Batches = list[tuple[Tensor, Tensor]]
_NAMES = ("copy", "reads", "small kernels", "one bucket", "slow rank", "slow link")


def five_traces() -> dict[str, list[list[dict[str, Any]]]]:
    """By letter: what the GPUs of four ranks do in two steps, as events of torch.profiler's trace.

    Only in A do the ranks differ, and wait for each other. In the others, rank 0's trace stands for all.
    """
    with settings_of_pytorch():
        alone = _alone("BDE") | _alone("C", links="PCIe 3")
        # Forked now, the ranks find the profiler's modules loaded.
        with modelled_gpus(4, "RTX 4090"):
            together = launch(_record, "A", ranks=4, show=False)
    return {
        letter: [alone[letter]] * 4 if letter in alone else [each[letter] for each in together] for letter in _RIGHT
    }


def _alone(letters: str, **settings: Any) -> dict[str, list[dict[str, Any]]]:
    with modelled_gpus(4, "RTX 4090", rank=0, world_size=4, **settings):
        dist.init_process_group("nccl")
        return _record(0, letters)


def _record(rank: int, letters: str) -> dict[str, list[dict[str, Any]]]:
    model = DistributedDataParallel(_net([_WIDTH] * (_LAYERS + 1), torch.bfloat16), bucket_cap_mb=64)
    _step("", model, rank)()  # after the first step, DDP arranges its buckets
    return {letter: _profiled(_step(_RIGHT[letter], model, rank)) for letter in letters}


def _net(widths: list[int], dtype: torch.dtype) -> nn.Sequential:
    layers = [nn.Linear(*pair, bias=False, dtype=dtype, device="cuda") for pair in pairwise(widths)]
    return nn.Sequential(*layers)


def _step(disease: str, model: nn.Module, rank: int) -> Callable[[], object]:
    rows = _ROWS * 3 // 2 if disease == "slow rank" and rank == 2 else _ROWS
    inputs = torch.zeros(rows, _WIDTH)
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
    return (
        "Each has its own mark. The slow rank can only be told from a slow link with the traces of several ranks. "
        "In B, the second step has fewer gaps: while the GPU ends the first, the CPU launches kernels of the second."
    )


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
        compare.number(call(answer, nbytes, ranks, busbw), right, "ms", 0.01, mistakes, case)  # one decimal is enough
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
        ("a spike in step 10", put(calm, step10=200.0), 20),
        ("a high loss in step 0", put(calm, step0=100.0), 10),
        ("a high loss in step 9", put(calm, step9=100.0), 10),
        ("losses of 2.0 and one of 6.25 in step 30", put(flat, step30=6.25), 10),
        ("losses of 2.0 and one of 6.0 in step 30", put(flat, step30=6.0), 10),
        ("losses of 2.0 and one of 0.5 in step 30", put(flat, step30=0.5), 10),
        ("losses of 100 up to step 3, then of 2.0, and one of 8.0 in step 12", put([100.0] * 4 + flat, step12=8.0), 5),
        ("losses of 10, from step 20 on of 2.0, and one of 20 in step 25", put([10.0] * 20 + flat, step25=20.0), 5),
        ("losses of 2.0, from step 20 on of 5.0, and one of 12 in step 25", put(flat[:20] + [5.0] * 9, step25=12.0), 5),
        ("two spikes, in steps 25 and 50", put(calm, step25=50.0, step50=80.0), 5),
        ("2.0 and 3.0 in turn, 7.0 in step 30 and 8.0 in step 50", put([2.0, 3.0] * 30, step30=7.0, step50=8.0), 10),
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
        early = f"{case}step {step:g} is too early. The first spike is in step {spike}."
        require(step > spike - 5 - every, early, "A later checkpoint is at least 5 steps before it.")
    return "The steps from there are taken again without the batches up to the spike."


_BATCHES, _SMALL = 4, [8, 16, 4]  # of each rank where values count, and the widths of the net


@exercise
def train(answer):
    """Exercise 4: `answer(net, batches)` ends where one GPU ends with the batches of all ranks; its time is scored."""
    require(callable(answer), f"{show(answer)} is not a function. Write train(net, batches).")
    with modelled_gpus(2, shapes_only=False):
        found = in_ranks(_train_in_rank, answer, ranks=2, timeout=30)
        right, losses = _on_one_gpu()
        known = {
            "The net is as it was before. Train the net itself and not a copy.": _on_one_gpu(0.0)[0],
            "The gradients are summed over the ranks. Take their average.": _on_one_gpu(0.2)[0],
        }
        apart = [_on_one_gpu(ranks=[rank])[0] for rank in (0, 1)]
    why = "Is it SGD with lr=0.1, one step per batch, and are the gradients reset after each step?"
    for rank, (returned, weights) in enumerate(found):
        what = f"Rank {rank} returned {show(given(returned, answer))}."
        require(isinstance(returned, Tensor), what, "Return a tensor with the losses of its batches.")
        alone = {"It learned from its own batches only. Average the gradients of all ranks.": apart[rank]}
        compare.alike(weights, right, f"Compared with one GPU, the weights of rank {rank} are", why, known | alone)
        everyone = {"Those are averages over the ranks. Return the losses of this rank's batches.": losses.mean(dim=0)}
        before = "Return one loss for each batch, from before its step."
        compare.alike(returned, losses[rank], f"Rank {rank}'s losses are", before, everyone)
    try:
        score = _score(answer)
    except RuntimeError as error:
        lines = str(error).splitlines() or [""]
        race = f"Your code stopped{where(error)}. {lines[0]} On real GPUs, the numbers may be wrong."
        require(not lines[0].startswith("Race: "), race, lines[-1])
        raise
    return "Weights and losses are those of one GPU. " + compare_with_par(
        "12 a loop without waiting", naive=_goal(_waiting), par=_goal(_ahead), you=score, unit_note="modelled"
    )


def _train_in_rank(rank: int, answer: Callable) -> tuple[object, Tensor]:
    """What the learner's function returns, as one tensor if it can be one, and the weights."""
    net, batches = _small_job()
    returned = answer(net, batches[rank])
    if isinstance(returned, list | tuple) and returned:
        returned = torch.tensor([float(each) for each in returned])
    returned = returned.detach().cpu() if isinstance(returned, Tensor) else plain(returned)
    weights = [getattr(each, "full_tensor", each.detach)() for each in net.parameters()]  # also after fully_shard
    return returned, parameters_to_vector(weights).detach().cpu()


def _small_job() -> tuple[nn.Module, list[_Batches]]:
    """A net, and the batches of two ranks."""
    torch.manual_seed(12)
    draw = [[(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(_BATCHES)] for _ in range(2)]
    return _net(_SMALL, torch.float32), draw


def _on_one_gpu(rate: float = 0.1, ranks: Sequence[int] = (0, 1)) -> tuple[Tensor, Tensor]:
    """The weights after training on the batches of `ranks`, and the losses of both ranks."""
    net, batches = _small_job()
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=rate), []
    for both in zip(*batches, strict=True):
        losses.append(torch.stack([cross_entropy(net(x.to("cuda")), y.to("cuda")) for x, y in both]))
        losses[-1][list(ranks)].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_to_vector(net.parameters()).detach().cpu(), torch.stack(losses, dim=1).detach().cpu()


def _seconds(answer: Callable, count: int) -> float:
    """How long rank 0 of four takes for so many batches, without values. A missing wait raises a RaceError."""
    with modelled_gpus(4, "RTX 4090", rank=0, world_size=4, check_races=True):
        dist.init_process_group("nccl")
        net = _net([_WIDTH] * (_LAYERS + 1), torch.bfloat16)
        batch = torch.zeros(_ROWS, _WIDTH, dtype=torch.bfloat16), torch.zeros(_ROWS, dtype=torch.long)
        with record_timeline() as timeline:
            answer(net, [batch] * count)
    return timeline.seconds


def _score(answer: Callable) -> Score:
    """The time of a step, without what only the first steps need."""
    few, many = (_seconds(answer, count) for count in (2, 6))  # six: memory freed too early is used again
    return Score(None, (many - few) / 4)


_goal = cache(_score)


def _waiting(net: nn.Module, batches: _Batches) -> Tensor:
    """The naive answer."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for x, y in batches:
        loss = cross_entropy(net(x.to("cuda")), y.to("cuda"))
        loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return torch.stack(losses)


def _ahead(net: nn.Module, batches: _Batches) -> Tensor:
    """Par: DDP, and all copies on a stream of their own, which the kernels wait for."""
    model, copies, losses = DistributedDataParallel(net), torch.cuda.Stream(), []
    optimizer, on_gpu = torch.optim.SGD(net.parameters(), lr=0.1), []
    with torch.cuda.stream(copies):
        for batch in batches:
            moved = [tensor.pin_memory().to("cuda", non_blocking=True) for tensor in batch]
            on_gpu.append((moved, copies.record_event()))
    for (x, y), arrived in on_gpu:
        torch.cuda.current_stream().wait_event(arrived)
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)
