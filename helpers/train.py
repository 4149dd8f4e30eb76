"""One training loop for images: on one device, with `nn.DataParallel`, or in the ranks of `DistributedDataParallel`.

    history = train_epochs(network, optimizer, nn.CrossEntropyLoss(), loader, gpus[0], epochs=2)
    # [4 GPUs] epoch 0 | batch 128 | steps 32 | lr 0.10 | loss 2.068 | accuracy 24.10 %

The programs in notebooks/scripts contain the same loop in full, with validation and checkpoints.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from helpers.gpus import Device

__all__ = ["Epoch", "train_epochs"]


class Epoch(NamedTuple):
    """The mean loss over all images of an epoch, and the share of correct answers, from 0 to 1."""

    loss: float
    accuracy: float


def option_of(loss: Callable[..., Tensor], name: str) -> Any:
    """Return an option of a loss, which is a module, a function or a functools.partial. None if it has no such option.

    A lambda hides the options of what it calls.
    """
    while isinstance(loss, partial):
        if name in loss.keywords:
            return loss.keywords[name]
        loss = loss.func
    if isinstance(loss, FunctionType):
        parameter = inspect.signature(loss).parameters.get(name)
        return parameter and parameter.default
    return getattr(loss, name, None)


def require_mean(loss: Callable[..., Tensor]) -> None:
    """Raise ValueError for a loss with a `reduction` that is not "mean", and TypeError for a class."""
    if isinstance(loss, type):
        raise TypeError(f"{loss.__name__} is a class. Pass a loss that is made from it: {loss.__name__}().")
    reduction = option_of(loss, "reduction") or "mean"
    if reduction not in ("mean", "batchmean"):
        raise ValueError(f'The loss must be a mean. Build it with reduction="mean", not "{reduction}".')


def train_epochs(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Tensor, Tensor], Tensor],
    loader: Iterable[Sequence[Tensor]],
    device: Device,
    epochs: int = 1,
    log: Callable[[str], object] = print,
) -> list[Epoch]:
    """Train, and return the figures of each epoch.

    network: returns logits (N, classes) for images (N, ...). It is on `device`, plain or wrapped by nn.DataParallel,
    whose first GPU is then `device`. If it is wrapped by DistributedDataParallel, every rank calls this function. All
    ranks return the figures of all images, and rank 0 alone logs. Each may be compiled.

    loss: a mean over images, such as nn.CrossEntropyLoss(). DistributedDataParallel takes the mean of the ranks' means,
    so it trains like one GPU only if the ranks have equal parts of each batch. If the loss weights classes or ignores
    labels, the figures are not those of all images, but means of the batches' means.

    loader: gives (images, labels), the labels as (N,) class indices. Its DistributedSampler, if it has one, is told the
    epoch, which begins at 0; images that it repeats to fill the last batch count twice. log: called with a line for
    each epoch. The line is stored in notebooks, so it has few digits and no time, which would differ from run to run.

    Raises ValueError for a loss whose `reduction` is not "mean", for an optimizer that holds none of the model's
    parameters, for other batches than (images, labels), and for a loader that gives no batch. Raises TypeError for a
    loss that is a class.
    """
    require_mean(loss)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in network.parameters()):
        raise ValueError(
            f"This {type(optimizer).__name__} holds none of the model's parameters and would train nothing. Build "
            "the optimizer from model.parameters(), after the model."
        )
    group, ranks, where = None, 1, str(torch.device(device))
    wrapped = getattr(network, "_orig_mod", network)  # what torch.compile was given
    if isinstance(wrapped, DistributedDataParallel):
        group = wrapped.process_group
        ranks = dist.get_world_size(group)
        where = f"{ranks} ranks"
    scatters = isinstance(wrapped, nn.DataParallel)  # copies each piece straight to its GPU
    if scatters and len(wrapped.device_ids) > 1:
        where = f"{len(wrapped.device_ids)} GPUs"
    samplers = getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    history: list[Epoch] = []
    for epoch in range(epochs):
        for sampler in samplers:
            if isinstance(sampler, DistributedSampler):
                sampler.set_epoch(epoch)
        network.train()
        rate = optimizer.param_groups[0]["lr"]
        sums = torch.zeros(3, device=device)
        sizes: list[int] = []
        for batch in loader:
            match batch:
                case (Tensor() as images, Tensor(ndim=1) as labels) if len(images) == len(labels) > 0:
                    pass
                case _:
                    parts = batch if type(batch) in (list, tuple) else [batch]
                    found = ", ".join(str(getattr(part, "shape", type(part).__name__)) for part in parts)
                    raise ValueError(f"A batch must be two tensors, images and one class index for each, not {found}.")
            # Before the forward pass, so that old gradients and new activations are never in memory together.
            optimizer.zero_grad()
            mean, correct = _forward(network, loss, images, labels, device, scatters)
            mean.backward()
            optimizer.step()
            # Sums, because the last batch can be smaller than the others.
            sums[:2] += torch.stack([mean.detach().float() * len(labels), correct])
            sizes.append(len(labels))
        if not sum(sizes):
            raise ValueError(
                "The loader gave no batch. Its data set is empty or smaller than one batch with drop_last=True, or it "
                "is a generator that is used up."
            )
        sums[2] = sum(sizes)
        if group is not None:
            dist.all_reduce(sums, group=group)
        # The sums are read only here, because the host then waits until the GPU has done all its work. A wait in every
        # step would leave the GPU idle.
        history.append(Epoch(*(figure.item() for figure in sums[:2] / sums[2])))
        if group is None or dist.get_rank(group) == 0:
            log(
                f"[{where}] epoch {epoch} | batch {ranks * max(sizes)} | steps {len(sizes)} | lr {rate:#.2g} | "
                f"loss {history[-1].loss:.3f} | accuracy {100 * history[-1].accuracy:.2f} %"
            )
    return history


def _forward(
    network: nn.Module, loss: Callable[..., Tensor], images: Tensor, labels: Tensor, device: Device, scatters: bool
) -> tuple[Tensor, Tensor]:
    """The mean loss of a batch, with its graph, and the number of correct answers.

    A function of its own, so that the outputs have no name left when `backward` runs. A name would keep them in memory.
    """
    if not scatters:
        images = images.to(device, non_blocking=True)
    outputs = network(images)
    labels = labels.to(device, non_blocking=True)
    return loss(outputs, labels), (outputs.detach().argmax(1) == labels).sum()
