"""What DistributedDataParallel does in C++: its reducer, with buckets on GPUs, and the comparison of parameters."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from virtual_gpus.dispatch.copies import charge_copy
from virtual_gpus.entrance import entrance
from virtual_gpus.features.distributed.groups import require_backend
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.creation_sites import forget_creation_site
from virtual_gpus.placement.storages import gpu_of, has_values, place
from virtual_gpus.timeline.peak import BUFFERS

_raw_broadcast_coalesced: Any = getattr(torch.distributed, "_broadcast_coalesced", None)  # of builds with distributed
_raw_verify: Any = getattr(torch.distributed, "_verify_params_across_processes", None)
_on = entrance(place)
ALLOCATES = [("nn/parallel/distributed.py", ("__init__", "_sync_module_states"), BUFFERS),
             ("virtual_gpus/features/distributed/reducer.py", None, BUFFERS)]  # fmt: skip


class _Buckets(TorchDispatchMode):
    """Puts tensors on GPUs that C++ makes on "cpu", where the parameters are for C++.

    DDP's reducer (torch/csrc/distributed/c10d/reducer.cpp) names a device for its buckets and for the map of used
    parameters, and none for what it keeps in the computer's memory. `gpus`: of one after the other, and of all others.
    """

    def __init__(self, gpus: Sequence[VirtualGPU | None], gpu: VirtualGPU):
        super().__init__()
        self._gpus, self._gpu = iter(gpus), gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and gpu_of(args[0]) is None and not has_values(args[1]):
            charge_copy("copy_", args[1], args[0], True, gpu_of(args[1]), None)
            return args[0]  # the order of the buckets, back from rank 0: it has no values, so this rank's own stays
        result = func(*args, **kwargs)
        if kwargs.get("device") is not None:  # a bucket, or the numbers in which rank 0 sends the order of the buckets
            gpu = self._gpu if result.dtype is torch.int32 else next(self._gpus, self._gpu)
            return result if gpu is None else _on(result, gpu)
        if isinstance(result, torch.Tensor) and gpu_of(result) is None:
            forget_creation_site(result)  # it stays in the computer's memory, also where it meets a copy on the GPU
        return result


def _on_gpu(base: Any) -> type:
    """DDP's reducer, with its buckets on the GPU from the start, and again when they are made anew.

    C++ makes them anew in the order of the gradients before the second forward pass. Without
    `gradient_as_bucket_view` they are memory beside the gradients, of the same size.
    """

    class Reducer(base):
        def __init__(self, params: list[torch.Tensor], bucket_indices: list[list[int]], *args: Any, **kwargs: Any):
            self._gpus = [gpu_of(parameter) for parameter in params]
            with self._making([self._gpus[indices[0]] for indices in bucket_indices]):
                super().__init__(params, bucket_indices, *args, **kwargs)

        def _making(self, gpus: Sequence[VirtualGPU | None] = ()) -> AbstractContextManager[object]:
            first = self._gpus[0]
            return nullcontext() if first is None or not first.machine.on else _Buckets(gpus, first)

        def _rebuild_buckets(self) -> bool:
            if len({id(gpu) for gpu in self._gpus}) > 1:
                return False  # C++ would mix GPUs, which it cannot tell apart: the first buckets stay
            with self._making():
                return super()._rebuild_buckets()

        def _set_static_graph(self) -> None:
            with self._making():
                return super()._set_static_graph()

    return Reducer


def _without_times(base: Any) -> type:
    """DDP's logger, which with shapes only would warn that it has no timer for such tensors."""

    class Logger(base):
        def __init__(self, reducer: Any):
            super().__init__(reducer)
            gpu = reducer._gpus[0]
            self._timed = gpu is None or not gpu.machine.shapes_only

        def set_runtime_stats_and_log(self) -> None:
            if self._timed:
                super().set_runtime_stats_and_log()

    return Logger


def _numbers_by_gpu(tensors: list[torch.Tensor]) -> list[list[int]]:
    """The numbers in a list of tensors, one list per GPU: C++, which sees one CPU, must not mix them."""
    numbers: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        numbers.setdefault(id(gpu_of(tensor)), []).append(number)
    return list(numbers.values())


def _compute_bucket_assignment_by_size(
    tensors: list[torch.Tensor], limits: list[int], expect_sparse: Sequence[bool] = (), *args: Any, **kwargs: Any
) -> tuple[list[list[int]], list[int]]:
    """Buckets of parameters, of one GPU each."""
    compute: Callable[..., Any] = torch._C._distributed_c10d._compute_bucket_assignment_by_size
    if args or kwargs or len(groups := _numbers_by_gpu(tensors)) < 2:
        return compute(tensors, limits, expect_sparse, *args, **kwargs)
    numbered: list[tuple[list[int], int]] = []
    for numbers in groups:
        sparse = [expect_sparse[n] for n in numbers] if expect_sparse else []
        buckets, sizes = compute([tensors[n] for n in numbers], limits, sparse)
        numbered += [([numbers[i] for i in bucket], size) for bucket, size in zip(buckets, sizes, strict=True)]
    numbered.sort(key=lambda pair: min(pair[0]))
    return [bucket for bucket, _ in numbered], [size for _, size in numbered]


def _verify_params_across_processes(group: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    """Compare the parameters' sizes with the other ranks'; without values there is nothing to compare by."""
    gpu = gpu_of(tensors[0]) if tensors else None
    if tensors and gpu is None:  # C++ sees the same group for tensors of both kinds
        require_backend(group, "cpu")
    if not tensors or has_values(tensors[0]):
        _raw_verify(group, tensors, *args, **kwargs)


def _broadcast_coalesced(group: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    """Parameters or buffers in flat tensors, of one GPU each, which are gone when it returns."""
    for numbers in _numbers_by_gpu(tensors):
        gpu = gpu_of(tensors[numbers[0]])
        require_backend(group, "cpu" if gpu is None else "cuda")
        _raw_broadcast_coalesced(group, [tensors[n] for n in numbers], *args, **kwargs)


def patches() -> list[Patch]:
    if not torch.distributed.is_available():
        return []
    functions = (_broadcast_coalesced, _compute_bucket_assignment_by_size, _verify_params_across_processes)
    replaced: list[Patch] = [(torch.distributed, function.__name__, function) for function in functions]
    replaced.append((torch.distributed, "Reducer", _on_gpu(torch._C._distributed_c10d.Reducer)))
    return replaced + [(torch.distributed, "Logger", _without_times(torch._C._distributed_c10d.Logger))]
