"""How long collectives take by bytes over links, as one rank of many. An H100's NVLink: 450 GB/s. One InfiniBand NDR
adapter: 50 GB/s. Collectives reach 0.78 of both (`features.nccl`)."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from measuring import recorded, rows_of
from ranks import fully_sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from virtual_gpus import record_timeline, virtual_gpus
from virtual_gpus.clock.clock import Clock
from virtual_gpus.clock.links import arrange
from virtual_gpus.features.nccl.traffic import collective_seconds, links_of_group, occupy
from virtual_gpus.gpus import spec

GPUS = 8  # of a host
NBYTES = 1 << 28
WIDTH, BLOCKS = 8192, 4  # of a network
# What each GPU sends, as a part of the bytes (nccl-tests, doc/PERFORMANCE.md), and the hops one after the other.
PARTS = {
    "all_reduce": lambda n: (2 * (n - 1) / n, 2 * (n - 1)),
    "all_gather": lambda n: ((n - 1) / n, n - 1),
    "reduce_scatter": lambda n: ((n - 1) / n, n - 1),
    "all_to_all": lambda n: ((n - 1) / n, n - 1),
    "broadcast": lambda n: (1, n - 1),
    "reduce": lambda n: (1, n - 1),
}


def one_rank(rank: int, world: int, **options):
    """This process is one rank of `world` on hosts with 8 H100. The others are not there."""
    options |= {"kind": "H100", "network": "InfiniBand NDR", "shapes_only": True}
    return virtual_gpus(GPUS, rank=rank, world_size=world, **options)


def collectives(function) -> list:
    return [span for span in recorded(function).spans if span.kind == "collective"]


def on_host(count: int, adapters: int = 1, here: int = GPUS, kind: str = "H100", network: str = "InfiniBand NDR"):
    """The links of a group of `count` ranks, of which every host has `here`."""
    topology = arrange(spec(kind), GPUS, network=network, adapters=adapters)
    return links_of_group(topology, [divmod(rank, here) for rank in range(count)], per_host=GPUS)


def test_rings_and_what_is_none():
    rings = [
        *((kind, 8, {}, 450e9) for kind in PARTS),  # inside a host: over NVLink
        # Four hosts, whose adapters share the ring. Sixteen are faster than NVLink, which is the slowest link then.
        *((kind, 32, {"adapters": 8}, 400e9) for kind in PARTS if kind != "all_to_all"),
        *(("all_gather", 32, {"adapters": count}, across) for count, across in ((1, 50e9), (4, 200e9), (16, 450e9))),
        # Eight groups at a time, each with one rank of every host: an eighth of the adapters for each.
        *(("all_reduce", 4, {"adapters": count, "here": 1}, 50e9 * count / 8) for count in (1, 4, 8)),
    ]
    for kind, count, where, bandwidth in rings:
        part, hops = PARTS[kind](count)
        seconds = 15e-6 + part * NBYTES / (0.78 * bandwidth) + hops * 2.5e-6
        found = collective_seconds(on_host(count, **where), kind, NBYTES)
        assert found == pytest.approx(seconds, rel=1e-9), (kind, count, where)
    # An all-to-all of two hosts: half of what each GPU has goes to the other, from eight GPUs through eight adapters.
    seconds = 15e-6 + NBYTES / 2 / (0.78 * 50e9) + 15 * 2.5e-6
    assert collective_seconds(on_host(16, 8), "all_to_all", NBYTES) == pytest.approx(seconds, rel=1e-9)
    # A small all-reduce over 128 hosts goes along a tree: up and down through 8 GPUs and 7 levels of hosts, instead of
    # 2,046 hops around the ring.
    seconds = 15e-6 + 2 * 1024 / (0.9 * 0.78 * 400e9) + 2 * (7 + 7) * 2.5e-6
    assert collective_seconds(on_host(1024, 8), "all_reduce", 1024) == pytest.approx(seconds, rel=1e-9)
    assert collective_seconds(on_host(1024, 8), "all_gather", 1024) > 1023 * 2.5e-6


def test_each_collective_of_pytorch_takes_its_time():
    """In a mesh of 2 hosts x 8 GPUs: "dp" goes over the network, "tp" over NVLink. Latencies: 0.2 ms at most."""
    ms = {"tp": NBYTES / (0.78 * 450e9) * 1e3, "dp": NBYTES / (0.78 * 50e9) * 1e3}
    with one_rank(3, 16, adapters=8):
        mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp", "tp"))
        dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
        x, part = torch.empty(NBYTES // 4, device="cuda"), torch.empty(NBYTES // 32, device="cuda")
        shards = [torch.empty_like(part) for _ in range(8)]
        spread = DTensor.from_local(part.view(8, -1), mesh["tp"], [Shard(0)])
        whole = DTensor.from_local(x, mesh["tp"], [Partial()])
        calls = {
            "all-reduce": (2, lambda: dist.all_reduce(x, group=tp)),
            "all-reduce, functional": (2, lambda: functional.all_reduce(x, "sum", tp) + 0),
            "all-reduce, coalesced": (4, lambda: functional.all_reduce_coalesced([x, x], "sum", tp)[1] + 0),
            "all-gather": (1, lambda: dist.all_gather_into_tensor(x, part, group=tp)),
            "all-gather, list": (1, lambda: dist.all_gather(shards, part, group=tp)),
            "all-gather, DTensor": (1, lambda: spread.redistribute(placements=[Replicate()]).to_local() + 0),
            "reduce-scatter": (1, lambda: dist.reduce_scatter_tensor(part, x, group=tp)),
            "reduce-scatter, list": (1, lambda: dist.reduce_scatter(part, shards, group=tp)),
            "reduce-scatter, DTensor": (1, lambda: whole.redistribute(placements=[Shard(0)]).to_local()),
            "all-to-all": (1, lambda: dist.all_to_all_single(x, x, group=tp)),
            "all-to-all, list": (1, lambda: dist.all_to_all(shards, shards, group=tp)),
            "all-to-all, DTensor": (1 / 8, lambda: spread.redistribute(placements=[Shard(1)]).to_local() + 0),
            "gather": (1, lambda: dist.gather(part, None, 0, group=tp)),
            "scatter": (1, lambda: dist.scatter(part, None, 0, group=tp)),
            "broadcast": (8 / 7, lambda: dist.broadcast(x, 0, group=tp)),
        }
        calls = {name: (times * 7 / 8 * ms["tp"], call) for name, (times, call) in calls.items()}
        calls["send"] = ms["tp"], lambda: dist.send(x, 4)
        calls["recv"] = ms["dp"], lambda: dist.recv(x, 11)
        calls["all-reduce, dp"] = ms["dp"], lambda: dist.all_reduce(x, group=dp)
        for name, (milliseconds, call) in calls.items():
            spans = recorded(call).spans
            (span,) = (span for span in spans if span.kind == "collective")
            copies = [other for other in spans if other.lane == span.lane and other is not span]
            if name in ("all-gather, list", "reduce-scatter, list"):  # from or to a flat tensor
                gathers = name.startswith("all-gather")  # each reads and writes a part at 3.35 TB/s x 0.88
                assert [copy.name for copy in copies] == ["copy_"] * 8
                assert all(copy.start >= span.end if gathers else copy.end <= span.start for copy in copies)
                seconds = [copy.end - copy.start for copy in copies]
                assert seconds == pytest.approx([2 * NBYTES / 8 / (3.35e12 * 0.88)] * 8, abs=4e-6)
            else:
                assert not copies
            if name not in ("send", "recv"):
                assert span.lane == f"{name.split(',')[0]}, {'dp' if name.endswith('dp') else 'tp'}"
            assert (span.end - span.start) * 1e3 == pytest.approx(milliseconds, abs=0.2), name
        (everyone,) = collectives(lambda: dist.all_reduce(x))
        assert everyone.lane == "all-reduce" and everyone.sent == 2 * 15 / 16 * NBYTES


def forward_of_fully_shard(rows: int):
    """A forward pass over four blocks of one matrix each (256 MiB), sharded over 16 ranks with 8 adapters per host."""
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
    fully_sharded(net).to_empty(device="cuda")
    x = torch.empty(rows, WIDTH, device="cuda")
    with torch.no_grad():
        net(x)
        return recorded(lambda: net(x))


def test_fsdp2_gathers_the_next_block_under_the_computation_of_this_one():
    """All-gather: 256 MiB x 15/16 over 8 x 50 GB/s. Product: 2 x rows x 8192^2 operations at 66.9 TFLOP/s x 0.77. The
    next all-gather starts when this one ends. Meanwhile this block is copied out, which reads and writes 256 MiB at
    3.35 TB/s x 0.88, and multiplied, and this rank's sixteenth of the block after the next is copied in. So three
    all-gathers are hidden for that long, or wholly if that takes longer."""
    gather = 15e-6 + 15 / 16 * 4 * WIDTH**2 / (0.78 * 400e9) + 15 * 2.5e-6
    copies = 2 * 17 / 16 * 4 * WIDTH**2 / (3.35e12 * 0.88)
    with one_rank(0, 16, adapters=8):
        for rows in (128, 2048):
            product, timeline = 2 * rows * WIDTH**2 / (66.9e12 * 0.77), forward_of_fully_shard(rows)
            gathers = [span for span in timeline.spans if span.lane == "all-gather"]
            products = [span for span in timeline.spans if span.name == "mm"]
            assert [span.end - span.start for span in gathers] == pytest.approx([gather] * BLOCKS, rel=1e-6)
            for block in range(1, BLOCKS):
                assert gathers[block].start < products[block - 1].start
                assert products[block].start >= max(gathers[block].end, products[block - 1].end)
            found = timeline.communication()["all-gather"]
            assert (found.calls, found.sent) == (BLOCKS, BLOCKS * 15 / 16 * 4 * WIDTH**2)
            assert found.seconds == pytest.approx(BLOCKS * gather, rel=1e-6)
            exposed = gather + (BLOCKS - 1) * max(0, gather - copies - product)
            assert found.exposed == pytest.approx(exposed, abs=30e-6)
            assert timeline.communication()["all"] == found


def test_queues_streams_and_waits():
    """One queue per group; groups run side by side; `wait()` holds the stream that calls it, and no other."""
    with one_rank(0, 16):
        mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp", "tp"))
        x, y, z = (torch.empty(NBYTES // 4, device="cuda") for _ in "xyz")
        side = torch.cuda.Stream()
        with record_timeline() as timeline:
            works = [
                dist.all_reduce(x, group=mesh.get_group("tp"), async_op=True),
                dist.broadcast(y, 0, group=mesh.get_group("tp"), async_op=True),
                dist.all_reduce(z, group=mesh.get_group("dp"), async_op=True),
            ]
            torch.zeros(8, device="cuda")  # beside all three
            with torch.cuda.stream(side):
                works[1].wait()
                torch.ones(8, device="cuda")
            torch.empty(8, device="cuda").exp_()  # the stream of the computation has not waited
            z.add_(1)  # whoever uses a result waits without being told
        by_name = {span.name: span for span in timeline.spans if span.kind != "collective"}
        first, second, other = (span for span in timeline.spans if span.kind == "collective")
        assert second.start == first.end and other.start < first.end
        assert by_name["ones"].start == pytest.approx(second.end, abs=1e-9)
        assert max(by_name["zeros"].end, by_name["exp_"].end) < first.end < by_name["add_"].start
        assert by_name["add_"].start == pytest.approx(other.end, abs=1e-9)
        found = timeline.communication()
        assert set(found) == {"all", "all-reduce, tp", "broadcast, tp", "all-reduce, dp"}
        assert found["all"].seconds == pytest.approx(other.end - first.start)
        rows = [label.get_text() for label in timeline.plot().axes[0].get_yticklabels()]
        assert {"cuda:0, all-reduce, tp", "cuda:0, broadcast, tp", "cuda:0, all-reduce, dp"} < set(rows)


PUBLISHED = rows_of("nccl")["bus_bandwidths"]


@pytest.mark.parametrize("kind, ranks, here, host, mebibytes, published, error", PUBLISHED["rows"])
def test_bus_bandwidth_of_real_hosts(kind, ranks, here, host, mebibytes, published, error):
    """On hosts of 8 GPUs. Where an adapter of 400 Gbit/s is the slowest link, the model is too slow, since its 0.78 is
    the fraction of NVLink that is reached."""
    nbytes, sent = mebibytes << 20, 2 if kind == "all_reduce" else 1
    seconds = collective_seconds(on_host(ranks, here=here, **PUBLISHED[host]), kind, nbytes)
    assert sent * (ranks - 1) / ranks * nbytes / seconds == pytest.approx(published, rel=error)


def test_kernels_beside_a_collective_are_slower():
    """Before it is issued, and after; and those of a GPU that waits for it are not."""
    clock = Clock(1)
    clock.launch(0, 0, 1.0, 0.0, "mm")
    occupy(clock, 0, "nccl", 0.5, 2.5, "all_gather")
    assert clock.ready(0, 0) == pytest.approx(1 + 0.5 * 0.2)
    before = clock.ready(0, 0)
    clock.launch(0, 0, 1.0, 0.0, "mm")
    assert clock.ready(0, 0) == pytest.approx(before + 1 + 0.2)
    clock.hold(0, 0, 2.5)
    clock.launch(0, 0, 1.0, 0.0, "mm")
    assert clock.ready(0, 0) == pytest.approx(3.5)


@pytest.mark.parametrize("shapes_only", (False, True))
def test_ddp_copies_the_order_of_new_buckets_back_to_the_computer(shapes_only):
    """`Reducer::sync_bucket_indices` (reducer.cpp): two small tensors go to the GPU, from rank 0 to all, and back."""
    with virtual_gpus(1, rank=0, world_size=1, shapes_only=shapes_only):
        dist.init_process_group("nccl")
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda(), device_ids=[0])
        x = torch.ones(8, device="cuda")
        net(x).sum().backward()
        spans = recorded(lambda: net(x)).spans
    moved = [span.name for span in spans if span.kind in ("copy", "collective")]
    assert moved == ["to the GPU", "broadcast", "to the CPU"] * 2 and "_to_copy" not in {span.name for span in spans}
