"""The caching allocator's settings: where they come from, and how a snapshot lists them.

What they are and do: `memory.options`. Those that change no figure of the
model are accepted; those that would, and are not modelled, are refused by name.
"""

from __future__ import annotations

from virtual_gpus import errors
from virtual_gpus.machine import VirtualMachine
from virtual_gpus.memory.options import UNLIMITED, Options, environment_text, parse
from virtual_gpus.versions import ROUNDING_IN_SNAPSHOTS, Version


def from_environment() -> Options:
    """The options that PYTORCH_CUDA_ALLOC_CONF (else PYTORCH_ALLOC_CONF) asks for."""
    return _modelled(parse(environment_text()))


def start(machine: VirtualMachine) -> None:
    """The allocators of a machine begin with these options."""
    machine.first_options = from_environment


def apply(settings: str, machine: VirtualMachine) -> None:
    """Behind `torch.cuda.memory._set_allocator_settings`. Raises before anything was changed.

    per_process_memory_fraction counts until the first touch of a GPU, as in PyTorch.
    """
    before = machine.options or machine.first_options()
    options = _modelled(parse(settings, before))
    if machine.options is None:
        machine.first_options = lambda: options
    else:
        machine.set_options(options)


def _modelled(options: Options) -> Options:
    if options.unknown:
        raise errors.not_modelled(f'the allocator setting "{options.unknown[0]}"')
    return options


def described(settings: str, options: Options, version: Version) -> dict:
    """The settings as a snapshot lists them (torch/csrc/cuda/Module.cpp)."""
    result = {
        "PYTORCH_CUDA_ALLOC_CONF": settings,
        "max_split_size": -1 if options.max_split == UNLIMITED else options.max_split,
        "garbage_collection_threshold": options.gc_threshold,
        "expandable_segments": options.expandable,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {str(1 << i): divisions for i, divisions in enumerate(options.divisions)},
    }
    return result | ({"max_round_threshold": -1, "max_cached_size": -1} if version >= ROUNDING_IN_SNAPSHOTS else {})
