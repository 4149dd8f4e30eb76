"""Readings, peaks, the search for the largest batch, on virtual GPUs and with nvidia-smi's answers changed."""

import gc
import sys

import GPUtil
import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.measure import GiB, MiB, Reading, largest_batch, memory, read_memory

pytestmark = pytest.mark.usefixtures("workspaces_given_back")
CONTEXT = 760 * MiB  # an H200's, which the driver counts from the first tensor on


def take(size: int, gpu: int = 0) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")


def test_both_views_are_read_in_bytes():
    with virtual_gpus(2, memory="16 GiB"):
        kept, _ = take(3 * MiB, 1), take(30 * MiB, 1)
        del _
        torch.cuda.empty_cache()
        readings = read_memory()
    assert readings[1] == Reading(
        index=1, name="NVIDIA H200", capacity=16 * GiB, allocated=3 * MiB, peak_allocated=33 * MiB, reserved=20 * MiB,
        peak_reserved=50 * MiB, driver_used=CONTEXT + 20 * MiB, driver_total=16 * GiB,
    )  # fmt: skip
    assert len(readings) == 2 and readings.note == "" and readings[0].driver_used == 0 < len(kept)


def test_some_devices_in_any_spelling_each_once(four):
    torch.cuda.set_device(1)
    found = read_memory([torch.device("cuda:3"), "cuda:0", 2, "cuda", "cuda:2"])
    assert [reading.index for reading in found] == [3, 0, 2, 1]
    assert [reading.index for reading in read_memory("cuda:2")] == [2]
    with pytest.raises(ValueError, match="cpu is not a GPU"):
        read_memory("cpu")
    with pytest.raises(ValueError, match="no cuda:4. PyTorch sees cuda:0 to cuda:3"):
        read_memory([4])


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has real GPUs")
def test_without_any_gpu_a_sentence_says_what_to_do():
    for read in (read_memory, memory.reset_peaks, lambda: memory.measure_memory().__enter__()):
        with pytest.raises(RuntimeError, match="Call use_gpus first"):
            read()


def test_hidden_gpus_are_matched_by_uuid(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with virtual_gpus(4), pytest.raises(KeyError), memory.measure_memory() as readings:
        assert str(readings) == "No readings yet."
        kept = take(1)
        raise KeyError
    assert readings[0].peak_allocated == 512 and readings[0].driver_used > 0 == readings[1].driver_used, kept
    assert readings.note == (
        "The driver lists 4 GPU(s), PyTorch sees 2: cuda:0 is the driver's GPU 3, "
        "cuda:1 is the driver's GPU 1 (matched by UUID)."
    )
    assert " ".join(str(readings).split()).endswith(readings.note)  # wrapped to the table's width


def test_what_nvidia_smi_or_gputil_do_not_tell(four, monkeypatch):
    first, _, *others = GPUtil.getGPUs()
    first.memoryUsed = float("nan")
    monkeypatch.setattr(GPUtil, "getGPUs", lambda: [first, *others])
    readings = read_memory()
    assert [reading.driver_used for reading in readings] == [None, None, 0, 0] and readings[0].driver_total > GiB
    assert "cuda:1 is not in the driver's list" in readings.note and "  -  " in str(readings)
    monkeypatch.setattr(GPUtil, "getGPUs", list)
    readings, kept = read_memory(), take(1)
    assert all(reading.driver_used is None for reading in readings) and "found no nvidia-smi" in str(readings)
    monkeypatch.setattr(GPUtil, "getGPUs", lambda: int("NVIDIA-SMI has failed"))
    readings = read_memory()
    assert "GPUtil failed (invalid literal" in readings.note and readings[0].allocated == 512 > kept.nbytes
    monkeypatch.setitem(sys.modules, "GPUtil", None)  # what an import without distutils looks like
    assert "GPUtil failed (import of GPUtil" in read_memory().note


def test_the_peaks_of_a_step_come_back_the_same_every_time(four):
    net = nn.DataParallel(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to("cuda:0"))

    def step():
        net(torch.randn(64, 256, device="cuda:0")).square().mean().backward()
        net.zero_grad()

    step()
    take(GiB)  # a peak before the step
    with memory.measure_memory() as first:
        step()
    with memory.measure_memory() as second:
        step()
    assert first == second
    assert all(GiB > reading.peak_allocated > reading.allocated for reading in first)
    assert first[0].peak_allocated > first[1].peak_allocated >= first[3].peak_allocated
    assert first[1].allocated == 0  # replicas and their outputs are gone


# ---- the largest batch ----------------------------------------------------------------------------------------------


def bounded(largest: int, tried: list[int]):
    def step(batch):
        tried.append(batch)
        if batch > largest:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    return step


@pytest.mark.parametrize(
    ("largest", "start"), [(0, 1), (1, 64), (3, 1), (63, 64), (100, 7), (10**9, 64), (10**9, 2000)]
)
def test_the_largest_batch_is_found_and_nothing_is_tried_twice(largest, start):
    tried = []
    assert largest_batch(bounded(largest, tried), start, limit=1000, steps=1) == min(largest, 1000)
    assert len(tried) == len(set(tried)) <= 20 and all(0 < batch <= 1000 for batch in tried)


def test_every_try_is_two_steps_and_errors_pass_through():
    tried = []
    assert largest_batch(bounded(5, tried)) == 5
    assert tried == [1, 1, 2, 2, 4, 4, 8, 6, 5, 5]
    with pytest.raises(ZeroDivisionError):
        largest_batch(lambda batch: 1 / 0)
    for nothing in ({"start": 0}, {"limit": 0}, {"steps": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            largest_batch(lambda batch: None, **nothing)


def test_the_largest_batch_of_a_training_fills_a_gpu_and_leaves_it_empty_and_the_random_numbers():
    with virtual_gpus(4, memory="1 GiB", shapes_only=True):
        net = nn.DataParallel(nn.Linear(1024, 4096, bias=False).to("cuda:0"))

        def step(batch):
            inputs = torch.zeros(batch, 1024, device="cuda:0")
            inputs.myself = inputs  # a cycle, as training loops leave them
            net(inputs).sum().backward()
            net.zero_grad()
            torch.rand(1)

        numbers, weights = torch.get_rng_state(), torch.cuda.memory_allocated(0)
        largest = largest_batch(step, start=1000)
        assert torch.equal(torch.get_rng_state(), numbers)
        assert torch.cuda.memory_allocated(0) == weights and read_memory()[1].reserved == 0
        step(largest)
        gc.collect()
        torch.cuda.empty_cache()  # as between two tries: what fits depends on how the cache is cut up
        with pytest.raises(torch.OutOfMemoryError):
            step(largest + 4)  # one more in each piece
            step(largest + 4)


def test_the_answer_does_not_depend_on_where_the_search_starts():
    """The state of the optimizer takes a place that depends on the batch of the very first step."""
    found = []
    for start in (1, 12, 20):
        with virtual_gpus(1, memory="256 MiB"):
            state = []

            def step(batch, state=state):
                take(batch * 8 * MiB)
                if not state:  # in the memory of the activations, which then cannot be given back
                    state.append(take(21 * MiB))

            found.append(largest_batch(step, start=start))
    assert len(set(found)) == 1, found
