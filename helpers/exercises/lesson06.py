"""Checks of lesson 06, out of memory: they run the learner's loops and measure what these take and leave behind."""

import gc
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from helpers.exercises import compare
from helpers.exercises.core import NotYet, call, exercise, require, show
from helpers.exercises.gpus import need_gpus
from helpers.measure import MiB

WIDTH, BATCH = 1024, 256
SLACK = 1.0 * MiB  # for losses, counters and the rounding of the allocator

Batches = list[tuple[Tensor, Tensor]]


def _gpu() -> torch.device:
    """The current GPU, with values, and free of what earlier cells left in cycles."""
    need_gpus(1, values=True)
    gc.collect()
    return torch.device("cuda", torch.cuda.current_device())


def _net(gpu: torch.device, outputs: int = 10) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs)]
    return nn.Sequential(*layers).to(gpu)


def _batches(count: int = 6, batch: int = BATCH) -> Batches:
    torch.manual_seed(1)
    x, y = torch.randn(count, batch, 64), torch.randint(10, (count, batch))
    return list(zip(x, y, strict=True))


def _measured(run: Callable[[], object]) -> tuple[object, int, int]:
    """What `run()` returned, and the bytes that the GPU held more at the peak and in the end, the result among them."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    return result, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


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
    outputs = []  # for each batch the device, and whether there is a graph
    net[-1].register_forward_hook(lambda module, inputs, output: outputs.append((output.device, output.requires_grad)))
    result, peak, left = _measured(lambda: call(answer, net, batches))
    require(not isinstance(result, Tensor), "The answer is a tensor, which may keep a graph. Return a number.")
    compare.number(result, right, rel=1e-4, mistakes={right * len(batches): "is the sum. Divide it by the batches."})
    for device, _ in outputs:
        require(device == gpu, f"The model ran on {device}. Run it on {gpu}.")
    why = f"A batch without a graph takes {one / MiB:.1f} MiB. What still refers to tensors of earlier batches?"
    _require_small(peak, one + SLACK, left, SLACK, why)
    graphs = any(graph for _, graph in outputs)
    require(not graphs, "Each batch still builds a graph, and frees it afterwards. A validation needs no graph.")
    kept = all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())
    require(kept, "The model has changed: its parameters need requires_grad=True for training, and no gradients.")
    return f"The peak is {peak / MiB:.1f} MiB, that of a single batch without a graph."


@exercise
def features(answer):
    """Exercise 2: `answer(net, batches)` gives the first four outputs of each image, without keeping all of them."""
    gpu = _gpu()
    net, batches = _net(gpu, outputs=WIDTH), _batches()
    with torch.no_grad():
        right = torch.cat([net(x.to(gpu))[:, :4].clone() for x, _ in batches])
        _, one, _ = _measured(lambda: net(batches[0][0].to(gpu)))
    result, peak, left = _measured(lambda: call(answer, net, batches))
    compare.tensor(result, right)
    compare.device(result, gpu)
    require(not result.requires_grad, "The features still refer to a graph. Nothing will be trained with them.")
    why = f"The results themselves take {right.nbytes / MiB:.2f} MiB. Which larger tensors stay alive with them?"
    _require_small(peak, one + BATCH * WIDTH * 4 + 2 * right.nbytes + SLACK, left, right.nbytes + SLACK, why)
    return f"{right.nbytes / MiB:.2f} MiB stay, and the peak is {peak / MiB:.1f} MiB."


@exercise
def halve_until_it_fits(answer):
    """Exercise 3: `answer(step, batch)` gives the largest of batch, batch // 2, ... that fits, with all memory back."""
    gpu = _gpu()
    torch.cuda.empty_cache()
    room = torch.cuda.mem_get_info(gpu)[0]
    tried = []

    def step(batch: int) -> None:
        tried.append(batch)
        pieces = []  # a variable of its own, which an error keeps
        for _ in range(3 if batch else 0):
            pieces.append(torch.empty(int(room * 0.3 * batch / 100) + 1, dtype=torch.uint8, device=gpu))

    result, peak, left = _measured(lambda: call(answer, step, 400))
    what = f"Your function tried {', '.join(map(str, tried[:6]))} and returned {show(result)}."
    require(result in tried, what, "Return the batch that ran.")
    require(tried[:3] == [400, 200, 100], what, "Each try should be half of the one before.")
    why = "What still refers to the tensors of the steps that failed?"
    require(result == 100, what, f"A batch of 100 fits on an empty GPU. {why}")
    _require_small(peak, room, left, SLACK, why)
    return "Each try began on an empty GPU."


@exercise
def accumulate(answer):
    """Exercise 4: `answer(net, x, y, pieces)` leaves the batch's gradients, with one piece on the GPU at a time."""
    gpu, pieces = _gpu(), 4
    net, (x, y) = _net(gpu), _batches(1, 3003)[0]
    few, labels = x[:10].to(gpu), y[:10].to(gpu)  # in pieces of 3, 3, 3 and 1
    loss = cross_entropy(net(few), labels).item()
    compare.number(call(answer, net, few.cpu(), labels.cpu(), pieces), loss, rel=1e-4, case="The loss of ")
    compare.accumulated(net, list(zip(few.chunk(pieces), labels.chunk(pieces), strict=True)))
    net.zero_grad()
    piece, labels = x.chunk(pieces)[0], y.chunk(pieces)[0]
    _, one, _ = _measured(lambda: cross_entropy(net(piece.to(gpu)), labels.to(gpu)).backward())
    net.zero_grad()
    _, peak, left = _measured(lambda: call(answer, net, x, y, pieces))
    # In a later piece the sum of the gradients is there while the new ones are made.
    most = one + max(parameter.nbytes for parameter in net.parameters()) + SLACK
    why = "The graphs of all pieces exist at the same time. Which call frees the graph of a piece?"
    _require_small(peak, most, left, most, why)
    return f"The peak is {peak / MiB:.1f} MiB, that of one piece of {pieces}."


@exercise
def train_with_drift(answer):
    """Exercise 5: `answer(net, batches)` trains and returns averages, in memory that does not grow with the batches."""
    gpu = _gpu()
    batches, reference, net = _batches(6, 64), _net(gpu), _net(gpu)
    right, own_peak, own_left = _measured(lambda: _drift(reference, batches, gpu))
    result, peak, left = _measured(lambda: call(answer, net, batches))
    require(isinstance(result, list | tuple), f"{show(result)} is not a list. Return a list of averages.")
    require(len(result) == len(right), f"There are {len(result)} averages. Return one for each parameter.")
    for parameter, weight in zip(net.parameters(), reference.parameters(), strict=True):
        compare.tensor(parameter, weight, rel=1e-3, absolute=1e-5)
    for average, expected in zip(result, right, strict=True):
        compare.tensor(average, expected, rel=1e-3, absolute=1e-7)
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


# Exercise 6: the parts of a budget, and where each comes from.
PARTS = {
    "parameters": "A float32 takes four bytes, and buffers count.",
    "gradients": "Each parameter has one gradient.",
    "optimizer": "How many numbers does Adam keep for each parameter?",
    "activations": "Add up what each layer keeps for backward, and the softmax of the logits, for the whole batch.",
    "workspaces": "cuBLAS takes 32 MiB on Hopper GPUs and 8 MiB on most others.",
    "context": "It depends on the GPU. Measure it: mem_get_info's total - free, without what PyTorch has reserved.",
}
OFF = 0.1  # how far off a guess may be


@exercise
def budget(make_net: Callable[[], nn.Module], batch: Tensor, answer: Mapping[str, float]):
    """Exercise 6: `answer`, MiB by part, must be within 10 % of the second step of `make_net()` under Adam on `batch`.

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
