"""MemoryMonitor, and what filled a GPU that ran out of memory: kinds that add up to the allocator's figures."""

import random
from concurrent.futures import ThreadPoolExecutor

import matplotlib
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint
from virtual_gpus import virtual_gpus

from helpers.measure import MemoryMonitor, MiB, Refusal, explain_oom
from helpers.measure import monitor as monitor_module
from helpers.measure.oom import Explanation, origin
from helpers.show import describe_segments, draw_segments
from tests.pictures import alt_text

matplotlib.use("Agg")
pytestmark = pytest.mark.usefixtures("workspaces_given_back")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def train(model, optimizer, batch: int, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(torch.randn(batch, 512).to("cuda:0"))
        F.cross_entropy(outputs, torch.zeros(batch, dtype=torch.long).to("cuda:0")).backward()
        del outputs
        optimizer.step()


def recorded(gpus: int = 1, steps: int = 2) -> MemoryMonitor:
    model = net().to("cuda:0")
    parallel = nn.DataParallel(model, list(range(gpus))) if gpus > 1 else model
    optimizer = torch.optim.Adam(model.parameters())
    for gpu in range(gpus):
        torch.cuda.reset_peak_memory_stats(gpu)
    with MemoryMonitor() as monitor:
        train(parallel, optimizer, 8, steps)
    return monitor


PARAMETERS = sum(-(-parameter.nbytes // 512) * 512 for parameter in net().parameters())


def check_peaks(monitor, gpus):
    for gpu in range(gpus):
        most, held = max(monitor.allocated[gpu]), monitor.at_peak(gpu)
        assert most == sum(held.values()) == torch.cuda.max_memory_allocated(gpu)
        # The copies of DataParallel are parameters, too.
        assert held["parameters"] == pytest.approx(PARAMETERS, rel=0.2)
        assert ("optimizer state" in held) == (gpu == 0)


@pytest.mark.parametrize("gpus", [1, 3])
def test_gradients_and_state_are_counted_when_they_are_there(gpus):
    with virtual_gpus(gpus):
        first, monitor = recorded(gpus, steps=1).at_peak(), recorded(gpus)
        check_peaks(monitor, gpus)
        assert str(monitor).startswith("GPU 0 peaked at ") and str(monitor).count("\n") == gpus - 1
    held = monitor.at_peak()
    assert "optimizer state" not in first and held["optimizer state"] == pytest.approx(2 * PARAMETERS, rel=0.2)
    if gpus == 1:  # the peak is in the backward pass
        assert 0 < held["gradients"] <= 1.2 * PARAMETERS


def of_activations(save=False):
    """A batch that is mostly activations, also if a checkpoint computes them again."""
    model, inputs = net().to("cuda"), torch.ones(50_000, 512, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    with MemoryMonitor() as monitor:
        outputs = checkpoint(model, inputs, use_reentrant=False) if save else model(inputs)
        F.cross_entropy(outputs, torch.zeros(50_000, dtype=torch.long, device="cuda")).backward()
    held = monitor.at_peak()
    assert sum(held.values()) == max(monitor.allocated[0]) == torch.cuda.max_memory_allocated()
    assert held["parameters"] == pytest.approx(PARAMETERS, rel=0.2) and held["other"] >= inputs.nbytes
    return held["activations"] / inputs.nbytes


@pytest.mark.parametrize("save", [False, True])
def test_a_large_batch_is_held_by_activations_also_those_that_a_checkpoint_computes_again(save):
    with virtual_gpus(1, shapes_only=True):
        assert 3 <= of_activations(save) < 5


def test_gradients_that_zero_grad_let_go_are_not_counted():
    """In the forward pass, the blocks of the last step's gradients hold activations."""
    with virtual_gpus(1, shapes_only=True):
        model = net().to("cuda")
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with MemoryMonitor() as monitor:
            train(model, sgd, batch=8)
            sgd.zero_grad()
            outputs = model(torch.empty(50_000, 512, device="cuda"))
        assert "gradients" not in monitor.at_peak() and outputs.is_cuda


def test_nothing_is_left_behind():
    with virtual_gpus(1):
        with pytest.raises(ZeroDivisionError), MemoryMonitor() as monitor:
            kept = torch.ones(7, device="cuda")
            assert torch._C._cuda_isHistoryEnabled()
            raise ZeroDivisionError
        assert max(monitor.allocated[0]) == 512 > kept.nbytes and not torch._C._cuda_isHistoryEnabled()
        assert not _global_optimizer_pre_hooks


def test_who_was_recording_goes_on():
    with virtual_gpus(1):
        torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=1000)
        first = torch.ones(7, device="cuda")
        with MemoryMonitor() as monitor:
            second = torch.ones(1000, device="cuda")
        third = torch.ones(7, device="cuda")
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(None)
        made = [entry for entry in trace if entry["action"] == "alloc"]
        assert len(made) == 3 and all(entry["frames"] for entry in made) and len(monitor.allocated[0]) == 2
        assert all(tensor is not None for tensor in (first, second, third))


def test_errors_say_what_to_do(monkeypatch):
    with pytest.raises(RuntimeError, match="Call use_gpus first"), MemoryMonitor():
        pass
    with virtual_gpus(1):
        with pytest.raises(ValueError, match="no cuda:3"), MemoryMonitor(gpus=3):
            pass
        monkeypatch.setattr(monitor_module, "MOST_EVENTS", 20)
        with pytest.raises(RuntimeError, match="does not contain the whole run"):
            recorded()


# ---- random programs ------------------------------------------------------------------------------------------------


def bytes_of(size: int, gpu: int = 0) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")


class Saved(nn.Sequential):
    """Recomputed in the backward pass."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Program:
    """What a notebook may do in a monitor's block, in an order that `seed` picks."""

    def __init__(self, seed: int, gpus: int):
        self.numbers, self.gpus, self.kept = random.Random(seed), gpus, []
        self.begin()
        steps = [self.train, self.train, self.begin, self.forward, self.take, self.run_out, self.in_a_thread]
        steps += [torch.cuda.empty_cache, lambda: self.kept and self.kept.pop(0)]
        for step in self.numbers.choices(steps, k=self.numbers.randint(6, 14)):
            step()

    def begin(self) -> None:
        """A model and an optimizer, made in the run."""
        self.width = self.numbers.choice([64, 128, 300, 512])
        block = self.numbers.choice([Saved, nn.Sequential])
        block = block(nn.Linear(self.width, 2 * self.width), nn.ReLU(), nn.Linear(2 * self.width, self.width))
        net = nn.Sequential(nn.Linear(self.width, self.width), block, nn.BatchNorm1d(self.width)).to("cuda:0")
        self.optimizer = self.numbers.choice([torch.optim.SGD, torch.optim.Adam])(net.parameters(), lr=0.1)
        self.model = self.numbers.choice([net, nn.DataParallel(net, list(range(self.gpus)))])

    def forward(self) -> None:
        batch = self.numbers.choice([8, 9, 64, 1000])
        self.kept.append(self.model(torch.randn(batch, self.width, device="cuda:0")))

    def train(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.numbers.random() < 0.6)
        self.forward()
        self.kept.pop().square().mean().backward()
        self.optimizer.step()

    def in_a_thread(self) -> None:
        with ThreadPoolExecutor() as pool:
            pool.submit(self.train).result()

    def take(self) -> None:
        self.kept.append(bytes_of(self.numbers.randint(1, 9 * MiB), self.numbers.randrange(self.gpus)))

    def run_out(self) -> None:
        with pytest.raises(torch.OutOfMemoryError):
            bytes_of(2**40)


@pytest.mark.parametrize(("seed", "options"), [*enumerate(["", "expandable_segments:True"] * 2)])
def test_the_peak_of_any_program_is_the_allocators_and_its_kinds_add_up(seed, options, monkeypatch):
    """Beside blocks that were there before: of the last one, a segment has less than 1 MiB that was free."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", options)
    numbers, gpus = random.Random(f"before {seed}"), (1, 2, 3, 1)[seed]
    with virtual_gpus(gpus, shapes_only=True, memory="8 GiB"):
        held = [bytes_of(numbers.randint(1, 5 * MiB)) for _ in range(4)] + [bytes_of(20 * MiB)]
        del held[1::2], held[-1]  # leaves holes
        with MemoryMonitor() as monitor:
            held.append(bytes_of(20 * MiB - 4096))
            for gpu in range(gpus):
                torch.cuda.reset_peak_memory_stats(gpu)
            program = Program(seed, gpus)
        assert held and program.model
        for gpu in range(gpus):
            found = monitor.at_peak(gpu)
            assert sum(found.values()) == max(monitor.allocated[gpu]) == torch.cuda.max_memory_allocated(gpu)
            assert monitor.allocated[gpu][-1] == torch.cuda.memory_allocated(gpu)


# ---- out of memory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu():
    with virtual_gpus(1, memory="256 MiB") as devices:
        yield devices[0]


def mebibytes(count, gpu):
    return torch.zeros(count, MiB // 4, device=gpu)


def test_kinds_add_up_to_the_capacity(gpu):
    net = nn.Sequential(nn.Linear(512, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 512)).to(gpu)
    adam = torch.optim.Adam(net.parameters())
    net(torch.zeros(8, 512, device=gpu)).sum().backward()
    adam.step()
    with explain_oom() as why:
        x = torch.zeros(2048, 512, device=gpu)
        graph = net(x).sum()
        mebibytes(250, gpu)
    kinds = why.by_kind()
    size = sum(p.numel() * 4 for p in net.parameters())
    for kind, expected in {"parameters": size, "gradients": size, "optimizer state": 2 * size}.items():
        assert expected <= kinds[kind] <= expected + 2 * MiB
    assert kinds["other"] >= x.nbytes
    assert kinds["activations"] >= 2048 * (1024 + 1024) * 4  # BatchNorm's and ReLU's outputs
    assert sum(kinds.values()) == 256 * MiB and graph.is_cuda


def test_out_of_memory_is_explained_and_cleaned_up(gpu):
    def hungry():
        held = [mebibytes(20, gpu) for _ in range(5)]
        return held, mebibytes(100, gpu)

    kept = mebibytes(50, gpu)
    with explain_oom() as why:
        hungry()
    assert why and why.refused.requested == 100 * MiB
    assert why.by_kind()["other"] == 150 * MiB
    assert "(50, 262144) float32, other: made before the memory history began" in str(why) and kept.is_cuda
    row = "100 MiB  5 x (20, 262144) float32, other: `return torch.zeros(count, MiB // 4, device=gpu)` in mebibytes"
    assert f"{row} (tests/test_monitor.py:" in str(why)
    assert torch.cuda.memory_allocated(gpu) == kept.nbytes and not torch._C._cuda_isHistoryEnabled()
    cell = {"filename": "ipykernel_1/2.py", "name": "<module>", "line": 3}
    assert origin([{"filename": torch.__file__, "name": "zeros", "line": 1}, cell]) == "`<module>`"


def test_what_is_no_such_error(gpu):
    with explain_oom() as why:
        mebibytes(3, gpu)
    assert not why and str(why) == "Memory did not run out."
    with explain_oom() as why:
        raise torch.OutOfMemoryError("No figures.")
    assert not why and str(why) == "Memory ran out; PyTorch does not say where: No figures."
    with pytest.raises(ZeroDivisionError), explain_oom():
        1 / 0  # noqa: B018


def test_the_gpu_that_ran_out_is_the_one_explained():
    with virtual_gpus(2, memory="256 MiB"):
        kept = mebibytes(200, "cuda:0")
        with explain_oom() as why:
            mebibytes(250, "cuda:1")
        assert why.refused.gpu == 1 and why.by_kind().keys().isdisjoint({"other"}) and kept.is_cuda


@pytest.mark.parametrize(("held", "gone"), [(590, 90), (501, 0)])
def test_what_the_failed_operation_let_go_is_not_called_cached(held, gone):
    """The blocks are looked at after the refusal. Its text is rounded: a small difference says nothing."""
    refused = Refusal(0, 300 * MiB, 1000 * MiB, 200 * MiB, held * MiB, 700 * MiB)
    shown = Explanation(refused, 1000 * MiB, 700 * MiB, 100 * MiB, [(500 * MiB, "activations", "here")])
    kinds = shown.by_kind()
    assert kinds.get("inside the failed operation", 0) == gone * MiB
    assert kinds["cached by PyTorch"] == (200 - gone) * MiB and sum(kinds.values()) == shown.capacity


@pytest.mark.parametrize(
    ("kind", "held", "requested", "reserved", "first", "size"),
    [
        ("other", 1, 2000, 1, "larger than the whole GPU", 2000),
        ("parameters", 500, 300, 900, "expandable_segments", 400),
        ("activations", 600, 500, 600, "inference_mode", 600),
        ("parameters", 900, 200, 900, None, None),  # no cheap cure
    ],
)
def test_advice(kind, held, requested, reserved, first, size):
    refused = Refusal(0, requested * MiB, 1000 * MiB, (1000 - reserved) * MiB, held * MiB, reserved * MiB)
    shown = Explanation(refused, 1000 * MiB, reserved * MiB, 0, [(held * MiB, kind, "here")])
    advice = shown.advice()
    assert bool(advice) == bool(first)
    for found, text in advice[:1]:
        assert found == size * MiB and first in text and text[:20] in str(shown)


# --- segments --------------------------------------------------------------------------------------------


def test_segments_in_words_and_drawn(gpu):
    with pytest.raises(ValueError, match="has not reserved any memory"):
        draw_segments(gpu)
    torch.empty(24 * MiB, dtype=torch.uint8, device=gpu)
    first, second = (torch.empty(12 * MiB, dtype=torch.uint8, device=gpu) for _ in range(2))
    assert describe_segments(gpu) == "1 segment, 24.0 MiB reserved: 24.0 MiB used in 2 blocks, no gaps."
    del second
    said = "1 segment, 24.0 MiB reserved: 12.0 MiB used in 1 block, 12.0 MiB free in 1 piece, the largest 12.0 MiB."
    assert describe_segments(gpu) == said and first.is_cuda
    (ax,) = draw_segments(gpu, title="holes").axes
    assert alt_text(ax) == f"holes\n{said}"
    assert ax.get_title(loc="left") == "holes"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["segment 1"]
    assert [bar.get_width() for bar in ax.patches] == [24, 12]
