"""The clock's rules: host, streams, events, copies, threads. Times follow from the rules; here they are counted out."""

import math
import random
from contextlib import nullcontext

import pytest
import torch
from measuring import recorded
from virtual_gpus import active_machine, record_timeline, virtual_gpus
from virtual_gpus.clock.clock import Clock, Track
from virtual_gpus.clock.work import Operand, Operation
from virtual_gpus.dispatch.operators import ROWS, cost
from virtual_gpus.gpus import kinds, spec

MS = 1e-3


def test_streams_of_one_gpu_share_its_multiprocessors_fill_gaps_and_have_priorities():
    clock = Clock(1)
    clock.launch(0, 0, 4.0, 0.0, "a")
    clock.launch(0, 1, 4.0, 0.0, "b")
    clock.hold(0, 2, 20.0)
    clock.launch(0, 2, 1.0, 0.0, "late")
    clock.launch(0, 0, 3.0, 0.0, "into the gap")
    assert [clock.mark(0, stream) for stream in range(3)] == [11.0, 8.0, 21.0]
    clock = Clock(1)
    clock.tracks[0].urgent |= {1, 2}
    for name in "ab":
        clock.launch(0, 0, 4.0, 0.0, name)
    for stream in (1, 2):
        clock.hold(0, stream, 4.0)
        clock.launch(0, stream, 1.0, 0.0, "urgent")  # when "a" is done, one after the other; "b" and "c" are later
    clock.launch(0, 0, 4.0, 0.0, "c")
    assert [clock.mark(0, stream) for stream in range(3)] == [14.0, 5.0, 6.0]


def test_a_gpu_is_busy_for_the_sum_of_its_kernels_whatever_goes_first():
    for seed in range(400):
        choose, clock, total = random.Random(seed), Clock(1), 0.0
        clock.tracks[0].urgent |= set(choose.sample(range(4), seed % 5))
        for number in range(40):
            if seed % 4 > 1 and number % 8 == 0:
                clock.occupy(0, "", *sorted(choose.uniform(0, 70) for _ in "ab"), "collective", "sum", "sum", 0.2)
            clock.hold(0, choose.randrange(4), seed % 2 * choose.uniform(-300, 30))
            clock.launch(0, choose.randrange(4), seconds := choose.uniform(0.1, 3), 0.0, "kernel")
            total += seconds
        end, busy = max(clock.mark(0, stream) for stream in range(4)), list(clock.tracks[0].busy)
        assert end > total - 1e-9 and (seed % 4 or sum(busy[1::2]) - sum(busy[::2]) == pytest.approx(total) == end)


def test_threads_of_one_interpreter_slow_each_other_down_and_autograds_do_not():
    clock = Clock(2)
    threads = pytest.importorskip("virtual_gpus.features.data_parallel.parallel").ConcurrentThreads(clock, 2)
    for gpu in (0, 1):
        with threads:
            for _ in range(10):
                clock.launch(gpu, 0, 1.0, 1.0, "kernel")
    assert clock.now == 20.0 and clock.share == 1
    assert clock.mark(0, 0) == clock.mark(1, 0) == 21.0
    clock.start_backward()
    for gpu in (0, 1):
        for _ in range(10):
            clock.launch(gpu, 0, 0.5, 1.0, "kernel")
    clock.end_backward()
    assert clock.now == 30.0 and clock.mark(0, 0) == clock.mark(1, 0) == 30.5


def test_the_load_is_that_of_the_last_second_and_another_thread_may_work_meanwhile():
    clock = Clock(1)
    for _ in range(3000):
        clock.launch(0, 0, 0.25 * MS, 1 * MS, "kernel")
    assert clock.tracks[0].load(clock.now) == pytest.approx(0.25, rel=0.01)
    assert len(clock.tracks[0].busy) < 2 * 2000
    # A live panel asks for the load in the midst of a training, and a thread that was left over adds idle times.
    clock, track = Clock(1), Track()

    class Moment(float):
        def __lt__(self, other):
            clock.launch(0, 0, 0.25 * MS, 1 * MS, "kernel")
            return float(self) < other

    class Gap(list):
        def __getitem__(self, index):
            track.gaps.append([8.0, 9.0])
            return super().__getitem__(index)

    before, clock.now = [Moment(0.0), Moment(1 * MS), 2 * MS, 3 * MS], 4 * MS
    clock.tracks[0].busy.extend(before)
    assert clock.tracks[0].load(4 * MS) == pytest.approx(0.5) and len(clock.tracks[0].busy) > len(before)
    track.gaps.append(Gap([1.0, 2.0]))
    track.free_from = 10.0
    assert track.take(3.0, 1.0) == 10.0


def product(card, n: int = 8192, precision: str = "fp32") -> float:
    """Seconds of a product of two square matrices."""
    return cost("mm", [Operand((n, n), 4)] * 2, [Operand((n, n), 4)], card, precision).seconds


def test_costs_grow_with_size_up_to_the_data_sheet_and_words_that_do_not_fit_into_16_bytes_are_slower():
    for card in map(spec, kinds()):
        for name in ("mm", "add", "_softmax", "sum"):
            less, more = (cost(name, [Operand((n, n), 4)] * 2, [Operand((n, n), 4)], card).seconds for n in (512, 4096))
            assert 0 < less < more < math.inf
        for precision in ("fp32", "fp16", "bf16", "fp64"):
            assert 2 * 8192**3 / product(card, precision=precision) < card.flops_of(precision)

    def seconds(words, precision="bf16", size=2):
        hidden, table = Operand((8192, 768), size), Operand((words, 768), size, (768, 1))
        turned, logits = Operand((768, words), size, (1, 768)), Operand((8192, words), size, (words, 1))
        columns = Operand((words, 8192), size, (1, words))
        wanted = ((hidden, turned), logits), ((logits, table), hidden), ((columns, hidden), table)
        return [cost("mm", inputs, [output], spec("A100"), precision).seconds for inputs, output in wanted]

    for odd, even in zip(seconds(50_257), seconds(50_304), strict=True):
        assert 1.8 < odd / even < 2.1
    assert seconds(50_257, "fp32", 4) == pytest.approx(seconds(50_304, "fp32", 4), rel=0.01)  # no tensor cores


@pytest.fixture
def gpus():
    with virtual_gpus(2, kind="A100", shapes_only=True):
        yield active_machine()


def matrix(gpu=0, n=8192):
    return torch.empty(n, n, device=f"cuda:{gpu}")


PRODUCT = product(spec("A100"))


@pytest.mark.parametrize("name", ["add", "mm", "sum"])
def test_a_result_that_is_given_takes_as_long(name):
    with virtual_gpus(1, shapes_only=True):
        a, result = torch.empty(4096, 4096, device="cuda"), torch.empty(4096, 4096, device="cuda")
        others, function = ((0,), torch.sum) if name == "sum" else ((a,), getattr(torch, name))
        result = result[0] if name == "sum" else result
        times = []
        for options in ({}, {"out": result}):
            spans = recorded(lambda options=options: function(a, *others, **options)).spans
            times.append([span.end - span.start for span in spans if span.name == name])
        assert len(times[0]) == 1 and times[0] == pytest.approx(times[1])


def test_events_time_the_gpu_and_the_host_runs_ahead(gpus):
    x, (start, end, last) = matrix(), (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    x @ x
    end.record()
    assert start.query() and not end.query()
    assert gpus.clock.now < PRODUCT
    with pytest.raises(RuntimeError, match="Both events must be completed before calculating elapsed time"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(1e3 * PRODUCT, rel=0.01)
    assert gpus.clock.now >= PRODUCT
    torch.backends.cuda.matmul.allow_tf32 = True  # off until somebody turns it on
    try:
        x @ x
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    last.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 5 * end.elapsed_time(last)


def test_synchronize_item_and_cpu_make_the_host_wait(gpus):
    x = matrix()
    for wait in (torch.cuda.synchronize, lambda: x.sum().item(), x[0, 0].cpu, lambda: x[0].to("cpu")):
        before = gpus.clock.now
        x @ x
        assert gpus.clock.now - before < 1 * MS
        wait()
        assert gpus.clock.now - before > PRODUCT


def test_another_stream_waits_only_if_it_is_told(gpus):
    x, y, side = matrix(), torch.empty(10, device="cuda"), torch.cuda.Stream()
    x @ x
    pinned = torch.empty(10).pin_memory()
    side.wait_event(torch.cuda.Event())  # which was never recorded
    with torch.cuda.stream(side):
        y.copy_(pinned, non_blocking=True)
    assert side.record_event()._time < PRODUCT  # beside the product
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y.copy_(pinned, non_blocking=True)
    assert side.record_event()._time > PRODUCT
    assert not side.query()
    side.synchronize()
    assert side.query() and gpus.clock.now > PRODUCT


def test_copies_from_pinned_memory_and_between_gpus_let_the_host_go_on(gpus):
    pageable, taken = torch.empty(1 << 22), []
    for source in (pageable, pageable.pin_memory()):
        for non_blocking in (False, True):
            torch.cuda.synchronize()
            before = gpus.clock.now
            source.to("cuda", non_blocking=non_blocking)
            taken.append(gpus.clock.now - before)
    assert taken[0] == pytest.approx(taken[1]) and taken[0] > taken[2] > (4 << 22) / gpus.topology.pcie.bandwidth
    assert taken[3] < 0.1 * MS
    x, before = matrix(0), gpus.clock.now
    moved = (x @ x).to("cuda:1")
    assert gpus.clock.now - before < 1 * MS and moved.device.index == 1
    arrived = torch.cuda.current_stream(1).record_event()._time
    assert arrived - before >= PRODUCT + moved.numel() * 4 / gpus.topology.between(0, 1).bandwidth


def test_a_copy_casts_and_packs_where_cuda_does(gpus):  # aten/src/ATen/native/cuda/Copy.cu
    host, here, size = torch.empty(2048, 2048), matrix(n=2048), 1 << 23  # of half of it, or of float16
    for sent, taken, copy in (
        (1, 1, lambda: host.to("cuda", torch.float16)), (2, 3, lambda: host.to("cuda", torch.float16, True)),
        (2, 0, lambda: here.to("cpu", torch.float16)), (1, 1, lambda: here[:, ::2].cpu()),
        (1, 1, lambda: here[:, ::2].copy_(host[:, ::2])), (2, 0, lambda: here.copy_(torch.ones(1))),
        (0, 0, lambda: here.copy_(here[0, 0])), (2, 0, lambda: torch._foreach_copy_([here], [host])),
    ):  # fmt: skip
        before, held = gpus.clock.now, torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats(), copy(), torch.cuda.synchronize()
        assert gpus.clock.now - before == pytest.approx(sent * size / gpus.clock.host.pageable, abs=0.1 * MS)
        assert torch.cuda.max_memory_allocated() - held == taken * size


def convolution(out, into, kind="H200", bias=False, precision="tf32", groups=1, last=False, backward=False) -> float:
    """Seconds of a 3x3 convolution of 8 images of 128 x 128. last: channels last."""
    images, filters, result = (8, into, 128, 128), (out, into // groups, 3, 3), (8, out, 128, 128)
    size = 4 if precision in ("tf32", "fp32") else 2
    x, w, y = (Operand(shape, size, _strides(shape, last)) for shape in (images, filters, result))
    inputs, outputs = ((y, x, w), (x, w)) if backward else ((x, w, *[Operand((out,), size)] * bias), (y,))
    how = {"stride": (1,), "transposed": False, "output_padding": (0,), "groups": groups, "output_mask": (1, 1, 0)}
    time = ROWS["convolution_backward" if backward else "convolution"].time
    return time.formula(Operation("", inputs, outputs, spec(kind), precision, arguments=how)).seconds


def _strides(shape, last: bool) -> tuple[int, ...]:
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, device="meta").contiguous(memory_format=layout).stride()


def test_convolutions_on_tensor_cores_where_groups_of_few_channels_do_not_fill_a_tile():
    few, full, more = (convolution(out, 64) for out in (40, 64, 72))
    assert few > 0.9 * full and more > 1.5 * full  # a tile that is not full costs as much as a full one
    assert convolution(40, 64, "V100") < 0.7 * convolution(64, 64, "V100")  # no tensor cores for fp32
    assert 0.2 < convolution(512, 512, precision="bf16") / convolution(512, 512) < 0.5
    written = 2 * 8 * 64 * 128 * 128 * 4 / spec("H200").bandwidth
    assert convolution(64, 64, bias=True) - convolution(64, 64) > written  # a kernel of its own

    def seconds(groups, **how):
        return convolution(1024, 1024, "RTX3090", precision="fp16", groups=groups, last=True, **how)

    assert seconds(4) < 0.3 * seconds(1)  # 256 channels each: a quarter of the work
    assert seconds(64) > 3 * seconds(1) / 64  # 16 channels each fill a quarter of a tile
    assert seconds(16, backward=True) > 5 * seconds(32, backward=True)  # 64 each: no kernel for tensor cores
    one_by_one = seconds(1024)
    assert one_by_one >= 2 * 8 * 1024 * 128 * 128 * 2 / spec("RTX3090").bandwidth  # reads and writes
    assert seconds(1024, backward=True) > 4 * one_by_one


@pytest.mark.parametrize("kind", ["RTX3090", "V100", "A100", "B200"])
@pytest.mark.parametrize("backward", [False, True])
def test_channels_last_need_no_rewriting(kind, backward):
    how = {"precision": "fp16", "backward": backward}
    first, last = (convolution(256, 256, kind, last=last, **how) for last in (False, True))
    nbytes = 2 * 8 * 256 * 128 * 128 * 2  # of images and results
    assert first - last > 2 * (1 + backward) * (nbytes - spec(kind).l2_bytes) / spec(kind).bandwidth
    flops = 2 * 8 * 256 * 256 * 9 * 128 * 128 * (1 + backward)
    assert flops / last < spec(kind).flops.fp16
    assert convolution(64, 64, kind, precision="fp32", last=True) <= convolution(64, 64, kind, precision="fp32")


def test_times_do_not_depend_on_numbers_or_on_who_looks_on():
    """Nor does the order of the channels, which counts."""
    found = []
    for last in (torch.contiguous_format, torch.channels_last):
        for shapes_only, watcher in ((False, record_timeline), (True, record_timeline), (True, nullcontext)):
            with virtual_gpus(1, kind="RTX 3090", shapes_only=shapes_only), watcher():
                wide, thin = torch.nn.Conv2d(16, 32, 3), torch.nn.Conv2d(32, 32, 3, groups=32)
                parts = wide, torch.nn.BatchNorm2d(32), torch.nn.MaxPool2d(2), thin, torch.nn.Dropout(0.5)
                net = torch.nn.Sequential(*parts).cuda().to(memory_format=last)
                images = torch.ones(8, 16, 34, 34, device="cuda").contiguous(memory_format=last)
                with torch.autocast("cuda", torch.float16):
                    net(images).sum().backward()
                    with torch.no_grad():
                        net.eval()(images)
                torch.cuda.synchronize()
                found.append(round(active_machine().clock.now, 12))
    assert found[0] == found[1] == found[2] != found[3] == found[4] == found[5]


def test_few_rows_of_a_large_table_and_a_transposed_convolution_take_their_own_time(gpus):
    table, rows, x = (torch.empty(shape, device="cuda") for shape in ((1 << 16, 1024), (2, 1024), (64, 64, 64, 64)))
    nets, at = [torch.nn.ConvTranspose2d(64, n, 2, 2).cuda() for n in (64, 65)], rows[:, 0].long()
    spans = recorded(lambda: (table.index_copy_(0, at, rows), table.take(at), [net(x) for net in nets])).spans
    copied, taken, same, more = (span.end - span.start for span in spans)
    assert max(copied, taken) < 0.1 * MS < same < more


def test_a_group_norm_of_few_groups_leaves_the_gpu_half_idle():
    def seconds(groups):
        outputs = [Operand(shape, 4) for shape in ((8, 64, 64, 64), (8, groups), (8, groups))]
        return cost("native_group_norm", outputs[:1], outputs, spec("H200")).seconds

    assert seconds(4) > 1.5 * seconds(8) > 2 * seconds(64)
