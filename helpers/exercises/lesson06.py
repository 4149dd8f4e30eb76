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


def _net(gpu: torch.device, outputs: int = 10) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs)]
    return nn.Sequential(*layers).to(gpu)


def _batches(count: int = 12, batch: int = BATCH) -> Batches:
    torch.manual_seed(1)
    x, y = torch.randn(count, batch, 64), torch.randint(10, (count, batch))
    return list(zip(x, y, strict=True))


def _measured(run: Callable[[], object]) -> tuple[object, int, int]:
    """What `run()` returned, and the bytes that the GPU held more at the peak and in the end, `result` among them."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    return result, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


def _require_small(what: str, found: float, target: float, because: str) -> None:
    sizes = f"{found / MiB:,.1f} MiB, and {target / MiB:,.1f} MiB are the target"
    require(found <= target, f"The results are right, but {what} {sizes}.", because)


@exercise
def validation_loss(answer):
    """Exercise 1: `answer(net, batches)` gives the mean loss as a number, in the memory of a batch without a graph."""
    gpu = _gpu()
    net, batches = _net(gpu), _batches()

    def validate(batches: Batches) -> float:
        with torch.no_grad():
            return sum(cross_entropy(net(x.to(gpu)), y.to(gpu)).item() for x, y in batches) / len(batches)

    right = validate(batches)  # first: PyTorch before 2.15 keeps cuBLAS's workspace from then on
    _, one, _ = _measured(lambda: validate(batches[:2]))
    result, peak, left = _measured(lambda: call(answer, net, batches))
    require(not isinstance(result, Tensor), "A tensor came back.", "A number is asked for: a tensor may keep a graph.")
    compare.number(result, right, rel=1e-4, mistakes={right * len(batches): "is the sum: divide by the batches."})
    several = f"That is {peak / one:.1f} times one batch's: are batches, or layers, kept for a backward()?"
    _require_small("the peak is", peak, one + SLACK, several)
    why = "Something outside of the function refers to a tensor of it."
    _require_small("your function leaves behind", left, SLACK, why)
    require(net[0].weight.grad is None, "There are gradients now.", "A validation has no backward().")
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
    require(not result.requires_grad, "The features have a graph.", "`torch.no_grad()` or `detach()` is missing.")
    why = f"The results themselves take {right.nbytes / MiB:.2f} MiB: what else is alive with them?"
    outputs = BATCH * WIDTH * 4
    _require_small("the peak is", peak, one + outputs + 2 * right.nbytes + SLACK, why)
    _require_small("your function leaves behind", left, right.nbytes + SLACK, why)
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
        require(batch > 0, "The batch came down to 0.", "Nothing fitted: what died before was still on the GPU.")
        pieces = []  # a variable of its own, which an error keeps
        for _ in range(3):
            pieces.append(torch.empty(int(room * 0.3 * batch / 100) + 1, dtype=torch.uint8, device=gpu))

    result, _, left = _measured(lambda: call(answer, step, 400))
    what = f"it ended at {show(result)} and tried {tried[:6]}"
    require(result in tried, f"{what}.", "The batch that ran is asked for.")
    require(tried[:3] == [400, 200, 100], f"{what}.", "Each try should be half of the one before.")
    why = "100 fits on an empty GPU: inside `except` the error still keeps the variables of the step that died"
    require(result == 100, f"{what}.", f"{why}.")
    why = "Something keeps the error, or a tensor of the step."
    _require_small("your function leaves behind", left, SLACK, why)
    return "Each try began on an empty GPU."


@exercise
def accumulate(answer):
    """Exercise 4: `answer(net, x, y, pieces)` leaves the batch's gradients, with one piece on the GPU at a time."""
    gpu, pieces = _gpu(), 4
    net, (x, y) = _net(gpu), _batches(1, 3003)[0]
    right = cross_entropy(net(x.to(gpu)), y.to(gpu))
    expected, right = torch.autograd.grad(right, list(net.parameters())), right.item()
    piece, labels = x.chunk(pieces)[0], y.chunk(pieces)[0]
    _, one, _ = _measured(lambda: cross_entropy(net(piece.to(gpu)), labels.to(gpu)).backward())
    net.zero_grad()
    result, peak, _ = _measured(lambda: call(answer, net, x, y, pieces))
    compare.number(result, right, rel=1e-4, case="As the loss, ")
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        require(
            parameter.grad is not None,
            "A parameter has no gradient.",
            "Call `backward()`, and do not clear the gradients afterwards.",
        )
        compare.tensor(parameter.grad, gradient, rel=1e-3)
    # In a later piece the sum of the gradients is there while the new ones are made.
    most = one + max(parameter.nbytes for parameter in net.parameters()) + SLACK
    _require_small("the peak is", peak, most, "All pieces are on the GPU at once: until when does each graph live?")
    return f"The peak is {peak / MiB:.1f} MiB, that of one piece of {pieces}."


@exercise
def train_with_drift(answer):
    """Exercise 5: `answer(net, batches)` trains and returns averages, in memory that does not grow with the batches."""
    gpu = _gpu()
    batches, reference, net = _batches(6, 64), _net(gpu), _net(gpu)
    right, own_peak, own_left = _measured(lambda: _drift(reference, batches, gpu))
    result, peak, left = _measured(lambda: call(answer, net, batches))
    require(isinstance(result, list | tuple), f"{show(result)} is not a list.", "A list of averages is asked for.")
    require(len(result) == len(right), f"There are {len(result)} averages.", f"{len(right)} parameters have one each.")
    for parameter, weight in zip(net.parameters(), reference.parameters(), strict=True):
        compare.tensor(parameter, weight, rel=1e-3, absolute=1e-5)
    for average, expected in zip(result, right, strict=True):
        compare.tensor(average, expected, rel=1e-3, absolute=1e-7)
    size = sum(parameter.nbytes for parameter in net.parameters())
    # Averages that are not made in place exist twice for a moment, with what they are made of.
    why = "It grows with every batch: what do the averages, or a list, still refer to?"
    _require_small("the peak is", peak, own_peak + 4 * size + SLACK, why)
    why = f"That is {left / size:.1f} times the parameters: what do the averages still refer to?"
    _require_small("your function leaves behind", left, own_left + SLACK, why)
    return f"{left / MiB:.1f} MiB stay: gradients and averages, after any number of batches."


def _drift(net: nn.Module, batches: Batches, gpu: torch.device, decay: float = 0.9) -> list[Tensor]:
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    starts = [parameter.detach().clone() for parameter in net.parameters()]
    drift = [torch.zeros_like(start) for start in starts]
    for x, y in batches:
        sgd.zero_grad()
        cross_entropy(net(x.to(gpu)), y.to(gpu)).backward()
        sgd.step()
        for each, parameter, start in zip(drift, net.parameters(), starts, strict=True):
            each.lerp_((parameter.detach() - start).square(), 1 - decay)
    return drift


# Exercise 6: the parts of a budget, and why each is as large as it is.
PARTS = {
    "parameters": "they are four bytes for each float32, buffers included",
    "gradients": "there is one number for each parameter, of four bytes",
    "optimizer": "Adam keeps two numbers for each parameter, of four bytes each",
    "activations": "it is what each layer keeps for backward, and the logits' softmax, times the batch",
    "workspaces": "cuBLAS takes 32 MiB on Hopper GPUs and 8 MiB on most others",
    "context": "it is what is taken on the GPU, but not by PyTorch: mem_get_info's total - free - memory_reserved",
}
OFF = 0.1  # how far off a guess may be


@exercise
def budget(make_net: Callable[[], nn.Module], batch: Tensor, answer: Mapping[str, float]):
    """Exercise 6: `answer`, MiB by part, must be within 10 % of the second step of `make_net()` under Adam on `batch`.

    Says of each part how far off it is, and holds the sum against the GPU at the step's peak.
    """
    need_gpus(1)
    require(
        isinstance(batch, Tensor), f"{show(batch)} is not a tensor.", "One batch of inputs of your net is asked for."
    )
    compare.names(answer, PARTS, "MiB")
    guesses = {name: compare.as_number(answer[name]) for name in PARTS}
    parts, peak = _measure_parts(make_net, batch, torch.device("cuda", torch.cuda.current_device()))
    ratios = {name: guesses[name] * MiB / max(parts[name], 1) for name in PARTS}
    wrong = [name for name in PARTS if abs(ratios[name] - 1) > OFF]
    if wrong:
        what = "; ".join(f"{name} {ratios[name]:.2f} times what was measured" for name in wrong)
        raise NotYet(f"{what}.", f"Of the {wrong[0]}: {PARTS[wrong[0]]}.")
    percent = {name: round(100 * (ratios[name] - 1)) for name in PARTS}
    off = {name: f" ({percent[name]:+d} %)" if percent[name] else "" for name in PARTS}
    found = ", ".join(f"{name} {parts[name] / MiB:,.1f} MiB{off[name]}" for name in PARTS)
    held = f"{(peak + parts['context']) / MiB:,.1f} MiB were taken at the peak"
    return f"Measured, and how far off you were: {found}; {sum(guesses.values()):,.1f} MiB together, and {held}."


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
    require(
        isinstance(net, nn.Module), f"{show(net)} is not a net.", "A function that makes an nn.Module is asked for."
    )
    net, x = net.to(gpu), batch.to(gpu)
    adam = torch.optim.Adam(net.parameters())
    for _ in range(2):
        adam.zero_grad()
        torch.cuda.reset_peak_memory_stats(gpu)
        before = requested()
        loss = net(x)
        if loss.dim() == 2:
            loss = cross_entropy(loss, torch.zeros(len(loss), dtype=torch.long, device=gpu))
        loss = loss.float().mean()
        found["activations"] = requested() - before
        loss.backward()
        del loss
        adam.step()
    states = [each for state in adam.state.values() for each in state.values() if each.device == gpu]
    found["parameters"] = sum(each.nbytes for each in (*net.parameters(), *net.buffers()))
    found["gradients"] = sum(each.grad.nbytes for each in net.parameters() if each.grad is not None)
    found["optimizer"] = sum(each.nbytes for each in states)
    return found, torch.cuda.max_memory_allocated(gpu)
