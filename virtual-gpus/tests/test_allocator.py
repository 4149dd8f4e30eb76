"""The caching allocator against a real H200, and under threads, finalizers and Ctrl-C."""

import gc
import gzip
import json
import random
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from virtual_gpus.memory import allocator
from virtual_gpus.memory.allocator import CachingAllocator, OutOfMemory, format_size, oom_message

MEMORY = Path(allocator.__file__).parent
MEASURED = Path(__file__).parent / "data" / "h200"
H200 = 150_109_880_320
MIB, GIB = 1 << 20, 1 << 30
KEPT = 6_488_064  # bytes that cuDNN had kept when the H200 was measured
METRICS = ("allocation", "allocated_bytes", "requested_bytes", "active", "active_bytes", "segment")
METRICS += ("reserved_bytes", "inactive_split", "inactive_split_bytes")


def as_measured(**sizes):
    """An H200 as it was when the programs were measured: one segment of 20 MiB with a block in the middle."""
    gpu = CachingAllocator(H200, **sizes)
    hole = gpu.malloc(8_413_184)
    gpu.malloc(KEPT)
    gpu.free(hole)
    return gpu


def current(gpu, metric):
    return gpu.stats()[metric]["all"]["current"]


def sums_of(segments):
    """What the counters must say: metric -> pool -> the sum over the blocks of a snapshot."""
    sums = {metric: {"small_pool": 0, "large_pool": 0} for metric in METRICS}
    for segment in segments:
        blocks, pool = segment["blocks"], segment["segment_type"] + "_pool"
        used = [block for block in blocks if block["state"] == "active_allocated"]
        active = [block for block in blocks if block["state"] != "inactive"]
        free = [block for block in blocks if block["state"] == "inactive"]
        found = {
            "allocation": len(used),
            "allocated_bytes": sum(block["size"] for block in used),
            "active": len(active),
            "active_bytes": sum(block["size"] for block in active),
            "requested_bytes": sum(block["requested_size"] for block in active),
            "reserved_bytes": segment["total_size"],
        }
        assert [segment["allocated_size"], segment["active_size"], segment["requested_size"]] == [
            found[name] for name in ("allocated_bytes", "active_bytes", "requested_bytes")
        ]
        if not segment["is_expandable"]:
            found["segment"] = 1
            if len(blocks) > 1:
                found |= {"inactive_split": len(free), "inactive_split_bytes": sum(block["size"] for block in free)}
        for name, value in found.items():
            sums[name][pool] += value
    return sums


def check_invariants(gpu):
    """Blocks tile what has memory, free neighbours are merged, and every sum agrees with its counter."""
    segments, stats = gpu.snapshot(), gpu.stats()
    ends = [(segment["address"], segment["address"] + segment["total_size"]) for segment in segments]
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    for segment, (place, end) in zip(segments, ends, strict=True):
        for block in segment["blocks"]:
            assert block["address"] == place and block["size"] > 0 and block["size"] % 512 == 0
            place += block["size"]
        assert place == end
        assert ("inactive", "inactive") not in pairwise(block["state"] for block in segment["blocks"])
    for metric, pools in sums_of(segments).items():
        assert {pool: stats[metric][pool]["current"] for pool in pools} == pools, metric
        for figures in stats[metric].values():
            assert figures["current"] == figures["allocated"] - figures["freed"] <= figures["peak"], metric
        for key in ("current", "allocated", "freed"):
            assert stats[metric]["all"][key] == sum(stats[metric][pool][key] for pool in pools), metric
    assert (gpu.allocated, gpu.reserved) == (current(gpu, "allocated_bytes"), current(gpu, "reserved_bytes"))
    free_lists = [entry for pools in gpu._pools for pool in pools.values() for entry in pool.free]
    assert all((size, address) == (block.size, block.address) for size, address, block in free_lists)
    assert len(free_lists) == sum(b["state"] == "inactive" for s in segments for b in s["blocks"])
    for arena in (segment for segment in gpu.device.segments.values() if segment.expandable):
        # gaps and mapped pages tile the addresses
        blocks = [*gpu._taken_blocks(), *(entry[2] for entry in arena.pool.free + arena.pool.unmapped)]
        place = arena.address
        for block in sorted((block for block in blocks if block.arena is arena), key=lambda b: b.address):
            assert block.address == place
            place += block.size
        assert place == arena.address + arena.size


# ---- against the H200


@pytest.mark.parametrize("program", ["1", "2", "3", "4", "5"])
def test_every_step_of_a_random_program_as_on_a_real_h200(program):
    steps = json.loads(gzip.decompress((MEASURED / "allocator_sequences.json.gz").read_bytes()))[program]
    assert len(steps) == 400
    gpu, live = as_measured(), {}
    for number, (what, name, nbytes, *measured) in enumerate(steps):
        if what == "alloc":
            live[name] = gpu.malloc(nbytes)
        elif what == "free":
            gpu.free(live.pop(name))
        else:
            gpu.empty_cache()
        modelled = [current(gpu, key) for key in ("segment", "inactive_split_bytes")]
        assert [gpu.allocated - KEPT, gpu.reserved, *modelled] == measured, f"step {number}: {what} {nbytes}"
    check_invariants(gpu)


def test_running_out_of_memory_as_on_a_real_h200():
    *growing, text, halved, recovered = json.loads((MEASURED / "oom.json").read_text())
    gpu = as_measured(context=768 * MIB)
    gpu.device.other = 10 * MIB  # what the driver kept for itself in that run
    gpu.device.set_fraction(8 * GIB / H200)
    blocks = []
    for measured in growing:
        blocks.append(gpu.malloc((512 + len(blocks)) * MIB))
        assert [gpu.allocated, gpu.reserved] == measured
    with pytest.raises(OutOfMemory) as caught:
        gpu.malloc((512 + len(blocks)) * MIB)
    assert oom_message(caught.value, 0) == text
    for block in blocks[::2]:
        gpu.free(block)
    assert [gpu.allocated, gpu.reserved] == halved
    gpu.malloc(2 * GIB)
    stats = gpu.stats()
    assert [gpu.allocated, gpu.reserved, stats["num_alloc_retries"], stats["num_ooms"]] == recovered
    check_invariants(gpu)


def test_the_message_without_a_limit():
    error = OutOfMemory(200 * GIB, H200, 142_184 * MIB, 962 * MIB, None, 65 * MIB, 202 * MIB)
    assert oom_message(error, 3).startswith(
        "CUDA out of memory. Tried to allocate 200.00 GiB. GPU 3 has a total capacity of 139.80 GiB of which"
        " 138.85 GiB is free. Including non-PyTorch memory, this process has 962.00 MiB memory in use. Of the"
        " allocated memory 65.00 MiB is allocated by PyTorch, and 137.00 MiB is reserved by PyTorch but unallocated."
    )
    sizes = (0, 1024, 1025, MIB, MIB + 1, GIB, GIB + 10**7)
    printed = ["0 bytes", "1024 bytes", "1.00 KiB", "1024.00 KiB", "1.00 MiB", "1024.00 MiB", "1.01 GiB"]
    assert [format_size(size) for size in sizes] == printed


# ---- the rules


@pytest.mark.parametrize(
    ("nbytes", "size", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the tail of 1 MiB is not split off and counts as allocated
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(nbytes, size, segment):
    gpu = CachingAllocator(GIB, first_address=1 << 40)
    block = gpu.malloc(nbytes)
    assert block.size == gpu.allocated == size and block.address == 1 << 40
    assert gpu.reserved == segment
    assert current(gpu, "requested_bytes") == nbytes


def test_freed_memory_stays_reserved_until_the_cache_is_emptied():
    gpu = CachingAllocator(GIB, context=100 * MIB)
    assert (gpu.device.used_bytes, gpu.device.free_bytes) == (100 * MIB, 924 * MIB)
    block, first, second = (gpu.malloc(size * MIB) for size in (30, 4, 4))
    gpu.free(block)
    assert (gpu.allocated, gpu.reserved) == (8 * MIB, 50 * MIB)
    assert (gpu.device.used_bytes, gpu.device.free_bytes) == (150 * MIB, 874 * MIB)
    gpu.free(first)
    gpu.empty_cache()  # a segment of which a part is in use stays
    assert (gpu.allocated, gpu.reserved, gpu.device.used_bytes) == (4 * MIB, 20 * MIB, 120 * MIB)
    gpu.free(second)
    gpu.empty_cache()
    assert (gpu.reserved, gpu.device.used_bytes, gpu.device.free_bytes) == (0, 100 * MIB, 924 * MIB)
    assert (gpu.peak_allocated, gpu.peak_reserved) == (38 * MIB, 50 * MIB)
    gpu.device.other = 24 * MIB
    assert gpu.device.free_bytes == 900 * MIB


def test_the_smallest_block_that_fits_is_reused_on_its_own_stream():
    gpu = CachingAllocator(GIB)
    blocks = [gpu.malloc(size * MIB, stream=7) for size in (40, 20, 30)]
    addresses = [block.address for block in blocks]
    for block in blocks:
        gpu.free(block)
    assert gpu.malloc(20 * MIB).address not in addresses and gpu.reserved == 110 * MIB
    assert [gpu.malloc(size * MIB, stream=7).address for size in (20, 29, 31)] == [addresses[i] for i in (1, 2, 0)]
    assert [segment["stream"] for segment in gpu.snapshot()] == [7, 7, 7, 0]
    check_invariants(gpu)


def test_cached_segments_of_every_stream_and_pool_are_given_up_before_an_error():
    gpu = CachingAllocator(100 * MIB)
    for nbytes, stream in ((40 * MIB, 0), (30 * MIB, 1), (1000, 2)):
        gpu.free(gpu.malloc(nbytes, stream))
    held = gpu.malloc(90 * MIB)
    assert held.size == 90 * MIB
    assert gpu.stats()["num_alloc_retries"] == 1 and gpu.stats()["num_ooms"] == 0
    with pytest.raises(OutOfMemory) as caught:
        gpu.malloc(11 * MIB)
    error = caught.value
    assert (error.requested, error.capacity, error.free) == (12 * MIB, 100 * MIB, 10 * MIB)
    assert (error.used, error.allowed) == (90 * MIB, None)
    assert (error.allocated, error.reserved) == (90 * MIB, 90 * MIB)
    assert gpu.stats()["num_ooms"] == 1
    gpu.free(held)  # work goes on after running out
    assert gpu.malloc(95 * MIB).size == gpu.reserved == 96 * MIB
    check_invariants(gpu)


def test_the_fraction_limits_reserved_memory():
    gpu = CachingAllocator(100 * MIB)
    assert (gpu.device.fraction, gpu.device.allowed) == (1.0, None)
    gpu.device.set_fraction(0.5)
    assert (gpu.device.fraction, gpu.device.allowed) == (0.5, 50 * MIB)
    gpu.malloc(50 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        gpu.malloc(1)
    assert caught.value.allowed == 50 * MIB and caught.value.free == 50 * MIB
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="0~1"):
            gpu.device.set_fraction(wrong)
    assert gpu.device.fraction == 0.5
    gpu.device.set_fraction(1.0)  # is no limit
    assert (gpu.device.fraction, gpu.device.allowed) == (1.0, None)


def test_no_bytes_cost_nothing_and_freeing_twice_is_an_error():
    gpu = CachingAllocator(GIB)
    nothing = gpu.malloc(0)
    assert (nothing.size, gpu.allocated, gpu.reserved, current(gpu, "allocation")) == (0, 0, 0, 0)
    with pytest.raises(ValueError, match="-1 bytes"):
        gpu.malloc(-1)
    block, neighbour = gpu.malloc(1000), gpu.malloc(1000)
    for one in (nothing, block):
        gpu.free(one)
        with pytest.raises(ValueError, match="already been freed"):
            gpu.free(one)
    assert gpu.allocated == neighbour.size
    check_invariants(gpu)


@pytest.mark.parametrize(("capacity", "context"), [(0, 0), (-1, 0), (100, 100), (100, -1)])
def test_impossible_gpus(capacity, context):
    with pytest.raises(ValueError, match="cannot hold"):
        CachingAllocator(capacity, context)


# ---- figures


def test_peaks_and_accumulated_figures_start_again():
    gpu = CachingAllocator(100 * MIB)
    large, small = gpu.malloc(40 * MIB), gpu.malloc(1000)
    gpu.free(large)
    gpu.malloc(20 * MIB)
    assert gpu.peak_allocated == 40 * MIB + 1024
    gpu.reset_peak_stats()
    assert gpu.peak_allocated == gpu.allocated == 20 * MIB + 1024 and gpu.peak_reserved == gpu.reserved == 42 * MIB
    kept = gpu.malloc(12 * MIB)
    assert gpu.peak_allocated == gpu.allocated == 32 * MIB + 1024
    with pytest.raises(OutOfMemory):
        gpu.malloc(GIB)
    gpu.reset_accumulated_stats()
    gpu.free(kept)
    gpu.free(small)
    gpu.malloc(2000)
    stats = gpu.stats()
    assert stats["allocated_bytes"]["all"] == {
        "current": 20 * MIB + 2048, "peak": 32 * MIB + 1024, "allocated": 2048, "freed": 12 * MIB + 1024}  # fmt: skip
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (0, 0)


def test_peaks_of_the_pools_need_not_come_together():
    gpu = CachingAllocator(GIB)
    for nbytes in (MIB, 4 * MIB):
        gpu.free(gpu.malloc(nbytes))
    peaks = {pool: figures["peak"] for pool, figures in gpu.stats()["allocated_bytes"].items()}
    assert peaks == {"small_pool": MIB, "large_pool": 4 * MIB, "all": 4 * MIB}


def test_observers_hear_everything_in_order_and_see_the_figures_after_it():
    gpu, heard = CachingAllocator(64 * MIB), []
    gpu.observers.append(lambda *event: heard.append((*event, gpu.allocated)))
    block = gpu.malloc(30 * MIB)
    address = block.address
    gpu.free(block)
    with pytest.raises(OutOfMemory):
        gpu.malloc(65 * MIB)
    assert heard[1:] == [
        ("alloc", address, 30 * MIB, 30 * MIB),
        ("free", address, 30 * MIB, 0),
        ("segment_free", address, 30 * MIB, 0),
        ("oom", 0, 65 * MIB, 0),
    ]
    assert heard[0][:3] == ("segment_alloc", address, 30 * MIB)
    blocks = [gpu.malloc(1000) for _ in range(3)]
    heard.clear()
    for i in (0, 2, 1):  # with no neighbour to merge with, then with one, then with two
        gpu.free(blocks[i])
    assert [event[0] for event in heard] == ["free"] * 3 and [event[3] for event in heard] == [2048, 1024, 0]


# ---- at any moment: finalizers, threads, Ctrl-C (random programs are in test_allocator_options.py)


OUTER = {"malloc", "free", "exclusive", "_drain"}  # here the lock is taken and released


def interrupted_at(moment, action, interrupt, seen):
    """Run `action`, calling `interrupt` before the bytecode number `moment` of what runs with the allocator's lock.

    Returns whether there was such a moment. Tracing opcode by opcode is the worst that garbage collection and signals
    can do. The names of the functions that were interrupted are added to `seen`.
    """
    count, done = 0, False

    def trace(frame, event, _):
        nonlocal count, done
        code = frame.f_code
        if done:
            return None
        if code.co_name in OUTER or Path(code.co_filename).parent != MEMORY:
            return trace
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == moment:
                done = True
                seen.add(code.co_name)
                interrupt()
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # else Python 3.12 reports no opcodes the first time
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return done


def was_interrupted(moment, action, seen):
    """As interrupted_at, by Ctrl-C."""

    def interrupt():
        raise KeyboardInterrupt

    try:
        return interrupted_at(moment, action, interrupt, seen)
    except KeyboardInterrupt:
        return True


# What every allocation and every free runs through, and what one does that needs new memory: tests that interrupt at
# every moment check that they came there.
ALLOCATING = {"_allocate"}
FREEING = {"_free_pending", "reclaim", "change_splits"}
TAKING = {"_obtain", "_new_block", "release_cached"}


def busy_gpu():
    """A GPU whose next malloc of 70 MiB must give back the cache and take a new segment."""
    gpu = CachingAllocator(100 * MIB)
    held = [gpu.malloc(2000) for _ in range(5)]
    gpu.free(gpu.malloc(60 * MIB))
    gpu.free(held.pop(1))
    return gpu, held


@pytest.mark.parametrize("nbytes", [2000, 70 * MIB])
def test_a_finalizer_may_free_in_the_middle_of_a_malloc(nbytes):
    moment, found, seen = 0, True, set()
    while found:
        moment += 1 if nbytes < MIB else 11
        gpu, held = busy_gpu()
        left = sum(block.size for block in held[1:])
        found = interrupted_at(
            moment, lambda g=gpu, h=held: h.append(g.malloc(nbytes)), lambda g=gpu, h=held: g.free(h[0]), seen
        )
        if found:
            assert gpu.allocated == left + held[-1].size
            check_invariants(gpu)
    assert seen >= ALLOCATING | (TAKING if nbytes > MIB else set())


def test_ctrl_c_in_the_middle_of_a_free_still_frees():
    moment, found, seen = 0, True, set()
    while found:
        moment += 1
        gpu, held = busy_gpu()
        left = sum(block.size for block in held[2:])
        gpu.free(held[0])
        found = was_interrupted(moment, lambda g=gpu, h=held: g.free(h[1]), seen)
        assert gpu.allocated == left
        check_invariants(gpu)
    assert seen >= FREEING


def test_allocating_in_the_middle_of_a_malloc_is_refused_not_a_deadlock():
    gpu = CachingAllocator(GIB)
    gpu.observers.append(lambda *_: gpu.malloc(1))
    with pytest.raises(RuntimeError, match="A finalizer or an observer"):
        gpu.malloc(1000)
    gpu.observers.clear()
    check_invariants(gpu)
    assert gpu.malloc(1000).size == gpu.allocated == 1024


class Owner:
    """Frees its block when collected, as a tensor's finalizer does; a cycle, so that only gc finds it."""

    def __init__(self, gpu, nbytes):
        self.gpu, self.block, self.cycle = gpu, gpu.malloc(nbytes), self

    def __del__(self):
        self.gpu.free(self.block)


def test_threads_with_finalizers_leave_nothing_behind():
    gpu, failures = CachingAllocator(GIB), []
    thresholds = gc.get_threshold()

    def work(seed):
        rng = random.Random(seed)
        try:
            mine = []
            for _ in range(300):
                Owner(gpu, rng.randrange(1, 100_000))
                mine.append(gpu.malloc(rng.randrange(1, 3 * MIB), stream=seed % 2))
                if rng.random() < 0.5:
                    gpu.free(mine.pop(rng.randrange(len(mine))))
                if len(mine) > 50:
                    gpu.free(mine.pop())
            for block in mine:
                gpu.free(block)
        except Exception as error:  # noqa: BLE001 (a thread would lose it)
            failures.append(error)

    gc.set_threshold(5)  # collect as often as possible, also inside malloc
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
        assert not any(thread.is_alive() for thread in threads), "deadlock"
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
    gc.collect()
    assert not failures
    assert gpu.allocated == 0 and not gpu._pending
    check_invariants(gpu)
    gpu.empty_cache()
    assert gpu.reserved == 0
