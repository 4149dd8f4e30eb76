"""One training loop for images: on one device, or with `nn.DataParallel` on several GPUs.

    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), loader, device="cuda:0")
    trainer = DataParallelTrainer(model, optimizer, nn.CrossEntropyLoss(), loader, devices=gpus)
    trainer.train(epochs=2)         # [cuda:0-3] epoch 0 | batch 128 | steps 32 | lr 0.10 | loss 2.068 | ...

The programs in notebooks/scripts contain the same loop in full, with validation and checkpoints, and the loop of
DistributedDataParallel.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn


class Trainer:
    """Trains a model on one device. The model returns logits (N, classes) for images (N, ...) with labels (N,).

    model   is moved to `device`. An optimizer built before still holds its parameters, but must have no state yet
    loss    a mean over images, such as nn.CrossEntropyLoss()
    loader  gives (images, labels)
    log     called with a line for each epoch. It is stored in notebooks, so it has few digits and no time, which would
            differ from run to run

    `history` has the mean loss over all images, and the share of correct answers from 0 to 1, of each epoch.

    Raises ValueError for a loss that is not a mean, and for an optimizer that holds none of the model's parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        loader: Iterable[Sequence[Tensor]],
        device: torch.device | str,
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
        self.device = torch.device(device)
        self.name = str(self.device)
        self.model = self.network = model.to(self.device)
        self.optimizer, self.loss, self.loader, self.log = optimizer, loss, loader, log
        self.history: list[tuple[float, float]] = []

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
        """One optimizer step on one batch. Returns [sum of the losses, correct answers], (2,), on the device.

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
        outputs = self.network(self.place_inputs(images))
        labels = labels.to(self.device, non_blocking=True)
        return self.loss(outputs, labels), (outputs.detach().argmax(1) == labels).sum()

    def place_inputs(self, images: Tensor) -> Tensor:
        """Images where the network wants them. With `non_blocking`, copies from pinned memory overlap other work."""
        return images.to(self.device, non_blocking=True)


class DataParallelTrainer(Trainer):
    """The same loop with `nn.DataParallel`: every batch is divided into one piece per GPU.

    devices  the GPUs. The first one holds the parameters, the gradients and the optimizer's state, gathers the outputs
             and computes the loss
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        loader: Iterable[Sequence[Tensor]],
        devices: Sequence[torch.device],
        log: Callable[[str], object] = print,
    ):
        super().__init__(model, optimizer, loss, loader, devices[0], log)
        self.network = nn.DataParallel(self.model, devices)
        numbers = self.network.device_ids
        consecutive = len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1))
        self.name = f"cuda:{numbers[0]}-{numbers[-1]}" if consecutive else "cuda:" + ",".join(map(str, numbers))

    def place_inputs(self, images: Tensor) -> Tensor:
        """As they are: DataParallel copies each piece straight to its GPU, and no GPU holds all of them."""
        return images
