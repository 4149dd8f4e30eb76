"""helpers.lesson07.scaling: clusters, one rank's step laid out for many, laws, programs."""

import re
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from virtual_gpus import virtual_gpus

from helpers.gpus import GPU_KINDS, data_sheet
from helpers.lesson07.methods import BERT, TrainStep
from helpers.lesson07.pictures import describe_scaling, scaling_picture
from helpers.lesson07.scaling import (
    Bucket,
    Cluster,
    RankStep,
    amdahl,
    amdahl_seconds,
    efficiency,
    rank_step,
)
from helpers.measure.timeline import record_timeline
from helpers.parallel.launching import launch
from tests.pictures import alt_text

MIB = 2**20


# ---- clusters ------------------------------------------------------------------------------------------------------


def test_an_all_reduce_moves_two_n_minus_one_by_n_of_the_bytes():
    """Patarasu and Yuan 2009, as in test_known_times.py of the engine; with so many bytes latency is nothing."""
    cluster, size = Cluster("A100", 8), 2**34
    two = cluster.all_reduce_seconds(size, 2)
    for ranks in (4, 8):
        assert cluster.all_reduce_seconds(size, ranks) / two == pytest.approx(2 * (ranks - 1) / ranks, rel=1e-3)


def test_the_slowest_link_sets_the_pace():
    inside, ethernet, infiniband = (
        Cluster("A100", 8, network=network).all_reduce_seconds(100 * MIB, ranks)
        for network, ranks in (("Ethernet 10", 8), ("Ethernet 10", 16), ("InfiniBand NDR", 16))
    )
    assert inside < infiniband < ethernet


def test_an_all_reduce_uses_all_adapters_of_a_machine():
    """Bytes divide among them as long as links within the machine are not slower; a machine alone needs none."""
    one, eight = (Cluster("A100", 8, network="InfiniBand HDR", adapters=count) for count in (1, 8))
    size = 2**34
    assert one.all_reduce_seconds(size, 16) == pytest.approx(8 * eight.all_reduce_seconds(size, 16), rel=1e-3)
    assert one.all_reduce_seconds(size, 8) == eight.all_reduce_seconds(size, 8) < eight.all_reduce_seconds(size, 16)
    many = Cluster("A100", 8, network="InfiniBand HDR", adapters=100)
    inside = many.all_reduce_seconds(size, 8) / (2 * 7 / 8)
    assert many.all_reduce_seconds(size, 16) / (2 * 15 / 16) == pytest.approx(inside, rel=1e-3)
    assert one.copy_seconds(size, 16) == eight.copy_seconds(size, 16)  # two GPUs use one adapter
    with pytest.raises(ValueError, match="at least one network adapter, not 0"):
        Cluster("A100", 8, adapters=0)


def test_a_copy_goes_over_the_slowest_link():
    cluster = Cluster("A100", 8, network="Ethernet 25")
    assert cluster.copy_seconds(MIB, 1) == 0 < cluster.copy_seconds(MIB, 2) == cluster.copy_seconds(MIB, 8)
    assert cluster.copy_seconds(1000 * MIB, 16) == pytest.approx(1000 * MIB / (0.88 * 25e9 / 8), rel=1e-3)


def test_what_cards_reach_is_below_their_data_sheets():
    """Convolutions run on TF32's tensor cores where there are some, products do not."""
    for kind in GPU_KINDS:
        reached, sheet = Cluster(kind).rates, data_sheet(kind)
        assert 0.5 * sheet.flops.fp32 < reached.products < sheet.flops.fp32
        assert 0.2 * sheet.flops.fp32 < reached.convolutions < 0.5 * sheet.flops.tf32 or sheet.capability < (8, 0)
        assert 0.7 * sheet.bandwidth <= reached.memory < sheet.bandwidth and 1e-6 <= reached.kernel <= 4e-6
    assert Cluster("A100").rates.convolutions > 2 * Cluster("A100").rates.products


def test_a_cluster_knows_its_cards():
    cluster = Cluster("K80")
    assert cluster.gpu.name == "Tesla K80"
    with virtual_gpus(1, kind="K80"):
        torch.zeros(1, device="cuda")
        free, _ = torch.cuda.mem_get_info()
    assert free <= cluster.room <= free + 4 * MIB


@pytest.mark.parametrize("options", [{"kind": "K79"}, {"kind": "K80", "network": "string"}])
def test_unknown_names_are_refused(options):
    with pytest.raises(ValueError, match="Choose one of"):
        Cluster(**options)


def test_machines_are_filled_evenly():
    with pytest.raises(ValueError, match="evenly"):
        Cluster("A100", 8).all_reduce_seconds(1, 9)


# ---- one rank for many -----------------------------------------------------------------------------------------------


def a_step(ddp, gpu, samples):
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def step():
        sgd.zero_grad()
        ddp(torch.empty(samples, 1024, device=gpu)).sum().backward()
        sgd.step()

    return step


def a_net(gpu):
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(20)]).to(gpu)


def in_a_rank(rank, samples):
    step = a_step(DistributedDataParallel(a_net(rank), device_ids=[rank]), rank, samples)
    step(), step()
    with record_timeline() as timeline:
        step()
    return timeline.seconds, timeline.utilisation(rank)


@pytest.mark.parametrize(
    ("kind", "samples", "links", "bound"),
    [("K80", 4096, None, "GPU"), ("A100", 64, None, "host"), ("H200", 8, "PCIe 3", "links")],
)
def test_one_rank_tells_what_real_ranks_take(kind, samples, links, bound):
    """Ranks in processes of their own, two and four of them, whatever the bottleneck is. Tolerance: 0.2 %, and 0.01 of
    utilisation. (With DDP's gradients copied as for a communication hook, steps bound by the host came 5 % short.)"""
    cluster = Cluster(kind, 4, links)
    with virtual_gpus(4, kind=kind, links=links, shapes_only=True):
        alone = rank_step(a_net(0), partial(a_step, gpu=0, samples=samples), "cuda:0")
        for ranks in (2, 4):
            seconds, shares = zip(*launch(in_a_rank, samples, ranks=ranks, show=False), strict=True)
            assert alone.on(ranks, cluster) == pytest.approx(max(seconds), rel=0.002)
            assert alone.utilisation_on(ranks, cluster) == pytest.approx(shares[0], abs=0.01)
    assert sum(bucket.nbytes for bucket in alone.buckets) == 20 * 1025 * 1024 * 4
    assert alone.on(1, cluster) == pytest.approx(alone.seconds, rel=1e-3)
    computing = sum(end - start for start, end in alone.kernels) / alone.seconds
    waits = alone.on(4, cluster) / alone.seconds
    assert {"GPU": computing > 0.9, "host": computing < 0.7 and waits < 1.05, "links": waits > 1.2}[bound]


def test_buckets_wait_for_each_other_and_hide_in_the_backward_pass():
    cluster = Cluster("A100", 4)
    each = cluster.all_reduce_seconds(64 * MIB, 4)
    work = ((0.0, 9.0), (9.0, 9.0), (9.0, 10.0))
    hidden = RankStep(10.0, 0, 0, (Bucket(1.0, 64 * MIB, 1), Bucket(9.0, 64 * MIB, 1)), work)
    crowded = RankStep(10.0, 0, 0, (Bucket(9.0, 64 * MIB, 1), Bucket(9.0, 64 * MIB, 1)), work)
    assert hidden.on(4, cluster) == pytest.approx(10 + each)
    assert crowded.on(4, cluster) == pytest.approx(10 + 2 * each)
    assert hidden.utilisation_on(4, cluster) == 1


def test_gaps_between_kernels_take_up_a_delay():
    """The host is late with the optimizer's kernels: an all-reduce that is done by then costs nothing."""
    cluster = Cluster("A100", 4)
    each = cluster.all_reduce_seconds(64 * MIB, 4)
    late = RankStep(10.0, 0, 0, (Bucket(1.0, 64 * MIB, 1),), ((0.0, 1.0), (1.0 + each, 2.0), (9.0, 10.0)))
    assert late.on(4, cluster) == 10
    assert late.utilisation_on(4, cluster) == pytest.approx(0.3)


# ---- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("serial", [0.0, 0.03, 0.5, 1.0])
def test_amdahls_share_is_found_again(serial):
    seconds = {n: amdahl_seconds(7.0, serial, n) for n in (1, 2, 8, 64)}
    assert amdahl(seconds) == pytest.approx(serial, abs=1e-9)


def test_amdahls_limit():
    assert 1 / amdahl_seconds(1, 0.1, 10**9) == pytest.approx(10)


def test_efficiency_strong_and_weak():
    assert efficiency({1: 8.0, 4: 4.0}) == {1: 1.0, 4: 0.5}
    assert efficiency({1: 8.0, 4: 10.0}, weak=True) == {1: 1.0, 4: 0.8}
    assert efficiency({4: 4.0, 2: 8.0}) == {2: 1.0, 4: 1.0}


@pytest.mark.parametrize("seconds", [{1: 1.0}, {2: 1.0, 4: 0.5}])
def test_amdahl_needs_one_gpu_and_more(seconds):
    with pytest.raises(ValueError, match="one GPU"):
        amdahl(seconds)


# ---- programs and pictures -----------------------------------------------------------------------------------------


def test_the_job_measures_what_one_a100_can_hold():
    """One GPU takes the whole batch in a strong series and that of each in a weak one."""
    job = Path("notebooks/scripts/scaling.slurm").read_text()
    program, batch = re.search(r"(\S+scaling\.py) --batch-size (\d+)", job).groups()
    assert Path(program).is_file()  # from the course's folder, as the job says
    with virtual_gpus(1, kind="A100", shapes_only=True) as gpus:
        net = BERT.build().to(gpus[0])
        step = TrainStep(BERT, net, partial(BERT.loss, net, gpu=gpus[0]))
        step(int(batch)), step(int(batch))
        step.clear()
        with pytest.raises(torch.OutOfMemoryError):
            step(2 * int(batch))


@pytest.mark.parametrize("weak", [False, True])
def test_pictures_have_words(weak):
    curves = {"a": {1: 1.0, 2: 0.6, 4: 0.4}, "b": {1: 1.0, 2: 0.5, 4: 0.25}}
    figure = scaling_picture(curves, weak=weak)
    assert alt_text(figure.axes[0]) == describe_scaling(curves, weak)
    assert ("Amdahl" in describe_scaling(curves, weak)) is not weak
    plt.close(figure)
