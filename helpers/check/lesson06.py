"""Checks of lesson 06, out of memory: they run the learner's loops and measure what these take and leave behind."""

import gc
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from helpers.check import compare
from helpers.check.core import call, exercise, not_yet, require, show
from helpers.memory import MiB, measure_memory

__all__ = [
    "accumulate",
    "budget",
    "features",
    "halve_until_it_fits",
    "train_with_drift",
    "validation_loss",
]

WIDTH, BATCH, COUNT, PIECES = 1024, 256, 12, 4
SLACK = 1.0 * MiB  # for losses, counters and the rounding of the allocator
PARTS = ("parameters", "gradients", "optimizer", "activations")
Batches = Sequence[tuple[Tensor, Tensor]]


# -------------------------------------------------------------------------------------- what all of them need


def _gpu() -> torch.device:
    """The current GPU; "not yet" without one, or where it keeps no values."""
    require(torch.cuda.is_available(), "there is no GPU", "call use_gpus(1, memory='1 GiB') before")
    gpu = torch.device("cuda", torch.cuda.current_device())
    kept = torch.zeros((), device=gpu).item() == 0
    require(kept, "this GPU keeps no values", "this exercise needs some: gpu = use_gpus(1, memory='1 GiB')[0]")
    return gpu


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


class _Measured:
    """What one call of a function took on a GPU above what was there (`peak`) and left there (`left`), in bytes."""

    def __init__(self, gpu: torch.device, run: Callable[[], object]):
        gc.collect()
        before = torch.cuda.memory_allocated(gpu)
        with measure_memory(gpu) as readings:
            self.result = run()
        self.peak = readings[0].peak_allocated - before
        self.left = torch.cuda.memory_allocated(gpu) - before


def _small(what: str, found: float, target: float, because: str) -> None:
    """`found` bytes must not be more than `target`."""
    require(found <= target, f"{what} {found / MiB:,.1f} MiB, and {target / MiB:,.1f} MiB are the target", because)


def _peak(found: _Measured, target: float, because: str) -> None:
    _small("the results are right, but the peak is", found.peak, target, because)


def _left(found: _Measured, target: float, because: str) -> None:
    _small("the results are right, but your function leaves behind", found.left, target, because)


# ---------------------------------------------------------------------------------------------- 1: a validation


def _right_loss(net: nn.Module, batches: Batches, gpu: torch.device) -> float:
    with torch.no_grad():
        return sum(cross_entropy(net(x.to(gpu)), y.to(gpu)).item() for x, y in batches) / len(batches)


@exercise
def validation_loss(answer):
    """`answer(net, batches)` must return the mean loss as a number, in the memory of one batch without a graph."""
    gpu = _gpu()
    net, batches = _net(gpu), _batches()
    one = _Measured(gpu, lambda: _right_loss(net, batches[:2], gpu))
    right = _right_loss(net, batches, gpu)
    found = _Measured(gpu, lambda: call(answer, net, batches))
    result, found.result = found.result, None
    require(not isinstance(result, Tensor), "a tensor came back", "a number is asked for: a tensor may keep a graph")
    compare.number(result, right, rel=1e-4, mistakes={right * len(batches): "that is the sum: divide by the batches"})
    several = f"{found.peak / one.peak:.1f} times what one batch takes: batches, or layers, are kept for a backward()"
    _peak(found, one.peak + SLACK, several)
    _left(found, SLACK, "something outside of the function refers to a tensor of it")
    require(net[0].weight.grad is None, "there are gradients now", "a validation has no backward()")
    return f"the peak is {found.peak / MiB:.1f} MiB, that of a single batch without a graph"


# ------------------------------------------------------------------------------------------------- 2: the views


@exercise
def features(answer):
    """`answer(net, batches)` must return the first four outputs of each image, without keeping all of them."""
    gpu = _gpu()
    net, batches = _net(gpu, outputs=WIDTH), _batches()
    with torch.no_grad():
        right = torch.cat([net(x.to(gpu))[:, :4].clone() for x, _ in batches])
    one = _Measured(gpu, lambda: _without_graph(net, batches[0][0].to(gpu)))
    found = _Measured(gpu, lambda: call(answer, net, batches))
    result = found.result
    compare.tensor(result, right)
    compare.device(result, gpu)
    require(not result.requires_grad, "the features have a graph", "torch.no_grad() or detach() is missing")
    outputs = BATCH * WIDTH * 4
    why = "a slice is a view: as long as it lives, the whole tensor of 1,024 outputs does"
    _peak(found, one.peak + outputs + 2 * right.nbytes + SLACK, why)
    _small("the features keep", result.untyped_storage().nbytes(), right.nbytes + SLACK, why)
    _left(found, right.nbytes + SLACK, "more than the features stays: does a list outside of the function keep some?")
    return f"{right.nbytes / MiB:.2f} MiB stay, and the peak is {found.peak / MiB:.1f} MiB"


def _without_graph(net: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        net(x)


# ------------------------------------------------------------------------------------------------- 3: the error


@exercise
def halve_until_it_fits(answer):
    """`answer(step, batch)` must return the largest of batch, batch // 2, ... that fits, with all memory back."""
    gpu = _gpu()
    torch.cuda.empty_cache()
    room = torch.cuda.mem_get_info(gpu)[0]
    tried = []

    def step(batch: int) -> None:
        tried.append(batch)
        require(batch > 0, "the batch came down to 0", "nothing fitted: what died before was still on the GPU")
        pieces = []  # a variable of its own, which an error keeps
        for _ in range(3):
            pieces.append(torch.empty(int(room * 0.3 * batch / 100) + 1, dtype=torch.uint8, device=gpu))

    found = _Measured(gpu, lambda: call(answer, step, 400))
    what = f"it ended at {show(found.result)} and tried {tried[:6]}"
    require(found.result in tried, what, "the batch that ran is asked for")
    why = "100 fits on an empty GPU: inside `except` the error still keeps the variables of the step that died"
    require(tried[:3] == [400, 200, 100], what, "each try should be half of the one before")
    require(found.result == 100, what, why)
    _left(found, SLACK, "something keeps the error, or a tensor of the step")
    return "each try began on an empty GPU"


# ------------------------------------------------------------------------------------------ 4: the accumulation


@exercise
def accumulate(answer):
    """`answer(net, x, y, pieces)` must leave the whole batch's gradients, with one piece on the GPU at a time."""
    gpu = _gpu()
    (x, y), piece = _batches(1, 3003)[0], -(-3003 // PIECES)
    net = _net(gpu)
    right = cross_entropy(net(x.to(gpu)), y.to(gpu))
    expected, right = torch.autograd.grad(right, list(net.parameters())), right.item()
    one = _Measured(gpu, lambda: _backward(net, x[:piece].to(gpu), y[:piece].to(gpu)))
    net.zero_grad()
    found = _Measured(gpu, lambda: call(answer, net, x, y, PIECES))
    compare.number(found.result, right, rel=1e-4)
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        require(parameter.grad is not None, "a parameter has no gradient", "backward() was not called, or cleared")
        compare.tensor(parameter.grad, gradient, rel=1e-3)
    # In a later piece the sum of the gradients is there while the new ones are made.
    most = one.peak + max(p.numel() * p.element_size() for p in net.parameters()) + SLACK
    _peak(found, most, "the graphs of all pieces are alive until the one backward(): call it for each piece")
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
    gpu = _gpu()
    batches, reference = _batches(6, 64), _net(gpu)
    own = _Measured(gpu, lambda: _drift(reference, batches, gpu))
    weights = [parameter.detach() for parameter in reference.parameters()]
    net = _net(gpu)
    found = _Measured(gpu, lambda: call(answer, net, batches))
    _check_drift(found.result, own.result, net, weights)
    size = sum(p.numel() * p.element_size() for p in net.parameters())
    why = f"{found.left / size:.1f} times the parameters: the averages remember, in a graph, how they were made"
    # Averages that are not made in place exist twice for a moment, with what they are made of.
    _peak(
        found, own.peak + 4 * size + SLACK, "it grows with every batch: the averages carry a graph, or a list keeps all"
    )
    _left(found, own.left + SLACK, why)
    return f"{found.left / MiB:.1f} MiB stay: gradients and averages, after any number of batches"


def _check_drift(found: object, right: list[Tensor], net: nn.Module, weights: list[Tensor]) -> None:
    require(isinstance(found, (list, tuple)), f"{show(found)} is no list", "a list of averages is asked for")
    require(len(found) == len(right), f"there are {len(found)} averages", f"{len(right)} parameters have one each")
    for parameter, weight in zip(net.parameters(), weights, strict=True):
        compare.tensor(parameter, weight, rel=1e-3, absolute=1e-5)
    for average, expected in zip(found, right, strict=True):
        compare.tensor(average, expected, rel=1e-3, absolute=1e-7)


# ------------------------------------------------------------------------------------------------- 6: the budget


@exercise
def budget(make_net, batch, answer):
    """`answer`, MiB by part, must be within 10 % of the second step of `make_net()` under Adam on `batch`."""
    require(torch.cuda.is_available(), "there is no GPU", "call use_gpus(1, memory='1 GiB') before")
    require(isinstance(batch, Tensor), f"{show(batch)} is no tensor", "one batch of inputs for your net is asked for")
    require(isinstance(answer, Mapping), f"{show(answer)} is no dict", "MiB for each part are asked for, by name")
    require(
        set(answer) == set(PARTS), f"the parts are {show(list(answer))}", f"these are asked for: {', '.join(PARTS)}"
    )
    parts = _parts(call(make_net), batch, torch.device("cuda", torch.cuda.current_device()))
    values = {name: compare.number(answer[name], float(answer[name])) for name in PARTS}
    off = {name: values[name] * MiB / max(parts[name], 1) for name in PARTS}
    if all(0.9 <= share <= 1.1 for share in off.values()):
        return ", ".join(f"{name} {parts[name] / MiB:,.1f} MiB" for name in PARTS) + " were measured"
    worst = [f"{name} {share:.2f} times what was measured" for name, share in off.items() if not 0.9 <= share <= 1.1]
    not_yet("; ".join(worst), _why_budget(values, parts))


def _parts(net: object, batch: Tensor, gpu: torch.device) -> dict[str, int]:
    """Bytes of each part: measured as what is allocated grows by, in a first step and in a second forward pass."""
    require(isinstance(net, nn.Module), f"{show(net)} is no net", "a function that makes an nn.Module is asked for")
    found, now = {}, torch.cuda.memory_allocated
    start = now(gpu)
    net = net.to(gpu)
    found["parameters"] = now(gpu) - start
    adam, x = torch.optim.Adam(net.parameters()), batch.to(gpu)
    _loss(net, x).backward()
    before = now(gpu)
    adam.step()
    found["optimizer"] = now(gpu) - before
    adam.zero_grad()
    before = now(gpu)
    loss = _loss(net, x)
    found["activations"] = now(gpu) - before
    loss.backward()
    del loss
    found["gradients"] = now(gpu) - before
    return found


def _loss(net: nn.Module, x: Tensor) -> Tensor:
    """The cross entropy of a net with two-dimensional outputs, the mean of any other's."""
    out = net(x)
    if out.dim() != 2:
        return out.float().mean()
    return cross_entropy(out, torch.zeros(len(out), dtype=torch.long, device=out.device))


def _why_budget(values: Mapping[str, float], parts: Mapping[str, int]) -> str:
    wrong = next(name for name in PARTS if not 0.9 <= values[name] * MiB / max(parts[name], 1) <= 1.1)
    share = values[wrong] * MiB / max(parts[wrong], 1)
    if 0.2 < share < 0.3 and wrong != "activations":
        return "that looks like a count of numbers: each float32 takes four bytes"
    reasons = {
        "parameters": "four bytes for each float32, buffers included",
        "gradients": "one number for each parameter",
        "optimizer": "Adam keeps two numbers for each parameter",
        "activations": "what each layer keeps for backward, and the logits' softmax, times the batch",
    }
    return reasons[wrong]
