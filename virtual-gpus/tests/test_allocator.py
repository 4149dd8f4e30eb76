"""The caching allocator against a real H200, with its options, and under threads, finalizers and Ctrl-C."""

import gc
import gzip
import json
import random
import sys
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from interrupts import interrupted_at, press
from measuring import table
from virtual_gpus import NotModelled
from virtual_gpus.features.cuda.allocator_settings import parse
from virtual_gpus.memory import allocator
from virtual_gpus.memory.allocator import CachingAllocator, OutOfMemory, format_size, oom_message
from virtual_gpus.memory.options import Options
from virtual_gpus.memory_model import round_size, segment_size

MEMORY = Path(allocator.__file__).parent
MEASURED = Path(__file__).parent / "data" / "h200"
H200 = 150_109_880_320
MIB, GIB = 1 << 20, 1 << 30
KEPT = 6_488_064  # bytes that cuDNN had kept when the H200 was measured
PAGES = "expandable_segments:True"
POOLS = "small_pool", "large_pool"
METRICS = ("allocation", "allocated_bytes", "requested_bytes", "active", "active_bytes", "segment")
METRICS += ("reserved_bytes", "inactive_split", "inactive_split_bytes")
WRONG, REFUSED = (table("wrong_settings")[name].split() for name in ("allocator", "allocator_not_modelled"))
OPTIONS = ("backend:native", PAGES, "max_split_size_mb:25", "garbage_collection_threshold:0.6",
           "roundup_power2_divisions:8,expandable_segments:True")  # fmt: skip


def gpu_with(text, capacity=GIB):
    gpu = CachingAllocator(capacity)
    gpu.set_options(parse(text), first=True)
    return gpu


def as_measured(**sizes):
    """An H200 as it was when the programs were measured: one segment of 20 MiB with a block in the middle."""
    gpu = CachingAllocator(H200, **sizes)
    hole = gpu.malloc(8_413_184)
    gpu.malloc(KEPT)
    gpu.free(hole)
    return gpu


def current(gpu, metric):
    return gpu.stats()[metric]["all"]["current"]


def layout(gpu):
    """The blocks of each segment in MiB: "30" is used, "(30)" is free, and "[30]" waits for a stream."""
    forms = {"active_allocated": "{:g}", "inactive": "({:g})", "active_pending_free": "[{:g}]"}
    return ", ".join(" ".join(forms[b["state"]].format(b["size"] / MIB) for b in s["blocks"]) for s in gpu.snapshot())


def play(gpu, steps):
    """Do "+30" (allocate 30 MiB), "+30@7" (on stream 7), "-30" (free the first such block) and "empty" (the cache).
    "True" and "False" switch expandable segments on and off. Returns what the last step took and gave back."""
    live, events = defaultdict(list), []
    gpu.observers.append(lambda what, address, size: events.append((what, f"{what} {size // MIB}")))
    for step in steps.split():
        events.clear()
        size, _, stream = step[1:].partition("@")
        if step == "empty":
            gpu.empty_cache()
        elif step in ("True", "False"):
            gpu.set_options(parse(f"expandable_segments:{step}", gpu.options))
        elif step[0] == "-":
            gpu.free(live[size].pop(0))
        else:
            with suppress(OutOfMemory):
                live[size].append(gpu.malloc(int(size) * MIB, int(stream or 0)))
    return ", ".join(text for what, text in events if what not in ("alloc", "free"))


def sums_of(segments):
    """What the counters must say: (metric, pool) -> the sum over the blocks of a snapshot."""
    sums = Counter()
    for segment in segments:
        found = Counter(reserved_bytes=segment["total_size"], segment=not segment["is_expandable"])
        for block in segment["blocks"]:
            size, requested = block["size"], block["requested_size"]
            if block["state"] == "active_allocated":
                found.update(allocation=1, allocated_bytes=size)
            if block["state"] != "inactive":
                found.update(active=1, active_bytes=size, requested_bytes=requested)
            elif len(segment["blocks"]) > 1 and not segment["is_expandable"]:
                found.update(inactive_split=1, inactive_split_bytes=size)
        for name in ("allocated", "active", "requested"):
            assert segment[f"{name}_size"] == found[f"{name}_bytes"]
        sums.update({(name, segment["segment_type"] + "_pool"): value for name, value in found.items()})
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
    sums = sums_of(segments)
    for metric in METRICS:
        assert [stats[metric][pool]["current"] for pool in POOLS] == [sums[metric, pool] for pool in POOLS], metric
        for figures in stats[metric].values():
            assert figures["current"] == figures["allocated"] - figures["freed"] <= figures["peak"], metric
        for key in ("current", "allocated", "freed"):
            assert stats[metric]["all"][key] == sum(stats[metric][pool][key] for pool in POOLS), metric
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


def test_messages_have_sizes_in_words():
    sizes = {0: "0 bytes", 1024: "1024 bytes", 1025: "1.00 KiB", MIB: "1024.00 KiB", MIB + 1: "1.00 MiB"}
    sizes |= {GIB: "1024.00 MiB", GIB + 10**7: "1.01 GiB"}
    assert {size: format_size(size) for size in sizes} == sizes
    gpu = gpu_with(PAGES, capacity=100 * MIB)
    gpu.malloc(60 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        gpu.malloc(50 * MIB)  # 60 MiB in pages of 20 do not fit into 40
    error = caught.value
    assert (error.requested, error.free, error.reserved) == (50 * MIB, 40 * MIB, 60 * MIB)
    assert str(error) == "Tried to allocate 50.00 MiB, but only 40.00 MiB of 100.00 MiB is free."


@pytest.mark.parametrize(("text", "nbytes", "size", "segment"), table("allocator_sizes")["rows"])
def test_sizes_of_blocks_and_segments(text, nbytes, size, segment):
    gpu = gpu_with(text)
    assert gpu.malloc(nbytes).size == gpu.allocated == size
    assert gpu.reserved == segment == segment_size(nbytes, gpu.options)
    assert current(gpu, "requested_bytes") == nbytes and round_size(nbytes, gpu.options) in (size, nbytes)


def test_no_bytes_cost_nothing_and_freeing_twice_or_allocating_in_the_middle_of_a_malloc_is_an_error():
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
    with pytest.raises(ValueError, match="0~1"):
        gpu.device.set_fraction(float("nan"))
    for sizes in ((0, 0), (100, 100), (100, -1)):
        with pytest.raises(ValueError, match="cannot hold"):
            CachingAllocator(*sizes)
    gpu = CachingAllocator(GIB)
    gpu.observers.append(lambda *_: gpu.malloc(1))
    with pytest.raises(RuntimeError, match="A finalizer or an observer"):
        gpu.malloc(1000)
    gpu.observers.clear()
    check_invariants(gpu)
    assert gpu.malloc(1000).size == gpu.allocated == 1024


def test_peaks_and_accumulated_figures_start_again_also_those_of_oversize_blocks():
    gpu = CachingAllocator(100 * MIB)
    for nbytes in (40 * MIB, 1000):
        gpu.free(gpu.malloc(nbytes))
    gpu.malloc(20 * MIB)
    peaks = {pool: figures["peak"] for pool, figures in gpu.stats()["allocated_bytes"].items()}
    assert peaks == {"small_pool": 1024, "large_pool": 40 * MIB, "all": 40 * MIB}  # they need not come together
    gpu.reset_peak_stats()
    assert gpu.peak_allocated == gpu.allocated == 20 * MIB and gpu.peak_reserved == gpu.reserved == 42 * MIB
    with pytest.raises(OutOfMemory):
        gpu.malloc(GIB)
    gpu.reset_accumulated_stats()
    stats = gpu.stats()
    assert stats["allocated_bytes"]["all"] == {"current": 20 * MIB, "peak": 20 * MIB, "allocated": 0, "freed": 0}
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (0, 0)
    gpu = gpu_with("max_split_size_mb:100")
    play(gpu, "+200 -200 +50 +190 -190 +180 empty")
    assert gpu.stats()["oversize_allocations"] == {"current": 1, "peak": 1, "allocated": 3, "freed": 2}
    assert gpu.stats()["oversize_segments"] == {"current": 1, "peak": 2, "allocated": 2, "freed": 1}
    gpu.reset_accumulated_stats()
    assert gpu.stats()["oversize_segments"] == {"current": 1, "peak": 2, "allocated": 0, "freed": 0}


# By options: steps on a GPU of 1000 MiB, the segments then, what the last step took and gave back.
HAND = table("allocator_by_hand")


@pytest.mark.parametrize(("text", "steps", "segments", "last"), [(text, *row) for text in HAND for row in HAND[text]])
def test_by_hand(text, steps, segments, last):
    gpu = gpu_with(text, 1000 * MIB)
    assert (play(gpu, steps), layout(gpu)) == (last, segments)
    check_invariants(gpu)


def test_what_falls_back_to_its_default_and_what_stays():
    text = ("expandable_segments:True, max_split_size_mb:64, garbage_collection_threshold:0.5,"
            "roundup_power2_divisions:4, backend:native, pinned_use_background_threads:True,")  # fmt: skip
    first = parse(text)
    assert first == Options(expandable=True, max_split=64 * MIB, gc_threshold=0.5, divisions=4, text=text)
    second = parse("", first)
    assert second == Options(expandable=True)
    assert not first.is_default and not second.is_default and parse("per_process_memory_fraction:0.5").is_default
    allowed = [gpu_with(f"per_process_memory_fraction:{part}").device.allowed for part in (0.5, 1.0)]
    assert allowed == [GIB // 2, None]


@pytest.mark.parametrize("text", [*WRONG, *REFUSED])
def test_wrong_settings_and_those_that_are_refused(text):
    with pytest.raises(NotModelled if text in REFUSED else ValueError, match="allocator setting"):
        parse(text)


def clock(now=0, wait=lambda mark: None):
    """Streams whose marks are their numbers, of which those up to `now` are passed."""
    return SimpleNamespace(now=now, mark=lambda gpu, stream: stream, wait=wait)


def test_a_block_waits_for_the_last_of_its_streams_and_neighbours_merge_then():
    gpu = CachingAllocator(GIB)
    events, waited = [], []
    gpu.clock = partial(clock, wait=waited.append)
    gpu.observers.append(lambda what, address, size: events.append((what, size // MIB)))
    a, b = gpu.malloc(5 * MIB), gpu.malloc(5 * MIB)
    for stream in ((0, 1), (0, 2), (0, 0)):  # the last is its own
        gpu.record_stream(a, stream)
    gpu.free(a)
    assert events[-1] == ("free_requested", 5) and gpu.allocated == 5 * MIB
    assert current(gpu, "allocation") == 1 and current(gpu, "active_bytes") == 10 * MIB
    gpu.free(b)
    assert layout(gpu) == "[5] (15)"
    gpu.clock = partial(clock, 1, waited.append)
    assert gpu.malloc(5 * MIB).address != a.address
    assert [gpu.stats()[name]["all"]["peak"] for name in ("active_bytes", "allocated_bytes")] == [10 * MIB] * 2
    gpu.clock = partial(clock, 2, waited.append)
    again = gpu.malloc(5 * MIB)
    assert again.address == a.address and ("free_completed", 5) in events
    gpu.record_stream(again, (0, 3))
    gpu.free(again)
    gpu.empty_cache()
    assert waited == [3] and not gpu._waits.waiting and layout(gpu) == "(5) 5 (10)"
    check_invariants(gpu)


@pytest.mark.parametrize("text", OPTIONS)
def test_invariants_hold_in_random_programs(text):
    rng, toggles = random.Random(text), "roundup" in text
    gpu, live, ooms = gpu_with(text + ",per_process_memory_fraction:0.9", 256 * MIB), [], 0
    gpu.clock = clock
    for step in range(1200):
        choice = rng.random()
        if choice < 0.55:
            try:
                live.append(gpu.malloc(int(2 ** rng.uniform(0, 26)), stream=rng.choice([0, 0, 0, 1])))
                if rng.random() < 0.2:
                    gpu.record_stream(live[-1], (0, rng.choice([2, 3])))
            except OutOfMemory:
                ooms += 1
                for block in rng.sample(live, len(live) // 2):
                    live.remove(block)
                    gpu.free(block)
        elif choice < 0.97 and live:
            gpu.free(live.pop(rng.randrange(len(live))))
        elif choice < 0.98:
            gpu.clock = partial(clock, rng.choice([2, 3]))
        elif choice < 0.99 and toggles:
            gpu.set_options(replace(gpu.options, expandable=not gpu.options.expandable))
        else:
            gpu.empty_cache()
        assert gpu.allocated == sum(block.size for block in live)
        assert gpu.reserved <= gpu.device.allowed
        if step % 20 == 0:
            check_invariants(gpu)
    assert ooms == gpu.stats()["num_ooms"] > 0
    for block in live:
        gpu.free(block)
    gpu.empty_cache()
    assert (gpu.allocated, gpu.reserved, gpu.snapshot()) == (0, 0, [])
    check_invariants(gpu)


def crowded(text):
    """A GPU that must give back much and take new memory for 50 MiB, and the blocks that it holds."""
    gpu = gpu_with(text, capacity=104 * MIB)
    held = [gpu.malloc(size * MIB) for size in (1, 3, 45, 5, 10)]
    gpu.clock = partial(clock, 1)
    gpu.record_stream(held[4], (0, 1))
    gpu.record_stream(held[0], (0, 1))
    for block in (held[4], held[2]):
        gpu.free(block)
    return gpu, [held[i] for i in (0, 1, 3)]


def ours(code):
    """What runs with the lock: in these functions it is taken and released."""
    outer = ("malloc", "free", "exclusive", "_drain")
    return code.co_name not in outer and Path(code.co_filename).parent == MEMORY


# What new memory takes, by options: tests that interrupt at every moment check that they came there.
TAKING = {"_obtain", "_new_block", "_release_cached"}
REACHED = {"": TAKING | {"change_splits"},
           "max_split_size_mb:25": TAKING - {"_release_cached"} | {"_release_oversize", "change_splits"},
           PAGES: TAKING | {"expand", "_map", "map", "unmap_free_pages", "unmap"}}  # fmt: skip


@pytest.mark.parametrize("nbytes", [2000, 50 * MIB])
def test_a_finalizer_may_free_in_the_middle_of_a_malloc(nbytes):
    moment, place, seen = 0, "start", set()
    while place:
        moment += 7 if nbytes < MIB else 19
        gpu, held = crowded("")
        free, malloc = partial(gpu.free, held[0]), lambda g=gpu, h=held: h.append(g.malloc(nbytes))
        place = interrupted_at(moment, malloc, free, ours)
        seen.add(place)
        if place:
            assert gpu.allocated == sum(block.size for block in held[1:])
            check_invariants(gpu)
    assert seen >= {"_allocate"} | (TAKING if nbytes > MIB else set())


@pytest.mark.parametrize("nbytes", [2000, 50 * MIB])
@pytest.mark.parametrize("text", REACHED)
def test_ctrl_c_in_the_middle_leaves_the_books_in_order(text, nbytes):
    moment, place, seen = 0, "start", set()
    while place:
        moment += 17 if nbytes < MIB else 13
        gpu, held = crowded(text)
        before, place = gpu.allocated, interrupted_at(moment, partial(gpu.malloc, nbytes), press, ours)
        check_invariants(gpu)
        assert not place or gpu.allocated == before or nbytes <= gpu.allocated - before <= nbytes + MIB
        freed = held.pop(moment % 3)
        left = gpu.allocated - freed.size
        seen |= {place, interrupted_at(moment % 199, partial(gpu.free, freed), press, ours)}
        assert gpu.allocated == left
        check_invariants(gpu)
        for block in held:
            gpu.free(block)
        gpu.malloc(100)
        check_invariants(gpu)
        assert not gpu._waits.waiting  # nobody waits for ever
    reached = REACHED[text] if nbytes > MIB else set()
    assert seen >= {"_allocate", "passed", "_free_pending", "reclaim"} | reached


class Owner:
    """In a cycle, as tensors may be: only gc finds it."""

    def __init__(self):
        self.cycle = self


def test_threads_with_finalizers_leave_nothing_behind():
    gpu, meet = CachingAllocator(16 * GIB), threading.Barrier(4)
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()

    def work(seed):
        meet.wait()
        rng, mine = random.Random(seed), []
        for _ in range(300):
            gpu.malloc(rng.randrange(1, 100_000), owner=Owner())
            mine.append(gpu.malloc(rng.randrange(1, 3 * MIB), stream=seed % 2))
            if rng.random() < 0.5:
                gpu.free(mine.pop(rng.randrange(len(mine))))
        for block in mine:
            gpu.free(block)

    gc.set_threshold(5)  # collect as often as possible, also inside malloc
    sys.setswitchinterval(1e-5)
    pool = ThreadPoolExecutor(4)
    try:
        list(pool.map(work, range(4), timeout=300))  # raises what a thread raised, and for a deadlock
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
        pool.shutdown(wait=False)
    gc.collect()
    assert gpu.allocated == 0 and not gpu._pending
    check_invariants(gpu)
    gpu.empty_cache()
    assert gpu.reserved == 0
