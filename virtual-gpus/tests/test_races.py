"""Races that `check_races` must find: each case has one order too few, and none once it is mended."""

from __future__ import annotations

from functools import partial
from operator import methodcaller

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention
from virtual_gpus import RaceError, virtual_gpus
from virtual_gpus.testing import RankError, run_ranks


def current():
    return torch.cuda.current_stream()


def ones(device="cuda"):
    return torch.ones(4096, device=device)


def on_another_stream(work, mended=True):
    """Run `work` on a new stream, which waits for the current one if that is the mended part."""
    stream = torch.cuda.Stream()
    if mended:
        stream.wait_stream(current())
    with torch.cuda.stream(stream):
        return stream, work()


def starts_too_early(mended):
    x = ones()
    on_another_stream(lambda: x * 2, mended)


def result_is_read_too_early(mended):
    x = ones()
    stream, y = on_another_stream(lambda: x * 2)
    if mended:
        current().wait_stream(stream)
    y + 1


def is_overwritten_while_it_is_read(mended):
    x = ones()
    stream, _ = on_another_stream(lambda: x * 2)
    if mended:
        stream.record_event().synchronize()
    x.zero_()


def two_write(mended):
    x = ones()
    stream, _ = on_another_stream(lambda: x.fill_(2))
    if mended:
        torch.cuda.synchronize()
    x.fill_(3)


def a_part_of_it(mended):
    x = ones()
    on_another_stream(lambda: x[:100].zero_())
    x[100 if mended else 99 :].add_(1)


def the_event_is_recorded_too_early(mended):
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    early = ones()
    event.record()
    late = ones()
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        (early if mended else late) * 2


def the_event_is_of_another_stream(mended):
    x = ones()
    stream, _ = on_another_stream(lambda: x.add_(1))
    event = torch.cuda.Event()
    event.record(stream if mended else torch.cuda.Stream())
    current().wait_event(event)
    x + 1


def the_event_is_not_asked(mended):
    x = ones()
    stream, _ = on_another_stream(lambda: x.add_(1))
    event = stream.record_event()
    while mended and not event.query():
        torch.ones(1000, 1000, device="cuda:1") @ torch.ones(1000, 1000, device="cuda:1")
    x + 1


def freed_while_another_stream_reads(mended):
    x = ones()
    stream, _ = on_another_stream(partial(torch.mul, x, 2))
    if mended:
        x.record_stream(stream)
    del x
    ones()


def a_pinned_buffer_is_filled_again(mended):
    host = torch.ones(4096).pin_memory()
    device = host.to("cuda", non_blocking=True)
    if mended:
        torch.cuda.synchronize()
    host.zero_()
    return device


def reads_before_the_copy_is_here(mended):
    host = ones().to("cpu", non_blocking=True)
    if mended:
        current().synchronize()
    host.sum()


def reads_by(read):
    def reads_a_pinned_buffer(mended):
        host = torch.empty(1, pin_memory=True)
        host.copy_(torch.ones(1, device="cuda"), non_blocking=True)
        if mended:
            torch.cuda.synchronize()
        read(host)

    return reads_a_pinned_buffer


def a_prefetched_batch(mended):
    host, stream = torch.ones(4096).pin_memory(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        device = host.to("cuda", non_blocking=True)
    if mended:
        current().wait_stream(stream)
    device * 2


def attention(mended):
    q = torch.randn(1, 2, 16, 32, device="cuda")
    stream, y = on_another_stream(lambda: scaled_dot_product_attention(q, q, q))
    if mended:
        current().wait_stream(stream)
    y + 1


def an_lstm(mended):
    net, x = nn.LSTM(4, 4).cuda(), torch.randn(3, 2, 4, device="cuda")
    stream, (y, _) = on_another_stream(lambda: net(x))
    if mended:
        current().wait_stream(stream)
    y + 1


def the_optimizer(mended):
    net = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(2, 4, device="cuda")).sum().backward()
    on_another_stream(optimizer.step, mended)


def a_copy_from_another_gpu(mended):
    stream = torch.cuda.Stream("cuda:1")
    y = ones("cuda:0").to("cuda:1", non_blocking=True)
    if mended:
        stream.wait_stream(torch.cuda.current_stream("cuda:1"))
    with torch.cuda.stream(stream):
        y * 2


CASES = [
    starts_too_early, result_is_read_too_early, is_overwritten_while_it_is_read, two_write, a_part_of_it,
    the_event_is_recorded_too_early, the_event_is_of_another_stream, the_event_is_not_asked,
    freed_while_another_stream_reads, a_pinned_buffer_is_filled_again,
    reads_before_the_copy_is_here, *(reads_by(methodcaller(name)) for name in ("numpy", "tolist", "item")),
    a_prefetched_batch, attention, an_lstm, the_optimizer, a_copy_from_another_gpu,
]  # fmt: skip


@pytest.mark.parametrize("shapes_only", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_race(case, shapes_only):
    with virtual_gpus(2, check_races=True, shapes_only=shapes_only), pytest.raises(RaceError):
        case(False)
    with virtual_gpus(2, check_races=True, shapes_only=shapes_only):
        case(True)


def test_both_lines_and_what_to_do():
    line = starts_too_early.__code__.co_firstlineno + 1
    with virtual_gpus(1, check_races=True), pytest.raises(RaceError) as caught:
        starts_too_early(False)
    said = str(caught.value)
    assert "written by ones on the default stream of cuda:0, test_races.py:" in said
    assert f"test_races.py:{line + 1}: on_another_stream(lambda: x * 2, mended)" in said
    assert "stream.wait_stream(other)" in said


def test_nothing_is_checked_unless_asked_for():
    with virtual_gpus(2):
        for case in CASES:
            case(False)


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()


def _train(net):
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        net(torch.randn(4, 16, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def ordered(rank):
    """Nothing here is a race: DDP with and without a hook, fully_shard, collectives with and without a Work."""
    ddp = nn.parallel.DistributedDataParallel(_net(), device_ids=[rank])
    _train(ddp)
    ddp.register_comm_hook(None, fp16_compress_hook)
    _train(ddp)
    net = _net()
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    _train(net)
    x = torch.ones(10, device="cuda")
    dist.all_reduce(x, async_op=True).wait()
    dist.all_reduce(x)
    gathered = [torch.zeros_like(x) for _ in range(2)]
    dist.all_gather(gathered, x)
    if rank:
        dist.recv(x, 0)
    else:
        dist.send(x, 1)
    dist.barrier()
    return (gathered[1] + x).sum().item()


def unawaited(rank):
    x = torch.ones(10, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    x.zero_()
    work.wait()


def test_ranks():
    with virtual_gpus(2, check_races=True):
        assert run_ranks(ordered, 2) == [80.0, 80.0]
        with pytest.raises(
            RankError, match=r"RaceError.*(?s:.*)written by allreduce_ .*(?s:.*)Call wait\(\) of the Work"
        ):
            run_ranks(unawaited, 2)


def test_the_variable_of_pytorchs_sanitizer(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_SANITIZER", "1")
    with virtual_gpus(1), pytest.raises(RaceError, match="Race: two uses of the same memory of cuda:0"):
        starts_too_early(False)
