"""Lesson 10: quiet frameworks, programs with their output, and losses side by side. Imports none of the frameworks."""

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from helpers.gpus import is_virtual
from helpers.show.programs import SCRIPTS


def quiet() -> None:
    """Switch off downloads, telemetry and notes, and let Lightning use `launch`. Call it before they are imported.

    Programs that this process starts inherit the settings of the environment.
    """
    # Lightning's "ddp" runs the main program again for each GPU, so it refuses where Python has a prompt. It looks when
    # it is imported. The ranks of `launch` inherit the answer, although they are programs.
    if hasattr(sys, "ps1"):
        del sys.ps1
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    os.environ.update(TRANSFORMERS_VERBOSITY="error", ACCELERATE_LOG_LEVEL="ERROR")
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", "Was asked to gather along dimension 0")  # lesson 03 explains it


def run_program(*command: str, gpus: int = 0) -> None:
    """Run Python with these arguments and print what it prints, or its error if it fails.

    command     such as "ddp.py", "--max-steps", "10". A name that ends with .py is that of a program in scripts
    gpus        so many virtual GPUs if this notebook has virtual ones; 0 switches none on
    """
    virtual = ["-m", "virtual_gpus", "--gpus", str(gpus)] if gpus and is_virtual() else []
    words = [str(SCRIPTS / word) if word.endswith(".py") else word for word in command]
    ended = subprocess.run([sys.executable, *virtual, *words], capture_output=True, text=True)
    print(ended.stdout if ended.returncode == 0 else ended.stderr)


def show_losses(name: str, losses: Sequence[Sequence[float]]) -> None:
    """Print the losses (ranks, steps) of a run, for each step the mean over its ranks."""
    steps = "  ".join(f"{loss:.3f}" for loss in _mean(losses).tolist())
    print(f"{name:13} {steps}")


def compare(name: str, losses: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> None:
    """Print the losses of a run, and raise AssertionError if they differ from the expected ones.

    losses      (ranks, steps), and so is `expected`; the numbers of ranks may differ, because means are compared
    """
    show_losses(name, losses)
    torch.testing.assert_close(_mean(losses), _mean(expected), atol=1e-4, rtol=0)


def _mean(losses: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(losses).mean(dim=0)
