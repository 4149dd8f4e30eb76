"""Measure a training step or an operator on the GPU that is at hand: a virtual one, or a real one.

    measured = load("steps.json")["cases"]["mlp_adamw_b256"]      # what the H200 said
    modelled = on_virtual_gpu(lambda: training_steps(CASES["mlp_adamw_b256"]), "2.11.0")
    modelled["memory"][0]["peak_allocated"] / measured["memory"][0]["peak_allocated"]

Figures are bytes; allocated ones above what was in use before.
"""

from __future__ import annotations

import functools
import gc
import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from virtual_gpus import virtual_gpus

if TYPE_CHECKING:
    from torch.distributed._tools.mem_tracker import MemTracker

FOLDER = Path(__file__).parents[2] / "tests" / "data" / "h200"
FIGURES = ("allocated", "peak_allocated", "reserved", "peak_reserved")
STEPS = 3


@functools.cache
def load(name: str) -> dict:
    """What a file of tests/data/h200 holds (.json or .json.gz)."""
    content = (FOLDER / name).read_bytes()
    return json.loads(gzip.decompress(content) if name.endswith(".gz") else content)


def on_virtual_gpu(act: Callable, torch_version: str, shapes_only: bool = True, kind: str = "H200"):
    """What `act()` returns on one fresh virtual GPU that uses memory as that version of PyTorch does."""
    gpus = virtual_gpus(1, kind=kind, shapes_only=shapes_only, torch_version=torch_version)
    with gpus, nothing_drawn() if shapes_only else nullcontext():
        return act()


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """Networks are made without their first random numbers, which take longer than a step that has no values."""
    names = "uniform_", "normal_", "kaiming_uniform_", "kaiming_normal_"
    with ExitStack() as patches:
        for name in names:
            patches.enter_context(mock.patch.object(torch.nn.init, name, lambda tensor, *_, **__: tensor))
        yield


def emptied(act: Callable):
    """What `act()` returns on an empty card: cuBLAS's workspaces go first, then the cache that they were in."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return act()


def steps_in_order(builds: dict[str, Callable], count: int = STEPS) -> dict[str, dict]:
    """All training steps one after the other, as the H200 ran them: each finds what the one before left in the cache.

    There the cache was emptied first and cuBLAS's workspaces given back afterwards, into the cache. (Nobody wrote that
    down. In the other order five of its nine cases differ by some hundred KiB; in this one they are equal.)
    """
    measured = {}
    for name, build in builds.items():
        gc.collect()
        torch.cuda.empty_cache()
        torch._C._cuda_clearCublasWorkspaces()
        measured[name] = training_steps(build, count)
    return measured


def training_steps(build: Callable, count: int = STEPS, device: str = "cuda") -> dict:
    """model_bytes, base, losses and per step the four figures, as in steps.json."""
    base = torch.cuda.memory_allocated()
    step = build(device)
    model_bytes = torch.cuda.memory_allocated() - base
    losses, memory = [], []
    for _ in range(count):
        torch.cuda.reset_peak_memory_stats()
        losses.append(step())
        memory.append(_figures(base))
    del step
    gc.collect()
    return {"model_bytes": model_bytes, "base": base, "losses": losses, "memory": memory}


def _figures(base: int) -> dict[str, int]:
    """Allocated memory above `base`; reserved memory as it is."""
    ask = torch.cuda
    allocated = ask.memory_allocated() - base, ask.max_memory_allocated() - base
    return dict(zip(FIGURES, (*allocated, ask.memory_reserved(), ask.max_memory_reserved()), strict=True))


def operator_rounds(build: Callable, rounds: int = 2, device: str = "cuda") -> dict:
    """inputs and per round of forward and backward six figures, as in operator_memory.json."""
    base = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    inputs, forward = build(device)
    measured = {"inputs": torch.cuda.memory_allocated() - base, "steps": []}
    for _ in range(rounds):
        figures = {"before": torch.cuda.memory_allocated()}
        torch.cuda.reset_peak_memory_stats()
        output = forward()
        figures |= _moment("forward")
        torch.cuda.reset_peak_memory_stats()
        output.float().sum().backward()
        figures |= _moment("backward")
        del output
        figures["after_del"] = torch.cuda.memory_allocated()
        measured["steps"].append({name: nbytes - base for name, nbytes in figures.items()})
    del inputs, forward
    return measured


def operators_in_order(builds: dict[str, Callable], rounds: int = 2) -> dict[str, dict]:
    """All of them one after the other. What an LSTM with dropout keeps in cuDNN shifts the blocks of later ones."""
    return {name: emptied(functools.partial(operator_rounds, build, rounds)) for name, build in builds.items()}


def _moment(name: str) -> dict[str, int]:
    return {f"after_{name}": torch.cuda.memory_allocated(), f"peak_{name}": torch.cuda.max_memory_allocated()}


@contextmanager
def mem_tracker(*watched: Any) -> Iterator[MemTracker]:
    """PyTorch's own MemTracker, watching modules, optimizers and tensors on the CPU."""
    from torch.distributed._tools.mem_tracker import MemTracker  # imports PyTorch's compiler, which takes a second

    tracker = MemTracker()
    tracker.track_external(*watched)
    inherited = "resize_" not in vars(torch.UntypedStorage)
    with tracker:
        yield tracker
    if inherited:  # it puts the inherited method back as one of the class's own
        del torch.UntypedStorage.resize_


def mem_tracker_peak(build: Callable, count: int = STEPS) -> int:
    """The peak of the same steps by MemTracker."""
    step = build("cpu")
    with mem_tracker(step.net, step.optimizer, *step.batch) as tracker:
        for _ in range(count):
            step()
            tracker.reset_mod_stats()  # it refuses a second step otherwise
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
