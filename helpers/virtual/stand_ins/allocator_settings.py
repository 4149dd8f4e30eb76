"""The caching allocator's settings (c10/core/AllocatorConfig.h, c10/cuda/CUDAAllocatorConfig.h): "key:value,key:value".

Settings that change no figure of the model are accepted, those that would are refused by name.
"""

from __future__ import annotations

import re

from helpers.virtual import errors

_FRACTION = "per_process_memory_fraction"
# How host memory is pinned, when a lock is held and what a graph capture does: nothing that GPU memory depends on here.
_WITHOUT_EFFECT = {
    "pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb", "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb",
    "pinned_free_catch_all", "release_lock_on_cudamalloc", "graph_capture_record_stream_reuse",
}  # fmt: skip
# What the model does; another value is not modelled.
_AS_MODELLED = {"backend": "native", "expandable_segments": "False", "throw_on_cudamalloc_oom": "False",
                "large_segment_size_mb": "20"}  # fmt: skip
_NOT_MODELLED = {"max_split_size_mb", "max_non_split_rounding_mb", "garbage_collection_threshold",
                 "roundup_power2_divisions", "segments_reserve_by_cb"}  # fmt: skip


def pairs(settings: str) -> list[tuple[str, str]]:
    """The settings in a text; a list in brackets stays one value. Raises ValueError for what PyTorch cannot read."""
    found = []
    for part in re.split(r",(?![^\[]*\])", settings.replace(" ", "")):
        key, colon, value = part.partition(":")
        if not part:
            continue
        if key not in _WITHOUT_EFFECT | _NOT_MODELLED | {*_AS_MODELLED, _FRACTION}:
            raise ValueError(f"Unrecognized key '{key}' in Accelerator allocator config.")
        if not colon or not value:
            raise ValueError(f"the allocator setting '{key}' has no value: write {key}:value")
        found.append((key, value))
    return found


def apply(settings: str, gpus) -> None:
    """Apply a text of settings to all GPUs. Raises NotModelled or ValueError, before anything was changed."""
    wanted = pairs(settings)
    for key, value in wanted:
        if key in _NOT_MODELLED or value != _AS_MODELLED.get(key, value):
            raise errors.not_modelled(f'the allocator setting "{key}:{value}"')
    for key, value in wanted:
        if key == _FRACTION:
            for gpu in gpus:
                gpu.allocator.set_fraction(float(value))


def described(settings: str, version: tuple[int, int]) -> dict:
    """The settings as a snapshot lists them: PyTorch's defaults, which are all that the model has."""
    result = {
        "PYTORCH_CUDA_ALLOC_CONF": settings,
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)},
    }
    return result | ({"max_round_threshold": -1, "max_cached_size": -1} if version >= (2, 13) else {})
