"""The rules of memory as functions and the allocator that uses them, by hand and against traces of an H200."""

import random

import pytest
import torch
from benchmarks.reference import measure
from virtual_gpus.memory.allocator import CachingAllocator, OutOfMemory
from virtual_gpus.memory.options import parse
from virtual_gpus.memory_model import blas_workspaces, reduction_scratch, replay, round_size, segment_size

MIB, GIB = 1 << 20, 1 << 30


# ---- blocks and segments


@pytest.mark.parametrize("text", ["", "roundup_power2_divisions:4", "large_segment_size_mb:40"])
def test_sizes_are_those_of_the_allocator(text):
    options = parse(text)
    for nbytes in (1, 512, 513, 9000, MIB, MIB + 1, 5 * MIB + 1, 10 * MIB - 512, 10 * MIB, 31 * MIB + 5):
        gpu = CachingAllocator(GIB)
        gpu.set_options(options)
        block = gpu.malloc(nbytes)
        assert segment_size(nbytes, options) == gpu.reserved
        assert 0 <= block.size - round_size(nbytes, options) <= (MIB if nbytes > MIB else 0)
    assert [round_size(n) for n in (1, 512, 513)] == [512, 512, 1024]
    assert [segment_size(n) // MIB for n in (1, MIB, MIB + 1, 10 * MIB, 11 * MIB)] == [2, 2, 20, 10, 12]
    assert segment_size(2 * MIB, parse("large_segment_size_mb:40")) == 40 * MIB


# ---- every request of a real training step

RECORDED, STEPS = measure.load("allocations.json.gz"), measure.load("steps.json")["cases"]


@pytest.mark.parametrize("case", RECORDED)
def test_a_recorded_step_replays_as_on_the_h200(case):
    """To the byte at every event, but for unsplit tails (at most 1 MiB each, large pool only) that count as allocated.

    A recording begins with blocks in use that it does not show. Those that it frees later are made first, so placement
    differs from the H200's.
    """
    gpu, live, recorded, tails, worst, first = CachingAllocator(150_109_880_320), {}, 0, 0, 0, {}
    events = [event for event in RECORDED[case] if event[0] in ("alloc", "free_completed")]
    for event in events:
        first.setdefault(event[2], event)
    before = [("alloc", nbytes, address) for what, nbytes, address in first.values() if what != "alloc"]
    assert len(events) > 70
    for what, nbytes, address in before + events:
        if what == "alloc":
            assert address not in live
            live[address] = block = gpu.malloc(nbytes)
        else:
            block = live.pop(address)
        tail, sign = block.size - round_size(nbytes), 1 if what == "alloc" else -1
        assert tail == 0 or 0 < tail <= MIB < nbytes
        if what != "alloc":
            gpu.free(block)
        recorded, tails = recorded + sign * round_size(nbytes), tails + sign * tail
        assert gpu.allocated == recorded + tails
        worst = max(worst, tails)
    real = STEPS[case]["memory"][1]
    assert worst <= 0.02 * real["peak_allocated"]
    # From the end of the step to its peak: the same but for tails, in which the H200's own steps differ too.
    climb = real["peak_allocated"] - real["allocated"]
    assert gpu.peak_allocated - gpu.allocated == pytest.approx(climb, abs=0.01 * real["peak_allocated"])


PAGES, LARGE = "expandable_segments:True", "large_segment_size_mb:30"


@pytest.mark.parametrize("text, known", [("", True), (PAGES, True), (PAGES, False), (LARGE, False)])
def test_a_replay_follows_the_allocator_to_the_byte(text, known):
    rng, gpu, live, trace, asked = random.Random(text), CachingAllocator(80 * MIB), [], [], []
    gpu.set_options(parse(text))
    if known:  # something is there before the history begins
        live = [gpu.malloc(size) for size in (1000, 3 * MIB, 11 * MIB, 700)]
        gpu.free(live.pop(1))
    segments = gpu.snapshot()

    def hear(event, address, size):
        size = asked[-1] if event == "alloc" else size
        actions = ("free_requested", "free_completed") if event == "free" else (event,)
        trace.extend({"action": action, "addr": address, "size": size} for action in actions)

    gpu.observers.append(hear)
    expected = {}  # how many events there were -> what the allocator says then
    for _ in range(600):
        choice = rng.random()
        if choice < 0.55:
            asked.append(int(2 ** rng.uniform(0, 25)))
            try:
                live.append(gpu.malloc(asked[-1]))
            except OutOfMemory:
                gpu.free(live.pop(0))
        elif choice < 0.97 and live:
            gpu.free(live.pop(rng.randrange(len(live))))
        else:
            gpu.empty_cache()
        expected[len(trace)] = gpu.allocated, gpu.reserved, gpu.stats()["segment"]["all"]["current"]
    states = list(replay(trace, segments, parse(text)))
    assert len(states) == len(trace) + 1 > 600 and {event["action"] for event in trace} > {"oom"}
    assert {place: states[place] for place in expected} == expected


def test_a_replay_of_what_it_does_not_know():
    """A history that begins in the middle: blocks count as their rounded sizes."""
    trace = [{"action": "alloc", "addr": 4096, "size": 1000}, {"action": "free_requested", "addr": 8192, "size": 600},
             {"action": "free_completed", "addr": 8192, "size": 600}, {"action": "oom", "device_free": 0, "size": 5},
             {"action": "free_requested", "addr": 4096, "size": 1000}]  # fmt: skip
    assert [state.allocated for state in replay(trace)] == [0, 1024, 0, 0, 0, -1024]


# ---- cuBLAS: by version and setting in test_cublas_workspaces.py, on GPUs


def test_workspaces_need_no_gpu():
    hopper, older = (blas_workspaces(kind, (2, 11), {}) for kind in ("H100", "T4"))
    assert (hopper.size("cublas"), older.size("cublas"), older.size("cublaslt")) == (32 * MIB, 8320 << 10, MIB)
    assert hopper.libraries() == ("cublas",) and hopper.libraries(lt=True) == ("cublas", "cublaslt")
    unified = blas_workspaces("T4", (2, 13), {"CUBLASLT_WORKSPACE_SIZE": "65536"})
    assert unified.kept and unified.libraries(lt=True) == ("cublas",)
    assert unified.size("cublaslt") == 8320 << 10  # within cuBLAS's
    assert not blas_workspaces("T4", (2, 15), {}).kept
    with pytest.raises(ValueError, match="RTX"):
        blas_workspaces("RTX", (2, 13), {})


# ---- reductions

# Rows, columns of matrices whose rows were added up; bytes of partial results and of semaphores, both rounded up to
# blocks of 512, in traces of training steps on an H200.
COLUMN_SUMS = [
    (2048, 384, 6_291_456, 512),
    (2048, 1536, 25_165_824, 512),
    (2048, 1152, 18_874_368, 512),
    (2608, 20_000, 143_360_000, 1024),
    (2608, 256, 5_373_952, 512),
    (2608, 1024, 21_495_808, 512),
    (2608, 768, 16_121_856, 512),
    (4096, 1024, 33_554_432, 512),
]


def test_partial_sums_of_training_steps_on_an_h200():
    for rows, columns, partial, semaphores in COLUMN_SUMS:
        found = reduction_scratch((rows, columns), "H200", [0])
        assert tuple(map(round_size, found)) == (partial, semaphores), (rows, columns)
    assert reduction_scratch((1000, 10_000), "H200") == (4 * 528, 4)  # the mean of 10,000,000 losses: 3,072 bytes


def test_partial_sums_depend_on_the_gpu_and_the_layout():
    assert reduction_scratch((8192, 256), "H200", [0])[0] > reduction_scratch((8192, 256), "K80", [0])[0]
    assert reduction_scratch((8192, 256), "H200", [1]) == (0, 0)  # 8,192 outputs keep the GPU busy: no need to cut
    for shape, dims in (((8, 256), [0]), ((0, 4), [0]), ((), None)):
        assert reduction_scratch(shape, "H200", dims) == (0, 0)
    turned = torch.empty(2048, 384, device="meta").t()
    found = reduction_scratch(turned.shape, "H200", [-1], strides=turned.stride())
    assert found == reduction_scratch((2048, 384), "H200", [0])
