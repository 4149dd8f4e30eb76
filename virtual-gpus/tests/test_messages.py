"""Messages between ranks on the clock: their times travel beside them, and must neither hang nor wait for patience."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss
from virtual_gpus import record_timeline, virtual_gpus
from virtual_gpus.dispatch import collectives


def pass_on(rank):
    """Ten messages from rank 0 to rank 1, each read; the seconds of rank 1's clock."""
    with record_timeline() as timeline:
        for _ in range(10):
            x = torch.ones(2**20, device="cuda")
            dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
            x.sum().item()
    return timeline.seconds


def test_a_messages_time_is_there_as_soon_as_the_message(monkeypatch):
    """gloo never calls a message completed before somebody waits for it: polling would use up the patience."""
    monkeypatch.setattr(collectives, "_PATIENCE", timedelta(seconds=600))
    with virtual_gpus(2):
        first, second = in_ranks(pass_on, count=2, seconds=60)
    assert 0 < second < 1 and 0 < first < 1


def unread(rank):
    """Messages that nobody looks at, in tensors that are gone at once; then one that is read."""
    for number in range(30):
        x = torch.full((4,), float(number), device="cuda")
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        del x
        torch.ones(8, device="cuda").sum().item()  # lets the clock forget what nobody holds
    x = torch.full((4,), 7.0 * (1 - rank), device="cuda")
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    return x.sum().item()


def test_messages_that_nobody_reads_do_not_stop_later_ones():
    with virtual_gpus(2):
        assert in_ranks(unread, count=2, seconds=60) == [28.0, 28.0]


SECONDS = 15e-6 + 6.5e-6 + 2**24 / (0.78 * 0.9 * 31.5e9)  # 16 MiB from GPU to GPU over PCIe 4.0 and the host


def neighbours(rank, how):
    """Send 16 MiB to the next rank while as much comes from the previous one: when both began and ended, and by when
    the tensor was read."""
    sent, received = torch.ones(2**22, device="cuda"), torch.zeros(2**22, device="cuda")
    peers = (rank + 1) % dist.get_world_size(), (rank - 1) % dist.get_world_size()
    dist.barrier()
    with record_timeline() as timeline:
        if how == "batch":
            calls = [dist.P2POp(dist.isend, sent, peers[0]), dist.P2POp(dist.irecv, received, peers[1])]
            works = dist.batch_isend_irecv(calls)
        else:
            works = [dist.isend(sent, peers[0]), dist.irecv(received, peers[1])]
        for work in works:
            work.wait()
        received.add_(1)
    times = {span.name: (span.start, span.end) for span in timeline.spans if span.kind == "collective"}
    return times["send"], times["recv"], timeline.seconds


def are_at_once(found):
    for send, received, whole in found:
        for start, end in (send, received):
            assert end - start == pytest.approx(SECONDS, rel=1e-6)
        assert abs(send[0] - received[0]) < 50e-6  # the host issues one after the other
        assert SECONDS < whole < SECONDS + 100e-6


@pytest.mark.parametrize("shapes_only", [False, True])
@pytest.mark.parametrize("how", ["batch", "two calls"])
def test_a_rank_sends_and_receives_at_once(how, shapes_only):
    """A link carries both directions, and NCCL uses them: an exchange takes as long as one of its two messages."""
    with virtual_gpus(4, kind="RTX 4090", shapes_only=shapes_only):
        are_at_once(in_ranks(neighbours, how, count=4, seconds=60))


def test_spawned_ranks_send_and_receive_at_once():
    with virtual_gpus(2, kind="RTX 4090"):
        are_at_once(in_ranks(neighbours, "batch", count=2, start="spawn"))


@pytest.mark.parametrize("how", ["batch", "two calls"])
def test_one_rank_of_many_sends_and_receives_at_once(how):
    with virtual_gpus(4, kind="RTX 4090", shapes_only=True, rank=1, world_size=4):
        dist.init_process_group("nccl")
        torch.cuda.set_device(1)
        are_at_once([neighbours(1, how)])


def ring(rank):
    """An all-reduce of 64 MiB by hand and NCCL's; the seconds of both."""
    ranks, x = dist.get_world_size(), torch.ones(2**24, device="cuda")
    pieces, incoming = x.chunk(ranks), torch.empty(2**24 // ranks, device="cuda")
    dist.barrier()
    with record_timeline() as by_hand:
        for step in range(2 * (ranks - 1)):
            sent, there = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
            to_next = dist.P2POp(dist.isend, sent, (rank + 1) % ranks)
            from_previous = dist.P2POp(dist.irecv, incoming, (rank - 1) % ranks)
            for work in dist.batch_isend_irecv([to_next, from_previous]):
                work.wait()
            there.add_(incoming) if step < ranks - 1 else there.copy_(incoming)
        torch.cuda.synchronize()
    dist.barrier()
    with record_timeline() as nccls:
        dist.all_reduce(x)
        torch.cuda.synchronize()
    return by_hand.seconds, nccls.seconds


@pytest.mark.parametrize("rank", [None, 2])
def test_a_ring_by_hand_takes_little_longer_than_an_all_reduce(rank):
    """The same bytes over the same links, and between the messages the sums and copies of a quarter each."""
    options = {} if rank is None else {"rank": rank, "world_size": 4}
    with virtual_gpus(4, kind="RTX 4090", shapes_only=True, **options):
        if rank is None:
            found = in_ranks(ring, count=4, seconds=60)
        else:
            dist.init_process_group("nccl")
            torch.cuda.set_device(rank)
            found = [ring(rank)]
    for by_hand, nccls in found:
        assert nccls < by_hand < 1.15 * nccls


def both_ways_twice(rank):
    """Two messages to the other rank, two from it, and an all-reduce: the spans."""
    sent, received = torch.ones(2**22, device="cuda"), [torch.ones(2**22, device="cuda") for _ in range(2)]
    dist.barrier()
    with record_timeline() as timeline:
        calls = [(kind, x) for x in received for kind in (dist.isend, dist.irecv)]
        calls = [dist.P2POp(kind, sent if kind is dist.isend else x, 1 - rank) for kind, x in calls]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        for x in received:
            x.add_(1)
        dist.all_reduce(sent)
        torch.cuda.synchronize()
    return [(span.name, span.start, span.end) for span in timeline.spans if span.kind == "collective"]


def test_messages_in_one_direction_share_the_link():
    with virtual_gpus(2, kind="RTX 4090", shapes_only=True):
        for spans in in_ranks(both_ways_twice, count=2, seconds=60):
            by_kind = {kind: [span[1:] for span in spans if span[0] == kind] for kind in ("send", "recv", "all_reduce")}
            for kind in ("send", "recv"):
                (first, _), (second, end) = sorted(by_kind[kind])
                assert second >= first + SECONDS - 50e-6
                assert end <= by_kind["all_reduce"][0][0] + 1e-9


def layers():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)], torch.randn(16, 8), torch.randn(16, 8)


def pipelined(rank, schedule_class):
    nets, x, y = layers()
    stage = PipelineStage(nets[rank].to(rank), rank, 4, torch.device("cuda", rank))
    schedule = schedule_class(stage, 8, loss_fn=mse_loss)
    for _ in range(2):
        nets[rank].zero_grad()
        schedule.step(*([x.to(rank)] if rank == 0 else []), target=y.to(rank) if rank == 3 else None)
    return nets[rank][0].weight.grad.cpu()


@pytest.mark.parametrize("schedule_class", [ScheduleGPipe, Schedule1F1B])
def test_pytorchs_pipelines_run_on_virtual_gpus(schedule_class):
    nets, x, y = layers()
    mse_loss(nn.Sequential(*nets)(x), y).backward()
    with virtual_gpus(4):
        found = in_ranks(pipelined, schedule_class, count=4, seconds=60)
    for net, gradient in zip(nets, found, strict=True):
        torch.testing.assert_close(gradient, net[0].weight.grad)
