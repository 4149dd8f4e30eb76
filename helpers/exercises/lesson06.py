"""Checks of lesson 06, out of memory: they run the learner's loops and measure what these take and leave behind."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from helpers.exercises import compare
from helpers.exercises.budget import budget
from helpers.exercises.core import call, exercise, require, show
from helpers.exercises.measuring import SLACK, Measured, gpu_with_values, require_left, require_peak, require_small
from helpers.measure import MiB

__all__ = [
    "accumulate",
    "budget",
    "features",
    "halve_until_it_fits",
    "train_with_drift",
    "validation_loss",
]

WIDTH, BATCH, COUNT, PIECES = 1024, 256, 12, 4
Batches = Sequence[tuple[Tensor, Tensor]]


# -------------------------------------------------------------------------------------- what all of them need


def _net(gpu: torch.device, outputs: int = 10) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs)]
    return nn.Sequential(*layers).to(gpu)


def _batches(count: int = COUNT, batch: int = BATCH) -> Batches:
    numbers = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(batch, 64, generator=numbers), torch.randint(10, (batch,), generator=numbers))
        for _ in range(count)
    ]
    return made


# ---------------------------------------------------------------------------------------------- 1: a validation


def _right_loss(net: nn.Module, batches: Batches, gpu: torch.device) -> float:
    with torch.no_grad():
        return sum(cross_entropy(net(x.to(gpu)), y.to(gpu)).item() for x, y in batches) / len(batches)


@exercise
def validation_loss(answer):
    """`answer(net, batches)` must return the mean loss as a number, in the memory of one batch without a graph."""
    gpu = gpu_with_values()
    net, batches = _net(gpu), _batches()
    right = _right_loss(net, batches, gpu)  # first: PyTorch before 2.15 keeps cuBLAS's workspace from then on
    one = Measured(gpu, lambda: _right_loss(net, batches[:2], gpu))
    found = Measured(gpu, lambda: call(answer, net, batches))
    result, found.result = found.result, None
    require(not isinstance(result, Tensor), "a tensor came back", "a number is asked for: a tensor may keep a graph")
    compare.number(result, right, rel=1e-4, mistakes={right * len(batches): "that is the sum: divide by the batches"})
    several = f"that is {found.peak / one.peak:.1f} times one batch's: are batches, or layers, kept for a backward()?"
    require_peak(found, one.peak + SLACK, several)
    require_left(found, SLACK, "something outside of the function refers to a tensor of it")
    require(net[0].weight.grad is None, "there are gradients now", "a validation has no backward()")
    return f"the peak is {found.peak / MiB:.1f} MiB, that of a single batch without a graph"


# ------------------------------------------------------------------------------------------------- 2: the views


@exercise
def features(answer):
    """`answer(net, batches)` must return the first four outputs of each image, without keeping all of them."""
    gpu = gpu_with_values()
    net, batches = _net(gpu, outputs=WIDTH), _batches()
    with torch.no_grad():
        right = torch.cat([net(x.to(gpu))[:, :4].clone() for x, _ in batches])
    one = Measured(gpu, lambda: _without_graph(net, batches[0][0].to(gpu)))
    found = Measured(gpu, lambda: call(answer, net, batches))
    result = found.result
    compare.tensor(result, right)
    compare.device(result, gpu)
    require(not result.requires_grad, "the features have a graph", "torch.no_grad() or detach() is missing")
    outputs = BATCH * WIDTH * 4
    why = f"the results themselves take {right.nbytes / MiB:.2f} MiB: what else is alive with them?"
    require_peak(found, one.peak + outputs + 2 * right.nbytes + SLACK, why)
    require_small("the features keep", result.untyped_storage().nbytes(), right.nbytes + SLACK, why)
    require_left(
        found, right.nbytes + SLACK, "more than the features stays: does a list outside of the function keep some?"
    )
    return f"{right.nbytes / MiB:.2f} MiB stay, and the peak is {found.peak / MiB:.1f} MiB"


def _without_graph(net: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        net(x)


# ------------------------------------------------------------------------------------------------- 3: the error


@exercise
def halve_until_it_fits(answer):
    """`answer(step, batch)` must return the largest of batch, batch // 2, ... that fits, with all memory back."""
    gpu = gpu_with_values()
    torch.cuda.empty_cache()
    room = torch.cuda.mem_get_info(gpu)[0]
    tried = []

    def step(batch: int) -> None:
        tried.append(batch)
        require(batch > 0, "the batch came down to 0", "nothing fitted: what died before was still on the GPU")
        pieces = []  # a variable of its own, which an error keeps
        for _ in range(3):
            pieces.append(torch.empty(int(room * 0.3 * batch / 100) + 1, dtype=torch.uint8, device=gpu))

    found = Measured(gpu, lambda: call(answer, step, 400))
    what = f"it ended at {show(found.result)} and tried {tried[:6]}"
    require(found.result in tried, what, "the batch that ran is asked for")
    why = "100 fits on an empty GPU: inside `except` the error still keeps the variables of the step that died"
    require(tried[:3] == [400, 200, 100], what, "each try should be half of the one before")
    require(found.result == 100, what, why)
    require_left(found, SLACK, "something keeps the error, or a tensor of the step")
    return "each try began on an empty GPU"


# ------------------------------------------------------------------------------------------ 4: the accumulation


@exercise
def accumulate(answer):
    """`answer(net, x, y, pieces)` must leave the whole batch's gradients, with one piece on the GPU at a time."""
    gpu = gpu_with_values()
    (x, y), piece = _batches(1, 3003)[0], -(-3003 // PIECES)
    net = _net(gpu)
    right = cross_entropy(net(x.to(gpu)), y.to(gpu))
    expected, right = torch.autograd.grad(right, list(net.parameters())), right.item()
    one = Measured(gpu, lambda: _backward(net, x[:piece].to(gpu), y[:piece].to(gpu)))
    net.zero_grad()
    found = Measured(gpu, lambda: call(answer, net, x, y, PIECES))
    compare.number(found.result, right, rel=1e-4)
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        require(parameter.grad is not None, "a parameter has no gradient", "backward() was not called, or cleared")
        compare.tensor(parameter.grad, gradient, rel=1e-3)
    # In a later piece the sum of the gradients is there while the new ones are made.
    most = one.peak + max(p.numel() * p.element_size() for p in net.parameters()) + SLACK
    require_peak(found, most, "all pieces are on the GPU at once: until when does each graph live?")
    return f"the peak is {found.peak / MiB:.1f} MiB, that of one piece of {PIECES}"


def _backward(net: nn.Module, x: Tensor, y: Tensor) -> None:
    cross_entropy(net(x), y).backward()


# ------------------------------------------------------------------------------------------------ 5: the average


def _drift(net: nn.Module, batches: Batches, gpu: torch.device, decay: float = 0.9) -> list[Tensor]:
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    starts = [parameter.detach().clone() for parameter in net.parameters()]
    drift = [torch.zeros_like(start) for start in starts]
    for x, y in batches:
        sgd.zero_grad()
        _backward(net, x.to(gpu), y.to(gpu))
        sgd.step()
        for each, parameter, start in zip(drift, net.parameters(), starts, strict=True):
            each.lerp_((parameter.detach() - start).square(), 1 - decay)
    return drift


@exercise
def train_with_drift(answer):
    """`answer(net, batches)` must train and return averages, in memory that does not grow with the batches."""
    gpu = gpu_with_values()
    batches, reference = _batches(6, 64), _net(gpu)
    own = Measured(gpu, lambda: _drift(reference, batches, gpu))
    weights = [parameter.detach() for parameter in reference.parameters()]
    net = _net(gpu)
    found = Measured(gpu, lambda: call(answer, net, batches))
    _check_drift(found.result, own.result, net, weights)
    size = sum(p.numel() * p.element_size() for p in net.parameters())
    why = f"that is {found.left / size:.1f} times the parameters: what do the averages still refer to?"
    # Averages that are not made in place exist twice for a moment, with what they are made of.
    require_peak(
        found,
        own.peak + 4 * size + SLACK,
        "it grows with every batch: what do the averages, or a list, still refer to?",
    )
    require_left(found, own.left + SLACK, why)
    return f"{found.left / MiB:.1f} MiB stay: gradients and averages, after any number of batches"


def _check_drift(found: object, right: list[Tensor], net: nn.Module, weights: list[Tensor]) -> None:
    require(isinstance(found, (list, tuple)), f"{show(found)} is no list", "a list of averages is asked for")
    require(len(found) == len(right), f"there are {len(found)} averages", f"{len(right)} parameters have one each")
    for parameter, weight in zip(net.parameters(), weights, strict=True):
        compare.tensor(parameter, weight, rel=1e-3, absolute=1e-5)
    for average, expected in zip(found, right, strict=True):
        compare.tensor(average, expected, rel=1e-3, absolute=1e-7)
