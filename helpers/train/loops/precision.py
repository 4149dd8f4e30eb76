"""Mixed precision, and the end of an optimizer step: autocast, the scaled loss, clipping.

    precision = Precision("fp16", "cuda")
    with precision.autocast():
        loss = criterion(model(inputs), labels)
    precision.backward(loss)
    precision.step(optimizer, clip=1.0)

Matrix products and convolutions run in 16 bits, weights stay in float32. bfloat16 has float32's range. float16 has
not: small gradients would become 0, so the loss is multiplied by a large number before `backward`, and the gradients
are divided by it before they are used. Where they overflowed, the step is left out and the number made smaller.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["Precision"]

DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """How the steps of one training are computed.

    amp          None (as the weights are), "bf16" or "fp16"
    device_type  "cuda" or "cpu"
    """

    def __init__(self, amp: str | None, device_type: str):
        if amp not in DTYPES:
            raise ValueError(f'amp must be None, "bf16" or "fp16", not {amp!r}')
        self.device_type, self.dtype = device_type, DTYPES[amp]
        self.scaler = torch.amp.GradScaler(device_type) if amp == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """For the forward pass and the loss; `backward` is called outside of it."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device_type, self.dtype)

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None = None) -> None:
        """One step of the optimizer; `clip` is the largest norm that all its gradients together may have."""
        if clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)  # a norm of scaled gradients would mean nothing
            torch.nn.utils.clip_grad_norm_(_parameters(optimizer), clip)
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def state_dict(self) -> dict[str, Any] | None:
        """The scaler's state; None where there is no scaler."""
        return None if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on with a saved scale, if both trainings have one."""
        if self.scaler is not None and state is not None:
            self.scaler.load_state_dict(state)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
