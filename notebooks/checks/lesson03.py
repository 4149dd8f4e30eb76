"""Checks of lesson 03, parallel loss."""

import gc
from collections.abc import Sequence
from functools import partial
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear_cross_entropy
from torch.nn.utils import parameters_to_vector

from helpers.data import random_tokens
from helpers.gpus import modelled_gpus
from helpers.measure import fits
from helpers.models import LLAMA_1B, Llama
from notebooks.checks import compare
from notebooks.checks.core import call, exercise, given, require, show
from notebooks.checks.gpus import need_empty_rtx_4090s, need_gpus
from notebooks.checks.par import Score, compare_with_par, measured

NAN = float("nan")


@exercise
def combine(answer):
    """Exercise 1: `answer(losses, weights)` must be the weighted mean, on the first loss's GPU, with its gradient."""
    gpus = need_gpus(2, values=True)[::-1]
    for means, weights in (
        ([2.0, 5.0], [3, 1]), ([2.0, 4.0], [5, 5]), ([3.0, NAN], [4, 0]), ([NAN, 3.0], [0, 4]), ([7.0], [2]),
        ([NAN, 2.0], [1, 3]), ([3.0, 1.0, 6.0], [1, 5, 2]), ([4.0, NAN, 1.0, 2.0], [1, 0, 3, 4]),
    ):  # fmt: skip
        # A piece without terms is a sum of none, divided by 0, as a criterion computes it.
        pieces = [torch.full((max(n, 1),), mean if n else 1.0) for mean, n in zip(means, weights, strict=True)]
        leaves = [piece.to(gpu).requires_grad_() for piece, gpu in zip(pieces, cycle(gpus), strict=False)]
        losses = [(leaf * bool(n)).sum() / torch.tensor(n).to(leaf) for leaf, n in zip(leaves, weights, strict=True)]
        before = [loss.item() for loss in losses]
        found = call(answer, list(losses), list(weights))
        case = f"For the losses {means} with the weights {weights}"
        for number, (loss, old) in enumerate(zip(losses, before, strict=True)):
            same = loss.item() == old or old != old  # nan
            changed = f"{case}, your function changes losses[{number}] to {loss.item():g}."
            require(same, changed, "An operator such as += or *= changes the tensor of the caller. Leave it as it is.")
        require(isinstance(found, Tensor), f"{case}, you return {show(found)}. Return a tensor, which has a gradient.")
        require(found.shape == (), f"{case}, the shape is {tuple(found.shape)}. Return one number, of shape ().")
        there = f"{case}, the result is on {found.device}, and the first loss is on {gpus[0]}."
        require(found.device == gpus[0], there, "It should be where the first loss is, whatever its weight.")
        weighted = sum(mean * n for mean, n in zip(means, weights, strict=True) if n)
        if weighted != weighted:  # nan
            hidden = f"{case}, the result is {found.item():.3g}. A loss that counts is nan, so the result must be nan."
            require(bool(found.isnan()), hidden)
            continue
        require(not found.isnan(), f"{case}, the result is nan. A loss of weight 0 must not count, and 0 x nan is nan.")
        mistakes = {
            sum(mean for mean, n in zip(means, weights, strict=True) if n) / len(weights): "is the mean of the means. "
            "Where are the weights?",
            weighted: "is the weighted sum. A mean is asked for.",
        }
        compare.number(found, weighted / sum(weights), rel=1e-4, mistakes=mistakes, case=f"{case}, ")
        require(found.requires_grad, f"{case}, the result has no graph: .item(), .data and .detach() cut it off.")
        found.backward()
        for leaf, n in zip(leaves, weights, strict=True):
            if n:
                require(leaf.grad is not None, f"{case}, no gradient arrives on {leaf.device}.")
                compare.number(leaf.grad.sum(), n / sum(weights), rel=1e-4, case=f"{case}, a gradient of ")
            elif leaf.grad is not None:
                why = "The backward pass still runs through the piece of weight 0, and through its 0 / 0. Leave it out."
                require(not leaf.grad.isnan().any(), f"{case}, the loss is right, but a gradient is nan. {why}")
    return "The value, the GPU and the gradients are right, and a piece of weight 0 does no harm."


class _Watched(nn.Module):
    """Tokens (N, T) -> logits (N, T, V). Knows the batches it got, and whether a backward pass has run before each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.output = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.seen: list[tuple[int, bool]] = []
        self.went_back = False

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.append((len(tokens), self.went_back))
        logits = self.output(self.embedding(tokens).tanh())
        if logits.requires_grad:
            logits.register_hook(lambda gradient: setattr(self, "went_back", True))
        return logits


@exercise
def accumulate_words(answer):
    """Exercise 2: `answer(model, micro_batches)` must leave the gradients of the mean over all labels that count."""
    gpu = need_gpus(1, values=True)[0]
    for rows, kept in (((2, 1, 3), (4, 2, 1)), ((1, 3, 2, 2), (4, 1, 0, 3)), ((2, 2), (0, 4))):
        tokens = [torch.randint(11, (count, 5), device=gpu) for count in rows]
        labels = [
            torch.where(torch.arange(5, device=gpu) < n, (3 * x + 1) % 11, -100)
            for x, n in zip(tokens, kept, strict=True)
        ]
        counts = [int((piece != -100).sum()) for piece in labels]
        case = f"With micro-batches that have {counts} labels"
        model = _Watched().to(gpu)
        parameters = list(model.parameters())
        before = [parameter.detach().clone() for parameter in parameters]
        found = call(answer, model, [(x.clone(), y.clone()) for x, y in zip(tokens, labels, strict=True)])
        seen, model.seen = model.seen, []
        _require_kept(model, before, case)
        left = all(parameter.grad is not None for parameter in parameters)
        require(left, f"{case}, some parameters have no gradient. Was backward() called?")
        gradient = [parameter.grad for parameter in parameters]
        one = f"{case}, you run {len(seen)} forward passes, with {[size for size, _ in seen]} sequences."
        require(max(size for size, _ in seen) <= max(rows), one, "Run one micro-batch at a time.")
        first = next(index for index, count in enumerate(counts) if count)
        order = "You run several micro-batches before the first backward(), so that all their graphs are in memory."
        require(all(before for _, before in seen[first + 2 :]), f"{case}: {order}")

        sums = [
            cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
            for x, y in zip(tokens, labels, strict=True)
        ]
        right = sum(sums) / sum(counts)
        each = [parameters_to_vector(torch.autograd.grad(part, parameters, retain_graph=True)) for part in sums]
        nan = any(part.isnan().any() for part in gradient)
        require(not nan, f"{case}, the gradient is nan. A mean over no labels is 0 / 0.")
        means = [part / count for part, count in zip(each, counts, strict=True) if count]
        by_sequences = sum(n * part / max(count, 1) for n, part, count in zip(rows, each, counts, strict=True))
        every = sum(y.numel() for y in labels)
        mistakes = {
            "It is the sum of the micro-batches' means. Divide sums by the number of all labels.": sum(means),
            "It is a mean of means. Which number is right for all micro-batches?": sum(means) / len(rows),
            "It is a mean of the means that are not nan. Weight them.": sum(means) / len(means),
            "It is the sum over all labels. A mean is asked for.": sum(each),
            "It is divided by the number of all labels, also ignored ones.": sum(each) / every,
            "It is weighted by sequences. Count labels.": by_sequences / sum(rows),
            "It is that of the last micro-batch alone. Something sets the gradients back.": each[-1] / sum(counts),
        }
        counts_as = f"Every label that counts should count 1 / {sum(counts)}, and no other label."
        compare.alike(gradient, sum(each) / sum(counts), f"{case}, the gradient is", counts_as, mistakes)
        said = f"{case}, the gradients are right, but the returned loss of "
        compare.number(found, right.item(), rel=1e-3, case=said)
    return "The gradients are those of the whole batch, also where a micro-batch has no label."


def _require_kept(model: nn.Module, before: Sequence[Tensor], case: str) -> None:
    for (name, parameter), old in zip(model.named_parameters(), before, strict=True):
        require(parameter.device == old.device, f"{case}, your function moves `{name}` to {parameter.device}.")
        same = parameter.dtype == old.dtype and torch.equal(parameter, old)
        require(same, f"{case}, your function changes `{name}`. Leave the model as it is.")


# Exercise 3: which losses come out of sums over the pieces?
NOT_AT_ALL, MOST, SIZES = "not at all", 4, (10, 13)  # two sizes, so that no function can contain the size
_DIVISIBLE = {"present": True, "triplet": True, "root": True, "dice": True, "ranking": False}


@exercise
def losses(answers, losses):
    """Exercise 3: for each loss `(sums, finish)`, or "not at all"."""
    compare.names(answers, _DIVISIBLE, "an answer")
    asked = f"Give {NOT_AT_ALL!r}, or a pair of functions (sums, finish)."
    for name, answer in answers.items():
        pair = isinstance(answer, tuple | list) and len(answer) == 2 and all(callable(each) for each in answer)
        require(pair or _is_not_at_all(answer), f"The answer for `{name}` is {show(answer)}.", asked)
    gpus = need_gpus(4, values=True)[:4]
    functions = {function.__name__: function for function in losses}
    for size in SIZES:
        inputs, chance = 3 * torch.randn(size, 3), torch.rand(size, 6)
        tags = (chance < torch.linspace(0.1, 0.8, size)[:, None]).float()
        tags[0, 0], tags[-1, 5] = 1, 0  # at least one present and one absent
        for name in _DIVISIBLE:
            _check_loss(name, answers[name], functions[name], inputs, tags, gpus)
    return "Loss and gradient are those of one GPU wherever they can be."


def _is_not_at_all(answer: object) -> bool:
    return isinstance(answer, str) and answer.strip().lower() == NOT_AT_ALL


def _check_loss(name: str, answer, alone_fn, inputs: Tensor, tags: Tensor, gpus: list) -> None:
    if _is_not_at_all(answer):
        require(not _DIVISIBLE[name], f"`{name}` can be divided. Which sums over the samples determine it?")
        return
    net = nn.Linear(3, 6).to(gpus[0])
    loss, totals = _from_sums(name, *answer, net(inputs.to(gpus[0])), tags, gpus)
    alone = alone_fn(net(inputs.to(gpus[0])), tags.to(gpus[0]))
    both = f"With {len(tags)} images, `{name}` is {loss.item():.4f} from your sums on 4 GPUs"
    both += f", and {alone.item():.4f} on one GPU"
    hint = "Does each of your numbers add up over the GPUs?"
    if len(tags) != SIZES[0]:
        hint = f"It was right with {SIZES[0]} images. Do your functions contain the size of a batch?"
    if not _DIVISIBLE[name]:
        hint = "It compares tags of different images. Can sums over the images know that?"
    require(torch.isclose(loss, alone, rtol=1e-4, atol=1e-5), f"{both}. {hint}")
    beside = "They pass whole pieces on, for example in a variable outside. `finish` may use the totals only."
    require(_DIVISIBLE[name], f"{both}, but your functions pass on more than {MOST} numbers per GPU.", beside)
    weights = {"the net's weights": (net.weight, net.weight)}
    compare.gradients(loss, alone, weights, "Is a part of it detached?", f"`{name}` is right, but ")


def _from_sums(name: str, sums, finish, scores: Tensor, tags: Tensor, gpus: list) -> tuple[Tensor, Tensor]:
    """The loss from the learner's functions, and the totals."""
    totals = None
    for piece, target, gpu in zip(scores.chunk(4), tags.chunk(4), gpus, strict=True):
        part = call(sums, piece.to(gpu), target.to(gpu))
        if isinstance(part, tuple | list):
            part = torch.stack([torch.as_tensor(each, device=gpu).float().reshape(()) for each in part])
        require(isinstance(part, Tensor), f"The sums of `{name}` are {show(part)}. Return a tensor.")
        few = f"The sums of `{name}` have the shape {tuple(part.shape)}. Return at most {MOST} numbers in one row."
        require(part.dim() <= 1 and part.numel() <= MOST, few, "More would gather what is to stay on its GPU.")
        totals = part.to(gpus[0]) if totals is None else totals + part.to(gpus[0])
    loss = call(finish, totals)
    what = f"`finish` of `{name}` returns {show(loss)}."
    require(isinstance(loss, Tensor), what, "Return a tensor, which has a gradient.")
    require(loss.numel() == 1, f"`finish` of `{name}` returns the shape {tuple(loss.shape)}. Return one number.")
    return loss.reshape(()).to(gpus[0]), totals


class _LossInForward(nn.Module):
    """The two sums. in_chunks: never make the logits."""

    def __init__(self, model: Llama, in_chunks: bool):
        super().__init__()
        self.model, self.in_chunks = model, in_chunks

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        features, labels = self.model.features(tokens).flatten(0, 1), labels.flatten()
        if self.in_chunks:
            weight, options = self.model.output.weight, nn.LinearCrossEntropyOptions()
            summed = linear_cross_entropy(features, weight, labels, reduction="sum", options=options)
        else:
            summed = cross_entropy(self.model.output(features), labels, reduction="sum")
        return summed.unsqueeze(0), (labels != -100).sum().unsqueeze(0)


def _divided(model: Llama, gpus: Sequence, tokens: Tensor, labels: Tensor, in_chunks: bool = True) -> Tensor:
    sums, counts = nn.DataParallel(_LossInForward(model, in_chunks), gpus)(tokens, labels)
    return sums.sum() / counts.sum()


def _gathered(model: Llama, gpus: Sequence, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = nn.DataParallel(model, gpus)(tokens)
    return cross_entropy(logits.flatten(0, -2), labels.flatten().to(gpus[0]))


LENGTH, STEP = 1024, 4


def _llama(gpu: torch.device) -> Llama:
    with gpu:
        model = Llama(**LLAMA_1B).to(torch.bfloat16)
    model.recompute = True
    return model


@exercise
def largest(answer):
    """Exercise 4: the largest batch, in steps of 4: a fresh job of two steps, parallel loss and checkpointing."""
    gpus = need_empty_rtx_4090s(4)

    def two_steps(batch: int) -> None:
        model = _llama(gpus[0])
        optimizer = torch.optim.AdamW(model.parameters())
        tokens, labels = random_tokens(batch, LENGTH, LLAMA_1B["vocabulary"])
        for _ in range(2):
            optimizer.zero_grad()
            _divided(model, gpus, tokens, labels, in_chunks=False).backward()
            optimizer.step()

    least = "A new job with two steps runs out of memory. A smaller batch before it, or a single step, hides that."
    compare.largest(answer, STEP, partial(fits, two_steps), least)
    gc.collect()
    torch.cuda.empty_cache()
    return f"With {STEP} sequences more, a GPU runs out of memory."


@exercise
def llama_loss(answer):
    """Exercise 5: loss and gradients of one GPU; then the peak and the modelled time of the Llama beside a par."""
    require(callable(answer), f"{show(answer)} cannot be called. Pass the function itself: its name without brackets.")
    with modelled_gpus(4, shapes_only=False) as gpus:
        _equal_to_one_gpu(answer, list(gpus))
    with modelled_gpus(4, "RTX 4090") as gpus:
        you = _score(answer, list(gpus))
        said = "Loss and gradients are right, but with 48 sequences a GPU runs out of memory, as with the naive answer."
        require(you.peak is not None, said, "What is large on the fullest GPU, and must it be there?")
        naive, par = _score(_gathered, list(gpus)), _score(_divided, list(gpus))
    return "Loss and gradients are those of one GPU. " + compare_with_par(
        "03 The loss of the Llama", naive=naive, par=par, you=you, unit_note="modelled"
    )


def _equal_to_one_gpu(answer, gpus: list[torch.device]) -> None:
    for rows, last in ((7, 3), (8, 0)):  # the second time, the last GPU has no label that counts
        seed = int(torch.randint(1000, ()))
        torch.manual_seed(seed)
        alone = Llama(vocabulary=512, tied=True)
        torch.manual_seed(seed)
        model = Llama(vocabulary=512, tied=True).to(gpus[0])
        model.recompute = True
        tokens, labels = random_tokens(rows, 16, 512)
        labels[1, 4:] = labels[-2:, last:] = -100
        right = cross_entropy(alone(tokens).flatten(0, 1), labels.flatten())
        before = [parameter.detach().clone() for parameter in model.parameters()]
        loss = call(answer, model, gpus, tokens, labels.clone())
        case = "On a small Llama with values" + ("" if last else ", where the last GPU has no label that counts")
        _require_kept(model, before, case)
        require(isinstance(loss, Tensor), f"{case}, you return {show(loss)}. Return the loss, a tensor.")
        require(loss.numel() == 1, f"{case}, the shape of the loss is {tuple(loss.shape)}. Return one number.")
        require(not loss.isnan().any(), f"{case}, the loss is nan.")
        value = f"{case}, the loss is {loss.item():.4f}, and one GPU's is {right.item():.4f}."
        require(abs(loss.item() / right.item() - 1) < 1e-3, value, "What is the mean over?")
        pairs = zip(model.named_parameters(), alone.parameters(), strict=True)
        leaves = {f"`{name}`": (parameter, same) for (name, parameter), same in pairs}
        why = "Does every label count the same in it?"
        compare.gradients(loss, right, leaves, why, f"{case}, the loss is right, but ")


def _score(loss_function, gpus: list[torch.device]) -> Score:
    gc.collect()
    torch.cuda.empty_cache()
    model = _llama(gpus[0])
    tokens, labels = random_tokens(48, LENGTH, LLAMA_1B["vocabulary"])

    def step() -> None:
        model.zero_grad()
        given(loss_function(model, gpus, tokens, labels), loss_function).backward()

    try:
        score = measured(step, gpus)
    except torch.OutOfMemoryError:
        return Score(None, None)
    for name, parameter in model.named_parameters():
        none = f"With 48 sequences, `{name}` gets no gradient, as it did on the small Llama."
        require(parameter.grad is not None, none)
    return score
