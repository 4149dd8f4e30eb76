"""Checkpoints: saved so that none is lost, loaded so that it does not matter who saved them.

    save_checkpoint("run/last.pt", model, optimizer, epoch)    # a model wrapped in DataParallel, or not
    epoch = load_checkpoint("run/last.pt", model, optimizer)   # and so may this one

`nn.DataParallel(net)` and `DistributedDataParallel(net)` put `module.` before every key of their
`state_dict()`, which is why a file saved from the one does not load into the other. Files written here never
have the prefix; files that have it are read all the same. A file is read with `weights_only=True`: it can
hold numbers, not code.
"""

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from helpers.train.generators import generator_states, set_generators

__all__ = [
    "CheckpointError",
    "fill_from",
    "load_checkpoint",
    "read_checkpoint",
    "remove_leftovers",
    "save_checkpoint",
    "unwrap",
]

PREFIX = "module."


class CheckpointError(RuntimeError):
    """The file is there, but it is damaged, or made by another net or another optimizer."""


def unwrap(model: nn.Module) -> nn.Module:
    """The net inside DataParallel or DistributedDataParallel, the model itself when it is not wrapped."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    return model


# ------------------------------------------------------------------------------------------------------ save


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    scheduler: Any = None,
    rng: bool = True,
    generator: torch.Generator | None = None,
    training: Mapping[str, Any] | None = None,
) -> Path:
    """Write all that training needs to go on after `epoch`, the last finished one; returns the path.

    rng:        also the state of PyTorch's random generators, on the CPU and on each GPU: dropout and
                shuffling then go on as if nothing had happened. Python's and NumPy's generators are not
                saved.
    generator:  the DataLoader's own generator, if it was given one.
    training:   what else a trainer wants to find again, numbers and tensors only: see `helpers.train.loops.state`.

    The file appears whole or not at all: it is written under another name in the same folder, forced to the
    disk, and then takes the place of the old one in one step (`os.replace` is atomic within a file system). A
    process that is killed half-way leaves the old checkpoint as it was.
    """
    content = {
        "model": unwrap(model).state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "epoch": epoch,
        "rng": generator_states(generator) if rng else None,
        "training": training,
        "types": {"optimizer": type(optimizer).__name__, "scheduler": type(scheduler).__name__},
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_then_replace(content, path)
    return path


def _write_then_replace(content: dict[str, Any], path: Path) -> None:
    # The process number keeps two programs that save at the same time from writing into one file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            # Without fsync a power cut could leave the new name on an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(path: str | os.PathLike[str]) -> None:
    """Delete the unfinished files that processes left beside `path` when they were killed in the middle of a save."""
    path = Path(path)
    for unfinished in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        unfinished.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------ load


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    rng: bool = False,
    generator: torch.Generator | None = None,
    map_location: Any = "cpu",
) -> int | None:
    """Fill the model, and what else is given, from a checkpoint; returns the epoch that was finished last.

    Reads the files of `save_checkpoint`, and plain ones of `torch.save(model.state_dict(), path)`, for which
    the epoch is None; with or without `module.`, into a model with or without DataParallel.

    map_location:  where the file's tensors are put before they are copied into the model. The CPU by default,
                   so that a file saved on cuda:3 can be read on a laptop, and GPU 0 does not hold all weights
                   twice.
    rng:           also set PyTorch's generators (and `generator`) to the saved states; the states of GPUs
                   that this machine does not have are left out.

    Raises FileNotFoundError, or CheckpointError for a damaged file and for one of another net or optimizer.
    Every key and shape is compared first: after an error the model is as it was.
    """
    return fill_from(read_checkpoint(path, map_location), path, model, optimizer, scheduler, rng, generator)


def fill_from(
    content: Mapping[str, Any],
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    rng: bool = False,
    generator: torch.Generator | None = None,
) -> int | None:
    """`load_checkpoint` from what `read_checkpoint` returned; `path` is for the error messages."""
    weights = _matching(content["model"], unwrap(model), path)
    if optimizer is not None:
        _fill(optimizer, content, "optimizer", path)
    if scheduler is not None:
        _fill(scheduler, content, "scheduler", path)
    unwrap(model).load_state_dict(weights)
    if rng:
        set_generators(_part(content, "rng", path), generator)
    return content.get("epoch")


def read_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """What a file holds, "model" and perhaps more. FileNotFoundError, or CheckpointError for a damaged file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}: look at the path, or train with checkpoint= first")
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # torch.load has no error class of its own: a damaged file raises any of six
        size = path.stat().st_size / 2**20
        raise CheckpointError(
            f"{path} ({size:.2f} MiB) cannot be read: it is damaged, cut off, or holds more than numbers. "
            f"Delete it and take an older one. PyTorch says: {error}"
        ) from error
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a checkpoint")
    return content if isinstance(content.get("model"), Mapping) else {"model": content}


def _matching(weights: Mapping[str, Any], model: nn.Module, path: Any) -> dict[str, Any]:
    """The file's weights under the model's keys; CheckpointError names what differs."""
    expected = model.state_dict()
    # Compare before cutting the prefix: a net may well have a layer of its own that is called `module`.
    if weights.keys() != expected.keys() and all(key.startswith(PREFIX) for key in weights):
        weights = {key.removeprefix(PREFIX): value for key, value in weights.items()}
    problems = _differences(weights, expected)
    if problems:
        name = type(model).__name__
        raise CheckpointError(
            f"{path} was not made by this {name}: {'; '.join(problems)}. "
            "Build the model with the arguments (classes, depth, vocabulary, ...) that it was saved with"
        )
    return dict(weights)


def _differences(weights: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    missing = [key for key in expected if key not in weights]
    unexpected = [key for key in weights if key not in expected]
    shapes = [
        f"{key} has shape {_shape(weights[key])} in the file, {_shape(value)} in the model"
        for key, value in expected.items()
        if key in weights and _shape(weights[key]) != _shape(value)
    ]
    return [
        f"{len(found)} {what}, first {found[0]}"
        for found, what in (
            (missing, "keys missing in the file"),
            (unexpected, "keys unknown to the model"),
            (shapes, "other shapes"),
        )
        if found
    ]


def _shape(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _part(content: Mapping[str, Any], name: str, path: Any) -> Any:
    part = content.get(name)
    if part is None:
        raise CheckpointError(f"{path} holds no {name}: load it with {name} left out")
    return part


def _fill(target: Any, content: Mapping[str, Any], name: str, path: Any) -> None:
    # PyTorch would take an SGD's state into an Adam without a word, and fail at its next step.
    saved, here = content.get("types", {}).get(name), type(target).__name__
    if saved not in (None, "NoneType", here):
        raise CheckpointError(f"{path} holds the state of {saved}, not of {here}: build the {name} as it was")
    try:
        target.load_state_dict(_part(content, name, path))
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} holds the {name} of another training: {error}. Build the {here} as it was"
        ) from error
