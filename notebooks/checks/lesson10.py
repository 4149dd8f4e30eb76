"""Checks of lesson 10, frameworks. They compare what was trained with plain loops and import no framework."""

import io
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from notebooks.checks import compare
from notebooks.checks.core import NotYet, call, exercise, require, show

SAMPLES, BATCH = 64, 8  # of exercises 1 and 2: eight batches
CHECKED = 23  # the seed of the checks' samples, so that no net of the lesson passes; each mistake has other weights
CLIP = 8.0  # the largest norm: some of their gradients are longer, and some are not


def samples(seed: int = 0) -> TensorDataset:
    """64 pairs, x of shape (4,) and y of shape (1,). The checks train on others than the lesson."""
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]))


def rate(step: int) -> float:
    """The learning rate's factor: a warm-up of eight steps."""
    return min(1.0, (step + 1) / 8)


def _train(
    factor: Callable[[int], float] = lambda step: 1.0,
    accumulate: int = 1,
    divide: bool = True,
    clip: float = 0.0,
    clip_each: bool = False,
    by_value: bool = False,
    zero: str = "after the update",
) -> Tensor:
    """The weights after one epoch of a plain loop, with the learning rate 0.1 * factor(step)."""
    clip_gradients = clip_grad_value_ if by_value else clip_grad_norm_
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, factor)
    for number, (x, y) in enumerate(DataLoader(samples(CHECKED), BATCH), 1):
        if zero == "before each batch":
            sgd.zero_grad()
        loss = mse_loss(net(x), y) / (accumulate if divide else 1)
        loss.backward()
        if clip and (clip_each or number % accumulate == 0):
            clip_gradients(net.parameters(), clip)
        if number % accumulate == 0:
            sgd.step()
            if zero == "after the update":
                sgd.zero_grad()
            schedule.step()
    return parameters_to_vector(net.parameters()).detach()


def _weights(net: nn.Module) -> Tensor:
    found = parameters_to_vector(net.parameters()).detach().cpu().float()
    require(len(found) == 5, f"It has {len(found)} parameters, and `nn.Linear(4, 1)` has 5.")
    return found


_SEARCH = "Compare seed, order of the samples, learning rate, loss, clipping and number of steps."


@exercise
def converted(answer):
    """Exercise 1: `answer(samples)` must train with Lightning as the plain loop does, and return the module."""
    module = call(answer, samples(CHECKED))
    kinds = [kind.__name__ for kind in type(module).__mro__]
    require("LightningModule" in kinds, f"It returned {show(module)}. Return the LightningModule.")
    try:
        steps, batches = module.trainer.global_step, SAMPLES // BATCH
    except RuntimeError as error:
        raise NotYet("No Trainer has trained the module.", "Call `fit` of an L.Trainer with it.") from error
    what = f"Lightning has taken {steps} steps, and the plain loop takes {batches}."
    require(steps == batches, what, "Use the same batch size, and one epoch.")
    mistakes = {
        "The learning rate stays at its first value. By default, Lightning calls a scheduler after each epoch. "
        "Return a dictionary from configure_optimizers that says how often.": _train(_first_rate, clip=CLIP),
        "The learning rate has no warm-up. Return the scheduler from configure_optimizers, too.": _train(clip=CLIP),
        "The gradients are not clipped. That is an argument of the Trainer.": _train(rate),
        "The gradients are not clipped, and the learning rate stays at its first value.": _train(_first_rate),
        "The gradients are not clipped, and the learning rate has no warm-up.": _train(),
        "Each number of the gradient is clipped. Clip the norm of all of them together.": _train(
            rate, clip=CLIP, by_value=True
        ),
        "The scheduler takes two steps per batch. Lightning already calls it.": _train(
            lambda step: rate(2 * step), clip=CLIP
        ),
    }
    otherwise = _SEARCH
    clip, precision = module.trainer.gradient_clip_val, module.trainer.precision
    if clip not in (None, CLIP):
        otherwise = f"The Trainer clips the gradients to {clip:g}, and the plain loop clips them to {CLIP:g}."
    if precision not in ("32-true", "64-true"):
        otherwise = f"The Trainer's precision is {precision}, and the plain loop computes in float32."
    compare.alike(_weights(module), _train(rate, clip=CLIP), "The weights are", otherwise, mistakes, rel=1e-4)
    return "Lightning ends with the weights of the plain loop, with its warm-up and its clipping."


def _refuse(*args, **kwargs):
    raise NotYet("`back` calls Lightning's Trainer. Write the loop without Lightning.")


def _first_rate(step: int) -> float:
    return rate(0)


@exercise
def back(answer):
    """Exercise 2: `answer(samples)` must train as Lightning does, which accumulates two batches and clips, and return
    the net."""
    trainer = getattr(sys.modules.get("lightning"), "Trainer", None)
    with mock.patch.object(trainer, "fit", _refuse) if trainer else nullcontext():
        net = call(answer, samples(CHECKED))
    require(isinstance(net, nn.Module), f"It returned {show(net)}. Return the net.")
    kinds = [kind.__name__ for kind in type(net).__mro__]
    require("LightningModule" not in kinds, "It returned a LightningModule. Write the loop without Lightning.")
    mistakes = {
        "Each loss must be divided by the number of batches that are accumulated.": _train(
            accumulate=2, divide=False, clip=CLIP
        ),
        "The gradients are clipped after each batch. Lightning clips once, just before the update.": _train(
            accumulate=2, clip=CLIP, clip_each=True
        ),
        "The gradients are not clipped.": _train(accumulate=2),
        "The optimizer takes a step after each batch. The Trainer accumulates two.": _train(clip=CLIP),
        "Each number of the gradient is clipped. Clip the norm of all of them together.": _train(
            accumulate=2, clip=CLIP, by_value=True
        ),
        "The gradients are clipped to 4, or divided after the clipping. "
        "Divide each loss before backward(), and clip to 8.": _train(
            lambda step: 0.5, accumulate=2, divide=False, clip=CLIP
        ),
        "The first of two batches has no effect: its gradients are set to zero before the update.": _train(
            accumulate=2, clip=CLIP, zero="before each batch"
        ),
        "The gradients are never set to zero after an update.": _train(accumulate=2, clip=CLIP, zero="never"),
    }
    compare.alike(_weights(net), _train(accumulate=2, clip=CLIP), "The weights are", _SEARCH, mistakes, rel=1e-4)
    return "The plain loop ends with Lightning's weights."


IMAGES = {"lightning": 256, "accelerate": 64, "split": 16, "trainer": 128, "torchrun": 64, "fsdp": 64}
_HINTS: dict[str, dict[float, str]] = {
    "lightning": {
        16: "is the batch of one process. All processes take part in a step.",
        64: "counts the GPUs of one machine. There are two machines.",
        128: "leaves out the accumulation: two batches of each process make one step.",
    },
    "accelerate": {16: "is the batch of one process. By default, the loader's batch size is for one process."},
    "split": {64: "would be right without split_batches.", 4: "is the share of one process."},
    "trainer": {
        32: "counts one GPU. One process that sees several GPUs uses all of them.",
        64: "leaves out the accumulation.",
        16: "is the batch of one GPU.",
    },
    "torchrun": {
        128: "counts four GPUs. Each of the two processes uses one.",
        256: "counts four GPUs in each process. Under torchrun, each process uses one.",
        32: "leaves out the accumulation.",
        16: "is the batch of one GPU.",
    },
    "fsdp": {16: "is the batch of one process. Sharding divides the model, and each rank has images of its own."},
}


@exercise
def images_per_step(answer):
    """Exercise 3: how many images each of six programs uses for one update, by name."""
    compare.names(answer, IMAGES, "a number")
    for name, right in IMAGES.items():
        compare.number(answer[name], right, "images", 1e-6, _HINTS[name], f'For "{name}", ')
    return "Only one of the six programs takes 16 images per step, the number that all of them name."


@exercise
def continuing(answer):
    """Exercise 4: `answer` must be a class of DataLoader that says where it is, and continues there."""
    require(
        isinstance(answer, type) and issubclass(answer, DataLoader),
        f"{show(answer)} is not a class that inherits from DataLoader. Pass the class itself.",
    )
    data = TensorDataset(torch.randperm(_SIZE * _BATCHES))
    sampler = DistributedSampler(data, num_replicas=1, rank=0)  # as Lightning does it: in each epoch another order

    def loader() -> DataLoader:
        return answer(data, batch_size=_SIZE, sampler=sampler, drop_last=True)

    def right(epoch: int) -> list:
        sampler.set_epoch(epoch)
        return _taken(DataLoader(data, batch_size=_SIZE, sampler=sampler))

    def resumed(state: object) -> DataLoader:
        new = loader()
        new.load_state_dict(state)  # type: ignore[attr-defined]
        return new

    done = int(torch.randint(2, 4, ()))
    first, first_epoch = loader(), right(0)
    running = iter(first)
    list(islice(running, done))
    state = saved = _state(first)
    _continues(_taken(loader()), first_epoch, 0, "Without a checkpoint")
    require(len(loader()) == _BATCHES, f"`len` of a loader with {_BATCHES} batches is {len(loader())}. Leave it alone.")
    _continues(_taken(resumed(state)), first_epoch, done, f"After {done} batches and a restart")
    require(
        len(resumed(state)) == _BATCHES, "`len` changes after a restart. It is the number of batches of a whole epoch."
    )
    again = resumed(state)
    running = iter(again)
    next(running)
    state = _state(again)
    _continues(_taken(resumed(state)), first_epoch, done + 1, "When a loader that has continued is saved again")
    list(islice(running, _BATCHES - done - 1))  # not to the end of the generator: Lightning stops after `len` batches
    second_epoch = right(1)
    _continues(_taken(again), second_epoch, 0, "In the epoch after the one that was resumed")
    _continues(_taken(resumed(_state(again))), second_epoch, 0, "Once the last batch of an epoch is done")
    running = iter(again)
    list(islice(running, done))
    _continues(_taken(resumed(_state(again))), second_epoch, done, f"After {done} batches of the second epoch")
    _continues(_taken(again), second_epoch, 0, "In a new loop over a loader that was not resumed")
    list(islice(iter(again), done))  # a loop that ends with `break`
    running = iter(again)
    next(running)
    when = "After a loop that ended early, and one batch of the next loop over the same loader"
    _continues(_taken(resumed(_state(again))), second_epoch, 1, when)
    what = f"After {done} batches of {_SIZE} samples, `state_dict` returned {show(saved)}. No value is {done}."
    shown = {show(value) for value in saved.values()}
    samples = {f"{done * _SIZE}", f"tensor({done * _SIZE})"} & shown and not {f"{done}", f"tensor({done})"} & shown
    require(not samples, what, "Count batches, not samples.")
    return "The loader continues where it was, and later epochs are complete."


_BATCHES, _SIZE = 7, 2


def _taken(loader: DataLoader) -> list:
    """The batches of a loop that takes as many as `len` says and does not ask for more, as Lightning's does."""
    return [batch[0].tolist() for batch in islice(iter(loader), _BATCHES)]


def _state(loader: DataLoader) -> dict:
    """What `state_dict` returns, as it is after it was in a checkpoint."""
    name = type(loader).__name__
    for method in ("state_dict", "load_state_dict"):
        require(callable(getattr(loader, method, None)), f"`{name}` has no method `{method}`. Lightning asks for both.")
    state = call(loader.state_dict)  # type: ignore[attr-defined]
    require(isinstance(state, dict), f"`state_dict` returned {show(state)}. Return a dictionary.")
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    try:
        return torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        what = f"`state_dict` returned {show(state)}, which cannot be read with weights_only=True."
        numbers = "Return a dictionary of Python's own numbers. `int(...)` makes one of a number of NumPy."
        raise NotYet(what, numbers) from error


def _continues(found: list, epoch: list, done: int, when: str) -> None:
    """End with "Not yet" unless the batches are those of the epoch after the first `done`."""
    if found == epoch[done:]:
        return
    what = f"{when}, the loader should begin with batch {done} of 0 to {_BATCHES - 1}"
    if not found:
        raise NotYet(f"{what}, and it gives no batch.", "Is the number of batches that are done still the old one?")
    if found[0] not in epoch:
        raise NotYet(f"{what}, and it gives {found[0]}, which is no batch of this epoch.", "Keep the sampler's order.")
    begin = epoch.index(found[0])
    if begin != done:
        why = {
            0: "It begins anew. Does `load_state_dict` keep the number, and does `__iter__` skip as many batches?",
            1: "After a restart, count the batches that were skipped, too.",
            done + 1: "It leaves one out.",
            done - 1: "One comes twice. Code after `yield` runs when the next batch is asked for: count before it.",
        }
        otherwise = "Skip only once, count each batch, and count anew in each loop."
        raise NotYet(f"{what}, and it begins with batch {begin}.", why.get(begin, otherwise))
    raise NotYet(f"{what}, and it does so, but later batches are missing or come twice: it gives {len(found)}.")
