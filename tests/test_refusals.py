"""Out of memory: PyTorch's text read, on a real H200's and on virtual GPUs; what readings then say."""

import weakref

import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.measure import GiB, MiB, Refusal, measure_memory, read_memory
from helpers.measure.readings import read_refusal

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


def refusal(**figures) -> Refusal | None:
    return read_refusal(torch.OutOfMemoryError(text(**figures)))


def gib(number: float) -> int:
    return round(number * GiB)


USUAL = Refusal(1, 2 * GiB, gib(11.91), 700 * MiB, gib(9.2), gib(9.2) + 900 * MiB)


def test_every_unit_of_pytorch_is_read():
    sizes = {"512 bytes": 512, "16.00 KiB": 16 * 1024, "20.00 MiB": 20 * MiB, "3.64 GiB": gib(3.64)}
    for said, size in sizes.items():
        found = refusal(requested=said, free=said, allocated=said, unallocated=said)
        assert (found.requested, found.free, found.allocated, found.reserved) == (size, size, size, 2 * size)


@pytest.mark.parametrize(
    "found",
    [
        text(others="Process 4711 has 3.25 GiB memory in use. Process 12 has 17179869183.99 GiB memory in use. "),
        text(pools="with 64.00 MiB allocated in private pools (e.g., CUDA Graphs), "),
        text(reserve="This allocation exceeds the expandable-segment reserve of 1.00 GiB for this stream. "),
        f"Caught OutOfMemoryError in replica 1.\n{text(requested='1.00 GiB')}\n\nDuring handling\n{text()}",  # the last
    ],
)
def test_pytorchs_variants_give_the_same_figures(found):
    assert read_refusal(torch.OutOfMemoryError(found)) == USUAL


def test_what_a_real_gpu_said():
    found = read_refusal(torch.OutOfMemoryError(MEASURED))
    assert found == Refusal(
        gpu=0, requested=528 * MiB, capacity=gib(139.80), free=gib(131.41), allocated=gib(7.62),
        reserved=gib(7.62) + round(13.81 * MiB), allowed=8 * GiB,
    )  # fmt: skip
    assert found.limited and found.over == 528 * MiB - (8 * GiB - found.reserved)
    assert str(found) == (
        "GPU 0 ran out of the 8.00 GiB that this process may reserve: with 7.62 GiB allocated and 7.63 GiB reserved "
        "it was asked for 528 MiB more, which is 153 MiB too much"
    )


def test_what_is_too_much_in_figures_and_words():
    assert (USUAL.limited, USUAL.over) == (False, 1348 * MiB)
    assert str(USUAL).startswith("GPU 1 ran out of its 11.9 GiB: with 9.20 GiB allocated and 10.1 GiB reserved ")
    found = refusal(requested="700.00 MiB")  # which the rounded figures would let pass
    assert found.over == 0 and str(found).endswith("it was asked for 700 MiB more")
    assert not refusal(allowed="11.91 GiB allowed; ").limited  # did not stand in the way
    limited = refusal(allowed="10.00 GiB allowed; ")  # less than what is reserved already
    assert limited.over == limited.requested


def test_other_texts_are_not_guessed_at():
    no_figures = "CUDA out of memory. Tried to allocate more than 1EB memory."
    for other in ("", no_figures, ASYNC, text(requested="2.00 XiB")):
        assert read_refusal(torch.OutOfMemoryError(other)) is None


# ---- on virtual GPUs


def fill(device: str, count: int):
    return torch.empty(count, dtype=torch.uint8, device=device)


def refused(step, devices=None):
    """The readings after a step that ran out of memory."""
    with measure_memory(devices, catch=True) as readings:
        step()
    return readings


@pytest.mark.parametrize(("size", "rounded"), [(801 * MiB - 5, 802 * MiB), (3 * MiB, 20 * MiB)])
def test_the_gpu_that_refused_says_what_it_was_asked_for(size, rounded):
    with virtual_gpus(3, memory="2 GiB", shapes_only=True):
        held = [fill("cuda:1", 256 * MiB)]
        with pytest.raises(torch.OutOfMemoryError), measure_memory() as readings:
            while True:
                held.append(fill("cuda:1", size))
        free, reserved = torch.cuda.mem_get_info(1)[0], torch.cuda.memory_reserved(1)
    assert [reading.refused is None for reading in readings] == [True, False, True]
    told = readings[1].refused
    assert (told.gpu, told.requested, told.capacity) == (1, rounded, 2 * GiB)
    assert told.over == rounded - told.free
    expected = [free, readings[1].peak_allocated, reserved]
    assert [told.free, told.allocated, told.reserved] == pytest.approx(expected, abs=0.01 * GiB)
    assert f"{told}." == readings.note and readings.note in " ".join(str(readings).split())


def test_a_run_that_does_not_fit_can_be_caught():
    with virtual_gpus(2, memory="2 GiB", shapes_only=True):
        alive = []

        def step():
            tensor = fill("cuda:0", GiB)
            alive.append(weakref.ref(tensor))
            fill("cuda:0", 2 * GiB)

        readings = refused(step)
        assert readings[0].refused.requested == 2 * GiB and readings[0].allocated == GiB  # as it was when it failed
        assert alive[0]() is None and torch.cuda.memory_allocated(0) == 0  # and nothing of it is kept
        assert read_memory()[0].refused is None and refused(lambda: fill("cuda:0", MiB))[0].refused is None


def test_only_out_of_memory_is_caught():
    def other():
        raise RuntimeError("shapes do not match")

    def handled():
        with pytest.raises(torch.OutOfMemoryError):
            fill("cuda:0", 2 * GiB)

    def unreadable():
        raise torch.OutOfMemoryError(ASYNC)

    with virtual_gpus(1, memory="1 GiB"):
        with pytest.raises(RuntimeError, match="shapes do not match"):
            refused(other)
        readings = refused(handled)
        assert readings[0].refused is None and readings.note == ""
        readings = refused(unreadable)
    assert readings[0].refused is None
    assert readings.note == f"Memory ran out; PyTorch does not say where: {ASYNC.splitlines()[0]}"


class GrowsOnGPU1(nn.Module):
    def forward(self, x):
        return x.sum() + (torch.empty(3 * GiB, dtype=torch.uint8, device=x.device).sum() if x.device.index else 0)


def test_a_replica_that_runs_out_and_a_limit_of_the_process():
    with virtual_gpus(2, memory="2 GiB", shapes_only=True):
        net = nn.DataParallel(GrowsOnGPU1().to("cuda:0"))
        readings = refused(lambda: net(torch.zeros(8, 8, device="cuda:0")))
        assert readings[0].refused is None and readings[1].refused.requested == 3 * GiB
        readings = refused(lambda: fill("cuda:1", 3 * GiB), devices=0)  # GPU 1 is named in the note
        assert readings[0].refused is None and readings.note.startswith("GPU 1 ran out of its 2.00 GiB")
        torch.cuda.set_per_process_memory_fraction(0.5, 0)
        told = refused(lambda: fill("cuda:0", gib(1.5)))[0].refused
    assert told.limited and told.allowed == GiB and told.over == 512 * MiB
    assert "the 1.00 GiB that this process may reserve" in str(told)


def test_hidden_cards_keep_pytorchs_numbers(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with virtual_gpus(4, memory="1 GiB", shapes_only=True):
        readings = refused(lambda: fill("cuda:1", 2 * GiB))
    assert readings[1].refused.gpu == 1
    assert readings.note.startswith("GPU 1 ran out") and "PyTorch sees 2" in readings.note
