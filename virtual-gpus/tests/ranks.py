"""Functions in several processes of one process group, as programs for several GPUs run, and waiting for them."""

import time

import pytest
import torch

run_ranks = pytest.importorskip("virtual_gpus.testing").run_ranks  # needs `distributed`, as all who import this

HANGS_S = 300  # nothing here takes that long, however busy the machine is


def in_ranks(function, *arguments, count: int) -> list:
    """What `function(rank, *arguments)` returns in each of `count` processes, rank 0's first."""
    return run_ranks(function, count, arguments, timeout=HANGS_S, show=False)


def fully_sharded(net, **options):
    """A network of which the whole is sharded, and each part by itself."""
    for part in (*net, net):
        torch.distributed.fsdp.fully_shard(part, **options)
    return net


def ones(*shape, dtype=None):
    return torch.ones(*shape, dtype=dtype, device="cuda")


def until(condition, seconds=200, every=0.005):
    """What `condition()` gives as soon as it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(every)
    raise AssertionError(f"{condition} did not become true within {seconds} s")
