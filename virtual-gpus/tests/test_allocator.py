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
PROGRAMS = ["1", "2", "3", "4", "5"]
METRICS = ("allocation", "allocated_bytes", "requested_bytes", "active", "active_bytes", "segment")
METRICS += ("reserved_bytes", "inactive_split", "inactive_split_bytes")


def as_measured(**sizes):
    """An H200 as it was when the programs were measured: one segment of 20 MiB with a block in the middle."""
    gpu = CachingAllocator(H200, **sizes)
    hole = gpu.malloc(8_413_184)
    gpu.malloc(KEPT)
    gpu.free(hole)
    return gpu


def current(gpu, metric, pool="all"):
    return gpu.stats()[metric][pool]["current"]


def check_invariants(gpu):
    """Blocks tile their segments, free neighbours are merged, and every sum agrees with its counter."""
    segments = gpu.snapshot()
    stats = gpu.stats()
    ends = [(segment["address"], segment["address"] + segment["total_size"]) for segment in segments]
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    found = {metric: {"small_pool": 0, "large_pool": 0} for metric in METRICS}
    for segment in segments:
        pool = segment["segment_type"] + "_pool"
        blocks = segment["blocks"]
        place = segment["address"]
        for block in blocks:
            assert block["address"] == place and block["size"] > 0 and block["size"] % 512 == 0
            place += block["size"]
        assert place == segment["address"] + segment["total_size"]
        states = [block["state"] for block in blocks]
        assert ("inactive", "inactive") not in pairwise(states)
        used = [block for block in blocks if block["state"] == "active_allocated"]
        free = [block for block in blocks if block["state"] == "inactive"]
        assert segment["allocated_size"] == segment["active_size"] == sum(block["size"] for block in used)
        found["segment"][pool] += 1
        found["reserved_bytes"][pool] += segment["total_size"]
        for name in ("allocation", "active"):
            found[name][pool] += len(used)
        for name in ("allocated_bytes", "active_bytes"):
            found[name][pool] += sum(block["size"] for block in used)
        found["requested_bytes"][pool] += sum(block["requested_size"] for block in used)
        if len(blocks) > 1:
            found["inactive_split"][pool] += len(free)
            found["inactive_split_bytes"][pool] += sum(block["size"] for block in free)
    for metric, pools in found.items():
        assert {pool: stats[metric][pool]["current"] for pool in pools} == pools, metric
        for figures in stats[metric].values():
            assert figures["current"] == figures["allocated"] - figures["freed"], metric
            assert figures["current"] <= figures["peak"], metric
        whole = stats[metric]["all"]
        for key in ("current", "allocated", "freed"):
            assert whole[key] == sum(stats[metric][pool][key] for pool in pools), metric
    assert gpu.allocated == stats["allocated_bytes"]["all"]["current"]
    assert gpu.reserved == stats["reserved_bytes"]["all"]["current"]
    free_lists = [entry for pools in gpu._pools for pool in pools.values() for entry in pool.free]
    assert all((size, address) == (block.size, block.address) for size, address, block in free_lists)
    assert len(free_lists) == sum(b["state"] == "inactive" for s in segments for b in s["blocks"])


def free_half(gpu, live, rng):
    for block in rng.sample(live, len(live) // 2):
        live.remove(block)
        gpu.free(block)


# ---- against the H200


def check_program(gpu, program):
    """Every step of a random program gives the figures that the H200 gave."""
    steps = json.loads(gzip.decompress((MEASURED / "allocator_sequences.json.gz").read_bytes()))[program]
    assert len(steps) == 400
    live = {}
    for number, (what, name, nbytes, *measured) in enumerate(steps):
        if what == "alloc":
            live[name] = gpu.malloc(nbytes)
        elif what == "free":
            gpu.free(live.pop(name))
        else:
            gpu.empty_cache()
        stats = gpu.stats()
        modelled = [stats[key]["all"]["current"] for key in ("segment", "inactive_split_bytes")]
        assert [gpu.allocated - KEPT, gpu.reserved, *modelled] == measured, f"step {number}: {what} {nbytes}"
    check_invariants(gpu)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_step_of_a_random_program_as_on_a_real_h200(program):
    check_program(as_measured(), program)


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
    assert oom_message(error, 0) == (
        "CUDA out of memory. Tried to allocate 200.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which"
        " 138.85 GiB is free. Including non-PyTorch memory, this process has 962.00 MiB memory in use. Of the"
        " allocated memory 65.00 MiB is allocated by PyTorch, and 137.00 MiB is reserved by PyTorch but"
        " unallocated. If reserved but unallocated memory is large try setting"
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for"
        " Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )
    assert "GPU 3 has" in oom_message(error, 3)


def test_sizes_as_pytorch_prints_them():
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
    gpu = CachingAllocator(GIB)
    assert gpu.malloc(nbytes).size == gpu.allocated == size
    assert gpu.reserved == segment
    assert current(gpu, "requested_bytes") == nbytes


def test_freed_memory_stays_reserved_until_the_cache_is_emptied():
    gpu = CachingAllocator(GIB, context=100 * MIB)
    assert (gpu.device.used_bytes, gpu.device.free_bytes) == (100 * MIB, 924 * MIB)
    block = gpu.malloc(30 * MIB)
    gpu.free(block)
    assert (gpu.allocated, gpu.reserved) == (0, 30 * MIB)
    assert (gpu.device.used_bytes, gpu.device.free_bytes) == (130 * MIB, 894 * MIB)
    gpu.empty_cache()
    assert (gpu.reserved, gpu.device.used_bytes, gpu.device.free_bytes) == (0, 100 * MIB, 924 * MIB)
    assert (gpu.peak_allocated, gpu.peak_reserved) == (30 * MIB, 30 * MIB)
    gpu.device.other = 24 * MIB
    assert gpu.device.free_bytes == 900 * MIB


def test_emptying_the_cache_keeps_segments_in_use():
    gpu = CachingAllocator(GIB)
    first, second = gpu.malloc(4 * MIB), gpu.malloc(4 * MIB)
    gpu.free(first)
    gpu.empty_cache()
    assert gpu.reserved == 20 * MIB
    gpu.free(second)
    gpu.empty_cache()
    assert gpu.reserved == 0


def test_the_smallest_block_that_fits_is_reused():
    gpu = CachingAllocator(GIB)
    blocks = [gpu.malloc(size * MIB) for size in (40, 20, 30)]
    addresses = [block.address for block in blocks]
    for block in blocks:
        gpu.free(block)
    assert [gpu.malloc(size * MIB).address for size in (20, 29, 31)] == [addresses[i] for i in (1, 2, 0)]


def test_a_block_is_reused_on_its_own_stream_only():
    gpu = CachingAllocator(GIB)
    gpu.free(gpu.malloc(20 * MIB, stream=7))
    other = gpu.malloc(20 * MIB)
    assert gpu.reserved == 40 * MIB
    same = gpu.malloc(20 * MIB, stream=7)
    assert gpu.reserved == 40 * MIB and same.address != other.address
    assert [segment["stream"] for segment in gpu.snapshot()] == [7, 0]
    check_invariants(gpu)


def test_cached_segments_of_every_stream_and_pool_are_given_up_before_an_error():
    gpu = CachingAllocator(100 * MIB)
    for nbytes, stream in ((40 * MIB, 0), (30 * MIB, 1), (1000, 2)):
        gpu.free(gpu.malloc(nbytes, stream))
    assert gpu.malloc(90 * MIB).size == 90 * MIB
    assert gpu.stats()["num_alloc_retries"] == 1 and gpu.stats()["num_ooms"] == 0
    with pytest.raises(OutOfMemory) as caught:
        gpu.malloc(11 * MIB)
    error = caught.value
    assert (error.requested, error.capacity, error.free) == (12 * MIB, 100 * MIB, 10 * MIB)
    assert (error.used, error.allowed) == (90 * MIB, None)
    assert (error.allocated, error.reserved) == (90 * MIB, 90 * MIB)
    assert gpu.stats()["num_ooms"] == 1
    check_invariants(gpu)


def test_work_goes_on_after_running_out():
    gpu = CachingAllocator(100 * MIB)
    held = gpu.malloc(60 * MIB)
    with pytest.raises(OutOfMemory):
        gpu.malloc(60 * MIB)
    gpu.free(held)
    assert gpu.malloc(80 * MIB).size == gpu.reserved == 80 * MIB


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


def test_no_bytes_cost_nothing():
    gpu = CachingAllocator(GIB)
    nothing = gpu.malloc(0)
    assert (nothing.size, gpu.allocated, gpu.reserved, current(gpu, "allocation")) == (0, 0, 0, 0)
    gpu.free(nothing)
    with pytest.raises(ValueError, match="already been freed"):
        gpu.free(nothing)
    with pytest.raises(ValueError, match="-1 bytes"):
        gpu.malloc(-1)


def test_freeing_twice_is_an_error_and_changes_nothing():
    gpu = CachingAllocator(GIB)
    block, neighbour = gpu.malloc(1000), gpu.malloc(1000)
    gpu.free(block)
    with pytest.raises(ValueError, match="already been freed"):
        gpu.free(block)
    assert gpu.allocated == neighbour.size
    check_invariants(gpu)


@pytest.mark.parametrize(("capacity", "context"), [(0, 0), (-1, 0), (100, 100), (100, -1)])
def test_impossible_gpus(capacity, context):
    with pytest.raises(ValueError, match="cannot hold"):
        CachingAllocator(capacity, context)


def test_two_gpus_have_different_addresses_when_asked():
    assert CachingAllocator(GIB, first_address=1 << 40).malloc(1).address == 1 << 40


# ---- figures


def test_peaks_start_again_from_the_present():
    gpu = CachingAllocator(GIB)
    large, small = gpu.malloc(40 * MIB), gpu.malloc(1000)
    gpu.free(large)
    gpu.malloc(20 * MIB)
    assert gpu.peak_allocated == 40 * MIB + 1024
    gpu.reset_peak_stats()
    assert gpu.peak_allocated == gpu.allocated == current(gpu, "allocated_bytes") and small.size == 1024
    assert gpu.peak_reserved == gpu.reserved
    gpu.malloc(12 * MIB)
    assert gpu.peak_allocated == gpu.allocated
    check_invariants(gpu)


def test_peaks_of_the_pools_need_not_come_together():
    gpu = CachingAllocator(GIB)
    for nbytes in (MIB, 4 * MIB):
        gpu.free(gpu.malloc(nbytes))
    peaks = {pool: figures["peak"] for pool, figures in gpu.stats()["allocated_bytes"].items()}
    assert peaks == {"small_pool": MIB, "large_pool": 4 * MIB, "all": 4 * MIB}


def test_accumulated_figures_start_again_from_zero():
    gpu = CachingAllocator(100 * MIB)
    kept = gpu.malloc(30 * MIB)
    with pytest.raises(OutOfMemory):
        gpu.malloc(GIB)
    gpu.reset_accumulated_stats()
    gpu.free(kept)
    gpu.malloc(1000)
    stats = gpu.stats()
    allocated = stats["allocated_bytes"]["all"]
    assert allocated == {"current": 1024, "peak": 30 * MIB, "allocated": 1024, "freed": 30 * MIB}
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (0, 0)


def test_torch_reads_the_statistics(monkeypatch):
    memory = pytest.importorskip("torch").cuda.memory
    gpu = as_measured()
    gpu.free(gpu.malloc(3000))
    monkeypatch.setattr(memory, "memory_stats_as_nested_dict", lambda device=None: gpu.stats())
    flat = memory.memory_stats(0)
    assert flat["allocated_bytes.all.current"] == gpu.allocated == KEPT
    assert flat["inactive_split_bytes.large_pool.current"] == 14_483_456  # as on the H200
    documented = ("allocation", "segment", "active", "requested_bytes", "oversize_allocations")
    assert all(any(key.startswith(name + ".") for key in flat) for name in documented)
    events = {"num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"}
    assert events <= set(flat)
    assert flat["max_split_size"] == -1
    summary = memory.memory_summary(0)
    assert "GPU reserved memory   |  22528 KiB |" in summary and "CUDA OOMs: 0 " in summary


def test_torch_reads_the_snapshot():
    viz = pytest.importorskip("torch.cuda._memory_viz")
    gpu = as_measured()
    text = viz.segsum({"segments": gpu.snapshot(device=2)})
    assert "segments: 1" in text and "total_reserved: 20.0MiB" in text and "total_allocated: 6.2MiB" in text
    (segment,) = gpu.snapshot(device=2)
    assert (segment["device"], segment["segment_type"], segment["stream"]) == (2, "large", 0)
    assert [block["state"] for block in segment["blocks"]] == ["inactive", "active_allocated", "inactive"]
    assert [block["requested_size"] for block in segment["blocks"]] == [0, KEPT, 0]


def test_observers_hear_everything_in_order():
    gpu, heard = CachingAllocator(64 * MIB), []
    gpu.observers.append(lambda *event: heard.append(event))
    block = gpu.malloc(30 * MIB)
    address = block.address
    gpu.free(block)
    with pytest.raises(OutOfMemory):
        gpu.malloc(65 * MIB)
    assert heard == [
        ("segment_alloc", address, 30 * MIB),
        ("alloc", address, 30 * MIB),
        ("free", address, 30 * MIB),
        ("segment_free", address, 30 * MIB),
        ("oom", 0, 65 * MIB),
    ]


def test_an_observer_sees_the_figures_after_the_event():
    gpu, seen = CachingAllocator(GIB), []
    gpu.observers.append(lambda event, *_: seen.append((event, gpu.allocated)))
    before, block, after = gpu.malloc(1000), gpu.malloc(1000), gpu.malloc(1000)
    gpu.free(before)
    gpu.free(after)
    gpu.free(block)
    allocated = [nbytes for event, nbytes in seen if event != "segment_alloc"]
    assert allocated == [1024, 2048, 3072, 2048, 1024, 0]


# ---- at any moment: random programs, finalizers, threads, Ctrl-C


@pytest.mark.parametrize("seed", range(6))
def test_invariants_hold_in_random_programs(seed):
    rng = random.Random(seed)
    gpu, live, ooms = CachingAllocator(128 * MIB), [], 0
    for step in range(1500):
        choice = rng.random()
        if choice < 0.55:
            nbytes = int(2 ** rng.uniform(0, rng.choice([12, 20, 23, 26])))
            try:
                live.append(gpu.malloc(nbytes, stream=rng.choice([0, 0, 0, 1])))
            except OutOfMemory:
                ooms += 1
                free_half(gpu, live, rng)
        elif choice < 0.99 and live:
            gpu.free(live.pop(rng.randrange(len(live))))
        else:
            gpu.empty_cache()
        assert gpu.allocated == sum(block.size for block in live)
        if step % 25 == 0:
            check_invariants(gpu)
    assert ooms > 0 and gpu.stats()["num_ooms"] == ooms
    for block in live:
        gpu.free(block)
    gpu.empty_cache()
    assert (gpu.allocated, gpu.reserved, gpu.snapshot()) == (0, 0, [])
    check_invariants(gpu)


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


@pytest.mark.parametrize("nbytes", [100, 2000, 70 * MIB])
def test_a_finalizer_may_free_in_the_middle_of_a_malloc(nbytes):
    moment, found, seen = 0, True, set()
    while found:
        moment += 1 if nbytes < MIB else 5
        gpu, held = busy_gpu()
        left = sum(block.size for block in held[1:])
        found = interrupted_at(
            moment, lambda g=gpu, h=held: h.append(g.malloc(nbytes)), lambda g=gpu, h=held: g.free(h[0]), seen
        )
        if found:
            assert gpu.allocated == left + held[-1].size
            check_invariants(gpu)
    assert seen >= ALLOCATING | (TAKING if nbytes > MIB else set())


@pytest.mark.parametrize("nbytes", [100, 2000, 70 * MIB])
def test_ctrl_c_in_the_middle_of_a_malloc_leaves_the_books_in_order(nbytes):
    moment, found, seen = 0, True, set()
    while found:
        moment += 1 if nbytes < MIB else 5
        gpu, held = busy_gpu()
        before = gpu.allocated
        found = was_interrupted(moment, lambda g=gpu: g.malloc(nbytes), seen)
        check_invariants(gpu)
        if found:
            assert gpu.allocated in (before, before + -(-nbytes // 512) * 512)
        for block in held:
            gpu.free(block)
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


def was_interrupted(moment, action, seen):
    def interrupt():
        raise KeyboardInterrupt

    try:
        return interrupted_at(moment, action, interrupt, seen)
    except KeyboardInterrupt:
        return True


def test_allocating_in_the_middle_of_a_malloc_is_refused_not_a_deadlock():
    gpu = CachingAllocator(GIB)
    gpu.observers.append(lambda *_: gpu.malloc(1))
    with pytest.raises(RuntimeError, match="A finalizer or an observer"):
        gpu.malloc(1000)
    gpu.observers.clear()
    check_invariants(gpu)
    assert gpu.malloc(1000).size == gpu.allocated == 1024


def test_a_free_from_the_same_thread_while_the_allocator_is_busy_waits_its_turn():
    gpu = CachingAllocator(GIB)
    held = [gpu.malloc(1000) for _ in range(3)]
    gpu.observers.append(lambda event, *_: gpu.free(held.pop()) if event == "alloc" and held else None)
    kept = [gpu.malloc(5000) for _ in range(4)]
    assert not held and gpu.allocated == sum(block.size for block in kept)
    check_invariants(gpu)


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
            for _ in range(600):
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
            thread.join(timeout=120)
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
