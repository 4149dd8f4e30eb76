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
