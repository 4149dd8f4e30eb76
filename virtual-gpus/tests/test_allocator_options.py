"""The caching allocator with options: by hand from CUDACachingAllocator.cpp's rules, and at any moment."""

import random
from dataclasses import replace

import pytest
from test_allocator import ALLOCATING, GIB, MIB, TAKING, check_invariants, current, was_interrupted
from virtual_gpus.memory.allocator import CachingAllocator, OutOfMemory, oom_message
from virtual_gpus.memory.options import Options, parse

PAGES = "expandable_segments:True"


def gpu_with(text, capacity=GIB, fraction=None, **sizes):
    gpu = CachingAllocator(capacity, **sizes)
    gpu.set_options(parse(text), first=True)
    if fraction is not None:
        gpu.device.set_fraction(fraction)
    return gpu


def events_of(gpu):
    events = []
    gpu.observers.append(lambda what, address, size: events.append((what, size // MIB)))
    return events


def layout(gpu):
    """Each segment as (MiB, [(state, MiB), ...])."""
    short = {"active_allocated": "used", "inactive": "free", "active_pending_free": "waits"}
    return [
        (s["total_size"] / MIB, [(short[b["state"]], b["size"] / MIB) for b in s["blocks"]]) for s in gpu.snapshot()
    ]


# ---- max_split_size_mb


def test_a_block_of_max_split_size_is_not_split_and_serves_large_requests_only():
    gpu = gpu_with("max_split_size_mb:100")
    gpu.free(gpu.malloc(200 * MIB))
    small = gpu.malloc(50 * MIB)  # the cached 200 MiB are "oversize": a smaller request may not have them
    assert gpu.reserved == 250 * MIB and small.size == 50 * MIB
    large = gpu.malloc(190 * MIB)  # within 20 MiB (max_non_split_rounding_mb): may have them, whole
    assert gpu.reserved == 250 * MIB and large.size == 200 * MIB
    gpu.free(large)
    other = gpu.malloc(180 * MIB)  # 200 >= 180 + 20: too much would be wasted
    assert gpu.reserved == 430 * MIB and other.size == 180 * MIB
    stats = gpu.stats()
    assert stats["oversize_allocations"] == {"current": 1, "peak": 1, "allocated": 3, "freed": 2}
    assert stats["oversize_segments"] == {"current": 2, "peak": 2, "allocated": 2, "freed": 0}
    assert stats["max_split_size"] == 100 * MIB
    gpu.free(small)
    assert gpu.malloc(40 * MIB).size == 40 * MIB  # below the limit blocks are split as ever
    check_invariants(gpu)
    gpu.reset_accumulated_stats()
    assert gpu.stats()["oversize_segments"] == {"current": 2, "peak": 2, "allocated": 0, "freed": 0}


def test_oversize_blocks_go_back_first_when_memory_runs_out():
    gpu = gpu_with("max_split_size_mb:100", capacity=500 * MIB)
    blocks = [gpu.malloc(size * MIB) for size in (150, 120, 130, 30)]
    for block in blocks:
        gpu.free(block)
    events = events_of(gpu)
    gpu.malloc(200 * MIB)  # no single one has 200: the largest go until 200 MiB are free; 30 and 120 stay cached
    assert events == [("segment_free", 150), ("segment_free", 130), ("segment_alloc", 200), ("alloc", 200)]
    assert gpu.stats()["num_alloc_retries"] == 0 and gpu.reserved == 350 * MIB
    check_invariants(gpu)


def test_the_best_fit_goes_back_where_one_block_is_enough():
    gpu = gpu_with("max_split_size_mb:100", capacity=400 * MIB)
    for block in [gpu.malloc(size * MIB) for size in (110, 140, 130)]:
        gpu.free(block)
    events = events_of(gpu)
    gpu.malloc(85 * MIB)  # takes a segment of 86 MiB; all cached ones are oversize
    assert events == [("segment_free", 110), ("segment_alloc", 86), ("alloc", 86)]


# ---- garbage_collection_threshold


def test_old_cached_blocks_go_back_before_new_memory_is_taken():
    gpu = gpu_with("garbage_collection_threshold:0.625", fraction=0.4, capacity=1000 * MIB)  # 250 of 400 MiB allowed
    a, b, _ = gpu.malloc(20 * MIB), gpu.malloc(30 * MIB), gpu.malloc(100 * MIB)
    gpu.free(a)  # after 3 searches of the large pool
    gpu.malloc(120 * MIB)
    gpu.free(b)  # after 4
    events = events_of(gpu)
    gpu.malloc(60 * MIB)  # the fifth: 270 MiB are reserved, 20 too many. Ages are 2 and 1: a's is above the average
    assert events == [("segment_free", 20), ("segment_alloc", 60), ("alloc", 60)]
    assert gpu.stats()["num_alloc_retries"] == 0 and gpu.reserved == 310 * MIB
    gpu.malloc(50 * MIB)  # 60 MiB too many, of which b has 30: all that can go goes
    assert events[3:] == [("segment_free", 30), ("segment_alloc", 50), ("alloc", 50)]
    check_invariants(gpu)


def test_no_garbage_is_collected_without_a_limit_or_below_the_threshold():
    for threshold, fraction in ((0.5, None), (0.5, 1.0), (0.9, 0.4)):
        gpu = gpu_with(f"garbage_collection_threshold:{threshold}", fraction=fraction, capacity=1000 * MIB)
        gpu.free(gpu.malloc(250 * MIB))
        gpu.malloc(20 * MIB)
        gpu.malloc(40 * MIB)
        gpu.free(gpu.malloc(30 * MIB))
        assert gpu.stats()["num_device_free"] == 0
    allowed = [gpu_with(f"per_process_memory_fraction:{part}").device.allowed for part in (0.5, 1.0)]
    assert allowed == [GIB // 2, None]


# ---- roundup_power2_divisions, large_segment_size_mb


@pytest.mark.parametrize(
    ("divisions", "nbytes", "size"),
    [
        ("4", 1200, 1536),  # not above 512 * 4: rounds to 512
        ("4", 9 * 1024, 10 * 1024),  # 8, 10, 12, 14, 16 KiB
        ("4", 8 * 1024, 8 * 1024),
        ("[2:1,4:8,>:2]", 5 * MIB, 5 * MIB),
        ("[2:1,4:8,>:2]", 5 * MIB + 1, 5 * MIB + MIB // 2),  # 4 MiB in 8 steps
        ("[2:1,4:8,>:2]", 9 * MIB, 12 * MIB),  # 8 MiB in 2 steps
        ("[2:1,4:8,>:2]", 3 * MIB + 1, 3 * MIB + 512),
        ("[2:4,4:8,>:2]", 9000, 10240),  # the first interval's number counts for all below too
    ],
)
def test_sizes_round_up_to_steps_between_powers_of_two(divisions, nbytes, size):
    assert gpu_with(f"roundup_power2_divisions:{divisions}").malloc(nbytes).size == size


def test_what_falls_back_to_its_default_and_what_stays():
    first = parse("expandable_segments:True,max_split_size_mb:64,garbage_collection_threshold:0.5,"
                  "large_segment_size_mb:30,roundup_power2_divisions:4")  # fmt: skip
    assert not first.plain and Options().plain and parse("").plain
    assert first.divisions == (4,) * 16 and first.max_non_split_rounding == 30 * MIB
    second = parse("", first)
    assert second == Options(expandable=True, large_segment=30 * MIB, max_non_split_rounding=30 * MIB)


# ---- expandable segments


def test_pages_of_2_mib_in_the_small_pool_and_20_mib_in_the_large_one():
    gpu = gpu_with(PAGES)
    events = events_of(gpu)
    gpu.malloc(1000)
    gpu.malloc(3 * MIB)
    gpu.malloc(30 * MIB)
    assert [e for e in events if e[0] != "alloc"] == [("segment_map", 2), ("segment_map", 20), ("segment_map", 20)]
    assert gpu.reserved == 42 * MIB  # 3 + 30 of 40 MiB: the second needed 13 MiB more than was free
    assert gpu.stats()["num_device_alloc"] == 3
    small, large = gpu.snapshot()
    assert small["is_expandable"] and small["total_size"] == 2 * MIB and large["total_size"] == 40 * MIB
    assert layout(gpu)[1] == (40, [("used", 3), ("used", 30), ("free", 7)])
    assert gpu.malloc(7 * MIB - 512).size == 7 * MIB - 512  # in a fixed segment 1 MiB or less stays with the block
    check_invariants(gpu)


def test_free_pages_go_back_from_the_middle():
    gpu = gpu_with(PAGES)
    blocks = [gpu.malloc(50 * MIB) for _ in range(3)]
    assert gpu.reserved == 160 * MIB
    gpu.free(blocks[1])  # bytes 50 to 100 MiB: of these the pages from 60 to 100 MiB are wholly free
    events = events_of(gpu)
    gpu.empty_cache()
    assert events == [("segment_unmap", 40)] and gpu.reserved == 120 * MIB
    assert layout(gpu) == [(60, [("used", 50), ("free", 10)]), (60, [("used", 50), ("free", 10)])]
    end = gpu.malloc(60 * MIB)  # 10 free and 40 MiB of addresses in the gap are too few: it goes to the end
    assert end.address == blocks[2].address + 50 * MIB and gpu.reserved == 180 * MIB
    gap = gpu.malloc(45 * MIB)  # fits the gap: 10 MiB that are free, and two pages
    assert gap.address == blocks[0].address + 50 * MIB and gpu.reserved == 220 * MIB
    assert gpu.stats()["num_device_free"] == 1
    assert gpu.stats()["reserved_bytes"]["all"]["freed"] == 40 * MIB


def test_the_lowest_gap_is_filled_first():
    gpu = gpu_with(PAGES)
    blocks = [gpu.malloc(40 * MIB) for _ in range(5)]
    gpu.free(blocks[3])
    gpu.free(blocks[1])
    gpu.empty_cache()
    assert gpu.malloc(30 * MIB).address == blocks[1].address and gpu.reserved == 160 * MIB
    assert gpu.malloc(40 * MIB).address == blocks[3].address and gpu.reserved == 200 * MIB


def test_out_of_memory_with_expandable_segments():
    gpu = gpu_with(PAGES, capacity=100 * MIB)
    held = [gpu.malloc(30 * MIB), gpu.malloc(30 * MIB)]
    with pytest.raises(OutOfMemory) as caught:
        gpu.malloc(50 * MIB)  # 60 of 60 MiB are used: 60 MiB more in 20 MiB pages do not fit into 40
    error = caught.value
    assert (error.requested, error.free, error.reserved) == (50 * MIB, 40 * MIB, 60 * MIB)
    text = oom_message(error, 0, (2, 13))
    assert "try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation" in text
    text = oom_message(error, 0, (2, 15))
    assert text.partition("unallocated.")[2].startswith(" expandable_segments is enabled. If instead the process is")
    gpu.free(held[0])
    assert gpu.malloc(50 * MIB).address == held[1].address + 30 * MIB  # 30 free below do not help; 10 + 40 MiB above
    assert gpu.stats()["num_ooms"] == 1
    gpu = gpu_with(PAGES, capacity=1000 * MIB, fraction=0.1)
    gpu.malloc(70 * MIB)  # 80 MiB of the limit of 100
    with pytest.raises(OutOfMemory) as caught:
        gpu.malloc(21 * MIB)
    assert caught.value.allowed == 100 * MIB


def test_fragmentation_cured():
    """Every second block freed, then one request as large as all of that: fixed segments have no room, pages have."""
    for text, fits in (("", False), (PAGES, True)):
        gpu = gpu_with(text, capacity=400 * MIB)
        large = gpu.malloc(360 * MIB)
        gpu.free(large)  # one segment of 360 MiB, or 18 pages
        blocks = [gpu.malloc(40 * MIB) for _ in range(9)]
        for block in blocks[::2]:
            gpu.free(block)
        if fits:
            assert gpu.malloc(200 * MIB).size == 200 * MIB and gpu.stats()["num_alloc_retries"] == 1
        else:
            with pytest.raises(OutOfMemory):
                gpu.malloc(200 * MIB)
            assert (gpu.allocated, gpu.reserved) == (160 * MIB, 360 * MIB)


def test_best_fit_prefers_a_hole_to_the_end_that_can_grow():
    gpu = gpu_with(PAGES)
    first, hole, last = gpu.malloc(20 * MIB), gpu.malloc(30 * MIB), gpu.malloc(25 * MIB)
    gpu.free(hole)  # free: the hole of 30 MiB, and 5 MiB at the end of the mapped pages
    assert gpu.malloc(4 * MIB).address == hole.address  # 5 MiB would be the best fit but for the addresses behind them
    assert first.size + last.size == 45 * MIB


def test_switched_off_again_new_blocks_come_from_fixed_segments():
    gpu = gpu_with(PAGES)
    gpu.free(gpu.malloc(100 * MIB))
    gpu.set_options(parse("expandable_segments:False", gpu.options))
    block = gpu.malloc(100 * MIB)
    assert gpu.reserved == 200 * MIB and block.arena is None
    gpu.free(block)
    gpu.set_options(parse(PAGES, gpu.options))
    gpu.malloc(100 * MIB)
    assert gpu.reserved == 200 * MIB
    gpu.empty_cache()
    assert gpu.reserved == 100 * MIB


# ---- blocks that other streams use


class Clock:
    """Streams that pass a mark when told."""

    def __init__(self):
        self.done, self.waited = set(), []

    def mark(self, stream):
        return stream

    def has_passed(self, mark):
        return mark in self.done

    def wait_for(self, mark):
        self.waited.append(mark)


def test_a_block_that_another_stream_uses_waits_for_it():
    gpu = CachingAllocator(GIB)
    gpu.clock, events = Clock(), events_of(gpu)
    block = gpu.malloc(30 * MIB)
    gpu.record_stream(block, (0, 7))
    gpu.record_stream(block, (0, 0))  # its own stream
    gpu.free(block)
    assert events[-1] == ("free_requested", 30) and gpu.allocated == 0
    assert layout(gpu) == [(30, [("waits", 30)])]
    assert current(gpu, "allocation") == 0 and current(gpu, "active_bytes") == 30 * MIB
    check_invariants(gpu)
    other = gpu.malloc(30 * MIB)
    assert other.address != block.address and gpu.reserved == 60 * MIB
    assert gpu.stats()["active_bytes"]["all"]["peak"] == 60 * MIB
    assert gpu.stats()["allocated_bytes"]["all"]["peak"] == 30 * MIB
    gpu.clock.done.add((0, 7))
    again = gpu.malloc(30 * MIB)
    assert again.address == block.address and gpu.reserved == 60 * MIB and ("free_completed", 30) in events
    check_invariants(gpu)


def test_a_block_waits_for_the_last_of_its_streams_and_neighbours_merge_then():
    gpu = CachingAllocator(GIB)
    gpu.clock = Clock()
    a, b = gpu.malloc(5 * MIB), gpu.malloc(5 * MIB)
    for stream in ((0, 1), (0, 2)):
        gpu.record_stream(a, stream)
    gpu.free(a)
    gpu.free(b)
    assert layout(gpu) == [(20, [("waits", 5), ("free", 15)])]
    gpu.clock.done.add((0, 1))
    gpu.malloc(100)
    assert layout(gpu)[0] == (20, [("waits", 5), ("free", 15)])
    gpu.clock.done.add((0, 2))
    gpu.malloc(100)
    assert layout(gpu)[0] == (20, [("free", 20)])
    check_invariants(gpu)


def test_emptying_the_cache_waits_for_the_streams():
    gpu = CachingAllocator(GIB)
    block = gpu.malloc(30 * MIB)
    gpu.record_stream(block, (0, 3))
    gpu.free(block)
    assert layout(gpu) == [(30, [("waits", 30)])]
    again = gpu.malloc(30 * MIB)  # without a clock the block is back at the next allocation
    assert again.address == block.address
    gpu.clock = Clock()
    gpu.record_stream(again, (0, 3))
    gpu.free(again)
    gpu.empty_cache()
    assert gpu.clock.waited == [(0, 3)] and gpu.reserved == 0 and not gpu._waits.waiting


# ---- at any moment


OPTIONS = ("", PAGES, "max_split_size_mb:25", "garbage_collection_threshold:0.6",
           "roundup_power2_divisions:8,expandable_segments:True",
           "large_segment_size_mb:30,max_split_size_mb:32")  # fmt: skip


@pytest.mark.parametrize("text", OPTIONS)
def test_invariants_hold_in_random_programs(text):
    rng = random.Random(text)
    gpu, live, ooms = gpu_with(text, capacity=256 * MIB, fraction=0.9), [], 0
    gpu.clock = Clock()
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
            gpu.clock.done ^= {(0, rng.choice([2, 3]))}
        elif choice < 0.99 and "expandable" in text:
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
    """A GPU that must give back much and take new memory for 50 MiB."""
    gpu = gpu_with(text, capacity=104 * MIB)
    held = [gpu.malloc(size * MIB) for size in (1, 3, 45, 5, 10)]
    gpu.record_stream(held[4], (0, 1))
    gpu.record_stream(held[0], (0, 1))
    for block in (held[4], held[2]):
        gpu.free(block)
    return gpu, [held[i] for i in (0, 1, 3)]


REACHED = {"": TAKING, "max_split_size_mb:25": TAKING - {"release_cached"} | {"release_oversize"},
           PAGES: TAKING | {"expand", "_map", "map", "unmap_free_pages", "unmap"}}  # fmt: skip


@pytest.mark.parametrize("nbytes", [2000, 50 * MIB])
@pytest.mark.parametrize("text", REACHED)
def test_ctrl_c_in_the_middle_leaves_the_books_in_order(text, nbytes):
    moment, found, seen = 0, True, set()
    while found:
        moment += 9 if nbytes < 40 * MIB else 19
        gpu, held = crowded(text)
        before = gpu.allocated
        found = was_interrupted(moment, lambda g=gpu: g.malloc(nbytes), seen)
        check_invariants(gpu)
        assert not found or gpu.allocated == before or nbytes <= gpu.allocated - before <= nbytes + MIB
        moment2 = moment % 90 + 1
        was_interrupted(moment2, lambda g=gpu, h=held: g.free(h[0]), seen)
        check_invariants(gpu)
        for block in held[1:]:
            gpu.free(block)
        gpu.malloc(100)
        check_invariants(gpu)
        assert not gpu._waits.waiting  # nobody waits for ever
    assert seen >= ALLOCATING | {"passed", "reclaim"} | (REACHED[text] if nbytes == 50 * MIB else set())
