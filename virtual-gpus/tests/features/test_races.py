"""Races that `check_races` must find: each case has one order too few, and none once it is mended."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from operator import methodcaller

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from virtual_gpus import RaceError, virtual_gpus
from virtual_gpus.switch import active_machine
from virtual_gpus.testing import RankError


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


def freed_while_another_stream_reads_a_part(mended):
    x = ones()
    on_another_stream(partial(torch.mul, x[:100], 2))
    del x
    torch.empty(4096, device="cuda")[100 if mended else 99 :].fill_(2)


def resized_while_another_stream_reads(mended):
    storage = (x := ones()).untyped_storage()
    stream, _ = on_another_stream(partial(torch.mul, x, 2))
    if mended:
        x.record_stream(stream)
    storage.resize_(0)
    for _ in range(20):
        ones("cuda:1")  # by then the stream is done, and the block is the same
    storage.resize_(4 * 4096)
    x.fill_(2)


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


def replicas_are_summed_too_early(mended):
    sums, stream = [ones("cuda:0"), ones("cuda:1")], torch.cuda.Stream("cuda:1")
    stream.wait_stream(torch.cuda.current_stream("cuda:1"))
    with torch.cuda.stream(stream):
        sums[1].mul_(2)
    if mended:
        torch.cuda.current_stream("cuda:1").wait_stream(stream)
    nn.parallel.comm.reduce_add(sums)


def beside(work):
    """The start of a race: a tensor, another stream, and what `work` makes of the tensor there."""

    def start():
        x = ones()
        return x, *on_another_stream(lambda: work(x))

    return start


def pinned():
    host = torch.ones(4096).pin_memory()
    return host, host.to("cuda", non_blocking=True)


def copied():
    host = torch.empty(1, pin_memory=True)
    return (host.copy_(torch.ones(1, device="cuda"), non_blocking=True),)


def wait_for_it(x, stream, y):
    current().wait_stream(stream)


def synchronize(*_):
    torch.cuda.synchronize()


def attend(x):
    q = x.view(1, 8, 16, 32)
    return scaled_dot_product_attention(q, q, q)


def in_parts(start, mend, go_on, mended):
    state = start()
    if mended:
        mend(*state)
    go_on(*state)


IN_PARTS = {  # how it starts, what mends it, how it goes on
    "a result is read too early": (beside(lambda x: x * 2), wait_for_it, lambda x, stream, y: y + 1),
    "it is overwritten while it is read": (
        beside(lambda x: x * 2), lambda x, stream, y: stream.record_event().synchronize(), lambda x, *_: x.zero_()
    ),
    "two write": (beside(lambda x: x.fill_(2)), synchronize, lambda x, *_: x.fill_(3)),
    "a pinned buffer is filled again": (pinned, synchronize, lambda host, device: host.zero_()),
    "it is read before the copy is here": (
        lambda: (ones().to("cpu", non_blocking=True),), lambda host: current().synchronize(), torch.sum
    ),
    **{f"a pinned buffer by {name}": (copied, synchronize, methodcaller(name)) for name in ("numpy", "tolist", "item")},
    "a prefetched batch": (beside(lambda x: pinned()), wait_for_it, lambda x, stream, y: y[1] * 2),
    "attention": (beside(attend), wait_for_it, lambda x, stream, y: y + 1),
    "losses": (beside(lambda x: [x.requires_grad_().sin().sum(), on_another_stream(lambda: x.cos().sum())[1]]),
               synchronize, lambda x, stream, y: (y[0] + y[1], torch.autograd.backward(y))),
    "an LSTM": (beside(lambda x: nn.LSTM(4, 4).cuda()(x.view(32, 32, 4))[0]), wait_for_it, lambda x, stream, y: y + 1),
}  # fmt: skip
WHOLE = (starts_too_early, a_part_of_it, the_event_is_recorded_too_early, the_event_is_of_another_stream,
         the_event_is_not_asked, replicas_are_summed_too_early, freed_while_another_stream_reads,
         freed_while_another_stream_reads_a_part, resized_while_another_stream_reads, the_optimizer,
         a_copy_from_another_gpu)  # fmt: skip
CASES = {case.__name__: case for case in WHOLE} | {name: partial(in_parts, *parts) for name, parts in IN_PARTS.items()}


@pytest.mark.parametrize("shapes_only", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_race(case, shapes_only):
    with virtual_gpus(2, check_races=True, shapes_only=shapes_only), pytest.raises(RaceError):
        CASES[case](False)
    with virtual_gpus(2, check_races=True, shapes_only=shapes_only):
        CASES[case](True)


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
        for case in CASES.values():
            case(False)
        x = ones()
        assert on_another_stream(lambda: (x + 1).sum().item(), False)[1] == 8192  # numbers do not wait for streams


def test_what_was_freed_is_kept_once_and_an_empty_tensor_may_be_recorded_on_a_stream():
    with virtual_gpus(1, check_races=True):
        for start in range(12):
            x = torch.empty(4096, device="cuda")
            on_another_stream(partial(torch.mul, x[start:], 2))
            del x
        assert [len(accesses) for _, accesses in active_machine().follower._freed] == [1] * 12
        torch.empty(0, device="cuda").record_stream(torch.cuda.Stream())


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
    dist.recv(x, 0) if rank else dist.send(x, 1)
    for function in (attend, lambda x: rms_norm(x, (8,)), lambda x: nn.LSTM(8, 8).cuda()(x.view(64, 8, 8))[0]):
        y = function(torch.ones(4096, device="cuda", requires_grad=True).view(512, 8))
        y.backward(all_reduce(torch.ones_like(y), "sum", dist.group.WORLD))
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
        with pytest.raises(RankError, match=r"(?s)RaceError.*written by allreduce_ .*Call wait\(\) of the Work"):
            run_ranks(unawaited, 2)


def test_the_variable_of_pytorchs_sanitizer_which_is_off_only_while_gpus_are_on(monkeypatch):
    """With the variable, every operator goes through it from the import of torch on, and asks the driver."""
    monkeypatch.setenv("TORCH_CUDA_SANITIZER", "1")
    with virtual_gpus(1), pytest.raises(RaceError, match="Race: two uses of the same memory of cuda:0"):
        starts_too_early(False)
    program = """if True:
        import torch
        from torch.cuda._sanitizer import cuda_sanitizer
        import virtual_gpus.switch
        for _ in range(2):
            assert cuda_sanitizer.enabled
            with virtual_gpus.switch.virtual_gpus(2):
                assert not cuda_sanitizer.enabled and torch.ones(2, device="cuda:1").sum() == 2
        assert cuda_sanitizer.enabled
    """
    subprocess.run([sys.executable, "-c", program], check=True)
