"""The caching allocator, given every request of a real training step (tests/data/h200/allocations.json.gz).

The recording begins with blocks in use that it does not show. Those that it frees later are made first; the others
never matter. So placement differs from the H200's, and with it the unsplit tails (at most 1 MiB each, large pool only)
that count as allocated. Everything else must agree to the byte at every event.
"""

from itertools import pairwise

import pytest
from benchmarks.reference import measure
from virtual_gpus.memory.allocator import CachingAllocator

MIB = 1 << 20
RECORDED = measure.load("allocations.json.gz")
STEPS = measure.load("steps.json")["cases"]


def rounded(nbytes):
    return -(-nbytes // 512) * 512


def events_of(case):
    """[(bytes or -bytes, address)]: requests and the moments at which blocks were really free again."""
    signs = {"alloc": 1, "free_completed": -1}
    return [(signs[what] * nbytes, address) for what, nbytes, address in RECORDED[case] if what in signs]


def in_use_before(events):
    """Address -> bytes of the blocks that are freed without having been allocated."""
    made, before = set(), {}
    for nbytes, address in events:
        if nbytes > 0:
            made.add(address)
        elif address in made:
            made.remove(address)
        else:
            before[address] = -nbytes
    return before


def replay(case, after_event):
    """Run the recording on a fresh allocator. After each event `after_event(gpu, blocks in use, bytes recorded)`."""
    gpu, events = CachingAllocator(150_109_880_320), events_of(case)
    live = {address: gpu.malloc(nbytes) for address, nbytes in in_use_before(events).items()}
    recorded = sum(rounded(nbytes) for nbytes in in_use_before(events).values())
    for nbytes, address in events:
        if nbytes > 0:
            assert address not in live
            live[address] = gpu.malloc(nbytes)
            recorded += rounded(nbytes)
        else:
            gpu.free(live.pop(address))
            recorded -= rounded(-nbytes)
        after_event(gpu, live.values(), recorded)
    return gpu


@pytest.mark.parametrize("case", RECORDED)
def test_allocated_is_exact_after_every_event(case):
    seen = []

    def check(gpu, blocks, recorded):
        tails = [block.size - rounded(block.requested) for block in blocks]
        assert gpu.allocated == recorded + sum(tails)
        assert all(0 <= tail <= MIB for tail in tails)
        assert not any(block.size > rounded(block.requested) for block in blocks if block.requested <= MIB)
        seen.append(sum(tails))

    replay(case, check)
    assert len(seen) == len(events_of(case)) > 70
    assert max(seen) <= 0.02 * STEPS[case]["memory"][1]["peak_allocated"]


@pytest.mark.parametrize("case", RECORDED)
def test_blocks_never_overlap(case):
    def check(gpu, blocks, recorded):
        spans = sorted((block.address, block.address + block.size) for block in blocks)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))

    replay(case, check)


@pytest.mark.parametrize("case", RECORDED)
def test_a_step_climbs_as_high_as_on_the_h200(case):
    """From the end of the step to its peak: the same but for tails, in which the H200's own steps differ too."""
    gpu = replay(case, lambda *_: None)
    real = STEPS[case]["memory"][1]
    climb = real["peak_allocated"] - real["allocated"]
    assert gpu.peak_allocated - gpu.allocated == pytest.approx(climb, abs=0.01 * real["peak_allocated"])
