"""What the wrappers of `helpers.parallel.loss` share: nn.DataParallel that loses no samples and no autocast."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import scatter

from helpers.parallel.loss.shards import left_whole, tensors_in

__all__ = ["Devices", "OnGPUs", "check_alike", "sizes_in"]

Devices = Sequence[torch.device | str | int]


class OnGPUs(nn.DataParallel):
    """nn.DataParallel that says so when there is no GPU, gives no GPU work without samples, and whose replicas compute
    in the caller's autocast.

    dim: the dimension of the samples in all tensors. ValueError for device_ids on a machine without GPUs.
    """

    def __init__(self, module: nn.Module, device_ids: Devices | None = None, dim: int = 0):
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"need an nn.Module, such as nn.CrossEntropyLoss(), not {module!r}: only modules are copied"
            )
        if device_ids is not None and not device_ids:
            raise ValueError(
                "device_ids is empty: name GPUs, or leave it out for all of them (the CPU if there is none)"
            )
        if not isinstance(dim, int) or dim < 0:
            raise ValueError(f"dim={dim!r}: give the number of the dimension that the samples are in, 0 or more")
        super().__init__(module, None if device_ids is None else [torch.device(_named(gpu)) for gpu in device_ids])
        self.dim = dim  # not told above, where it gets lost on a machine without GPUs
        if device_ids and not self.device_ids:
            raise ValueError(
                f"no GPU for device_ids={list(device_ids)}: PyTorch sees none. Call use_gpus(...) before, or leave "
                "device_ids out to run on the CPU"
            )

    def scatter(self, inputs: tuple, kwargs: dict | None, device_ids: Sequence) -> tuple[tuple, tuple]:
        """One (args, kwargs) per GPU that gets samples.

        Together, so that both end with the last sample: nn.DataParallel hands a keyword such as mask=None to every
        GPU, and calls the model without inputs where a small batch has left some of them without samples.
        """
        if not inputs and not kwargs:
            return (), ()
        check_alike("inputs", [inputs, kwargs or {}], len(device_ids), self.dim)
        pieces = scatter((inputs, kwargs or {}), device_ids, self.dim)
        return tuple(piece[0] for piece in pieces), tuple(piece[1] for piece in pieces)

    def parallel_apply(self, replicas: Sequence, inputs: Sequence, kwargs: Any) -> list[Any]:
        """Each replica on its shard, in a thread of its own, with this thread's autocast and inference mode.

        PyTorch tells those threads whether autocast is on, but not its dtype: they would take a thread's default,
        and compute in float16 where bfloat16 was asked for.
        """
        here = _settings()
        return super().parallel_apply([partial(_apply, here, replica) for replica in replicas], inputs, kwargs)


def check_alike(name: str, things: list, gpus: int, dim: int) -> None:
    """ValueError if the tensors are not all cut at the same samples: these would be mixed up or lost, without a word.

    Twice as many rows for each sample are allowed: 8 and 16 make 2 and 4 per GPU.
    """
    whole = next(left_whole(things), None)
    if gpus > 1 and whole is not None:
        raise ValueError(
            f"{name} in a {type(whole).__name__} are not cut, and each GPU would get all of them: PyTorch cuts "
            "tensors, and tuples, lists and dicts of them. Give one of these, such as vars(...) of a dataclass"
        )
    sizes = sorted(set(sizes_in(things, dim)))
    if len({_borders(size, gpus) for size in sizes}) > 1:
        raise ValueError(
            f"{name} of {' and '.join(map(str, sizes))} samples cannot be cut alike, and samples would be mixed up or "
            "lost: every tensor needs one row per sample (x.expand(samples, -1)), or is a buffer of the module"
        )


def sizes_in(thing: Any, dim: int) -> list[int]:
    """How many samples each tensor has in dimension `dim`; ValueError for a tensor without that dimension."""
    shapes = [tuple(tensor.shape) for tensor in tensors_in(thing)]
    for shape in shapes:
        if len(shape) <= dim:
            raise ValueError(
                f"a tensor of shape {shape} has no dimension {dim}, where samples are looked for (dim={dim}): every "
                "tensor needs its samples there; what belongs to no sample is a number, or a buffer of the module"
            )
    return [shape[dim] for shape in shapes]


def _settings() -> list[Callable]:
    """What to enter in another thread to compute as in this one. Gradients are on or off there already."""
    found: list[Callable] = [torch.inference_mode] if torch.is_inference_mode_enabled() else []
    if torch.is_autocast_enabled("cuda"):
        dtype, cached = torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()
        found.append(partial(torch.autocast, "cuda", dtype=dtype, cache_enabled=cached))
    return found


def _apply(settings: list[Callable], module: Callable, *inputs: Any, **kwargs: Any) -> Any:
    with ExitStack() as stack:
        for setting in settings:
            stack.enter_context(setting())
        return module(*inputs, **kwargs)


def _borders(samples: int, gpus: int) -> tuple[Fraction, ...]:
    """Where torch.chunk cuts, as parts of the whole: pieces of the first one's size, but for the last."""
    size = math.ceil(samples / gpus)
    return tuple(Fraction(border, samples) for border in range(0, samples, max(size, 1)))


def _named(gpu: torch.device | str | int) -> Any:
    return f"cuda:{gpu}" if isinstance(gpu, int) else gpu
