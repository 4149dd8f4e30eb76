"""Where a training is within an epoch, and what a snapshot holds so that it goes on from exactly there.

A snapshot is a checkpoint (`helpers.train.checkpoints`) with one more entry, "training":

    job      what must be the same for a position to mean the same: ranks, batch, accumulation, order of samples
    scaler   of float16
    ranks    of each rank: its generators; and, in the middle of an epoch, its position and the generators with which
             that epoch began, from which the order of the samples follows

To go on in the middle of an epoch, its order is made again, and the batches that are done are loaded once more and
thrown away. That costs time, but leaves everything that loading draws from generators as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from helpers.train.checkpoints import CheckpointError, fill_from, read_checkpoint, remove_leftovers, save_checkpoint
from helpers.train.generators import generator_states, set_generators

__all__ = ["Position", "Resumable"]


@dataclass
class Position:
    """How far this rank is in an epoch.

    rate        the learning rate that the epoch began with
    sums        `batch_sums` of its batches
    largest     samples of the largest step
    start       the generators when the epoch began
    generators  the generators to go on with, after an interruption
    loading     the generators before the batches of the next step were loaded, if that was a step ahead
    """

    rate: float
    sums: Tensor
    steps: int = 0
    batches: int = 0
    largest: int = 0
    start: dict[str, Any] | None = None
    generators: dict[str, Any] | None = None
    loading: dict[str, Any] | None = None


class Resumable:
    """The part of a trainer that saves it and goes on: see `helpers.train.loops.loop.Trainer` for its attributes."""

    def save(self, path: str | Path | None = None) -> None:
        """Write a snapshot (to `checkpoint` by default). With several ranks all must call it; the first writes."""
        path = path or self._path("save to", "save")
        mine = {"generators": generator_states(self.generator, self.gpus), "position": None}
        if self.position is not None:
            mine["position"] = {**vars(self.position), "sums": self.position.sums.cpu(), "generators": None}
        everyone = self.gather(mine)
        if self.rank == 0:
            training = {"job": self._job(), "scaler": self.precision.state_dict(), "ranks": everyone}
            parts = (self.model, self.optimizer, self.epoch - 1, self.scheduler)
            save_checkpoint(path, *parts, generator=self.generator, training=training)

    def resume(self, path: str | Path | None = None, missing_ok: bool = False) -> int:
        """Go on from a snapshot (`checkpoint` by default); returns the number of the epoch that comes next.

        missing_ok: where there is no file, do nothing; a program that may be started again can then always call it.

        Training then ends in the same weights as if it had never been interrupted, also in the middle of an epoch.
        CheckpointError where that cannot be: a damaged file, another model, another order of the samples.
        """
        path = path or self._path("resume from", "resume")
        content = self.read(path, missing_ok)
        if content is not None:
            self._restore(content, path)
        return self.epoch

    def _path(self, question: str, verb: str) -> str | Path:
        if self.checkpoint is None:
            raise ValueError(f"{question} which file? Give {verb}(path), or checkpoint= to the trainer")
        return self.checkpoint

    @property
    def generator(self) -> torch.Generator | None:
        """The loader's own generator, if it has one."""
        return getattr(self.loader, "generator", None)

    @property
    def gpus(self) -> list[torch.device]:
        """The GPUs that this process trains on."""
        return [device for device in self.devices if device.type == "cuda"]

    def _seed_epoch(self) -> None:
        if self.seed is not None:
            # Ranks far apart, so that no rank's epoch draws what another rank drew in another epoch.
            seed = self.seed + self.epoch + 1_000_003 * self.rank
            torch.manual_seed(seed)
            if self.generator is not None:
                self.generator.manual_seed(seed)
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)

    def gather(self, state: Any) -> list[Any]:
        """The states of all ranks, on rank 0."""
        return [state]

    @property
    def steps_done(self) -> int:
        """Optimizer steps of the epoch that comes next, or is under way."""
        return self.position.steps if self.position is not None else 0

    def read(self, path: str | Path, missing_ok: bool = False) -> dict[str, Any] | None:
        """The content of a checkpoint."""
        remove_leftovers(path)
        return None if missing_ok and not Path(path).exists() else read_checkpoint(path)

    def _restore(self, content: Mapping[str, Any], path: str | Path) -> None:
        """After an error the model, its position and its generators are as they were."""
        training, parts = content.get("training"), (self.model, self.optimizer, self.scheduler)
        if training is None:  # written by `save_checkpoint` alone
            self.epoch = fill_from(content, path, *parts, rng=True, generator=self.generator) + 1
            return
        inside, same = training["ranks"][0]["position"] is not None, training["job"] == self._job()
        if inside and not same:
            check_job(training["job"], self._job(), path)
        self.epoch = fill_from(content, path, *parts) + 1
        self.precision.load_state_dict(training["scaler"])
        if inside:
            self.position = _position(self, training["ranks"], same)
        elif self.rank < len(training["ranks"]):
            set_generators(training["ranks"][self.rank]["generators"], self.generator, self.gpus)
        if self.rank == 0 and len(training["ranks"]) != self.world_size and (inside or self.seed is None):
            warnings.warn(_other_ranks(len(training["ranks"]), self.world_size), stacklevel=3)

    def _job(self) -> dict[str, Any]:
        return job_of(self.loader, self.world_size, self.accumulate)


def _other_ranks(before: int, now: int) -> str:
    return (
        f"a snapshot of {before} ranks goes on with {now}: weights, optimizer, schedule and the order of the samples "
        "are as they were; what each rank draws, as for dropout, is not"
    )


def _position(trainer: Resumable, ranks: list[Mapping[str, Any]], same: bool) -> Position:
    nothing = {"generators": None, "position": {"start": None, "loading": None}}
    mine = ranks[trainer.rank] if trainer.rank < len(ranks) else nothing
    drawn = {name: mine["position"].get(name) for name in ("start", "loading")}
    position = Position(**{**ranks[0]["position"], **drawn})
    position.generators = mine["generators"]
    if same:
        position.sums, position.largest = mine["position"]["sums"], mine["position"]["largest"]
    else:  # the same samples in other pieces: the first rank takes over what all have counted
        total = torch.stack([rank["position"]["sums"] for rank in ranks]).sum(0)
        position.sums = total if trainer.rank == 0 else torch.zeros_like(total)
        position.batches = position.steps * trainer.accumulate
        position.largest = trainer.loader.batch_size * trainer.accumulate
    position.sums = position.sums.to(trainer.output_device)
    return position


def job_of(loader: Any, ranks: int, accumulate: int) -> dict[str, Any]:
    """What fixes which samples a step takes. `order` is None where it cannot be known, as for a plain list."""
    batch_size = getattr(loader, "batch_size", None)
    known = isinstance(loader, DataLoader) and batch_size is not None
    return {
        "ranks": ranks,
        "batch_size": batch_size,
        "accumulate": accumulate,
        "order": _order_of(loader) if known else None,
    }


def _order_of(loader: DataLoader) -> str:
    sampler = loader.sampler
    parts = [type(sampler).__name__, f"of {len(loader.dataset)} samples" if hasattr(loader.dataset, "__len__") else ""]
    if isinstance(sampler, DistributedSampler):
        parts += [f"shuffle={sampler.shuffle}", f"seed={sampler.seed}", f"drop_last={sampler.drop_last}"]
    return " ".join([*parts, f"loader's drop_last={loader.drop_last}"])


def check_job(saved: Mapping[str, Any], here: Mapping[str, Any], path: Any) -> None:
    """CheckpointError if a position in the middle of an epoch of `saved` means nothing `here`.

    It does for another number of ranks or another `accumulate`, if their steps take the same samples.
    """
    steps = [_samples_of_a_step(job) for job in (saved, here)]
    if saved["order"] is None or saved["order"] != here["order"] or steps[0] != steps[1]:
        raise CheckpointError(
            f"{path} was saved in the middle of an epoch of another job ({_told(saved)}; here {_told(here)}): which "
            "samples are still to come cannot be known. Resume with the same order and the same number of samples "
            "per step, all ranks together, or from a checkpoint of the end of an epoch"
        )


def _samples_of_a_step(job: Mapping[str, Any]) -> int:
    return job["ranks"] * (job["batch_size"] or 0) * job["accumulate"]


def _told(job: Mapping[str, Any]) -> str:
    return (
        f"{job['ranks']} ranks, batches of {job['batch_size']}, accumulate {job['accumulate']}, "
        f"order {job['order'] or 'not known'}"
    )
