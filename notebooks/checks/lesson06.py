"""Checks of lesson 06, out of memory: they run the learner's loops and measure what these take and leave behind."""

import copy
import functools
import gc
import random
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear_cross_entropy

from helpers.measure import GiB, MiB
from helpers.models import LLAMA_1B, Llama
from notebooks.checks import compare
from notebooks.checks.core import NotYet, call, exercise, require, show
from notebooks.checks.gpus import AGAIN, need_gpus
from notebooks.checks.par import Score, compare_with_par, measured

WIDTH, BATCH = 512, 512
SLACK = 1.0 * MiB  # for losses, counters and the rounding of the allocator

Batches = list[tuple[Tensor, Tensor]]


def _gpu() -> torch.device:
    """The current GPU, with values, and free of what earlier cells left in cycles."""
    need_gpus(1, values=True)
    gc.collect()
    return torch.device("cuda", torch.cuda.current_device())


def _net(gpu: torch.device, outputs: int = 10, inputs: int = 64, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)]
    return nn.Sequential(*layers).to(gpu)


def _batches(count: int = 6, batch: int = BATCH, inputs: int = 64) -> Batches:
    torch.manual_seed(1)
    x, y = torch.randn(count, batch, inputs), torch.randint(10, (count, batch))
    return list(zip(x, y, strict=True))


def _measured(run: Callable[[], object]) -> tuple[object, int, int]:
    """What `run()` returned, and the bytes that the GPU held more at the peak and in the end, the result among them."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = _with_gradients_afterwards(run)
    return result, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


def _with_gradients_afterwards(run: Callable[[], object]) -> object:
    """What `run()` returned. Whether PyTorch builds graphs must be afterwards as before, and is."""
    before = torch.is_grad_enabled()
    try:
        result = run()
        builds_graphs = torch.is_grad_enabled() or not before
    finally:
        torch.set_grad_enabled(before)
    what = (
        "Your function leaves gradients switched off for the whole program, so that no model can be trained any more."
    )
    require(builds_graphs, what, "Switch them off in a block: `with torch.no_grad():`.")
    return result


def _untouched(net: nn.Module, batches: Batches) -> Callable[[], None]:
    """A function that refuses changes since this call: of the weights, of the model's modes, and of the batches."""
    given = [tensor.clone() for pair in batches for tensor in pair]
    weights = [parameter.detach().cpu().clone() for parameter in net.parameters()]

    def require_it() -> None:
        now = [tensor for pair in batches for tensor in pair]
        same = len(now) == len(given) and all(map(torch.equal, now, given))
        require(same, "Your function changes the images and labels that it gets.", "Later code still needs them.")
        same = all(map(torch.equal, (parameter.detach().cpu() for parameter in net.parameters()), weights))
        require(same, "Your function changes the weights of the model.", "Leave the model as it is.")
        trainable = all(parameter.requires_grad for parameter in net.parameters())
        require(trainable, "The model has changed: its parameters need requires_grad=True for training.")
        what = "Your function leaves the model in evaluation mode, where dropout and batch normalization do not train."
        require(all(module.training for module in net.modules()), what, "Call `model.train()` at the end.")

    return require_it


def _require_small(peak: float, most: float, left: float, kept: float, why: str) -> None:
    """At most `most` bytes more at the peak, and at most `kept` afterwards."""
    for does, found, allowed in (("takes", peak, most), ("leaves behind", left, kept)):
        what = f"The results are right, but your function {does} {found / MiB:,.1f} MiB"
        when = " at the peak" if found is peak else ""
        require(found <= allowed, f"{what}{when}, and {allowed / MiB:,.1f} MiB are allowed.", why)


@exercise
def validation_loss(answer):
    """Exercise 1: `answer(net, batches)` gives the mean loss as a number, in the memory of a batch without a graph."""
    gpu = _gpu()
    net, batches = _net(gpu), _batches()

    @torch.no_grad()
    def validate(batches: Batches) -> float:
        return sum(cross_entropy(net(x.to(gpu)), y.to(gpu)).item() for x, y in batches) / len(batches)

    right = validate(batches)  # first: PyTorch before 2.15 keeps cuBLAS's workspace from then on
    _, one, _ = _measured(lambda: validate(batches[:2]))
    outputs = []  # of each forward pass
    net[-1].register_forward_hook(
        lambda module, inputs, output: outputs.append((output.device, output.requires_grad, len(output)))
    )
    untouched = _untouched(net, batches)
    result, peak, left = _measured(lambda: call(answer, net, batches))
    require(not isinstance(result, Tensor), "The answer is a tensor, which may keep a graph. Return a number.")
    compare.number(result, right, rel=1e-4, mistakes={right * len(batches): "is the sum. Divide it by the batches."})
    require(len(outputs) > 0, f"The model did not run. Call it with each batch, on {gpu}.")
    for device, _, samples in outputs:
        require(device == gpu, f"The model ran on {device}. Run it on {gpu}.")
        require(samples <= BATCH, f"The model ran on {samples} images at once. Take one batch after the other.")
    why = f"A batch without a graph takes {one / MiB:.1f} MiB. What still refers to tensors of earlier batches?"
    _require_small(peak, one + SLACK, left, SLACK, why)
    graphs = any(graph for _, graph, _ in outputs)
    require(not graphs, "Each batch still builds a graph, and frees it afterwards. A validation needs no graph.")
    untouched()
    require(all(each.grad is None for each in net.parameters()), "Your function leaves gradients in the model.")
    return f"The peak is {peak / MiB:.1f} MiB, that of a single batch without a graph."


@exercise
def features(answer):
    """Going further, A: `answer(net, batches)` gives four outputs of each image, without keeping all of them."""
    gpu = _gpu()
    net, batches = _net(gpu, outputs=WIDTH), _batches()
    with torch.no_grad():
        right = torch.cat([net(x.to(gpu))[:, :4].clone() for x, _ in batches])
        _, one, _ = _measured(lambda: net(batches[0][0].to(gpu)))
    untouched = _untouched(net, batches)
    result, peak, left = _measured(lambda: call(answer, net, batches))
    kind = result.dtype if isinstance(result, Tensor) else right.dtype
    what = "rounds them" if kind.itemsize < right.dtype.itemsize else "is not what the model returns"
    require(kind == right.dtype, f"The features are {kind}, which {what}. Keep {right.dtype}.")
    compare.tensor(result, right)
    compare.device(result, gpu)
    require(not result.requires_grad, "The features still refer to a graph. Nothing will be trained with them.")
    why = f"The results themselves take {right.nbytes / MiB:.2f} MiB. Which larger tensors stay alive with them?"
    _require_small(peak, one + BATCH * WIDTH * 4 + 2 * right.nbytes + SLACK, left, right.nbytes + SLACK, why)
    untouched()
    return f"{right.nbytes / MiB:.2f} MiB stay, and the peak is {peak / MiB:.1f} MiB."


@exercise
def halve_until_it_fits(answer):
    """Exercise 2: `answer(step, batch)` gives the largest of batch, batch // 2, ... that fits, with all memory back."""
    gpu = _gpu()
    _require_search(answer, gpu, [400, 200, 100])
    start, halvings = random.randint(150, 999), random.randint(1, 4)
    _require_search(answer, gpu, [start >> times for times in range(halvings + 1)])
    _require_passed_on(answer)
    return "Each try began on an empty GPU."


def _require_search(answer: Callable, gpu: torch.device, expected: list[int]) -> None:
    """`answer` must try the batches `expected`, of which only the last fits, and leave nothing behind."""
    torch.cuda.empty_cache()
    room = torch.cuda.mem_get_info(gpu)[0]
    empty = torch.cuda.memory_allocated()
    tried, found = [], []  # each batch, and the bytes that were on the GPU when its step began

    def step(batch: int) -> None:
        tried.append(batch)
        found.append(torch.cuda.memory_allocated() - empty)
        pieces = []  # a variable of its own, which an error keeps
        share = 0.3 * batch / expected[-1]
        for each in (0.05, share, share, share) if batch else ():
            pieces.append(torch.empty(int(each * room), dtype=torch.uint8, device=gpu))

    result, peak, left = _measured(lambda: call(answer, step, expected[0]))
    what = f"Your function tried {', '.join(map(str, tried[:6]))} and returned {show(result)}."
    require(result in tried, what, "Return the batch that ran.")
    halves = f"It began with a batch of {expected[0]}. Each try should be half of the one before, rounded down."
    require(tried[: len(expected)] == expected, what, halves)
    why = "What still refers to the tensors of the steps that failed?"
    require(result == expected[-1], what, f"A batch of {expected[-1]} fits on an empty GPU. {why}")
    for batch, size in zip(tried, found, strict=True):
        full = f"When step({batch}) began, {size / MiB:,.0f} MiB of a step that failed were still on the GPU."
        require(size <= SLACK, full, "Inside `except`, the error keeps them. Retry after that block.")
    _require_small(peak, room, left, SLACK, why)


def _require_passed_on(answer: Callable) -> None:
    """An error that has nothing to do with memory must end the search."""
    text = "The labels have the wrong shape."
    tried = []

    def broken(batch: int) -> None:
        tried.append(batch)
        if len(tried) < 4:
            raise RuntimeError(text)

    try:
        answer(broken, 400)
    except Exception as error:  # noqa: BLE001 - the same error, or another that was raised because of it
        if text not in f"{error} {error.__context__}":
            raise
        return
    what = f'When step(400) raised RuntimeError("{text}"), your function hid it.'
    raise NotYet(what, "Catch only torch.OutOfMemoryError: a smaller batch cures no other error.")


@exercise
def accumulate(answer):
    """Exercise 3: `answer(net, x, y, pieces)` leaves the batch's gradients, with one piece on the GPU at a time."""
    gpu, pieces, width = _gpu(), 4, 256
    net, (x, y) = _net(gpu, inputs=width, width=width), _batches(1, 6403, width)[0]
    small = x[:10].clone(), y[:10].clone()  # in pieces of 3, 3, 3 and 1
    few, labels = (each.to(gpu) for each in small)
    loss = cross_entropy(net(few), labels).item()
    untouched = _untouched(net, [small])
    result = _with_gradients_afterwards(lambda: call(answer, net, *small, pieces))
    compare.number(result, loss, rel=1e-4, case="The loss of ")
    graph = isinstance(result, Tensor) and result.requires_grad
    require(not graph, "The loss that your function returns still refers to a graph. Return a number.")
    compare.device(net, gpu)
    untouched()
    compare.accumulated(net, list(zip(few.chunk(pieces), labels.chunk(pieces), strict=True)))
    net.zero_grad()
    _, own, _ = _measured(lambda: _accumulate(net, x, y, pieces))
    net.zero_grad()
    ran = []  # for each forward pass the device, and the bytes of the tensor that its input is a part of
    hook = net[0].register_forward_hook(
        lambda module, inputs, output: ran.append((output.device, inputs[0].untyped_storage().nbytes()))
    )
    untouched = _untouched(net, [(x, y)])
    _, peak, left = _measured(lambda: call(answer, net, x, y, pieces))
    hook.remove()
    require(len(ran) > 0, f"The model did not run. Call it with each piece, on {gpu}.")
    for device, size in ran:
        require(device == gpu, f"The model ran on {device}. Run it on {gpu}, piece by piece.")
        on_gpu = f"Your function moves all of x, {size / MiB:.1f} MiB, to the GPU at once."
        require(size < x.nbytes, on_gpu, "Move each piece when it is its turn.")
    part = x.nbytes / pieces  # a name may still refer to the piece before
    why = "More than one piece is on the GPU at the same time: its samples, or its graph."
    why += " Which call frees the graph of a piece?"
    size = sum(parameter.nbytes for parameter in net.parameters())  # of a second copy of the gradients
    _require_small(peak, own + part + size + SLACK, left, size + 2 * part + SLACK, why)
    untouched()
    return f"The peak is {peak / MiB:.1f} MiB, that of one piece of {pieces}."


def _accumulate(net: nn.Module, x: Tensor, y: Tensor, pieces: int) -> None:
    gpu = next(net.parameters()).device
    for part, labels in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
        (cross_entropy(net(part.to(gpu)), labels.to(gpu), reduction="sum") / len(x)).backward()


@exercise
def train_with_drift(answer):
    """Going further, B: `answer(net, batches)` trains and returns averages, in memory that does not grow."""
    gpu = _gpu()
    batches, reference, net = _batches(8, 64), _net(gpu), _net(gpu)
    right, own_peak, own_left = _measured(lambda: _drift(reference, batches, gpu))
    result, peak, left = _measured(lambda: call(answer, net, batches))
    require(isinstance(result, list | tuple), f"{show(result)} is not a list. Return a list of averages.")
    require(len(result) == len(right), f"There are {len(result)} averages. Return one for each parameter.")
    for parameter, weight in zip(net.parameters(), reference.parameters(), strict=True):
        compare.tensor(parameter, weight, rel=1e-3, absolute=1e-5)
    for average, expected in zip(result, right, strict=True):
        compare.tensor(average, expected, rel=1e-3, absolute=1e-7)
        compare.device(average, gpu)
    size = sum(parameter.nbytes for parameter in net.parameters())
    why = "The memory grows with every batch. What do the averages, or a list, still refer to?"
    # Averages that are not made in place exist twice for a moment, with what they are made of.
    _require_small(peak, own_peak + 4 * size + SLACK, left, own_left + SLACK, why)
    return f"{left / MiB:.1f} MiB stay, gradients and averages, after any number of batches."


def _drift(net: nn.Module, batches: Batches, gpu: torch.device) -> list[Tensor]:
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    starts = [parameter.detach().clone() for parameter in net.parameters()]
    drift = [torch.zeros_like(start) for start in starts]
    for x, y in batches:
        sgd.zero_grad()
        cross_entropy(net(x.to(gpu)), y.to(gpu)).backward()
        sgd.step()
        for each, parameter, start in zip(drift, net.parameters(), starts, strict=True):
            each.lerp_((parameter.detach() - start).square(), 1 - 0.9)
    return drift


# Exercise 4: the parts of a budget, and where each comes from.
PARTS = {
    "parameters": "A float32 takes four bytes, and buffers count.",
    "gradients": "Each parameter has one gradient.",
    "optimizer": "How many numbers does Adam keep for each parameter?",
    "activations": "Add up what each layer keeps for backward, and the softmax of the logits, for the whole batch.",
    "workspaces": "cuBLAS takes 32 MiB on Hopper GPUs and 8 MiB on most others.",
    "context": "It depends on the GPU. Measure it: mem_get_info's total - free, without what PyTorch has reserved.",
}
OFF = 0.03  # how far off a guess may be


@exercise
def budget(make_net: Callable[[], nn.Module], batch: Tensor, answer: Mapping[str, float]):
    """Exercise 4: `answer`, MiB by part, must be within 3 % of the second step of `make_net()` under Adam on `batch`.

    Says of each part how far off it is, and holds the sum against the GPU at the step's peak.
    """
    need_gpus(1)
    require(isinstance(batch, Tensor), f"{show(batch)} is not a tensor. Give a batch of inputs for your model.")
    compare.names(answer, PARTS, "MiB")
    guesses = {name: compare.as_number(answer[name]) for name in PARTS}
    parts, peak = _measure_parts(make_net, batch, torch.device("cuda", torch.cuda.current_device()))
    ratios = {name: guesses[name] * MiB / max(parts[name], 1) for name in PARTS}
    wrong = [name for name in PARTS if abs(ratios[name] - 1) > OFF]
    if wrong:
        for unit, size in compare.UNITS.items():
            in_unit = all(abs(ratios[name] * size / MiB - 1) < 0.01 for name in wrong)
            require(
                not in_unit, f"The figures for {', '.join(wrong)} would be right in {unit}. 1 MiB is {MiB:,} bytes."
            )
        what = ", ".join(f"{name} {ratios[name]:.2f}" for name in wrong)
        why = f"Begin with the {wrong[0]}. {PARTS[wrong[0]]}"
        raise NotYet(f"Your figures, divided by the measured ones: {what}. 1 would be right.", why)
    found = ", ".join(f"{name} {parts[name] / MiB:,.1f} MiB ({round(100 * (ratios[name] - 1)):+d} %)" for name in PARTS)
    held = f"The GPU held {(peak + parts['context']) / MiB:,.1f} MiB at the peak"
    why = "because not all parts exist at the same time, and temporary buffers come on top"
    total = f"Your sum is {sum(guesses.values()):,.1f} MiB"
    return f"The measured parts, each with the error of your figure: {found}. {total}. {held}, {why}."


def _measure_parts(make_net: Callable[[], nn.Module], batch: Tensor, gpu: torch.device) -> tuple[dict[str, int], int]:
    """Bytes of each part in a second step, and the most that was allocated in it."""

    def requested() -> int:
        """Bytes that tensors asked for: their blocks are up to 1 MiB larger, as chance has it."""
        return torch.cuda.memory_stats(gpu)["requested_bytes.all.current"]

    torch._C._cuda_clearCublasWorkspaces()  # PyTorch before 2.15 keeps them from the first matrix multiplication on
    small = torch.zeros(16, 16, device=gpu)
    _, workspaces, _ = _measured(lambda: small @ small)
    free, total = torch.cuda.mem_get_info(gpu)
    context = total - free - torch.cuda.memory_reserved(gpu)  # and what other programs have taken
    found = {"workspaces": workspaces, "context": context}
    net = call(make_net)
    require(isinstance(net, nn.Module), f"{show(net)} is not a model. Give a function that returns an nn.Module.")
    net, x = net.to(gpu), batch.to(gpu)
    adam = torch.optim.Adam(net.parameters())
    for _ in range(2):
        adam.zero_grad()
        torch.cuda.reset_peak_memory_stats(gpu)
        before = requested()
        loss = net(x).float()
        labels = torch.zeros(len(x), dtype=torch.long, device=gpu)
        loss = cross_entropy(loss, labels) if loss.dim() == 2 else loss.mean()
        found["activations"] = requested() - before
        loss.backward()
        del loss
        adam.step()
    states = [each for state in adam.state.values() for each in state.values() if each.device == gpu]
    found["parameters"] = sum(each.nbytes for each in (*net.parameters(), *net.buffers()))
    found["gradients"] = sum(each.grad.nbytes for each in net.parameters() if each.grad is not None)
    found["optimizer"] = sum(each.nbytes for each in states)
    return found, torch.cuda.max_memory_allocated(gpu)


# ---- exercise 5 -----------------------------------------------------------------------------------------------------

SEQUENCES, LENGTH, STEPS = 4, 2048, 2


@exercise
def train(answer):
    """Exercise 5: `answer(net, batches)` trains as `_naive` does. Its score: the peak and the time of a step."""
    gpu = need_gpus(1, values=False)[0]
    capacity = torch.cuda.get_device_properties(gpu).total_memory
    asked = f"This GPU has {capacity / GiB:.1f} GiB, and the exercise asks for one of 24 GB."
    require(22 * GiB < capacity < 25 * GiB, asked, AGAIN)
    require(callable(answer), f"{show(answer)} cannot be called. Pass the function itself: its name without brackets.")
    _require_the_same_weights(answer)
    gc.collect()
    held = torch.cuda.memory_allocated(gpu)
    require(held < 64 * MiB, f"Your cells still hold {held / GiB:.1f} GiB on the GPU.", AGAIN)
    you = _score(answer, gpu)
    states = 4 * 2 * sum(parameter.numel() for parameter in _llama(torch.device("meta")).parameters())
    why = f"Weights, gradients and AdamW's state take {states / GiB:.1f} GiB. What takes the rest?"
    require(you.peak is not None, f"Your function runs out of memory on {capacity / GiB:.1f} GiB.", why)
    naive, par = _goals(torch.cuda.get_device_name(gpu))
    return compare_with_par("06 1.2 billion parameters on 24 GB", naive=naive, par=par, you=you)


def _require_the_same_weights(answer: Callable) -> None:
    """On the CPU in float64, the weights after three steps are those of `_naive`, up to rounding error."""
    torch.manual_seed(0)
    net = Llama(vocabulary=96, width=32, layers=2, heads=4, kv_heads=2, hidden=64, tied=True).double()
    twin, before = copy.deepcopy(net), copy.deepcopy(net)
    batches = [torch.randint(96, (5, 9)) for _ in range(3)]  # in 4 chunks: 2, 2 and 1 sequences
    _naive(twin, batches)
    _with_gradients_afterwards(lambda: answer(net, batches))
    pairs = list(zip(net.named_parameters(), twin.parameters(), before.parameters(), strict=True))
    changed = any(not torch.equal(parameter, start) for (_, parameter), _, start in pairs)
    require(changed, "The weights have not changed. Train the model that your function gets, and call step().")
    for (name, parameter), right, _ in pairs:
        what = f"After {len(batches)} steps on a small model, {name} is"
        compare.alike(parameter, right, what, "It should be what AdamW makes of the whole batches.", rel=1e-5)


def _llama(device: torch.device) -> Llama:
    with device:
        return Llama(**LLAMA_1B).bfloat16()


def _score(train: Callable, gpu: torch.device) -> Score:
    """The score of a step of `train` at the size of the exercise; Score(None, None) where it runs out of memory."""
    net = _llama(gpu)
    batches = [torch.zeros(SEQUENCES, LENGTH + 1, dtype=torch.long, device=gpu) for _ in range(STEPS)]
    backwards = Counter()  # for each parameter how often it got a gradient
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: backwards.update([id(parameter)]))
    ran, seen = set(), Counter()
    for block in net.blocks:
        block.register_forward_hook(lambda module, inputs, output: ran.add(output.device))
    net.embedding.register_forward_hook(
        lambda module, inputs, output: seen.update(tokens=inputs[0].numel() if torch.is_grad_enabled() else 0)
    )
    try:
        score = measured(lambda: train(net, batches), gpu, steps=1)
    except torch.OutOfMemoryError:
        return Score(None, None)
    finally:
        for parameter in net.parameters():  # a hook that refers to its parameter is a cycle that gc does not see
            parameter._post_accumulate_grad_hooks.clear()
    require(ran == {gpu}, f"The blocks ran on {', '.join(map(str, ran)) or 'no GPU'}. Run all of them on {gpu}.")
    compare.device(net, gpu)
    every = STEPS * SEQUENCES * LENGTH
    short = f"In {STEPS} steps, the large model was trained on {seen['tokens']:,} of {every:,} tokens."
    require(seen["tokens"] >= every, short, "Train it on whole batches.")
    kinds = {parameter.dtype for parameter in net.parameters()}
    require(kinds == {torch.bfloat16}, f"The weights are {', '.join(map(str, kinds))} now. Keep torch.bfloat16.")
    fewest = min(backwards[id(parameter)] for parameter in net.parameters())
    require(fewest >= STEPS, f"In {STEPS} steps, some weights of the large model got a gradient {fewest} times.")
    return Score(score.peak, score.seconds / STEPS)


@functools.cache
def _goals(kind: str) -> tuple[Score, Score]:
    """The scores of `_naive` and of the folded solution on this kind of GPU."""
    gpu = torch.device("cuda", 0)
    scores = []
    for train in (_naive, _par):
        scores.append(_score(train, gpu))
        gc.collect()
        torch.cuda.empty_cache()
    return scores[0], scores[1]


def _naive(net: Llama, batches: list[Tensor]) -> None:
    adamw = torch.optim.AdamW(net.parameters(), lr=0.001, weight_decay=0.1)
    for tokens in batches:
        adamw.zero_grad()
        cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        adamw.step()


def _par(net: Llama, batches: list[Tensor]) -> None:
    net.recompute = True
    adamw = torch.optim.AdamW(net.parameters(), lr=0.001, weight_decay=0.1, fused=True)
    for tokens in batches:
        adamw.zero_grad()
        _chunked_loss(net, tokens).backward()
        adamw.step()


def _chunked_loss(net: Llama, tokens: Tensor) -> Tensor:
    features = net.features(tokens[:, :-1]).flatten(0, 1)
    chunks = nn.LinearCrossEntropyOptions()
    return linear_cross_entropy(features, net.output.weight, tokens[:, 1:].flatten(), options=chunks)
