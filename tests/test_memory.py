"""Readings, their table, peaks, PyTorch's refusals in figures, the search for the largest batch."""

import gc
import sys
import weakref
from dataclasses import replace

import GPUtil
import numpy as np
import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.measure import GiB, MiB, Reading, Readings, Refusal, format_bytes, largest_batch, memory, read_memory
from helpers.measure.memory import measure_memory
from helpers.measure.refusal import read_refusal
from helpers.sizes import digits
from tests.check_answers import raises

pytestmark = pytest.mark.usefixtures("workspaces_given_back")
CONTEXT = 760 * MiB  # an H200's, which the driver counts from the first tensor on


def peak_memory(step, devices=None, catch=False):
    """The readings of one step."""
    with measure_memory(devices, catch=catch) as readings:
        step()
    return readings


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
    with pytest.raises(ValueError, match="'cpu' is not a GPU"):
        read_memory("cpu")
    for index, device in ((4, [4]), (256, "cuda:256"), (256, 256)):
        with pytest.raises(ValueError, match=f"no cuda:{index}. Pass one of cuda:0 to cuda:3"):
            read_memory(device)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has real GPUs")
def test_without_any_gpu_a_sentence_says_what_to_do():
    for read in (read_memory, memory.reset_peaks, lambda: peak_memory(lambda: None), lambda: largest_batch(print)):
        with pytest.raises(RuntimeError, match="There is no GPU. Call use_gpus"):
            read()


def test_hidden_gpus_are_matched_by_uuid(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with virtual_gpus(4), pytest.raises(KeyError), memory.measure_memory() as readings:
        assert str(readings) == "No readings yet."
        kept = take(1)
        raise KeyError
    assert readings[0].peak_allocated == 512 and readings[0].driver_used > 0 == readings[1].driver_used, kept
    assert readings.note == (
        "The driver lists 4 GPUs, PyTorch sees 2: cuda:0 is the driver's GPU 3, "
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
    with measure_memory() as outer:
        take(GiB)  # a peak before the step, which the measurements of the step do not hide
        first = peak_memory(step)
        assert first == peak_memory(step)
        with virtual_gpus(1):
            assert peak_memory(lambda: take(2 * GiB))[0].peak_allocated == 2 * GiB  # of another GPU
    assert GiB < outer[0].peak_allocated < 2 * GiB < 2 * outer[0].peak_reserved and outer[1:] == first[1:]
    assert all(GiB > reading.peak_allocated > reading.allocated for reading in first)
    assert first[0].peak_allocated > first[1].peak_allocated >= first[3].peak_allocated
    assert first[1].allocated == 0  # replicas and their outputs are gone


# ---- as a table -----------------------------------------------------------------------------------------------------


def test_the_text_says_where_the_figures_come_from_and_fits_into_a_cell():
    first = Reading(0, "Card <X>", 16 * GiB, 3 * MiB, 5 * MiB, 20 * MiB, 22 * MiB, 500 * MiB, 16 * GiB + MiB)
    two = Readings([first, replace(first, index=1, allocated=1, driver_used=501 * MiB)])
    table = (
        "Memory in MiB: 2 x Card <X>\n"
        "     ------------------- PyTorch (torch.cuda) -------------------  - driver (GPUtil) -\n"
        "GPU  allocated  peak allocated  reserved  peak reserved  capacity         used   total\n"
        "  0       3.00            5.00     20.00          22.00    16,384        500.0  16,385\n"
        "  1      <0.01            5.00     20.00          22.00    16,384        501.0  16,385"
    )
    assert str(two) == repr(two) == table
    assert isinstance(two[1:], Readings) and str(Readings()) == "No readings yet."
    bare = Readings(replace(reading, driver_used=None, driver_total=None) for reading in two)
    assert all(line.split()[-2:] == ["-", "-"] for line in str(bare).splitlines()[3:])
    lines = str(Readings([Reading(0, "GPU", *[900 * GiB] * 7)] * 3, "a rather long sentence " * 13)).splitlines()
    assert max(map(len, lines)) <= 110
    assert len({len(line) for line in lines[2:6]}) == 1  # right-aligned down to the last column


def test_bytes_in_words():
    sizes = [0, 512, 1.25 * MiB, 12.34 * MiB, 1000 * MiB, GiB - 1, 139.8 * GiB, -1]
    words = ["0.00 MiB", "<0.01 MiB", "1.25 MiB", "12.3 MiB", "1,000 MiB", "1.00 GiB", "140 GiB", "0.00 MiB"]
    assert list(map(format_bytes, sizes)) == words and digits(0.5, 0) == "<1" and digits(0.005, 2) == "0.01"


# ---- refusals ------------------------------------------------------------------------------------------------------

MEASURED = (  # on an H200, with a limit of 8 GiB for the process
    "CUDA out of memory. Tried to allocate 528.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which "
    "131.41 GiB is free. Including non-PyTorch memory, this process has 8.38 GiB memory in use. 8.00 GiB "
    "allowed; Of the allocated memory 7.62 GiB is allocated by PyTorch, and 13.81 MiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
FULL = (
    "CUDA out of memory. Tried to allocate {requested}. {reserve}GPU 1 has a total capacity of 11.91 GiB of which "
    "{free} is free. {others}Including non-PyTorch memory, this process has 10.91 GiB memory in use. {allowed}Of the "
    "allocated memory {allocated} is allocated by PyTorch, {pools}and {unallocated} is reserved by PyTorch but "
    "unallocated."
)
ASYNC = "Allocation on device 0 would exceed allowed memory. (out of memory)\nRequested               : 640.00 MiB"


def text(**figures) -> str:
    usual = {"requested": "2.00 GiB", "free": "700.00 MiB", "allocated": "9.20 GiB", "unallocated": "900.00 MiB"}
    return FULL.format(**dict.fromkeys(("reserve", "others", "allowed", "pools"), "") | usual | figures)


def read(said: str) -> Refusal | None:
    return read_refusal(torch.OutOfMemoryError(said))


def gib(number: float) -> int:
    return round(number * GiB)


USUAL = Refusal(1, 2 * GiB, gib(11.91), 700 * MiB, gib(9.2), gib(9.2) + 900 * MiB)
EACH = ("requested", "free", "allocated", "unallocated")
REAL = Refusal(0, 528 * MiB, gib(139.80), gib(131.41), gib(7.62), gib(7.62) + round(13.81 * MiB), allowed=8 * GiB)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (text(others="Process 4711 has 3.25 GiB memory in use. Process 12 has 17179869183.99 GiB in use. "), USUAL),
        (text(pools="with 64.00 MiB allocated in private pools (e.g., CUDA Graphs), "), USUAL),
        (text(reserve="This allocation exceeds the expandable-segment reserve of 1.00 GiB for this stream. "), USUAL),
        (f"Caught OutOfMemoryError in replica 1.\n{text(requested='1.00 GiB')}\n\nDuring handling\n{text()}", USUAL),
        (text(**dict.fromkeys(EACH, "512 bytes")), Refusal(1, 512, gib(11.91), 512, 512, 1024)),
        (text(**dict.fromkeys(EACH, "16.00 KiB")), Refusal(1, 2**14, gib(11.91), 2**14, 2**14, 2**15)),
        (MEASURED, REAL),
        ("", None),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", None),
        (ASYNC, None),
        (text(requested="2.00 XiB"), None),
    ],
)
def test_every_text_and_unit_of_pytorch_is_read_and_others_are_not_guessed_at(found, expected):
    assert read(found) == expected


def test_what_is_too_much_in_figures_and_words():
    assert (USUAL.limited, USUAL.over) == (False, 1348 * MiB)
    assert str(USUAL).startswith("GPU 1 ran out of its 11.9 GiB: with 9.20 GiB allocated and 10.1 GiB reserved ")
    found = read(text(requested="700.00 MiB"))  # which the rounded figures would let pass
    assert found.over == 0 and str(found).endswith("it was asked for 700 MiB more")
    assert not read(text(allowed="11.91 GiB allowed; ")).limited  # did not stand in the way
    limited = read(text(allowed="10.00 GiB allowed; "))  # less than what is reserved already
    assert limited.over == limited.requested
    assert REAL.limited and str(REAL) == (
        "GPU 0 ran out of the 8.00 GiB that this process may reserve: with 7.62 GiB allocated and 7.63 GiB reserved "
        "it was asked for 528 MiB more, which is 153 MiB too much"
    )


@pytest.fixture
def three():
    with virtual_gpus(3, memory="2 GiB", shapes_only=True):
        yield


@pytest.mark.parametrize(("size", "rounded"), [(801 * MiB - 5, 802 * MiB), (3 * MiB, 20 * MiB)])
def test_the_gpu_that_refused_says_what_it_was_asked_for(three, size, rounded):
    held = [take(256 * MiB, 1)]
    with pytest.raises(torch.OutOfMemoryError), measure_memory() as readings:
        while True:
            held.append(take(size, 1))
    free, reserved = torch.cuda.mem_get_info(1)[0], torch.cuda.memory_reserved(1)
    assert [reading.refused is None for reading in readings] == [True, False, True]
    told = readings[1].refused
    assert (told.gpu, told.requested, told.capacity) == (1, rounded, 2 * GiB)
    assert told.over == rounded - told.free
    expected = [free, readings[1].peak_allocated, reserved]
    assert [told.free, told.allocated, told.reserved] == pytest.approx(expected, abs=0.01 * GiB)
    assert f"{told}." == readings.note and readings.note in " ".join(str(readings).split())


def test_a_run_that_does_not_fit_can_be_caught(three):
    alive = []

    def step():
        tensor = take(GiB)
        alive.append(weakref.ref(tensor))
        try:
            take(2 * GiB)
        except torch.OutOfMemoryError as error:
            kept = error  # which refers to this frame
            raise torch.OutOfMemoryError(str(error)) from kept

    first = peak_memory(step, catch=True)[0]
    assert first.refused.requested == 2 * GiB and first.allocated == GiB  # as it was when it failed
    assert alive[0]() is None and torch.cuda.memory_allocated(0) == 0  # and nothing of it is kept
    assert read_memory()[0].refused is None
    with pytest.raises(RuntimeError, match="shapes do not match"):
        peak_memory(raises(RuntimeError, "shapes do not match"), catch=True)
    for step in (lambda: take(MiB), lambda: pytest.raises(torch.OutOfMemoryError, take, 3 * GiB)):
        readings = peak_memory(step, catch=True)
        assert readings[0].refused is None and readings.note == ""
    readings = peak_memory(raises(torch.OutOfMemoryError, ASYNC), catch=True)
    assert readings[0].refused is None
    assert readings.note == f"Memory ran out; PyTorch does not say where: {ASYNC.splitlines()[0]}"


class GrowsOnGPU1(nn.Module):
    def forward(self, x):
        return x.sum() + (torch.empty(3 * GiB, dtype=torch.uint8, device=x.device).sum() if x.device.index else 0)


def test_a_replica_that_runs_out_a_limit_of_the_process_and_hidden_cards(three, monkeypatch):
    net = nn.DataParallel(GrowsOnGPU1().to("cuda:0"), [0, 1])
    readings = peak_memory(lambda: net(torch.zeros(8, 8, device="cuda:0")), catch=True)
    assert readings[0].refused is None and readings[1].refused.requested == 3 * GiB
    readings = peak_memory(lambda: take(3 * GiB, 1), 0, catch=True)  # GPU 1 is named in the note
    assert readings[0].refused is None and readings.note.startswith("GPU 1 ran out of its 2.00 GiB")
    torch.cuda.set_per_process_memory_fraction(0.5, 0)
    told = peak_memory(lambda: take(gib(1.5)), catch=True)[0].refused
    assert told.limited and told.allowed == GiB and told.over == 512 * MiB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with virtual_gpus(4, memory="1 GiB", shapes_only=True):
        readings = peak_memory(lambda: take(2 * GiB, 1), catch=True)
    assert readings[1].refused.gpu == 1  # PyTorch's number
    assert readings.note.startswith("GPU 1 ran out") and "PyTorch sees 2" in readings.note


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
    with virtual_gpus(1):
        assert largest_batch(bounded(largest, tried), start, limit=1000, steps=1) == min(largest, 1000)
    assert len(tried) == len(set(tried)) <= 20 and all(0 < batch <= 1000 for batch in tried)


def test_every_try_is_two_steps_and_errors_pass_through(four):
    tried = []
    assert type(largest_batch(bounded(5, tried), np.uint8(1))) is int
    assert tried == [1, 1, 2, 2, 4, 4, 8, 6, 5, 5]
    with pytest.raises(ZeroDivisionError):
        largest_batch(lambda batch: 1 / 0)
    assert largest_batch(bounded(5, tried), smallest=4) == 5 and largest_batch(bounded(5, tried), smallest=6) == 0
    for wrong in ({"start": 0}, {"limit": 8.5}, {"steps": 0}, {"smallest": 0}):
        with pytest.raises(ValueError, match="must be an integer"):
            largest_batch(lambda batch: None, **wrong)


def test_the_largest_batch_of_a_training_fills_a_gpu_and_leaves_it_empty_and_the_random_numbers():
    with virtual_gpus(4, memory="1 GiB", shapes_only=True):
        net = nn.DataParallel(nn.Linear(1024, 4096, bias=False).to("cuda:0"))

        def step(batch):
            inputs = torch.zeros(batch, 1024, device="cuda:0")
            inputs.myself = inputs  # a cycle, as training loops leave them
            net(inputs).sum().backward()
            net.zero_grad()
            return net.module(inputs), torch.rand(1)  # which is not kept while the next step runs

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
