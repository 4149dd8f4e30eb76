"""Checks of lesson 07, choosing a method."""

from helpers.advice import NETS, advise
from helpers.check.core import call, exercise, not_yet, require, show
from helpers.memory import MiB, format_bytes
from helpers.scaling import Cluster, amdahl_seconds

__all__ = ["cheapest", "choices", "fits", "serial_share"]


# ------------------------------------------------------------------------------------------ 1: Amdahl backwards


@exercise
def serial_share(answer):
    """`answer(one, many, gpus)` must give the share of one GPU's time that does not get shorter."""
    for one, serial, gpus in ((100.0, 0.25, 4), (8.0, 0.0, 8), (3.0, 1.0, 2), (52.0, 0.04, 64), (0.5, 0.1, 3)):
        many = amdahl_seconds(one, serial, gpus)
        found = call(answer, one, many, gpus)
        require(isinstance(found, (int, float)), f"{show(found)} is no number", "a share from 0 to 1 is asked for")
        if not abs(found - serial) <= 1e-6:  # nan is no answer
            what = f"one GPU {one:g} s, {gpus} GPUs {many:.3f} s: the share is {found:.3g}"
            not_yet(what, _why_share(found, one, many, gpus))
    return "from two runs you can say what a third would bring"


def _why_share(found: float, one: float, many: float, gpus: int) -> str:
    if abs(found - many / one) < 1e-6:
        return "that is the whole time that is left; a part of it is parallel work, 1/n of what it was"
    if abs(found - (many / one - 1 / gpus)) < 1e-6:
        return "1/n is what is left if all is parallel, but the serial share is not divided: solve for it once more"
    if abs(found - (one / many) / gpus) < 1e-6:
        return "that is the efficiency"
    return f"with this share Amdahl's law would give {amdahl_seconds(one, found, gpus):.3f} s on {gpus} GPUs"


# --------------------------------------------------------------------------- 2: how many GPUs are worth their money

_RUNS = (
    {1: 100.0, 2: 52.0, 4: 28.0, 8: 17.0, 16: 13.0},
    {1: 10.0, 2: 5.0, 4: 2.5, 8: 1.25},
    {1: 60.0, 2: 55.0, 4: 54.0},
    {8: 20.0, 4: 30.0, 2: 50.0, 1: 90.0},
)


@exercise
def cheapest(answer):
    """`answer(hours, deadline)` must give the number of GPUs with the fewest GPU-hours that is done in time, or 0."""
    for hours in _RUNS:
        for deadline in (1.0, *(each * 1.01 for each in hours.values()), 1000.0):
            found = call(answer, dict(hours), deadline)
            require(isinstance(found, int), f"{show(found)} is no whole number", "a number of GPUs is asked for, or 0")
            in_time = [gpus for gpus, each in hours.items() if each <= deadline]
            right = min(in_time, key=lambda gpus: gpus * hours[gpus], default=0)
            if not in_time:
                require(found == 0, f"{hours}, {deadline:g} h: {found}", "none of them is done in time: 0 is asked for")
            elif found not in hours or found not in in_time:
                not_yet(f"{hours}, {deadline:g} h: {found} GPUs", "they are not done in time")
            elif found * hours[found] > right * hours[right] + 1e-9:
                paid = f"{found * hours[found]:g} GPU-hours, and {right} GPUs take {right * hours[right]:g}"
                not_yet(f"{hours}, {deadline:g} h: {found} GPUs", f"these cost {paid}")
    return "efficiency is money: at 50 % every result costs twice as much"


# ------------------------------------------------------------------------------------ 3: which methods fit a card

_CASES = (  # parameters, states, at the loss per sample, outputs per sample, batch, gpus, room
    (21_750_320, 2, 93.3 * MiB, 18.65 * MiB, 200, 4, 11.6 * 1024 * MiB),
    (21_750_320, 2, 93.3 * MiB, 18.65 * MiB, 200, 4, 39.1 * 1024 * MiB),
    (24_253_410, 1, 37.6 * MiB, 40.0, 768, 4, 10.9 * 1024 * MiB),
    (24_253_410, 1, 37.6 * MiB, 40.0, 240, 1, 10.9 * 1024 * MiB),
    (365_375_290, 2, 1024.0 * MiB, 59.6 * MiB, 16, 8, 11.6 * 1024 * MiB),
    (365_375_290, 2, 1024.0 * MiB, 59.6 * MiB, 64, 64, 7.0 * 1024 * MiB),
)


@exercise
def fits(answer):
    """`answer(parameters, states, per_sample, batch, gpus)` must give the bytes on each GPU under DDP, within 2 %."""
    for parameters, states, per_sample, _, batch, gpus, _ in _CASES:
        found = call(answer, parameters, states, per_sample, batch, gpus)
        require(isinstance(found, (int, float)), f"{show(found)} is no number", "bytes are asked for")
        weights, mine = 4 * parameters, batch / gpus * per_sample
        right = weights * (2 + states) + max(weights, mine)
        if not abs(found - right) <= 0.02 * right:  # nan is no answer
            what = f"{parameters:,} parameters, {states} states, batch {batch} on {gpus} GPUs: {_size(found)}"
            not_yet(what, _why_bytes(found, weights, states, batch * per_sample, gpus, right))
    return "that is how close a budget on paper comes"


def _size(found: float) -> str:
    return format_bytes(round(found)) if 0 <= found < float("inf") else show(found)


def _why_bytes(found: float, weights: int, states: int, samples: float, gpus: int, right: float) -> str:
    def near(other: float) -> bool:
        return abs(found - other) <= 0.02 * abs(other)

    mine = samples / gpus
    if near(right / 4):
        return "a float32 number takes four bytes"
    if near(weights * (2 + states) + max(weights, samples)) and gpus > 1:
        return "a GPU sees its own share of the batch, not all of it"
    if near(weights * (1 + states) + max(weights, mine)):
        return "DDP's buckets are missing, which are as large as the gradients"
    if near(weights * 2 + max(weights, mine)) and states:
        return "the optimizer's states are missing"
    if near(weights * (3 + states) + mine):
        return "gradients come as activations go: of these two only the larger is there at the peak"
    return f"{format_bytes(round(right))} is what it comes to, by weights, buckets, states and the share of the batch"


# ------------------------------------------------------------------------------------------------ 4: choose a method

_NETWORKS = {"A": "Ethernet 10", "B": "Ethernet 10", "C": "InfiniBand HDR"}
_ASKED = {"A": ("BERT of the article", 512, 64), "B": ("7 billion, 2,048 tokens", 64, 4),
          "C": ("PyramidNet of the article", 2048, 16)}  # fmt: skip


@exercise
def choices(answer):
    """`answer` must give for "A", "B" and "C" (method, GPUs), as `helpers.advice.advise` does on A100s, 8 a machine."""
    require(isinstance(answer, dict), f"{show(answer)} is no dict", 'give {"A": (method, GPUs), "B": ..., "C": ...}')
    for case, (net, batch, gpus) in _ASKED.items():
        found, told = answer.get(case), advise(NETS[net], batch, gpus, Cluster("A100", 8, network=_NETWORKS[case]))
        is_pair = isinstance(found, tuple) and len(found) == 2
        require(is_pair, f"{case} is {show(found)}", 'a method and a number of GPUs are asked for, as in ("DDP", 64)')
        right = told.method, 0 if told.method == "more GPUs" else told.gpus
        require(found == right, f"{case}: {show(found)}", " ".join(f"{reason}." for reason in told.reasons))
    return "that is what the guide says, with its reasons in numbers"
