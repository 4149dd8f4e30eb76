"""Readings, peaks, the search for the largest batch: on a stand-in for torch.cuda, then on virtual GPUs."""

import sys
import weakref
from types import SimpleNamespace

import GPUtil
import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.measure import GiB, MiB, Reading, largest_batch, memory, read_memory

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


class Machine:
    """Answers for what helpers.measure.memory calls of torch.cuda and GPUtil, with real GPUtil.GPU objects."""

    def __init__(self, monkeypatch, cards: int = 4, visible: tuple[int, ...] = (0, 1, 2, 3)):
        self.visible = visible
        self.cards = [self.card(number) for number in range(cards)]
        self.held, self.peak = [3 * MiB + i for i in visible], [5 * MiB for _ in visible]
        monkeypatch.setattr(GPUtil, "getGPUs", lambda: self.cards)
        for name in (
            "device_count",
            "current_device",
            "get_device_properties",
            "reset_peak_memory_stats",
            "init",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: self.held[index])
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda index: self.peak[index])
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 20 * MiB)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda index: 22 * MiB)

    @staticmethod
    def card(number: int):
        used = 500.0 + number
        return GPUtil.GPU(
            number, f"GPU-abcd-{number}", 0.25, 16384.0, used, 16384.0 - used, "570", "Card", "", "", "", 40.0
        )

    def device_count(self):
        return len(self.visible)

    def current_device(self):
        return 1

    def init(self):
        pass

    def get_device_properties(self, index):
        return SimpleNamespace(name="Card <X>", total_memory=16 * GiB, uuid=f"ABCD-{self.visible[index]}")

    def reset_peak_memory_stats(self, index):
        self.peak[index] = self.held[index]

    def use(self, index: int, size: int):
        self.peak[index] = max(self.peak[index], self.held[index] + size)


def test_both_views_are_read_in_bytes(monkeypatch):
    Machine(monkeypatch)
    readings = read_memory()
    assert readings[2] == Reading(
        index=2, name="Card <X>", capacity=16 * GiB, allocated=3 * MiB + 2, peak_allocated=5 * MiB,
        reserved=20 * MiB, peak_reserved=22 * MiB, driver_used=502 * MiB, driver_total=16 * GiB,
    )  # fmt: skip
    assert len(readings) == 4 and readings.note == ""


def test_some_devices_in_any_spelling(monkeypatch):
    Machine(monkeypatch)
    assert [reading.index for reading in read_memory([torch.device("cuda:3"), "cuda:0", 2, "cuda"])] == [
        3,
        0,
        2,
        1,
    ]
    assert [reading.index for reading in read_memory("cuda:2")] == [2]


def test_devices_that_are_no_gpus(monkeypatch):
    Machine(monkeypatch)
    with pytest.raises(ValueError, match="cpu is not a GPU"):
        read_memory("cpu")
    with pytest.raises(ValueError, match="no cuda:4. PyTorch sees cuda:0 to cuda:3"):
        read_memory([4])


def test_a_device_that_is_named_twice_is_read_once(monkeypatch):
    Machine(monkeypatch)
    assert [reading.index for reading in read_memory([2, "cuda:2", 0])] == [2, 0]


@pytest.mark.parametrize("read", [read_memory, memory.reset_peaks, lambda: memory.peak_memory(lambda: None)])
def test_without_any_gpu_a_sentence_says_what_to_do(monkeypatch, read):
    Machine(monkeypatch, visible=())
    with pytest.raises(RuntimeError, match="Call use_gpus first"):
        read()


def test_hidden_cards_are_matched_by_uuid(monkeypatch):
    Machine(monkeypatch, visible=(3, 1))
    readings = read_memory()
    assert [reading.driver_used for reading in readings] == [503 * MiB, 501 * MiB]
    assert readings.note == (
        "The driver lists 4 GPU(s), PyTorch sees 2: cuda:0 is the driver's GPU 3, "
        "cuda:1 is the driver's GPU 1 (matched by UUID)."
    )
    assert " ".join(str(readings).split()).endswith(readings.note)  # wrapped to the table's width


def test_a_gpu_that_the_driver_does_not_list(monkeypatch):
    machine = Machine(monkeypatch)
    del machine.cards[1]
    readings = read_memory()
    assert [reading.driver_used is None for reading in readings] == [False, True, False, False]
    assert "cuda:1 is not in the driver's list" in readings.note
    assert "  -  " in str(readings)


def test_without_nvidia_smi_the_drivers_column_is_empty(monkeypatch):
    machine = Machine(monkeypatch)
    machine.cards = []
    readings = read_memory()
    assert all(reading.driver_used is None for reading in readings)
    assert "GPUtil found no nvidia-smi" in str(readings)
    assert readings[0].allocated == 3 * MiB


def test_a_broken_nvidia_smi_or_gputil_is_told(monkeypatch):
    Machine(monkeypatch)

    def broken():
        raise ValueError("invalid literal for int() with base 10: 'NVIDIA-SMI has failed'")

    monkeypatch.setattr(GPUtil, "getGPUs", broken)
    assert "GPUtil failed (invalid literal" in read_memory().note
    monkeypatch.setitem(sys.modules, "GPUtil", None)  # what an import without distutils looks like
    assert "GPUtil failed (import of GPUtil" in read_memory().note


def test_figures_that_the_driver_does_not_know(monkeypatch):
    machine = Machine(monkeypatch)
    machine.cards[0].memoryUsed = float("nan")
    reading = read_memory()[0]
    assert reading.driver_used is None and reading.driver_total == 16 * GiB


def test_peaks_are_those_of_the_run(monkeypatch):
    machine = Machine(monkeypatch)
    readings = memory.peak_memory(lambda: machine.use(1, 90 * MiB))
    assert [reading.peak_allocated for reading in readings] == [
        3 * MiB,
        93 * MiB + 1,
        3 * MiB + 2,
        3 * MiB + 3,
    ]


def test_a_block_that_fails_is_still_read(monkeypatch):
    machine = Machine(monkeypatch, visible=(3, 1))
    with pytest.raises(KeyError), memory.measure_memory() as readings:
        assert str(readings) == "No readings yet."
        machine.use(0, MiB)
        raise KeyError
    assert readings[0].peak_allocated == 4 * MiB + 3 and "matched by UUID" in readings.note


def bounded(largest: int, tried: list[int]):
    def step(batch):
        tried.append(batch)
        if batch > largest:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    return step


@pytest.mark.parametrize(
    ("largest", "start", "multiple_of"),
    [(0, 1, 1), (1, 64, 1), (3, 1, 4), (4, 7, 4), (63, 64, 1), (100, 7, 1), (767, 64, 4), (1000, 64, 4)],
)
def test_the_largest_batch_is_found_and_nothing_is_tried_twice(largest, start, multiple_of):
    tried = []
    found = largest_batch(bounded(largest, tried), start, limit=1000, multiple_of=multiple_of, steps=1)
    assert found == largest // multiple_of * multiple_of
    assert len(tried) == len(set(tried)) <= 20
    assert all(batch % multiple_of == 0 and 0 < batch <= 1000 for batch in tried)


def test_the_limit_is_respected_also_when_it_is_no_multiple():
    tried = []
    assert largest_batch(bounded(10**9, tried), limit=30, multiple_of=4) == 28 == max(tried)


def test_every_try_is_two_steps():
    tried = []
    assert largest_batch(bounded(5, tried)) == 5
    assert tried == [1, 1, 2, 2, 4, 4, 8, 6, 5, 5]


def test_other_errors_pass_through_the_search():
    def step(batch):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        largest_batch(step)


@pytest.mark.parametrize("wrong", [{"start": 0}, {"limit": 0}, {"limit": 3, "multiple_of": 4}, {"steps": 0}])
def test_a_search_with_nothing_to_try_is_refused(wrong):
    with pytest.raises(ValueError, match="must be at least 1"):
        largest_batch(lambda batch: None, **wrong)


def test_a_failed_try_leaves_nothing_behind(monkeypatch):
    alive, emptied = [], []

    def step(batch):
        tensor = torch.zeros(8)
        tensor.myself = tensor  # a cycle, as training loops leave them
        alive.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append([ref() for ref in alive]))
    assert largest_batch(step, start=4) == 0
    assert emptied and all(left is None for tries in emptied for left in tries)


def test_virtual_gpus_answer_like_real_ones():
    with virtual_gpus(4, memory="16 GiB"):
        before = read_memory()
        kept = torch.ones(1000, 1000, device="cuda:1")  # 4,000,000 bytes are 7,813 blocks of 512, in a 20 MiB segment
        after = read_memory()
        assert kept.device == torch.device("cuda:1")
    assert [reading.allocated for reading in after] == [0, 7813 * 512, 0, 0]
    assert [reading.reserved for reading in after] == [0, 20 * MiB, 0, 0]
    assert {reading.capacity for reading in before} == {16 * GiB} and before.note == after.note == ""
    assert before[1].driver_used == 0 and after[1].driver_used > after[1].reserved  # the rest is CUDA's context


def test_hidden_virtual_gpus_are_matched(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with virtual_gpus(4, memory="16 GiB"):
        kept = torch.ones(1000, device="cuda:0")
        readings = read_memory()
        assert kept.is_cuda
    assert "PyTorch sees 2: cuda:0 is the driver's GPU 3, cuda:1 is the driver's GPU 1" in readings.note
    assert readings[0].driver_used > 0 == readings[1].driver_used


def test_the_peaks_of_a_step_come_back_the_same_every_time():
    with virtual_gpus(4, memory="16 GiB"):
        net = nn.DataParallel(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to("cuda:0"))

        def step():
            net(torch.randn(64, 256, device="cuda:0")).square().mean().backward()
            net.zero_grad()

        step()
        first, second = memory.peak_memory(step), memory.peak_memory(step)
        assert first == second
        assert all(reading.peak_allocated > reading.allocated for reading in first)
        assert first[0].peak_allocated > first[1].peak_allocated >= first[3].peak_allocated
        assert first[1].allocated == 0  # replicas and their outputs are gone


def test_the_largest_batch_fills_a_virtual_gpu_and_leaves_it_empty():
    def step(batch):
        torch.empty(batch, MiB, dtype=torch.uint8, device="cuda:1")

    with virtual_gpus(2, memory="1 GiB"):
        step(1)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(1)[0]  # what the context leaves
        largest = largest_batch(step)
        step(largest)
        with pytest.raises(torch.OutOfMemoryError):
            step(largest + 1)
        assert largest == free // (2 * MiB) * 2  # large segments are multiples of 2 MiB
        torch.cuda.empty_cache()
        assert read_memory()[1].reserved == 0


def test_the_largest_batch_under_data_parallel_with_shapes_only():
    with virtual_gpus(4, memory="1 GiB", shapes_only=True):
        net = nn.DataParallel(nn.Linear(1024, 4096, bias=False).to("cuda:0"))

        def step(batch):
            net(torch.zeros(batch, 1024, device="cuda:0")).sum().backward()
            net.zero_grad()

        largest = largest_batch(step, start=1000, multiple_of=4)
        assert largest % 4 == 0
        step(largest)
        torch.cuda.empty_cache()  # as between two tries: what fits depends on how the cache is cut up
        with pytest.raises(torch.OutOfMemoryError):
            for _ in range(2):
                step(largest + 4)


def test_a_search_leaves_the_random_numbers_as_they_were():
    with virtual_gpus(1, memory="256 MiB") as (gpu,):
        net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).to(gpu)
        adam = torch.optim.Adam(net.parameters())

        def step(batch):
            net(torch.randn(batch, 64).to(gpu)).square().sum().backward()
            adam.step()

        step(4)
        numbers = torch.get_rng_state()
        assert largest_batch(step, start=2, limit=4, multiple_of=2) == 4
        assert torch.equal(torch.get_rng_state(), numbers)


def test_what_only_the_second_step_needs_counts():
    """One step of 224 MiB fits beside the context of 32. The second finds 30 more there, in the first one's block."""
    state = {}

    def step(batch):
        if batch not in state:  # a new try
            state.clear()
        torch.empty(batch * MiB, dtype=torch.uint8, device="cuda:0")
        state[batch] = torch.empty(30 * MiB, dtype=torch.uint8, device="cuda:0")

    with virtual_gpus(1, memory="256 MiB"):
        assert largest_batch(step, multiple_of=32) == 160


def test_the_answer_does_not_depend_on_where_the_search_starts():
    """The state of the optimizer takes a place that depends on the batch of the very first step."""
    found = []
    for start in (1, 40, 96, 120, 160):
        with virtual_gpus(1, memory="256 MiB"):
            state = []

            def step(batch, state=state):
                activations = torch.empty(batch * MiB, dtype=torch.uint8, device="cuda:0")
                del activations
                if not state:  # in the memory of the activations, which then cannot be given back
                    state.append(torch.empty(21 * MiB, dtype=torch.uint8, device="cuda:0"))

            found.append(largest_batch(step, start=start, multiple_of=8))
    assert len(set(found)) == 1 and found[0] % 8 == 0, found


def test_after_the_virtual_gpus_there_is_again_no_gpu():
    if torch.cuda.device_count():
        pytest.skip("this machine has real GPUs")
    with virtual_gpus(1):
        read_memory()
    with pytest.raises(RuntimeError, match="Call use_gpus first"):
        read_memory()
