"""The largest batch that fits, found without harm: `largest_batch`, and everything put back after it."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from helpers.measure.memory import largest_batch

__all__ = ["find_batch_size"]


def find_batch_size(
    step: Callable[[int], object],
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    limit: int = 2**16,
    multiple_of: int = 1,
    report: Callable[[int, bool], None] | None = None,
) -> int:
    """The largest batch up to `limit`, in multiples of `multiple_of`, for which `step(batch)` runs; 0 if none does.

    `step` is one whole training step on invented data: it survives running out of memory. Weights, buffers and
    gradients of `model` and the state of `optimizer` are after each try what they were before the search, the random
    numbers after the last; the copies lie on the host meanwhile, which GPUs without values can give for floating-point
    tensors only. A batch counts as fitting if two steps run, since optimizers make their state in the first, where
    it cuts up what that step had freed: with the state of an earlier try, larger batches would seem to fit.
    `report(batch, fitted)` is called after every try. Errors: `helpers.measure.memory.largest_batch`.
    """
    with _untouched(model, optimizer) as put_back:

        def tried(batch: int, fitted: bool) -> None:
            put_back()
            torch.cuda.empty_cache()
            if report is not None:
                report(batch, fitted)

        return largest_batch(step, limit=limit, multiple_of=multiple_of, report=tried)


@contextmanager
def _untouched(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Iterator[Callable[[], None]]:
    """Yields what puts all but the random numbers back; it is done at the end, too."""
    weights = None if model is None else _on_host(model.state_dict())
    gradients = {} if model is None else {p: _on_host(p.grad) for p in model.parameters()}
    state = None if optimizer is None else _on_host(optimizer.state_dict())

    def put_back() -> None:
        if model is not None:
            model.load_state_dict(weights)
        for parameter, gradient in gradients.items():
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        if optimizer is not None:
            optimizer.load_state_dict(_on_host(state))  # a copy: it keeps the steps, and counts them on

    with torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            yield put_back
        finally:
            put_back()


def _on_host(value):
    """A copy of nested tensors in the host's memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_host, value))
    return copy.copy(value)
