"""Checkpoints: files that are saved whole or not at all, and that load with or without DataParallel around the model.

    save_checkpoint("run/last.pt", model, optimizer, epoch)    # a model in DataParallel, or not
    epoch = load_checkpoint("run/last.pt", model, optimizer)   # and this one may be, too

`nn.DataParallel(net)` and `DistributedDataParallel(net)` put `module.` before every key of their `state_dict()`. So a
file saved from a wrapped model does not load into a plain one. Files written here never have the prefix; files that
have it are read as well. Files are read with `weights_only=True`, so they can hold numbers but no code.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["CheckpointError", "load_checkpoint", "save_checkpoint", "unwrap"]

PREFIX = "module."


class CheckpointError(RuntimeError):
    """The file exists, but it is damaged, or it lacks what is asked for."""


def unwrap(model: nn.Module) -> nn.Module:
    """The net inside DataParallel or DistributedDataParallel; the model itself if it is not wrapped."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    return model


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    scheduler: Any = None,
) -> Path:
    """Save what training needs to go on after `epoch`, the last finished epoch. Returns the path.

    The file is written under another name in the same folder and then takes the place of the old one in one step,
    because `os.replace` is atomic within a file system. A process that is killed half-way leaves the old checkpoint as
    it was.
    """
    given = {"optimizer": optimizer} | ({} if scheduler is None else {"scheduler": scheduler})
    content = {
        "model": unwrap(model).state_dict(),
        "epoch": epoch,
        "classes": {name: type(part).__name__ for name, part in given.items()},
        **{name: part.state_dict() for name, part in given.items()},
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            # Without fsync a power cut could leave the new name on an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
) -> int | None:
    """Fill the model, and what else is given, from a checkpoint. Returns the epoch that was finished last.

    Reads the files of `save_checkpoint`, and plain ones of `torch.save(model.state_dict(), path)`, for which the epoch
    is None; with or without `module.` in the keys, into a model with or without DataParallel.

    The file's tensors are read onto the CPU and copied into the model from there, so that a file saved on cuda:3 can be
    read on a laptop, and no GPU holds all weights twice.

    Raises FileNotFoundError, and CheckpointError for a damaged file and for one of another kind of optimizer. For a
    different model PyTorch's RuntimeError names the keys and shapes.
    """
    content = _read(Path(path))
    net, weights = unwrap(model), content["model"]
    # A net may have a layer of its own that is called `module`: cut the prefix only where the keys do not fit.
    if weights.keys() != net.state_dict().keys() and all(key.startswith(PREFIX) for key in weights):
        weights = {key.removeprefix(PREFIX): value for key, value in weights.items()}
    net.load_state_dict(weights)
    for name, part in {"optimizer": optimizer, "scheduler": scheduler}.items():
        if part is not None:
            _fill(part, name, content, path)
    return content.get("epoch")


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no checkpoint at {path}. Check the path, or write one with save_checkpoint first."
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has no error class of its own: a damaged file raises one of many
        raise CheckpointError(
            f"{path} ({path.stat().st_size / 2**20:.2f} MiB) cannot be read: it is damaged, cut off, or holds more "
            f"than numbers. Delete it and use an older one. PyTorch says: {error}"
        ) from error
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path} holds a {type(content).__name__}, which is not a checkpoint.")
    return content if isinstance(content.get("model"), Mapping) else {"model": content}


def _fill(part: Any, name: str, content: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    if name not in content:
        raise CheckpointError(f"{path} holds no {name}. Load it with {name} left out.")
    # PyTorch loads the state of SGD into Adam without a word, and fails at the next step.
    saved, here = content["classes"][name], type(part).__name__
    if saved != here:
        raise CheckpointError(f"{path} holds the state of {saved}, not of {here}. Build the {name} that was saved.")
    part.load_state_dict(content[name])
