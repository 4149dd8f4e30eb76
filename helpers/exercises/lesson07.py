"""Checks of lesson 07, choosing a method."""

from helpers.exercises import compare
from helpers.exercises.core import NotYet, call, exercise, require, show
from helpers.lesson07 import JOBS, NETS, Cluster, advise, amdahl, amdahl_seconds, record_job
from helpers.measure import MiB
from helpers.measure.timeline import Timeline, TimeUse, time_use

PAYS = 1.5  # times as fast, by twice the GPUs


def _log(one: float, serial: float, most: int, jump_at: int = 1024, factor: float = 1.0) -> dict[int, float]:
    """{GPUs: seconds} by Amdahl's law, from `jump_at` GPUs on `factor` times as long."""
    counts = [2**power for power in range(most.bit_length())]
    return {n: amdahl_seconds(one, serial, n) * (factor if n >= jump_at else 1.0) for n in counts}


_LOGS = (
    _log(0.32, 0.02, 64, jump_at=16, factor=3.0),
    _log(1.0, 0.01, 4),
    _log(2.0, 0.15, 16),
    _log(8.0, 0.05, 8, jump_at=4, factor=1.7),  # from 4 to 8 it pays again, but from 2 to 4 it does not
)


@exercise
def judge(answer):
    """Exercise 1: `answer(seconds)`, of {GPUs: seconds}: up to how many GPUs doubling pays, and Amdahl's share."""
    for seconds in _LOGS:
        found = call(answer, dict(seconds))
        pair = isinstance(found, tuple | list) and len(found) == 2
        require(pair, f"`judge` returned {show(found)}.", "Two numbers are asked for: (gpus, share).")
        log = ", ".join(f"{n}: {each:.3g} s" for n, each in seconds.items())
        gpus, share = found
        what = f"{log}: up to {show(gpus)} GPUs"
        require(
            isinstance(gpus, int) and gpus in seconds,
            f"{what}.",
            f"One of {', '.join(map(str, seconds))} is asked for.",
        )
        gains = {n: seconds[n // 2] / seconds[n] for n in seconds if n > 1}
        for n, gain in gains.items():
            why = f"From {n // 2} to {n} GPUs the step gets {gain:.2f} times as fast, and {PAYS} is asked for"
            require(gain >= PAYS or n > gpus, f"{what}.", f"{why}.")
            require(gain < PAYS or n != 2 * gpus, f"{what}.", f"It goes on paying: {why}.")
        one, many = seconds[1], seconds[gpus]
        mistakes = {
            amdahl(seconds): f"fits all of the log, also where doubling does not pay. Take T(1) and T({gpus}).",
            many / one: "is the whole time that is left. A part of it is parallel work, 1/n of what it was.",
            many / one
            - 1 / gpus: "takes 1/n of all the work as parallel. The serial share is not divided: solve for it.",
            one / many / gpus: "is the efficiency.",
        }
        compare.number(
            share, (many / one - 1 / gpus) / (1 - 1 / gpus), rel=1e-5, mistakes=mistakes, case=f"For {log}: "
        )
    return "It pays up to where the links change, and the law holds up to there."


def _wait(timelines: dict[str, Timeline]) -> tuple[int, TimeUse]:
    """Of all GPUs the one that waits longest: its number, and its time."""
    every = [(gpu, time_use(each, gpu)) for each in timelines.values() for gpu in each.gpus]
    return max(every, key=lambda each: each[1].waiting)


def _meanwhile(used: TimeUse) -> dict[str, tuple[float, str]]:
    """What a GPU may wait for: in how many seconds of its waiting it does, and what is to be seen then."""
    return {
        "slower rank": (used.collective, "it is in a collective"),
        "link": (used.copying, "a copy from or to it runs"),
        "other stage": (used.others, "another GPU of its process works"),
        "host": (used.nothing, "no GPU of its process does anything"),
    }


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


@exercise
def causes(answer):
    """Exercise 2a: `answer` gives for each of `helpers.lesson07.JOBS` what its GPUs wait for, one of `_meanwhile`."""
    compare.names(answer, JOBS, "a cause")
    for job in JOBS:
        gpu, used = _wait(record_job(job))
        meanwhile = _meanwhile(used)
        cause = str(answer[job]).strip().lower()
        require(cause in meanwhile, f"{job}: {show(answer[job])}.", f"The words to choose from are {list(meanwhile)}.")
        right = max(meanwhile, key=meanwhile.get)
        seconds, seen = meanwhile[cause]
        told = f"Only in {_ms(seconds)} of the {_ms(used.waiting)} modelled ms in which cuda:{gpu} does not compute"
        why = f"{told}, {seen}"
        if (cause, right) == ("link", "slower rank"):
            why += ". In most of them it is in a collective that the other rank enters late: a link would delay both"
        require(cause == right, f"{job}: {cause!r}.", f"{why}.")
    return "Each follows from what runs while a GPU does not compute, and from nothing else."


@exercise
def changes(answer):
    """Exercise 2b: `answer` gives for each job a dict with one argument; it is run so, and must wait half as long."""
    compare.names(answer, JOBS, "a dict with an argument")
    for job, told in JOBS.items():
        change = answer[job]
        what = f"{job}: {show(change)}"
        one = isinstance(change, dict) and len(change) == 1
        require(
            one, f"{what}.", f"A dict with one argument is asked for, as in {{{next(iter(told.arguments))!r}: ...}}."
        )
        try:
            after = record_job(job, **change)
        except (ValueError, TypeError) as error:
            raise NotYet(f"{what}.", str(error)) from error
        (_, was), (gpu, used) = _wait(record_job(job)), _wait(after)
        step = f"a step takes {_ms(sum(used))} ms, before {_ms(sum(was))} (modelled)"
        _, seen = max(_meanwhile(used).values())
        still = f"cuda:{gpu} waits for {_ms(used.waiting)} ms, mostly while {seen}, and at most {_ms(was.waiting / 2)}"
        require(used.waiting <= was.waiting / 2, f"{what}.", f"{still} are asked for; {step}.")
        require(sum(used) < sum(was), f"{what}.", f"It waits less, but {step}: busy is not fast.")
    return "And each was measured: what to change follows from what the GPUs wait for."


_CASES = (  # parameters, states, bytes per sample, batch, gpus
    (21_750_320, 2, 93.3 * MiB, 200, 4),
    (24_253_410, 1, 37.6 * MiB, 768, 4),
    (24_253_410, 1, 37.6 * MiB, 240, 1),
    (365_375_290, 2, 1024.0 * MiB, 16, 8),
    (365_375_290, 2, 1024.0 * MiB, 64, 64),
)


@exercise
def fits(answer):
    """Exercise 3: `answer(parameters, states, per_sample, batch, gpus)` gives DDP's bytes per GPU, within 2 %."""
    for parameters, states, per_sample, batch, gpus in _CASES:
        weights, mine = 4 * parameters, batch / gpus * per_sample
        mistakes = {
            parameters * (2 + states) + max(parameters, mine): "is too small: a float32 number takes four bytes.",
            weights * (2 + states)
            + max(weights, batch * per_sample): "counts the whole batch: a GPU sees its own share of it.",
            weights * (1 + states) + max(weights, mine): "lacks DDP's buckets, which are as large as the gradients.",
            weights * 2 + max(weights, mine): "lacks the optimizer's states.",
            weights * (3 + states)
            + mine: "counts both: gradients come as activations go, and only the larger is there at the peak.",
        }
        case = f"With {parameters:,} parameters, {states} states, batch {batch} on {gpus} GPUs, "
        right = weights * (2 + states) + max(weights, mine)
        compare.number(call(answer, parameters, states, per_sample, batch, gpus), right, "bytes", 0.02, mistakes, case)
    return "That is how close a budget on paper comes."


_ASKED = {
    "A": ("BERT of the article", 512, 64, "Ethernet 10"),
    "B": ("7 billion, 2,048 tokens", 64, 4, "Ethernet 10"),
    "C": ("PyramidNet of the article", 2048, 16, "InfiniBand HDR"),
}


@exercise
def choices(answer):
    """Exercise 4: `answer` gives for "A", "B" and "C" (method, GPUs), as `advise` does on A100s, 8 a machine."""
    compare.names(answer, _ASKED, "(method, GPUs)")
    for case, (net, batch, gpus, network) in _ASKED.items():
        found, advice = answer[case], advise(NETS[net], batch, gpus, Cluster("A100", 8, network=network))
        pair = isinstance(found, tuple | list) and len(found) == 2
        require(pair, f"{case} is {show(found)}.", 'A method and a number of GPUs are asked for, as in ("DDP", 64).')
        right = advice.method, 0 if advice.method == "more GPUs" else advice.gpus
        same = (str(found[0]).strip().lower(), found[1]) == (right[0].lower(), right[1])
        require(same, f"{case}: {show(found)}.", *advice.reasons)
    return "That is what the guide says, with its reasons in numbers."
