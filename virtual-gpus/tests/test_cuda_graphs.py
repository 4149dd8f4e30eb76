"""CUDA graphs: a replay does what eager steps do, on the same storages; the rules are those of a capture on CUDA."""

import collections
import functools
import gc

import pytest
import torch
from torch import nn
from virtual_gpus import NotModelled, virtual_gpus

pytestmark = pytest.mark.usefixtures("gpus_of_the_module")
GPUS = {"count": 2, "memory": "2 GiB"}
UNSUPPORTED = "CUDA error: operation not permitted when stream is capturing"
INVALIDATED = "CUDA error: operation failed due to a previous error during capture"


@pytest.fixture(autouse=True)
def default_stream():
    """Before PyTorch 2.15 `torch.cuda.graph` leaves its stream the current one where `capture_end` raises."""
    yield
    torch.cuda.set_stream(torch.cuda.default_stream())


def captured(function, **settings):
    """The graph of `function()` and what it returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **settings):
        result = function()
    return graph, result


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(8, 6, 2, batch_first=True, dropout=0.2), nn.Linear(6, 4)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def network():
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.1)
    convolution = nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.BatchNorm1d(5), nn.ReLU())
    return nn.Sequential(nn.RMSNorm(8), convolution, layer, nn.Linear(8, 4))


def train(make, optimizer, autocast: bool, graphed: bool):
    """Four steps after a warm-up, as in the examples of PyTorch's notes: losses, parameters and buffers."""
    torch.manual_seed(0)
    net = make().cuda()
    stepper, batches = optimizer(net.parameters()), [torch.randn(2, 5, 8, device="cuda") for _ in range(4)]
    x = batches[0].clone()

    def step():
        with torch.autocast("cuda", enabled=autocast, cache_enabled=False):
            loss = net(x).float().square().mean()
        loss.backward()
        stepper.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            stepper.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(side)
    stepper.zero_grad(set_to_none=True)
    graph, loss = captured(step) if graphed else (None, None)
    losses = []
    for batch in batches:
        x.copy_(batch)
        if graphed:
            graph.replay()
        else:
            stepper.zero_grad(set_to_none=True)
            loss = step()
        losses.append(loss.item())
    return losses, [tensor.tolist() for tensor in net.state_dict().values()]


adam = functools.partial(torch.optim.Adam, lr=0.01, capturable=True)
fused = functools.partial(torch.optim.AdamW, lr=0.01, fused=True, capturable=True)


@pytest.mark.parametrize(("make", "optimizer", "autocast"), [(network, adam, False), (Recurrent, fused, True)])
def test_a_whole_training_step_equals_eager_steps(make, optimizer, autocast):
    assert train(make, optimizer, autocast, True) == train(make, optimizer, autocast, False)


def test_nothing_runs_before_the_first_replay_storages_stay_and_numbers_on_the_cpu_count_as_they_were():
    x = torch.arange(6.0, device="cuda")
    rows = x.view(2, 3)

    def work():
        rows[0].mul_(2)
        made = x + 1
        half = made[3:]
        half.zero_()
        return made, half

    graph, (made, half) = captured(work)
    where = made.data_ptr(), half.data_ptr()
    assert x.tolist() == [0, 1, 2, 3, 4, 5] and not made.any()
    for expected in ([0, 2, 4, 3, 4, 5], [0, 4, 8, 3, 4, 5]):
        graph.replay()
        assert x.tolist() == expected and made.tolist() == [e + 1 for e in expected[:3]] + [0, 0, 0]
    assert (made.data_ptr(), half.data_ptr()) == where and half.data_ptr() == made[3:].data_ptr()
    x.zero_()
    graph.replay()
    assert made.tolist() == [1, 1, 1, 0, 0, 0]
    factor, x = torch.tensor(2.0), torch.ones(2, device="cuda")
    source, target = torch.ones(2).pin_memory(), torch.zeros(2).pin_memory()

    def work():
        x.copy_(source, non_blocking=True)
        target.copy_(x * factor, non_blocking=True)

    graph, _ = captured(work)
    factor.fill_(100)
    source.fill_(3)
    graph.replay()
    assert target.tolist() == [6, 6]


def test_each_replay_draws_new_numbers_of_the_generator():
    own = torch.Generator("cuda").manual_seed(7)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(own)
    torch.cuda.manual_seed(5)
    with torch.cuda.graph(graph):
        torch.cuda.manual_seed(5)  # the seed that it has is allowed
        x, y = torch.rand(3, device="cuda"), torch.randn(3, device="cuda", generator=own)
    replayed = []
    for _ in range(3):
        graph.replay()
        replayed.append((x.tolist(), y.tolist()))
    torch.cuda.manual_seed(5)
    own.manual_seed(7)
    for pair in replayed:
        assert pair == (torch.rand(3, device="cuda").tolist(), torch.randn(3, device="cuda", generator=own).tolist())
    assert len({str(pair) for pair in replayed}) == 3


def test_a_capture_spreads_over_streams_that_join_it():
    x = torch.ones(4, device="cuda")

    def forked(join: bool):
        with torch.cuda.stream(torch.cuda.Stream()):
            x.add_(1)  # not captured: this runs at once
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        assert torch.cuda.is_current_stream_capturing() and side.is_capturing()
        with torch.cuda.stream(side):
            y = x + 1
            event = torch.cuda.Event()
            event.record()
        if join:
            main.wait_event(event)
        return y * 2

    graph, y = captured(lambda: forked(True))
    graph.replay()
    assert x.tolist() == [2, 2, 2, 2] and y.tolist() == [6, 6, 6, 6] and not torch.cuda.is_current_stream_capturing()
    with pytest.raises(torch.AcceleratorError, match="capturing stream has unjoined work"):
        captured(lambda: forked(False))


def _new_segment():
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.empty(1 << 24, device="cuda")


def _event(x):
    event = torch.cuda.Event()
    event.record()
    event.query()


FORBIDDEN = {
    "item": (lambda x: x.sum().item(), UNSUPPORTED),
    "sizes": (lambda x: x.nonzero(), UNSUPPORTED),
    "list": (lambda x: x.tolist(), UNSUPPORTED),
    "synchronize": (lambda x: torch.cuda.synchronize(), UNSUPPORTED),
    "stream": (lambda x: torch.cuda.current_stream().synchronize(), UNSUPPORTED),
    "blocking copy from pinned": (lambda x: x.copy_(torch.ones(4).pin_memory()), UNSUPPORTED),
    "memory of another stream": (lambda x: _new_segment(), UNSUPPORTED),  # unless the error mode is "relaxed"
    "empty_cache": (lambda x: torch.cuda.empty_cache(), UNSUPPORTED),
    "a graph in a graph": (lambda x: captured(lambda: x + 1), UNSUPPORTED),
    "an event of the capture": (_event, "not permitted on an event last recorded in a capturing stream"),
    "a stream outside": (
        lambda x: torch.cuda.current_stream().wait_stream(torch.cuda.Stream()),
        "dependency created on uncaptured work",
    ),
}


REFUSED = {  # the capture stays valid, and what is raised is what was refused
    "unpinned memory": (lambda x: torch.ones(2).cuda(), "Cannot copy between CPU and CUDA tensors during CUDA graph"),
    "to the CPU": (lambda x: x.cpu(), "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless"),
    "seed": (lambda x: torch.cuda.manual_seed(99), "only if new seed is the same as the original seed"),
    "state": (lambda x: torch.cuda.get_rng_state(), "CUDAGeneratorImpl::current_seed during CUDA graph capture"),
    "strange generator": (lambda x: x.normal_(generator=torch.Generator("cuda")), "CUDA generator not in capture mode"),
    "the program's own": (lambda x: 1 / 0, "division by zero"),
    "a storage emptied": (lambda x: x.untyped_storage().resize_(0), "storages that become smaller"),
}


@pytest.mark.parametrize("name", [*FORBIDDEN, *REFUSED])
def test_what_a_capture_refuses_and_whether_that_ends_it(name):
    act, words = (FORBIDDEN | REFUSED)[name]
    x = torch.ones(4, device="cuda")
    with pytest.raises((RuntimeError, ZeroDivisionError)) as error:
        captured(lambda: (x.add_(1), act(x)))
    causes, found = [], error.value
    while found is not None:
        causes.append(str(found))
        found = found.__context__
    assert any(words in cause for cause in causes) and (INVALIDATED in causes[0]) == (name in FORBIDDEN)
    assert name == "a storage emptied" or x.tolist() == [1, 1, 1, 1]
    assert not torch.cuda.is_current_stream_capturing()
    if name == "memory of another stream":
        captured(lambda: (_new_segment(), torch.ones(2, device="cuda")), capture_error_mode="relaxed")
        with pytest.raises(torch.AcceleratorError, match=INVALIDATED):
            captured(_new_segment, capture_error_mode="thread_local")


def test_the_graph_s_own_errors():
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="CUDA graphs must be captured on a non-default stream"):
        graph.capture_begin()
    with pytest.raises(RuntimeError, match=r"(replay without a preceding|capture_end\(\) must have been called)"):
        graph.replay()
    with pytest.raises(RuntimeError, match=r"Called CUDAGraph::pool\(\) without a preceding successful capture"):
        graph.pool()
    with pytest.warns(UserWarning, match="The CUDA Graph is empty"):
        captured(lambda: None)
    with torch.cuda.graph(graph):
        torch.ones(2, device="cuda")
        assert torch.cuda.CUDAGraph.get_currently_capturing_graph() is graph
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="already owns a captured graph"):
        graph.capture_begin()
    for name in ("debug_dump", "raw_cuda_graph"):
        with pytest.raises(NotModelled, match=rf"torch\.cuda\.CUDAGraph\.{name}"):
            getattr(other, name)("file")


def pools():
    """Bytes by the id of the pool that reserves them."""
    found = collections.Counter()
    for segment in torch.cuda.memory_snapshot():
        found[tuple(segment["segment_pool_id"])] += segment["total_size"]
    return found


def test_a_graph_s_memory_is_a_private_pool():
    gc.collect()  # what an earlier test left is not to go in between
    x = torch.ones(1 << 20, device="cuda")
    torch.cuda.empty_cache()
    before, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()

    def work():
        y = x + 1
        for _ in range(5):
            y = y * 2  # two blocks of the pool take turns
        return y.sum()

    graph, total = captured(work)
    assert pools()[graph.pool()] == (20 << 20) + (2 << 20) == torch.cuda.memory_reserved() - before
    assert torch.cuda.memory_allocated() == allocated + 512
    peak = torch.cuda.max_memory_allocated()
    graph.replay()
    assert total.item() == 64 << 20 and torch.cuda.max_memory_allocated() == peak
    torch.cuda.empty_cache()
    assert graph.pool() in pools()
    second, _ = captured(work, pool=graph.pool())
    assert second.pool() == graph.pool() and pools()[graph.pool()] == 22 << 20
    del graph
    torch.cuda.empty_cache()
    assert second.pool() in pools()
    second.reset()
    del total, _
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_a_replay_is_one_launch_for_the_host():
    x = torch.ones(1000, device="cuda")

    def work():
        return functools.reduce(torch.mul, [x] * 50)

    graph, y = captured(work)
    start, between, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    eager = work()
    between.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    assert torch.equal(y, eager)
    assert between.elapsed_time(end) < 0.2 * start.elapsed_time(between)  # the kernels' time, without the host's


def test_graphs_without_values():
    with virtual_gpus(1, memory="80 GiB", shapes_only=True):
        net, x = nn.Linear(1 << 14, 1 << 14, device="cuda"), torch.randn(1 << 14, 1 << 14, device="cuda")
        graph, y = captured(lambda: net(x).sum().backward())
        before = torch.cuda.memory_reserved()
        graph.replay()
        assert torch.cuda.memory_reserved() == before and graph.pool() in pools() and net.weight.grad is not None


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="newer than this PyTorch")
def test_the_accelerator_s_graph():
    x, graph = torch.zeros(2, device="cuda"), torch.accelerator.Graph()
    with torch.Stream(), graph:
        x += 1
    graph.replay()
    assert x.tolist() == [1, 1]


def test_a_memory_pool_is_apart_from_all_other_memory():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x, small = torch.ones(1 << 20, device="cuda"), torch.ones(4, device="cuda")
        assert pool.use_count() == 2
    outside = torch.ones(1 << 20, device="cuda")
    assert pools()[pool.id] == 22 << 20 and pool.use_count() == 1
    assert sum(segment["total_size"] for segment in pool.snapshot()) == 22 << 20
    assert not {s["address"] for s in pool.snapshot()} >= {s["address"] for s in torch.cuda.memory_snapshot()}
    del x, outside
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before + (22 << 20)
    del small, pool
    assert torch.cuda.memory_reserved() == before
    pool = torch.cuda.MemPool(no_split=True)
    with torch.cuda.use_mem_pool(pool):
        kept = [torch.ones(4, device="cuda") for _ in range(3)]
    assert len(pool.snapshot()) == len(kept)
    with pytest.raises(NotModelled, match=r"torch\.cuda\.MemPool\(use_on_oom=True\)"):
        torch.cuda.MemPool(use_on_oom=True)
