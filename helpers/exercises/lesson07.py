"""Checks of lesson 07, choosing a method."""

from helpers.exercises.core import call, exercise, not_yet, require, show
from helpers.lesson07.advice import NETS, advise
from helpers.lesson07.scaling import Cluster, amdahl, amdahl_seconds
from helpers.lesson07.waiting import JOBS, record_job
from helpers.measure import MiB, format_bytes
from helpers.measure.timeline import Timeline, TimeUse, time_use

__all__ = ["causes", "changes", "choices", "fits", "judge"]


# ------------------------------------------------------------------------------------------ 1: read a scaling log

_PAYS = 1.5  # times as fast, by twice the GPUs


def _log(one: float, serial: float, most: int, jump_at: int = 1024, factor: float = 1.0) -> dict[int, float]:
    """{GPUs: seconds} by Amdahl's law, from `jump_at` GPUs on `factor` times as long."""
    counts = [2**power for power in range(most.bit_length())]
    return {n: amdahl_seconds(one, serial, n) * (factor if n >= jump_at else 1.0) for n in counts}


_LOGS = (
    _log(0.32, 0.02, 64, jump_at=16, factor=3.0),
    _log(1.0, 0.0, 4),
    _log(2.0, 0.15, 16),
    _log(8.0, 0.05, 8, jump_at=4, factor=1.7),  # from 4 to 8 it pays again, but from 2 to 4 it does not
)


@exercise
def judge(answer):
    """`answer(seconds)`, of {GPUs: seconds of a step}, must give (GPUs up to which doubling pays, Amdahl's share)."""
    for seconds in _LOGS:
        found = call(answer, dict(seconds))
        is_pair = isinstance(found, (tuple, list)) and len(found) == 2
        require(is_pair, f"judge returned {show(found)}", "two numbers are asked for: (gpus, share)")
        gpus, share = found
        log = ", ".join(f"{n}: {each:.3g} s" for n, each in seconds.items())
        _check_count(gpus, seconds, f"{log}: up to {show(gpus)} GPUs")
        require(isinstance(share, (int, float)), f"{show(share)} is no number", "a share from 0 to 1 is asked for")
        one, many = seconds[1], seconds[gpus]
        right = (many / one - 1 / gpus) / (1 - 1 / gpus)
        if not abs(share - right) <= 1e-6:  # nan is no answer
            not_yet(f"{log}: a serial share of {share:.3g}", _why_share(share, one, many, gpus, seconds))
    return "it pays up to where the links change, and the law holds up to there"


def _check_count(gpus: object, seconds: dict[int, float], what: str) -> None:
    require(isinstance(gpus, int) and gpus in seconds, what, f"one of {', '.join(map(str, seconds))} is asked for")
    gains = {n: seconds[n // 2] / seconds[n] for n in seconds if n > 1}
    for n, gain in gains.items():
        pays = f"from {n // 2} to {n} GPUs the step gets {gain:.2f} times as fast, and {_PAYS} is asked for"
        if n <= gpus:
            require(gain >= _PAYS, what, pays)
        elif n == 2 * gpus:
            require(gain < _PAYS, what, f"it goes on paying: {pays}")


def _why_share(found: float, one: float, many: float, gpus: int, seconds: dict[int, float]) -> str:
    if abs(found - amdahl(seconds)) < 1e-6:
        return f"that fits all of the log, also where doubling does not pay; T(1) and T({gpus}) are asked for"
    if abs(found - many / one) < 1e-6:
        return "that is the whole time that is left; a part of it is parallel work, 1/n of what it was"
    if abs(found - (many / one - 1 / gpus)) < 1e-6:
        return "1/n is what is left if all is parallel, but the serial share is not divided: solve for it once more"
    if abs(found - (one / many) / gpus) < 1e-6:
        return "that is the efficiency"
    return f"with this share Amdahl's law would give {amdahl_seconds(one, found, gpus):.3f} s on {gpus} GPUs"


# --------------------------------------------------------------------------------------------- 2: why does it wait?

CAUSES = ("other stage", "link", "host", "slower rank")


@exercise
def causes(answer):
    """`answer` must give for each of `helpers.lesson07.waiting.JOBS` what its GPUs wait for, one of `CAUSES`."""
    _one_for_each_job(answer, "a cause")
    for job in JOBS:
        known = isinstance(answer[job], str) and answer[job].strip().lower() in CAUSES
        require(known, f"{job}: {show(answer[job])}", f"the words to choose from are {', '.join(map(repr, CAUSES))}")
        _check_cause(job, answer[job].strip().lower())
    return "each follows from what runs while a GPU does not compute, and from nothing else"


def _check_cause(job: str, found: str) -> None:
    name, gpu, used = _longest_wait(record_job(job))
    others = [time_use(each, own) for other, each in record_job(job).items() if other != name for own in each.gpus]
    if found == _cause(used):
        return
    waits = f"of the {_ms(used.waiting)} modelled ms in which cuda:{gpu} does not compute"
    refuted = {
        "other stage": f"another GPU of its process works in only {_ms(used.others)} {waits}",
        "host": f"in only {_ms(used.nothing)} {waits} no GPU of its process does anything",
        "slower rank": f"it is in a collective for only {_ms(used.collective)} {waits}",
        "link": _why_no_link(waits, used, others),
    }
    not_yet(f"{job}: {found!r}", refuted[found])


def _cause(used: TimeUse) -> str:
    """What most of a GPU's waiting is."""
    parts = {"slower rank": used.collective, "link": used.copying, "other stage": used.others, "host": used.nothing}
    return max(parts, key=parts.get)


def _why_no_link(waits: str, used: TimeUse, others: list[TimeUse]) -> str:
    if used.collective > used.copying and others:
        least = _ms(min(other.collective for other in others))
        rank = f"it is in a collective for {_ms(used.collective)} {waits}, and the other rank for {least} ms"
        return f"{rank}: a slow link would hold up both"
    return f"a copy from or to it runs in only {_ms(used.copying)} {waits}"


def _longest_wait(timelines: dict[str, Timeline]) -> tuple[str, int, TimeUse]:
    """Of all GPUs the one that waits longest: the timeline's name, its number, and its time."""
    every = [(name, gpu, time_use(each, gpu)) for name, each in timelines.items() for gpu in each.gpus]
    return max(every, key=lambda each: each[2].waiting)


@exercise
def changes(answer):
    """`answer` must give for each job a dict with one argument; the job is run so, and must wait half as long."""
    _one_for_each_job(answer, "a dict with an argument")
    for job, told in JOBS.items():
        change = answer[job]
        one = isinstance(change, dict) and len(change) == 1
        first = next(iter(told.arguments))
        require(one, f"{job}: {show(change)}", f"a dict with one argument is asked for, as in {{{first!r}: ...}}")
        try:
            after = record_job(job, **change)
        except (ValueError, TypeError) as error:
            not_yet(f"{job}: {show(change)}", str(error))
        _check_change(f"{job} with {show(change)}", record_job(job), after)
    return "and each was measured: what to change follows from what the GPUs wait for"


def _check_change(what: str, before: dict, after: dict) -> None:
    (_, _, was), (_, gpu, used) = _longest_wait(before), _longest_wait(after)
    step = f"a step takes {_ms(sum(used))} ms, before {_ms(sum(was))}"
    meanwhile = {
        "another GPU works": used.others,
        "copies run": used.copying,
        "nothing runs": used.nothing,
        "it is in a collective": used.collective,
    }
    most, asked = max(meanwhile, key=meanwhile.get), _ms(was.waiting / 2)
    still = f"cuda:{gpu} waits for {_ms(used.waiting)} ms, mostly while {most}, and at most {asked} are asked for"
    require(used.waiting <= was.waiting / 2, what, f"{still}; {step} (modelled)")
    require(sum(used) < sum(was), what, f"it waits less, but {step} (modelled): busy is not fast")


def _one_for_each_job(answer: object, what: str) -> None:
    whole = isinstance(answer, dict) and set(answer) == set(JOBS)
    require(whole, show(answer), f"{what} for each of {', '.join(JOBS)} is asked for")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


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
    """`answer` must give for "A", "B" and "C" (method, GPUs), as `advise` does on A100s, 8 a machine."""
    require(isinstance(answer, dict), f"{show(answer)} is no dict", 'give {"A": (method, GPUs), "B": ..., "C": ...}')
    for case, (net, batch, gpus) in _ASKED.items():
        found, told = answer.get(case), advise(NETS[net], batch, gpus, Cluster("A100", 8, network=_NETWORKS[case]))
        is_pair = isinstance(found, tuple) and len(found) == 2
        require(is_pair, f"{case} is {show(found)}", 'a method and a number of GPUs are asked for, as in ("DDP", 64)')
        right = told.method, 0 if told.method == "more GPUs" else told.gpus
        require(found == right, f"{case}: {show(found)}", " ".join(f"{reason}." for reason in told.reasons))
    return "that is what the guide says, with its reasons in numbers"
