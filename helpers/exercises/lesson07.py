"""Checks of lesson 07, choosing a method."""

import math

from helpers.exercises import compare
from helpers.exercises.core import NotYet, call, exercise, require, show
from helpers.lesson07.advice import METHODS, advise, peak_bytes, step_seconds
from helpers.lesson07.nets import NETS
from helpers.lesson07.scaling import Cluster, amdahl
from helpers.lesson07.waiting import JOBS, record_job
from helpers.measure import MiB, format_bytes
from helpers.measure.timeline import Timeline, TimeUse, time_use

PAYS = 1.5  # times as fast, by twice the GPUs
_LOGS = (  # {GPUs: seconds}
    {1: 0.32, 2: 0.1632, 4: 0.0848, 8: 0.0456, 16: 0.0780, 32: 0.0486, 64: 0.0339},
    {1: 1.0, 2: 0.505, 4: 0.2575},
    {1: 2.0, 2: 1.15, 4: 0.725, 8: 0.5125, 16: 0.40625},
    {1: 8.0, 2: 4.2, 4: 3.91, 8: 2.295},  # from 4 to 8 it pays again, but from 2 to 4 it does not
)


@exercise
def judge(answer):
    """Exercise 1: `answer(seconds)`, of {GPUs: seconds}: up to how many GPUs doubling pays, and Amdahl's share."""
    for seconds in _LOGS:
        found = call(answer, dict(seconds))
        log = ", ".join(f"{n}: {each:.3g} s" for n, each in seconds.items())
        what = f"For {log}, `judge` returned {show(found)}."
        pair = isinstance(found, tuple | list) and len(found) == 2
        require(pair, what, "Return two numbers, (gpus, share).")
        gpus, share = found
        require(gpus in list(seconds), what, f"The first number should be one of {', '.join(map(str, seconds))}.")
        gains = {n: seconds[n // 2] / seconds[n] for n in seconds if n > 1}
        for n, gain in gains.items():
            why = f"From {n // 2} to {n} GPUs a step gets {gain:.2f} times as fast, and {PAYS} times is the limit."
            require(gain >= PAYS or n > gpus, what, why)
            require(gain < PAYS or n != 2 * gpus, what, why)
        one, many = seconds[1], seconds[gpus]
        mistakes = {
            amdahl(seconds): f"fits the whole log, but doubling does not pay in all of it. Use T(1) and T({gpus}).",
            many / one: "is T(gpus) / T(1). A part of that time is parallel work.",
            many / one - 1 / gpus: "subtracts 1/gpus for all of the work. The serial work is not divided by gpus.",
            one / many / gpus: "is the efficiency.",
        }
        right = (many / one - 1 / gpus) / (1 - 1 / gpus)
        compare.number(share, right, rel=1e-5, mistakes=mistakes, case=f"For {log}, the share of ")
    return "Doubling pays until the links change, and up to there Amdahl's law holds."


def _wait(timelines: dict[str, Timeline]) -> tuple[int, TimeUse]:
    """Of all GPUs the one that waits longest: its number, and its time in ms."""
    every = [(gpu, time_use(each, gpu)) for each in timelines.values() for gpu in each.gpus]
    gpu, used = max(every, key=lambda each: each[1].waiting)
    return gpu, TimeUse(*(1e3 * seconds for seconds in used))


def _meanwhile(used: TimeUse) -> dict[str, tuple[float, str]]:
    """What a GPU may wait for: in how much of its waiting it does, and what is to be seen then."""
    return {
        "slower rank": (used.collective, "it is in a collective"),
        "link": (used.copying, "a copy from or to it runs"),
        "other stage": (used.others, "another GPU of its process works"),
        "host": (used.nothing, "no GPU of its process does anything"),
    }


@exercise
def causes(answer):
    """Exercise 2a: `answer` gives for each of `helpers.lesson07.JOBS` what its GPUs wait for, one of `_meanwhile`."""
    compare.names(answer, JOBS, "a cause")
    for job in JOBS:
        gpu, used = _wait(record_job(job))
        meanwhile = _meanwhile(used)
        cause = str(answer[job]).strip().lower()
        require(cause in meanwhile, f"{job}: {show(answer[job])}.", f"Choose one of {', '.join(meanwhile)}.")
        right = max(meanwhile, key=meanwhile.get)
        ms, seen = meanwhile[cause]
        what = f"{job}: {cause!r} is not the main cause."
        why = f"cuda:{gpu} does not compute for {used.waiting:.1f} modelled ms, and {seen} in only {ms:.1f} of them."
        if (cause, right) == ("link", "slower rank"):
            why += " A slow link would keep both ranks in the collective."
        require(cause == right, what, why)
    return "You can read each cause from what runs while a GPU does not compute."


@exercise
def changes(answer):
    """Exercise 2b: `answer` gives for each job a dict with one argument; it is run so, and must wait half as long."""
    compare.names(answer, JOBS, "a dict with an argument")
    for job, told in JOBS.items():
        change = answer[job]
        what = f"{job}: {show(change)}."
        one = isinstance(change, dict) and len(change) == 1 and set(change) <= set(told.arguments)
        require(one, what, f"Give a dict with one of these arguments: {', '.join(told.arguments)}.")
        try:
            after = record_job(job, **change)
        except ValueError as error:
            raise NotYet(what, str(error)) from error
        (_, was), (gpu, used) = _wait(record_job(job)), _wait(after)
        _, seen = max(_meanwhile(used).values())
        waits = f"cuda:{gpu} waits for {used.waiting:.1f} ms, and at most {was.waiting / 2:.1f} are allowed."
        step = f"A step takes {sum(used):.1f} modelled ms, and took {sum(was):.1f} before."
        better = used.waiting <= was.waiting / 2 and sum(used) < sum(was)
        require(better, what, waits, f"While it waits, {seen} most of the time.", step)
    return "All four ran. What the GPUs wait for tells you what to change."


_CASES = (  # parameters, states, bytes per sample, batch, gpus
    (21_750_320, 2, 93.3 * MiB, 200, 4),
    (24_253_410, 1, 37.6 * MiB, 768, 4),
    (24_253_410, 1, 37.6 * MiB, 240, 1),
    (365_375_290, 2, 1024.0 * MiB, 16, 8),
    (365_375_290, 2, 1024.0 * MiB, 31, 8),  # so that 31 // 8 shows
    (365_375_290, 2, 1024.0 * MiB, 64, 64),
)


def _peak(weights: float, share: float, kept: int) -> float:
    """Of `kept` times the weights all the time, and the gradients or a share of the batch, whichever is larger."""
    return kept * weights + max(weights, share)


@exercise
def fits(answer):
    """Exercise 3: `answer(parameters, states, per_sample, batch, gpus)` gives DDP's bytes per GPU, within 2 %."""
    for parameters, states, per_sample, batch, gpus in _CASES:
        weights, share, kept = 4 * parameters, batch / gpus * per_sample, 2 + states
        right = _peak(weights, share, kept)
        mistakes = {
            _peak(parameters, share, kept): "counts a byte for each number. A float32 takes four bytes.",
            _peak(weights, batch * per_sample, kept): "counts the whole batch, and a GPU has only its share of it.",
            _peak(weights, batch // gpus * per_sample, kept): "drops the samples that do not divide evenly.",
            _peak(weights, share, kept - 1): "lacks DDP's buckets, which are as large as the gradients.",
            _peak(weights, share, 2): "lacks the optimizer's states.",
            right + min(weights, share): "adds gradients and samples. Only the larger is there at the peak.",
        }
        case = f"With {parameters:,} parameters, {states} states and a batch of {batch} on {gpus} GPUs, "
        compare.number(call(answer, parameters, states, per_sample, batch, gpus), right, "bytes", 0.02, mistakes, case)
    return "This formula gives the memory that section 2 measured."


_ASKED = {
    "A": ("BERT of the article", 512, 64, "Ethernet 10", 1),
    "B": ("7 billion, 2,048 tokens", 64, 4, "Ethernet 10", 1),
    "C": ("PyramidNet of the article", 2048, 16, "InfiniBand HDR", 8),
}


@exercise
def choices(answer):
    """Exercise 4: `answer` gives for "A", "B" and "C" (method, GPUs), as `advise` does on A100s, 8 a machine."""
    compare.names(answer, _ASKED, "(method, GPUs)")
    for case, (name, batch, gpus, network, adapters) in _ASKED.items():
        found, net = answer[case], NETS[name]
        cluster = Cluster("A100", 8, network=network, adapters=adapters)
        what = f"{case}: {show(found)}."
        choice = found if isinstance(found, tuple | list) and len(found) == 2 else ("", 0)
        methods = {name.lower(): name for name in (*METHODS, "more GPUs")}
        method, advice = methods.get(str(choice[0]).strip().lower()), advise(net, batch, gpus, cluster)
        why = f'Give one of {", ".join(methods.values())}, and a number of GPUs, as in ("DDP", 64).'
        require(method is not None, what, why)
        right = advice.method, 0 if advice.method == "more GPUs" else advice.gpus
        asked = method if method in METHODS[1:] else "DDP"
        used = int(choice[1]) if choice[1] in range(1, gpus + 1) else gpus
        least = format_bytes(round(peak_bytes(net, asked, batch, used, cluster, math.ceil(batch / used))))
        speed = step_seconds(net, "one GPU", batch, 1, cluster) / step_seconds(net, asked, batch, used, cluster)
        need = f"{asked} on {used} GPUs needs at least {least} on each, and a GPU has {format_bytes(cluster.room)}."
        fast = f"A step is {speed:.1f} times as fast as on one GPU: {100 * speed / used:.0f} % efficiency (rough)."
        rule = "The guide takes DDP where a copy fits, on the most GPUs that keep an efficiency of 50 %."
        require((method, choice[1]) == right, what, need, fast, rule)
    return "The guide gives the same answers. Call `advise` to read its reasons."
