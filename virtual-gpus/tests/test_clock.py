"""The clock's rules: host, streams, events, copies, threads. Times follow from the rules; here they are counted out."""

import math
import random
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from measuring import times_of
from virtual_gpus import active_machine, record_timeline, virtual_gpus
from virtual_gpus.clock.clock import Clock, Track
from virtual_gpus.clock.work import Operand
from virtual_gpus.dispatch.operators import cost
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
        times = [times_of(partial(function, a, *others, **options)) for options in ({}, {"out": result})]
    assert times[0].keys() == {name} and times[0][name] == pytest.approx(times[1][name])


def test_synchronize_item_and_cpu_make_the_host_wait(gpus):
    x = matrix()
    for wait in (torch.cuda.synchronize, lambda: x.sum().item(), x[0, 0].cpu, lambda: x[0].to("cpu")):
        before = gpus.clock.now
        x @ x
        assert gpus.clock.now - before < 1 * MS
        wait()
        assert gpus.clock.now - before > PRODUCT


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
