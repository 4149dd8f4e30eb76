"""One training loop for images: on one device, or with `nn.DataParallel` on several GPUs.

    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), loader, gpus)
    trainer.train(epochs=2)         # [cuda:0-3] epoch 0 | batch 128 | steps 32 | lr 0.10 | loss 2.068 | ...

The programs in notebooks/scripts contain the same loop in full, with validation and checkpoints, and the loop of
DistributedDataParallel.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn


class Trainer:
    """Trains a model that returns logits (N, classes) for images (N, ...) with labels (N,).

    model    is moved to the first device. An optimizer built before still holds its parameters, but must have no state
             yet
    loss     a mean over images, such as nn.CrossEntropyLoss()
    loader   gives (images, labels)
    devices  a device, such as "cpu" or gpus[0], or a list of GPUs. With several GPUs, `nn.DataParallel` divides every
             batch into one piece per GPU. The first GPU holds the parameters, the gradients and the optimizer's state,
             gathers the outputs and computes the loss
    log      called with a line for each epoch. It is stored in notebooks, so it has few digits and no time, which would
             differ from run to run

    `history` has the mean loss over all images, and the share of correct answers from 0 to 1, of each epoch.

    Raises ValueError for a loss whose `reduction` is not "mean", and for an optimizer that holds none of the model's
    parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        loader: Iterable[Sequence[Tensor]],
        devices: torch.device | str | Sequence[torch.device | str],
        log: Callable[[str], object] = print,
    ):
        if getattr(loss, "reduction", "mean") != "mean":
            raise ValueError(f'The loss must be a mean. Build it with reduction="mean", not "{loss.reduction}".')
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in held for parameter in model.parameters()):
            raise ValueError(
                f"This {type(optimizer).__name__} holds none of the model's parameters and would train nothing. Build "
                "the optimizer from model.parameters(), after the model."
            )
        self.devices = [devices] if isinstance(devices, str | torch.device) else list(devices)
        self.device = torch.device(self.devices[0])
        self.model = self.network = model.to(self.device)
        if len(self.devices) > 1:
            self.network = nn.DataParallel(self.model, self.devices)
        self.optimizer, self.loss, self.loader, self.log = optimizer, loss, loader, log
        self.history: list[tuple[float, float]] = []

    @property
    def name(self) -> str:
        """The devices as text: "cpu", "cuda:0-3", "cuda:1,3"."""
        if self.network is self.model:
            return str(self.device)
        first, *_, last = numbers = self.network.device_ids
        consecutive = numbers == list(range(first, last + 1))
        return f"cuda:{first}-{last}" if consecutive else "cuda:" + ",".join(map(str, numbers))

    def train(self, epochs: int) -> None:
        """Train `epochs` more epochs. Raises what `train_epoch` raises."""
        for _ in range(epochs):
            self.train_epoch()

    def train_epoch(self) -> None:
        """One pass over the loader. Raises ValueError for a loader that gives no batch."""
        self.network.train()
        rate = self.optimizer.param_groups[0]["lr"]
        sums, sizes = torch.zeros(2, device=self.device), []
        for images, labels in self.loader:
            sums += self.step(images, labels)
            sizes.append(len(labels))
        if not sizes:
            raise ValueError(
                "The loader gave no batch. Its data set is empty or smaller than one batch with drop_last=True, or it "
                "is a generator that is used up."
            )
        # The sums are read only here, because the host then waits until the GPU has done all its work. A wait in every
        # step would leave the GPU idle.
        loss, accuracy = (each.item() for each in sums / sum(sizes))
        self.log(
            f"[{self.name}] epoch {len(self.history)} | batch {max(sizes)} | steps {len(sizes)} | lr {rate:#.2g} | "
            f"loss {loss:.3f} | accuracy {100 * accuracy:.2f} %"
        )
        self.history.append((loss, accuracy))

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """One optimizer step on one batch. Returns [sum of the losses, correct answers], (2,), on the first device.

        They are sums because the last batch can be smaller than the others.
        """
        # Before the forward pass, so that old gradients and new activations are never in memory together.
        self.optimizer.zero_grad()
        loss, correct = self.forward(images, labels)
        loss.backward()
        self.optimizer.step()
        return torch.stack([loss.detach() * len(labels), correct])

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, with its graph, and the number of correct answers.

        A function of its own, so that the outputs have no name left when `backward` runs. A name would keep them in
        memory.
        """
        if self.network is self.model:  # DataParallel copies each piece straight to its GPU
            images = images.to(self.device, non_blocking=True)
        outputs = self.network(images)
        labels = labels.to(self.device, non_blocking=True)
        return self.loss(outputs, labels), (outputs.detach().argmax(1) == labels).sum()
