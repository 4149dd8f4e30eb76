"""Streams and events: objects, times on the modelled clock, and the streams of backward passes."""

import pytest
import torch
from measuring import draw, function, times_of
from virtual_gpus import active_machine, virtual_gpus

GPUS = {"count": 3, "memory": "16 GiB"}
PLACES = []  # where the backward pass of `seen` ran


def test_streams_come_from_a_pool_per_gpu_and_priority(gpus):
    """c10/cuda/CUDAStream.cpp: after 32 of them, the first one comes again."""
    many = [torch.cuda.Stream(device=2) for _ in range(33)]
    assert many[0] == many[32] and len(set(many)) == 32 and torch.cuda.Stream(2, priority=-1) not in many


def test_streams_and_events_are_objects_that_work(gpus):
    side, default = torch.cuda.Stream(device=1), torch.cuda.default_stream(1)
    assert side.device == gpus[1] and side != torch.cuda.current_stream(1) == default and isinstance(side, torch.Stream)
    torch.cuda.set_stream(side)
    assert torch.cuda.current_stream(1) == side and torch.cuda.current_device() == 1
    torch.accelerator.set_stream(default)
    torch.cuda.set_device(0)
    assert torch.cuda.current_stream(1) == torch.accelerator.current_stream(1) == default
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(ValueError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    end.record(side)
    side.synchronize()
    with pytest.raises(torch.AcceleratorError, match="invalid resource handle"):
        start.elapsed_time(end)  # of two GPUs
    with pytest.raises(RuntimeError, match=r"Event device 1 does not match recording stream's device 0\."):
        end.record()
    assert repr(default) == "<torch.cuda.Stream device=cuda:1 cuda_stream=0x0>"
    assert torch.cuda.Stream.priority_range() == (0, -3)
    assert [torch.cuda.Stream(priority=p).priority for p in (5, 0, -1, -9)] == [0, 0, -1, -3]


@pytest.fixture
def multiplied():
    """A matrix on an A100 that has done nothing yet, and the seconds of its product with itself."""
    with virtual_gpus(1, kind="A100", shapes_only=True):
        x = torch.empty(8192, 8192, device="cuda")
        seconds = times_of(lambda: x @ x)["mm"]
    with virtual_gpus(1, kind="A100", shapes_only=True):
        yield torch.empty(8192, 8192, device="cuda"), seconds


def test_events_time_the_gpu_and_the_host_runs_ahead(multiplied):
    (x, product), (start, end, last) = multiplied, (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    x @ x
    end.record()
    assert start.query() and not end.query()
    assert active_machine().clock.now < product
    with pytest.raises(RuntimeError, match="Both events must be completed before calculating elapsed time"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(1e3 * product, rel=0.01)
    assert active_machine().clock.now >= product
    torch.backends.cuda.matmul.allow_tf32 = True  # off until somebody turns it on
    try:
        x @ x
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    last.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 5 * end.elapsed_time(last)


def test_another_stream_waits_only_if_it_is_told(multiplied):
    (x, product), y, side = multiplied, torch.empty(10, device="cuda"), torch.cuda.Stream()
    x @ x
    pinned = torch.empty(10).pin_memory()
    side.wait_event(torch.cuda.Event())  # which was never recorded
    with torch.cuda.stream(side):
        y.copy_(pinned, non_blocking=True)
    assert side.record_event()._time < product  # beside the product
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y.copy_(pinned, non_blocking=True)
    assert side.record_event()._time > product
    assert not side.query()
    side.synchronize()
    assert side.query() and active_machine().clock.now > product


def note_the_place(ctx, gradient):
    device = torch.ones(1, device="cuda").device
    PLACES.append((device, torch.cuda.current_stream(device)))
    return gradient


seen = function(lambda ctx, x: x.clone(), note_the_place)


def test_a_backward_pass_runs_on_the_streams_and_the_gpu_of_the_forward_pass(gpus):
    PLACES.clear()
    first, second, side = (torch.cuda.Stream(2) for _ in range(3))
    default, x = torch.cuda.default_stream(2), draw(3).to(gpus[2]).requires_grad_()
    with torch.cuda.stream(first):
        one = seen(x)
    with torch.cuda.stream(second):
        two = seen(x * 2)
    with torch.cuda.stream(side):
        torch.autograd.grad((seen(one) + two).sum(), x, retain_graph=True)
        seen(one.detach())
        assert torch.cuda.current_stream(2) == side
    assert PLACES == [(gpus[2], stream) for stream in (side, second, first)]
    with torch.cuda.stream(first):
        seen(x) * 2
    loss = (seen(one) + two).sum()
    with torch.cuda.stream(side):
        loss.backward()
        assert side._mark() >= first._mark() and side._mark() >= default._mark()
    assert [stream for _, stream in PLACES[3:]] == [default, second, first]
    assert torch.cuda.current_stream(2) == default and torch.cuda.current_device() == 0
    (y := x * 2).register_hook(lambda _: PLACES.append(torch.cuda.current_stream(2)))
    with torch.cuda.stream(side):
        z = y * 3
    z.sum().backward()
    assert PLACES[-1] == default
