"""The training loop with `nn.DataParallel`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from helpers.train.checkpoints import unwrap
from helpers.train.loops.checks import Device, check_batch, existing_gpus
from helpers.train.loops.loop import Trainer

__all__ = ["DataParallelTrainer"]


class DataParallelTrainer(Trainer):
    """The same loop with `nn.DataParallel`: every batch is cut into one piece per GPU.

    devices        the GPUs; the first holds the parameters, the gradients and the optimizer's state
    output_device  the GPU where outputs are gathered and the loss is computed; the first one by default

    A batch of fewer samples than GPUs makes one piece per sample, and DataParallel leaves the other GPUs
    without work. Where even the loader's full batch is that small, the trainer refuses it. It refuses amp="bf16" as
    well: DataParallel's threads know that autocast is on, but not its type, and would compute in float16.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        loader: Iterable[Any],
        devices: Sequence[Device],
        output_device: Device | None = None,
        **options: Any,
    ):
        devices = existing_gpus(devices)
        check_batch(loader, len(devices))
        if options.get("amp") == "bf16" and len(devices) > 1:
            raise ValueError(
                'DataParallel\'s threads would compute in float16 whatever autocast is told: take amp="fp16", or a '
                "DistributedTrainer"
            )
        super().__init__(unwrap(model), optimizer, loss, loader, devices[0], **options)
        self.devices = devices
        self.output_device = devices[0] if output_device is None else existing_gpus([output_device])[0]
        self.network = nn.DataParallel(self.model, devices, self.output_device)
        self.name = _name_of([device.index for device in devices])

    def place_inputs(self, inputs: Tensor) -> Tensor:
        """As they are: DataParallel copies each piece straight to its GPU, and no GPU holds all of them."""
        return inputs


def _name_of(numbers: list[int]) -> str:
    """[0, 1, 2, 3] -> "cuda:0-3", [0, 2] -> "cuda:0,2"."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and numbers == list(range(first, last + 1)):
        return f"cuda:{first}-{last}"
    return "cuda:" + ",".join(map(str, numbers))
