"""The caching allocator, given every request of a real training step (tests/data/h200/allocations.json.gz).

The recording begins with blocks in use that it does not show. Those that it frees later are made first; the others
never matter. So placement differs from the H200's, and with it the unsplit tails (at most 1 MiB each, large pool only)
that count as allocated. Everything else must agree to the byte at every event.
"""

from bisect import bisect

import pytest
from benchmarks.reference import measure
from virtual_gpus.memory.allocator import CachingAllocator

MIB = 1 << 20
RECORDED = measure.load("allocations.json.gz")
STEPS = measure.load("steps.json")["cases"]


def rounded(nbytes):
    return -(-nbytes // 512) * 512


def in_use_before(events):
    """Address -> bytes of the blocks that are freed without having been allocated."""
    made, before = set(), {}
    for what, nbytes, address in events:
        if what == "alloc":
            made.add(address)
        elif address in made:
            made.remove(address)
        else:
            before[address] = nbytes
    return before


@pytest.mark.parametrize("case", RECORDED)
def test_a_step_replays_as_on_the_h200(case):
    gpu = CachingAllocator(150_109_880_320)
    live, taken, recorded, tails, worst = {}, [], 0, 0, 0  # taken: where blocks begin and end, in order

    def allocate(nbytes, address):
        nonlocal recorded, tails
        assert address not in live
        live[address] = block = gpu.malloc(nbytes)
        tail = block.size - rounded(nbytes)
        assert tail == 0 or 0 < tail <= MIB < nbytes
        recorded, tails = recorded + rounded(nbytes), tails + tail
        place = bisect(taken, block.address)
        assert place % 2 == 0 and bisect(taken, block.address + block.size - 1) == place, "blocks overlap"
        taken[place:place] = [block.address, block.address + block.size]

    events = [event for event in RECORDED[case] if event[0] in ("alloc", "free_completed")]
    assert len(events) > 70
    for address, nbytes in in_use_before(events).items():
        allocate(nbytes, address)
    for what, nbytes, address in events:
        if what == "alloc":
            allocate(nbytes, address)
        else:
            block = live.pop(address)
            recorded, tails = recorded - rounded(nbytes), tails - (block.size - rounded(nbytes))
            place = bisect(taken, block.address)
            del taken[place - 1 : place + 1]
            gpu.free(block)
        assert gpu.allocated == recorded + tails
        worst = max(worst, tails)
    real = STEPS[case]["memory"][1]
    assert worst <= 0.02 * real["peak_allocated"]
    # From the end of the step to its peak: the same but for tails, in which the H200's own steps differ too.
    climb = real["peak_allocated"] - real["allocated"]
    assert gpu.peak_allocated - gpu.allocated == pytest.approx(climb, abs=0.01 * real["peak_allocated"])
