"""PyTorch's CUDA sanitizer (torch/cuda/_sanitizer.py): its variable works, and `features.races` does its work."""

import os
import sys


def is_asked_for() -> bool:
    """Whether TORCH_CUDA_SANITIZER is set, as PyTorch reads it."""
    return "TORCH_CUDA_SANITIZER" in os.environ


def switch_off() -> None:
    """Switch PyTorch's own off. It asks the driver at every operator, and sees no wait of a virtual stream."""
    module = sys.modules.get("torch.cuda._sanitizer")
    if module is not None and module.cuda_sanitizer.enabled:
        module.cuda_sanitizer.disable()
