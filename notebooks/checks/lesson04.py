"""Checks of lesson 04, distributed data parallel. Two of them start ranks of their own."""

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from helpers.parallel import RankError
from notebooks.checks import compare
from notebooks.checks.core import NotYet, call, exercise, given, require, show
from notebooks.checks.gpus import in_ranks, need_gpus, plain


@exercise
def tree(answer):
    """Exercise 1: `answer(ranks)` lists steps, each a list of (source, target), that bring rank 0's tensor to all."""
    for ranks in (2, 4, 3, 8, 1, 5, 13, 64):
        steps = call(answer, ranks)
        require(isinstance(steps, list | tuple), f"{show(steps)} is not a list. Return a list of steps.")
        nobody = "With ranks=1 no other rank waits for the tensor. Return an empty list."
        require(ranks > 1 or not steps, nobody)
        have = {0}
        for number, step in enumerate(steps, 1):
            step = list(step) if isinstance(step, Iterator) else step  # such as zip, which can be read once
            what = f"With ranks={ranks}, step {number} is {show(step)}."
            try:
                pairs = [(int(source), int(target)) for source, target in step]
                require(pairs == [(source, target) for source, target in step], what, "A rank is an integer.")
            except (TypeError, ValueError, RuntimeError) as error:
                raise NotYet(what, "A step is a list of pairs (source, target).") from error
            sources, targets = {source for source, _ in pairs}, {target for _, target in pairs}
            can_send = sources <= have and len(sources) == len(pairs)
            require(can_send, what, "A rank can send once in a step, if it had the tensor before the step.")
            in_need = targets <= set(range(ranks)) - have and len(targets) == len(pairs)
            require(in_need, what, f"Send once to each rank, 0 to {ranks - 1}, that does not have the tensor yet.")
            have |= targets
        missing = ranks - len(have)
        wait = "1 rank still waits" if missing == 1 else f"{missing} ranks still wait"
        require(not missing, f"With ranks={ranks}, {wait} for the tensor after your last step.")
        fewest = (ranks - 1).bit_length()
        enough = "1 is enough." if fewest == 1 else f"{fewest} are enough."
        what = f"With ranks={ranks} you return {len(steps)} steps, and {enough}"
        require(len(steps) == fewest, what, "How many ranks could send in each step?")
    return "64 ranks have the tensor after 6 steps. Sending to one after the other would take 63."


class _OnTheCPU(RuntimeError):
    pass


ON_THE_CPU = "A collective got a tensor on the CPU. NCCL takes only tensors on GPUs."
# What ranks raise -> what is wrong, and what to do. Windows has no NCCL, so that gloo accepts tensors on the CPU there.
RAISED = {
    "_OnTheCPU": (ON_THE_CPU, "Create the tensor with device=... of the losses."),
    "device type cpu": (ON_THE_CPU, "Create it with device=..., and move a net to the rank's GPU before DDP."),
    "Duplicate GPU": ("Several ranks use the same GPU.", "LOCAL_RANK chooses the GPU of a rank."),
    "_Mismatch": (
        "The ranks call different collectives, or one with tensors of different sizes or dtypes, or without a tensor.",
        "Every rank must call the same collective, with a tensor of the same size and dtype.",
    ),
    "_NotAwaited": (
        "A collective with async_op=True is not awaited, so that its result can be incomplete on a real GPU.",
        "Call wait() on what it returns before you use the result.",
    ),
    "process group twice": (
        "The ranks have a process group already.",
        "Leave out `init_process_group`, which `launch` has called for you.",
    ),
    "process group has not been initialized": (
        "Your function ends the process group.",
        "Leave out `destroy_process_group`, because the ranks go on after your function.",
    ),
}


def _ranks(work: Callable, answer, ranks: int, **options) -> list:
    """As `in_ranks`, with a plain sentence for a tensor or a net on the wrong device."""
    try:
        return in_ranks(work, answer, ranks, **options)
    except RankError as error:
        for words, (what, why) in RAISED.items():
            if words in str(error):
                raise NotYet(what, why) from error
        what, _, traces = str(error).partition("\n\nIn rank ")
        lines = re.findall(r'File "Cell .+\n +(.+)', traces)  # the learner's line instead of the whole traceback
        at = f" at `{lines[-1]}`" if lines else ""
        raise NotYet(f"Your code stopped{at}: {' '.join(what.split())[:300].rstrip('.')}.") from error


class _Pending:
    """What a collective with async_op=True returns. Counts those for which nobody waits."""

    count = 0

    def __init__(self, work):
        self.work = work
        _Pending.count += 1

    def __getattr__(self, name: str):
        if name in ("wait", "get_future"):
            _Pending.count -= 1
        return getattr(self.work, name)


def _only_gpus(name: str):
    """Replaces `dist.<name>` so that it refuses tensors on the CPU, and of other sizes than those of other ranks."""
    original = getattr(dist, name)

    def collective(*args, **named):
        called = [name]
        for each in (*args, *named.values()):
            for tensor in each if isinstance(each, list | tuple) else [each]:
                if isinstance(tensor, Tensor):
                    called.append(f"{tensor.numel()} of {tensor.dtype}")
                    if tensor.device.type == "cpu":
                        raise _OnTheCPU(f"_OnTheCPU: dist.{name} got a tensor on the CPU")
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, called)
        if any(each != called for each in of_ranks):
            raise RuntimeError("_Mismatch")
        work = original(*args, **named)
        return _Pending(work) if named.get("async_op") else work

    return mock.patch.object(dist, name, collective)


# Exercise 2: four ranks share so many samples: uneven, and with one rank left over.
VALIDATION_RANKS, COUNTS = 4, (10, 3)


def _losses(count: int, factor: float) -> Tensor:
    return factor * (1 + torch.arange(count) ** 2 / 10)


def _validate_in_rank(rank: int, answer, factor: float) -> list[tuple]:
    """For each count: what the learner's function returned in this rank, and which samples it asked for."""
    found = []
    for count in COUNTS:
        values, asked = _losses(count, factor).to(rank), []

        def losses(numbers, values=values, asked=asked) -> Tensor:
            numbers = [int(number) for number in numbers]
            asked += numbers
            return values[numbers]

        with _only_gpus("all_reduce"), _only_gpus("reduce"), _only_gpus("all_gather"), _only_gpus("broadcast"):
            found.append((plain(answer(rank, count, losses)), asked))
            dist.get_rank()  # raises if the answer has ended the process group
            if _Pending.count > 0:
                raise RuntimeError("_NotAwaited")
    return found


@exercise
def validate(answer):
    """Exercise 2: `answer(rank, count, losses)` gives each of four ranks the mean loss of all samples, asked once."""
    need_gpus(VALIDATION_RANKS, values=True)
    factor = 1 + torch.rand(()).item()  # so that no function can contain the means
    work, who = partial(_validate_in_rank, factor=factor), "Every rank, even one without samples,"
    found = _ranks(work, answer, VALIDATION_RANKS, timeout=20, who=who)
    for place, count in enumerate(COUNTS):
        values, asked = zip(*(of_rank[place] for of_rank in found), strict=True)
        for value in values:
            _not_text(given(value, answer))
        what = f"With {count} samples on {VALIDATION_RANKS} ranks,"
        _check_shares(asked, count, what)
        lost = any(isinstance(value, float) and math.isnan(value) for value in values)
        require(not lost, f"{what} the results are {show(values)}. The mean of no samples is nan.")
        losses = _losses(count, factor)
        right, means = losses.mean().item(), [losses[numbers].mean().item() for numbers in asked if numbers]
        counts = " + ".join(str(len(numbers)) for numbers in asked)
        mistakes = {mean: "is the mean of one rank's samples. The samples of the others are missing." for mean in means}
        mistakes[sum(means) / len(means)] = f"is the mean of the ranks' means, but the ranks have {counts} samples."
        mistakes[right * count] = "is the sum of the losses. Return their mean."
        close = [math.isclose(compare.as_number(value), right, rel_tol=1e-4) for value in values]
        why = "`dist.reduce` gives one rank the sum, and `dist.all_reduce` gives it to all."
        require(sum(close) != 1, f"{what} only rank {close.index(max(close))} has the mean of all samples.", why)
        for rank, value in enumerate(values):
            compare.number(value, right, rel=1e-4, mistakes=mistakes, case=f"{what} rank {rank}'s result of ")
    return "Each sample counts once, and all ranks have the same mean, even a rank without samples."


def _check_shares(asked: tuple[list[int], ...], count: int, what: str) -> None:
    """Each sample is asked for by one rank, and no rank has more than its share."""
    together, most = sum(asked, []), max(map(len, asked))
    missing = sorted(set(range(count)) - set(together))
    require(not missing, f"{what} no rank looks at the samples {missing}. Count every sample.")
    again = any(len(set(numbers)) < len(numbers) for numbers in asked)
    asks = f"{what} a rank asks for the losses of a sample twice."
    require(not again, asks, "Call `losses` once and keep the result.")
    shared = most <= -(-count // VALIDATION_RANKS)
    require(shared, f"{what} one rank looks at {most} samples. The ranks should share the work.")
    twice = sorted({number for number in together if together.count(number) > 1})
    why = "DistributedSampler does this: it repeats samples, so that all ranks get the same number."
    require(not twice, f"{what} the samples {twice} are looked at twice.", why)


def _not_text(value: object) -> object:
    """`value`, which `plain` gave; "Not yet" if it is the words of something that is not a number."""
    require(not isinstance(value, str), f"Your function returned {value}, which is not a number. Return a number.")
    return value


LABELS = ([16, 16, 16, 13], [37, 12, 8, 4], [5, 5], [1, 9], [3, 0, 7], [10])  # exercise 3: of each rank


def _factor_in_rank(rank: int, answer, counts: list[int]):
    return plain(answer(list(counts), rank))


# What an answer raises outside ranks if it asks for the process group or for torchrun's environment.
ASKS_FOR_RANKS = ("process group has not been initialized", "'RANK'", "'LOCAL_RANK'", "'WORLD_SIZE'")


def _factors(answer, counts: list[int]) -> list[float]:
    """The factors of all ranks. An answer that asks for the process group or the environment runs in ranks."""
    try:
        return [compare.as_number(call(answer, list(counts), rank)) for rank in range(len(counts))]
    except Exception as error:
        if not any(words in str(error) for words in ASKS_FOR_RANKS):
            raise
    # Not above, or the traceback of a rank would begin with this error.
    values = _ranks(partial(_factor_in_rank, counts=counts), answer, len(counts), timeout=20)
    values = [_not_text(given(value, answer)) for value in values]
    return [compare.as_number(value) for value in values]


@exercise
def factor(answer):
    """Exercise 3: `answer(counts, rank)` is the factor of a rank's loss that makes DDP's the mean over all labels."""
    for counts in LABELS:
        ranks, what = len(counts), f"For ranks with {counts} labels,"
        counted = {}  # by rank: what one of its labels counts, where 1 is right
        for rank, (labels, value) in enumerate(zip(counts, _factors(answer, counts), strict=True)):
            if labels:
                counted[rank] = value * sum(counts) / (ranks * labels)
            else:
                require(value == 0, f"{what} rank {rank} has no labels, but its factor is {value:g}. It should be 0.")
        rank, worst = max(counted.items(), key=lambda each: abs(each[1] - 1))
        which, why = f"a label of rank {rank}", "Every label must count the same."
        if all(math.isclose(each, worst, rel_tol=1e-5) for each in counted.values()):
            which, why = "every label", f"DDP divides by the number of ranks, here {ranks}."
        much = f"counts {worst:.3g} times as much as in the mean over all labels."
        require(abs(worst - 1) < 1e-5, f"{what} {which} {much}", why)
    return "The mean of the ranks' losses is now the mean over all labels, even if a rank has none."


SAMPLES, EPOCHS, RANKS, BATCH = 32, 3, 2, 8  # of exercise 4
OTHER_SEED = 1000  # of rank 0 before it calls the learner's function


class Samples(TensorDataset):
    """What exercise 4 trains on: 32 pairs, x of shape (4,) and y of shape (1,). Notes which were asked for."""

    def __init__(self):
        x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
        super().__init__(x, x @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]))
        self.asked: list[int] = []

    def __getitem__(self, number: int):
        self.asked.append(int(number))
        return super().__getitem__(number)


def _train_in_rank(rank: int, answer) -> tuple[Tensor | None, list[int], int, object, list[int]]:
    """The learner's function in a rank: the weights, which samples it took, how often it logged, what it returned."""
    torch.manual_seed(OTHER_SEED + rank)  # so that a missing torch.manual_seed(0) shows
    samples, logged, before = Samples(), [], _allocations()
    net = answer(rank, samples, logged.append)
    used = [gpu for gpu, count in enumerate(_allocations()) if count > before[gpu]]
    weights = nn.utils.parameters_to_vector(net.parameters()).detach().cpu() if isinstance(net, nn.Module) else None
    dist.barrier()
    return weights, samples.asked, len(logged), plain(net), used


def _allocations() -> list[int]:
    """How many allocations each GPU of this process has had."""
    stats = (torch.cuda.memory_stats(gpu) for gpu in range(torch.cuda.device_count()))
    return [each.get("allocation.all.allocated", 0) for each in stats]


@exercise
def ranked(answer):
    """Exercise 4: `answer(rank, samples, log)` must train for three epochs on two ranks, and end where one GPU ends."""
    need_gpus(RANKS, values=True)
    found = _ranks(_train_in_rank, answer, RANKS, timeout=30)
    weights, asked, logged, returned, used = zip(*found, strict=True)
    for net, value in zip(weights, returned, strict=True):
        require(net is not None, f"It returned {given(value, answer)}. Return the net.")

    for rank, gpus in enumerate(used):
        where = " and ".join(f"cuda:{gpu}" for gpu in gpus) or "the CPU"
        why = f"Its LOCAL_RANK is {rank}, so it should use cuda:{rank}."
        require(gpus == [rank], f"Rank {rank} put its tensors on {where}.", why)

    why = "Their gradients were never averaged. Does the forward pass go through DistributedDataParallel?"
    compare.alike(weights[1], weights[0], "The ranks' weights differ, and are", why, rel=1e-6)
    _check_samples(asked)
    what = f"Ranks 0 and 1 logged {logged[0]} and {logged[1]} lines."
    require(logged == (EPOCHS, 0), what, f"Rank 0 should log one line per epoch, {EPOCHS} in all, and rank 1 none.")
    each = BATCH // RANKS
    many = f"A step takes {BATCH} samples on each rank, {RANKS * BATCH} together, and {BATCH} in `alone`."
    mistakes = {
        "The net starts from random weights. `alone` sets the seed first.": _on_one_device(asked, each, OTHER_SEED),
        many: _on_one_device(asked, BATCH),
    }
    what = "Both ranks end with the same weights, but compared with those of one GPU they are"
    why = "Compare the net, the seed, the learning rate, the loss and the batch size with those of `alone`."
    compare.alike(weights[0], _on_one_device(asked, each), what, why, mistakes)
    return "Both ranks have one GPU's weights, each epoch has its own order, and only rank 0 logs."


def _check_samples(asked: tuple[list[int], ...]) -> None:
    size = SAMPLES // RANKS
    epochs = [[numbers[first : first + size] for numbers in asked] for first in range(0, EPOCHS * size, size)]
    taken = all(len(numbers) == EPOCHS * size for numbers in asked)
    shared = taken and all(sorted(sum(parts, [])) == list(range(SAMPLES)) for parts in epochs)
    twice = max(len(set(first) & set(second)) for first, second in epochs)
    what = f"Ranks 0 and 1 took {len(asked[0])} and {len(asked[1])} samples."
    hidden = "The check sees `samples[number]` in the ranks themselves, as in a DataLoader with num_workers=0."
    require(any(asked), "The check saw neither rank take a sample.", hidden)
    why = "The ranks divide one order of the samples, which must be the same on both."
    require(not taken or not twice, f"In an epoch, {twice} samples go to both ranks.", why)
    require(shared, what, f"In each of {EPOCHS} epochs, half of the {SAMPLES} samples should go to each rank.")
    stored = epochs[0][0] == sorted(epochs[0][0])
    require(not stored, "The samples come in the order in which they are stored. Shuffle them, as `alone` does.")
    orders = len({str(parts) for parts in epochs})
    why = "How does the sampler know which epoch it is?"
    require(orders > 1, "Every epoch has the same order.", why)
    require(orders == EPOCHS, "Two epochs have the same order.", why)
    halves = {frozenset(parts[0]) for parts in epochs}
    why = "A rank should see all samples in the course of the epochs. Draw one order for all ranks, and then divide it."
    require(len(halves) > 1, "Rank 0 takes the same half of the samples in every epoch.", why)


def _on_one_device(asked: tuple[list[int], ...], each: int, seed: int = 0) -> Tensor:
    """The weights of `alone` after the samples that the ranks took, `each` of every rank per step."""
    x, y = Samples().tensors
    torch.manual_seed(seed)
    net = nn.Linear(4, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for first in range(0, len(asked[0]), each):
        numbers = sum((rank[first : first + each] for rank in asked), [])
        sgd.zero_grad()
        mse_loss(net(x[numbers]), y[numbers]).backward()
        sgd.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()
