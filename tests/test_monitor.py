"""MemoryMonitor: its curve is the allocator's to the byte, its kinds add up, and it leaves nothing behind."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint
from virtual_gpus import virtual_gpus

from helpers.measure import MemoryMonitor, MiB
from helpers.measure import monitor as monitor_module

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


def net(width: int = 512) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def train(model, optimizer, batch: int = 64, steps: int = 2, width: int = 512) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(torch.randn(batch, width).to("cuda:0"))
        F.cross_entropy(outputs, torch.zeros(batch, dtype=torch.long).to("cuda:0")).backward()
        del outputs
        optimizer.step()


def recorded(gpus: int = 1, batch: int = 64, steps: int = 2) -> MemoryMonitor:
    model = net().to("cuda:0")
    parallel = nn.DataParallel(model, list(range(gpus))) if gpus > 1 else model
    optimizer = torch.optim.Adam(model.parameters())
    for gpu in range(gpus):
        torch.cuda.reset_peak_memory_stats(gpu)
    with MemoryMonitor() as monitor:
        train(parallel, optimizer, batch, steps)
    return monitor


def rounded(tensors) -> int:
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors)


PARAMETERS = rounded(net().parameters())


@pytest.mark.parametrize("shapes_only", [False, True])
@pytest.mark.parametrize("gpus", [1, 3])
def test_the_peak_is_the_allocators_to_the_byte(gpus, shapes_only):
    with virtual_gpus(gpus, shapes_only=shapes_only):
        monitor = recorded(gpus)
        for gpu in range(gpus):
            most = max(monitor.allocated[gpu])
            assert most == sum(monitor.at_peak(gpu).values()) == torch.cuda.max_memory_allocated(gpu)
        assert str(monitor).startswith("GPU 0 peaked at ") and str(monitor).count("\n") == gpus - 1


def test_what_the_allocator_did_not_split_counts_as_it_does():
    sizes = (3, 512, MiB - 1, MiB + 1, 9 * MiB + 5, 10 * MiB, 700_000, 19 * MiB + 3)
    with virtual_gpus(1):
        before = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
        del before[::2]
        with MemoryMonitor() as monitor:
            for size in sizes + sizes[::-1]:
                before.append(torch.empty(size + 100, dtype=torch.uint8, device="cuda"))
                before.pop(len(before) // 3)
                if size == MiB + 1:
                    before.clear()
                    torch.cuda.empty_cache()
        assert monitor.allocated[0][-1] == torch.cuda.memory_allocated()


def test_a_large_batch_is_held_by_activations():
    with virtual_gpus(1, shapes_only=True):
        model, inputs = net().to("cuda"), torch.ones(50_000, 512, device="cuda")
        with MemoryMonitor() as monitor:
            F.cross_entropy(model(inputs), torch.zeros(50_000, dtype=torch.long, device="cuda")).backward()
        held = monitor.at_peak()
    assert held["parameters"] == pytest.approx(PARAMETERS, rel=0.2) and held["other"] >= inputs.nbytes
    assert 3 <= held["activations"] / inputs.nbytes < 5


def test_gradients_and_state_are_counted_when_they_are_there():
    with virtual_gpus(1, shapes_only=True):
        first, second = recorded(batch=8, steps=1).at_peak(), recorded(batch=8, steps=2).at_peak()
    for held in (first, second):  # the peak is in the backward pass, with cuBLAS's workspace
        assert held["parameters"] == pytest.approx(PARAMETERS, rel=0.2)
    assert "optimizer state" not in first and second["optimizer state"] == pytest.approx(2 * PARAMETERS, rel=0.2)
    assert 0 < second["gradients"] <= 1.2 * PARAMETERS


def test_gradients_that_zero_grad_let_go_are_not_counted():
    """In the forward pass, the blocks of the last step's gradients hold activations."""
    with virtual_gpus(1, shapes_only=True):
        model = net().to("cuda")
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with MemoryMonitor() as monitor:
            train(model, sgd, batch=8, steps=2)
            sgd.zero_grad()
            outputs = model(torch.empty(50_000, 512, device="cuda"))
        assert "gradients" not in monitor.at_peak() and outputs.is_cuda


def test_copies_of_data_parallel_are_parameters():
    with virtual_gpus(2, shapes_only=True):
        held = recorded(2).at_peak(1)
    assert held["parameters"] == pytest.approx(PARAMETERS, rel=0.2) and "optimizer state" not in held


def test_what_a_checkpoint_computes_again_is_activations():
    with virtual_gpus(1, shapes_only=True):
        model = net().to("cuda")
        with MemoryMonitor() as monitor:
            checkpoint(model, torch.empty(50_000, 512, device="cuda"), use_reentrant=False).sum().backward()
    assert monitor.at_peak()["activations"] > 3 * 50_000 * 512 * 4


def test_nothing_is_left_behind():
    with virtual_gpus(1):
        model = net().to("cuda:0")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ZeroDivisionError), MemoryMonitor() as monitor:
            train(model, optimizer)
            assert torch._C._cuda_isHistoryEnabled()
            raise ZeroDivisionError
        assert max(monitor.allocated[0]) > 0 and not torch._C._cuda_isHistoryEnabled()
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


def test_expandable_segments_that_were_there_before_are_split_wherever_it_may_be(monkeypatch):
    """A large segment that is not expandable hands out a block whole where less than 1 MiB would be left of it."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with virtual_gpus(1, shapes_only=True):
        torch.empty(20 * MiB, dtype=torch.uint8, device="cuda")
        with MemoryMonitor() as monitor:
            kept = torch.empty(20 * MiB - 4096, dtype=torch.uint8, device="cuda")
        assert max(monitor.allocated[0]) == torch.cuda.memory_allocated() == kept.nbytes
