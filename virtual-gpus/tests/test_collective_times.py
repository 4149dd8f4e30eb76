"""How long collectives take by bytes over links, as one rank of many (PyTorch's backend "fake").

An H100's NVLink: 450 GB/s. One InfiniBand NDR adapter: 50 GB/s. Collectives reach 0.78 of both (`clock.links`).
"""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from virtual_gpus import record_timeline, virtual_gpus
from virtual_gpus.clock.links import arrange
from virtual_gpus.clock.traffic import collective_seconds
from virtual_gpus.gpus import spec

GPUS = 8  # of a host
NBYTES = 1 << 28


@contextmanager
def one_rank(rank: int, world: int, **options):
    """This process is one rank of `world` on hosts with 8 H100. The others are not there."""
    with virtual_gpus(GPUS, kind="H100", network="InfiniBand NDR", shapes_only=True, **options):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        torch.cuda.set_device(rank % GPUS)
        try:
            yield
        finally:
            dist.destroy_process_group()


def collectives(function) -> list:
    with record_timeline() as timeline:
        function()
    return [span for span in timeline.spans if span.kind == "collective"]


def wire(function) -> float:
    """Seconds of a collective without its fixed part, which the latencies make."""
    (span,) = collectives(function)
    return span.end - span.start


def on_host(count: int, adapters: int = 1, here: int = GPUS):
    """The links of a group of `count` ranks, of which every host has `here`."""
    topology = arrange(spec("H100"), GPUS, network="InfiniBand NDR", adapters=adapters)
    return topology.route([divmod(rank, here) for rank in range(count)], per_host=GPUS)


# What each GPU sends, as a part of the bytes (nccl-tests, doc/PERFORMANCE.md), and the hops one after the other.
PARTS = {
    "all_reduce": lambda n: (2 * (n - 1) / n, 2 * (n - 1)),
    "all_gather": lambda n: ((n - 1) / n, n - 1),
    "reduce_scatter": lambda n: ((n - 1) / n, n - 1),
    "all_to_all": lambda n: ((n - 1) / n, n - 1),
    "broadcast": lambda n: (1, n - 1),
    "reduce": lambda n: (1, n - 1),
}


@pytest.mark.parametrize("kind", PARTS)
def test_inside_a_host_bytes_go_over_nvlink(kind):
    part, hops = PARTS[kind](8)
    seconds = 15e-6 + part * NBYTES / (0.78 * 450e9) + hops * 2.5e-6
    assert collective_seconds(on_host(8), kind, NBYTES) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("adapters, across", [(1, 50e9), (4, 200e9), (8, 400e9), (16, 450e9)])
@pytest.mark.parametrize("kind", [kind for kind in PARTS if kind != "all_to_all"])
def test_across_hosts_all_adapters_share_the_ring(kind, adapters, across):
    """Four hosts. Sixteen adapters are faster than NVLink, which is the slowest link then."""
    part, hops = PARTS[kind](32)
    seconds = 15e-6 + part * NBYTES / (0.78 * across) + hops * 2.5e-6
    assert collective_seconds(on_host(32, adapters), kind, NBYTES) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("adapters", [1, 4, 8])
def test_groups_of_one_host_share_its_adapters(adapters):
    """Eight groups at a time, each with one rank of every host: an eighth of the adapters for each."""
    part, hops = PARTS["all_reduce"](4)
    seconds = 15e-6 + part * NBYTES / (0.78 * 50e9 * adapters / 8) + hops * 2.5e-6
    assert collective_seconds(on_host(4, adapters, here=1), "all_reduce", NBYTES) == pytest.approx(seconds, rel=1e-9)


def test_an_all_to_all_across_hosts():
    """Two hosts: half of what each GPU has goes to the other host, from eight GPUs through eight adapters."""
    seconds = 15e-6 + NBYTES / 2 / (0.78 * 50e9) + 15 * 2.5e-6
    assert collective_seconds(on_host(16, 8), "all_to_all", NBYTES) == pytest.approx(seconds, rel=1e-9)


def test_each_collective_of_pytorch_takes_its_time():
    """In a mesh of 2 hosts x 8 GPUs: "dp" goes over the network, "tp" over NVLink. Latencies: 0.2 ms at most."""
    ms = {"tp": NBYTES / (0.78 * 450e9) * 1e3, "dp": NBYTES / (0.78 * 50e9) * 1e3}
    with one_rank(3, 16, adapters=8):
        mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp", "tp"))
        dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
        x, part = torch.empty(NBYTES // 4, device="cuda"), torch.empty(NBYTES // 32, device="cuda")
        shards = [torch.empty_like(part) for _ in range(8)]
        spread = DTensor.from_local(part.view(8, -1), mesh["tp"], [Shard(0)])
        calls = {
            "all-reduce": (2, lambda: dist.all_reduce(x, group=tp)),
            "all-reduce, functional": (2, lambda: functional.all_reduce(x, "sum", tp) + 0),
            "all-reduce, coalesced": (4, lambda: functional.all_reduce_coalesced([x, x], "sum", tp)[1] + 0),
            "all-gather": (1, lambda: dist.all_gather_into_tensor(x, part, group=tp)),
            "all-gather, list": (1, lambda: dist.all_gather(shards, part, group=tp)),
            "all-gather, functional": (
                1,
                lambda: torch.ops._c10d_functional.all_gather_into_tensor(part, 8, tp.group_name),
            ),
            "all-gather, DTensor": (1, lambda: spread.redistribute(placements=[Replicate()]).to_local() + 0),
            "reduce-scatter": (1, lambda: dist.reduce_scatter_tensor(part, x, group=tp)),
            "reduce-scatter, list": (1, lambda: dist.reduce_scatter(part, shards, group=tp)),
            "reduce-scatter, DTensor": (
                1,
                lambda: DTensor.from_local(x, mesh["tp"], [Partial()]).redistribute(placements=[Shard(0)]).to_local(),
            ),
            "all-to-all": (1, lambda: dist.all_to_all_single(x, x, group=tp)),
            "all-to-all, list": (1, lambda: dist.all_to_all(shards, shards, group=tp)),
            "all-to-all, DTensor": (1 / 8, lambda: spread.redistribute(placements=[Shard(1)]).to_local() + 0),
            "gather": (1, lambda: dist.gather(part, None, 0, group=tp)),
            "scatter": (1, lambda: dist.scatter(part, None, 0, group=tp)),
            "broadcast": (8 / 7, lambda: dist.broadcast(x, 0, group=tp)),
        }
        for name, (times, call) in calls.items():
            (span,) = collectives(call)
            assert span.lane == f"{name.split(',')[0]}, tp"
            assert (span.end - span.start) * 1e3 == pytest.approx(times * 7 / 8 * ms["tp"], abs=0.2), name
        assert wire(lambda: dist.all_reduce(x, group=dp)) * 1e3 == pytest.approx(ms["dp"], abs=0.2)
        assert wire(lambda: dist.send(x, 4)) * 1e3 == pytest.approx(ms["tp"], abs=0.2)
        assert wire(lambda: dist.recv(x, 11)) * 1e3 == pytest.approx(ms["dp"], abs=0.2)
        (everyone,) = collectives(lambda: dist.all_reduce(x))
        assert everyone.lane == "all-reduce" and everyone.sent == 2 * 15 / 16 * NBYTES
