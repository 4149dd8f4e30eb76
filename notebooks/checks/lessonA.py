"""Checks of the appendix, the articles checked."""

import random
from functools import cache

import torch
from torch.nn.functional import cross_entropy

from helpers.gpus import modelled_gpus
from helpers.measure import GiB, MiB
from helpers.models import LLAMA_1B, Llama
from notebooks.checks import compare
from notebooks.checks.core import NotYet, call, exercise, require, show

# ---- 1. which GPU was it? --------------------------------------------------------------------------------------------

_NEAR = 0.05  # points: closer to a limit than this, nothing is asked


def _points(added: float, total: float) -> float:
    return 100 * added / total


def _shares() -> list[tuple]:
    """Cases (before, after, added, memories): the article's, a close one, and two of GPUs that no answer knows."""
    memories = {"K80": 11_441, "TITAN Xp": 12_196, "T4": 15_079, "V100": 16_160}
    totals = (9_540, 9_744, 9_768, 10_000, 10_170, 10_300)  # 1.05 and 0.95 points away are the second and the third
    close = dict(zip("ABCDEF", totals, strict=True))  # C, D and E are possible
    cases: list[tuple] = [(5, 30, 3_815, memories), (4, 44, 4_000, close)]
    while len(cases) < 4:
        memories = {f"GPU {name}": random.randint(7_000, 90_000) for name in "ABCDEF"}
        total = memories["GPU A"]
        near = total * random.choice((0.985, 1.015, 1.03))  # a GPU whose share differs by about one point or less
        memories["GPU B"] = round(near)
        context, added = random.randint(300, 900), round(total * random.uniform(0.3, 0.8))
        before, after = round(_points(context, total)), round(_points(context + added, total))
        gaps = [abs(_points(added, each) - (after - before)) for each in memories.values()]
        if before >= 1 and after <= 99 and all(abs(gap - limit) > _NEAR for gap in gaps for limit in (0.5, 1)):
            cases.append((before, after, added, memories))
    return cases


@exercise
def could_be(answer):
    """Exercise 1: `answer(before, after, added, memories)`: the GPUs that can have shown these rounded shares."""
    for before, after, added, memories in _shares():
        given = dict(memories)
        found = call(answer, before, after, added, given)
        what = f"For {added:,} MiB, {before} % before and {after} % after, `could_be` returned {show(found)}."
        require(isinstance(found, list | tuple | set | dict), what, "Return a list of names.")
        require(given == memories, "`could_be` changes the dictionary that it gets.", "Later code still needs it.")
        unknown = [name for name in found if name not in memories]
        require(not unknown, what, f"{show(unknown)} is not among the names, which are {', '.join(memories)}.")
        for name, total in memories.items():
            points = _points(added, total)
            possible = abs(points - (after - before)) < 1
            if possible != (name in found):
                why = f"On {name} with {total:,} MiB, these {added:,} MiB are {points:.2f} points."
                verdict = "can" if possible else "cannot"
                rounded = "Both figures are rounded to whole percent, so each of them can be half a point off."
                raise NotYet(what, why, f"The printed shares {verdict} come from this GPU.", rounded)
    return "Arithmetic finds the GPU behind a wrong name: a T4 fits the article's rise, and a K80 does not."


# ---- 2. what would explain it? ---------------------------------------------------------------------------------------

_TIMES = [(0.532, 0.145, 2 / 3), (0.5, 0.125, 0.25), (0.4, 0.1, 0.2), (0.9, 0.3, 1.0), (0.5, 0.2, 1.25)]


@exercise
def outside(answer):
    """Exercise 2: `answer(before, after, ratio)`: the seconds outside the GPUs that turn our times into `ratio`."""
    drawn = [(random.uniform(0.3, 2), random.uniform(0.05, 0.2), random.uniform(0.7, 0.95)) for _ in range(3)]
    for before, after, ratio in (*_TIMES, *drawn):
        case = f"For {before:.4g} s before, {after:.4g} s after and a published ratio of {ratio:.4g}, "
        try:
            found = call(answer, before, after, ratio)
        except ValueError:
            found = None
        except ZeroDivisionError as error:
            why = "No time makes two different times equal. Raise a ValueError before you divide."
            raise NotYet(f"{case}`outside` divides by zero.", why) from error
        right = (ratio * before - after) / (1 - ratio) if ratio != 1 else -1.0
        if right < 0:
            why = f"Without anything outside, the ratio is {after / before:.4g}, and more time brings it towards 1."
            require(found is None, f"{case}`outside` returned {show(found)}.", why, "Raise a ValueError here.")
            continue
        require(found is not None, f"{case}`outside` raised a ValueError.", f"But {right:.4g} s explain it.")
        if right == 0:
            value = compare.as_number(found)
            require(abs(value) < 1e-9, f"{case}{value:.4g} s is wrong.", "Our own times have this ratio already.")
            continue
        mistakes = {
            1e3 * right: "is in milliseconds. Return seconds.",
            before - after: "is what the change saves.",
            ratio * before - after: "is still to be divided: the time outside is in both steps.",
            (before - after) / (1 - ratio): "is the whole step before the change. Return the part outside.",
            ((1 - ratio) * before - after) / ratio: "takes the ratio for what is saved. It is after / before.",
        }
        compare.number(found, right, "s", rel=1e-4, mistakes=mistakes, case=case)
    return "A published speedup that is smaller than ours may hide a time that our runs do not have."


# ---- 3. judge a post -------------------------------------------------------------------------------------------------

_WORDS = ("holds", "does not hold", "open")
_VERDICTS = {"A": "holds", "B": "does not hold", "C": "holds", "D": "open"}
_PARAMETERS = 1_235_814_400


def _llama(batch: int) -> tuple[int, int]:
    """Bytes of two steps of the post's job on one virtual RTX 4090: the peak of tensors, what nvidia-smi shows."""
    with modelled_gpus(1, "RTX 4090"):
        with torch.device("cuda"):
            model = Llama(**LLAMA_1B).bfloat16()
        adamw = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            _step(model, adamw, batch)
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.max_memory_allocated(), total - free


def _step(model: Llama, adamw: torch.optim.Optimizer, batch: int) -> None:
    tokens = torch.zeros(batch, 1024, dtype=torch.long, device="cuda")
    adamw.zero_grad()
    cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    adamw.step()


@cache
def _largest() -> int:
    batch = 4
    while True:
        try:
            _llama(batch + 1)
        except torch.OutOfMemoryError:
            return batch
        batch += 1


@cache
def _four() -> tuple[int, int]:
    return _llama(4)


@exercise
def post(verdicts, figures):
    """Exercise 3: the verdicts on four claims of a post, and the three figures that can be found."""
    compare.names(figures, "ABC", "a number")
    compare.names(verdicts, "ABCD", "a verdict")
    for claim, word in verdicts.items():
        require(word in _WORDS, f"{claim}: {show(word)} is no verdict. Write one of {', '.join(map(repr, _WORDS))}.")
    only = {
        2 * _PARAMETERS: "is the weights alone. Gradients are as large, and AdamW keeps two numbers for each weight.",
        6 * _PARAMETERS: "leaves out the weights or the gradients.",
        16 * _PARAMETERS: "counts float32. The post trains in bfloat16, with two bytes for each number.",
        12 * _PARAMETERS: "counts AdamW's states in float32. They have the format of the weights.",
    }
    compare.memory(figures["A"], 8 * _PARAMETERS, "GiB", rel=0.01, mistakes=only, case="A: ")
    tensors, shown = _four()
    parts = {tensors: "is the peak of tensors. `nvidia-smi` also counts CUDA's context and PyTorch's cache."}
    compare.memory(figures["B"], shown, "GiB", rel=0.01, mistakes=parts, case="B: ")
    why = "Which is the first batch that raises OutOfMemoryError? Free what the job before has left."
    batch = compare.as_number(figures["C"])
    require(batch == _largest(), f"C: {batch:g} is not the largest batch that fits on a virtual RTX 4090.", why)
    ours = {
        "A": f"Calculated, they take {8 * _PARAMETERS / GiB:.1f} GiB.",
        "B": f"You found {shown / GiB:.1f} GiB, or {shown / MiB:,.0f} MiB.",
        "C": f"You found {_largest()}.",
        "D": "Which run of yours shows it? They have no loader, and modelled times are off by 16 % in the median.",
    }
    for claim, word in _VERDICTS.items():
        require(verdicts[claim] == word, f"{claim}: {verdicts[claim]!r} is wrong.", ours[claim])
    return "Two claims hold, one does not, and one cannot be decided from what the post says."
