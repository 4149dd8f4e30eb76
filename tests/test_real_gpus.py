"""What only real GPUs can tell about the helpers. Skipped, with the reason, on machines that have none.

Virtual GPUs in the place of real ones try the tests themselves:

    GPUS=auto python -m virtual_gpus --gpus 3 -m pytest -n0 tests/test_real_gpus.py -k "monitor or oom"
"""

import gc

import pytest
import torch
from torch import nn

from helpers import use_gpus
from helpers.gpus import is_virtual
from helpers.measure import MemoryMonitor, explain_oom, read_memory
from helpers.models import group_norm, small_resnet
from helpers.show import describe_segments

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def real(monkeypatch, capsys):
    monkeypatch.setenv("GPUS", "auto")
    assert use_gpus(1) == [torch.device("cuda", 0)]
    assert capsys.readouterr().out.startswith("1 real GPU (") or is_virtual()
    gc.collect()  # what another test left behind must not be freed in the middle of this one
    torch.cuda.empty_cache()


def test_readings_see_the_card():
    kept = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    (reading,) = read_memory([0])
    assert reading.allocated >= kept.numel() and reading.capacity > reading.reserved >= reading.allocated
    assert reading.driver_used is None or reading.driver_used > reading.reserved


# ---- the monitor ---------------------------------------------------------------------------------------------------


def monitored(gpus=(0,), steps=2):
    """The monitor of a small network's training; the allocator's own peaks are those of its block then."""
    torch.manual_seed(0)
    net = small_resnet(norm=group_norm).to("cuda:0")
    model = nn.DataParallel(net, list(gpus)) if len(gpus) > 1 else net
    optimizer = torch.optim.Adam(net.parameters())
    images, labels = torch.randn(4 * len(gpus), 3, 32, 32), torch.arange(4 * len(gpus)) % 10
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    with MemoryMonitor(list(gpus)) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images.to("cuda:0")), labels.to("cuda:0")).backward()
            optimizer.step()
    return monitor, net, optimizer


def size_of(net):
    return sum(-(-parameter.nbytes // 512) * 512 for parameter in net.parameters())


def assert_curve(monitor, gpu):
    curve = monitor.allocated[gpu]
    assert curve[-1] == torch.cuda.memory_allocated(gpu)
    assert sum(monitor.at_peak(gpu).values()) == max(curve) == torch.cuda.max_memory_allocated(gpu)


def test_the_monitors_curve_is_the_allocators():
    monitor, net, optimizer = monitored()
    assert_curve(monitor, 0)
    assert {"parameters", "gradients", "optimizer state"} <= set(monitor.at_peak())
    assert not torch._C._cuda_isHistoryEnabled()


def test_the_monitor_of_a_batch_that_is_mostly_activations():
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.Tanh())]).to("cuda")
    inputs = torch.ones(50_000, 512, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    with MemoryMonitor() as monitor:
        net(inputs).sum().backward()
    assert_curve(monitor, 0)
    held = monitor.at_peak()
    assert 3 <= held["activations"] / inputs.nbytes < 7.5  # four outputs, and gradients of outputs
    assert held["parameters"] == pytest.approx(size_of(net), rel=0.2)  # blocks may be a little larger


def test_the_monitor_when_memory_runs_out():
    kept = []
    with pytest.raises(torch.OutOfMemoryError), MemoryMonitor() as monitor:
        kept.append(torch.empty(30 * 2**20, dtype=torch.uint8, device="cuda"))
        torch.empty(torch.cuda.mem_get_info()[1] + 2**30, dtype=torch.uint8, device="cuda")
    assert len(monitor.allocated[0]) == 2 and monitor.allocated[0][-1] == torch.cuda.memory_allocated()


@pytest.mark.gpu(2)
def test_the_monitor_of_data_parallel_on_every_gpu():
    """Replicas run in threads of their own, and so do the GPUs' backward passes."""
    gpus = range(torch.cuda.device_count())
    monitor, net, _ = monitored(gpus, steps=3)
    for gpu in gpus:
        assert_curve(monitor, gpu)
        # Copies come in flat buffers, where each parameter is not rounded up to 512 bytes.
        assert 0.8 * size_of(net) < monitor.at_peak(gpu)["parameters"] < 1.2 * size_of(net)


# ---- the tools of lesson 06

WHOLE_CARD = 2**40  # larger than any


@pytest.fixture
def places():
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python")
    yield
    torch.cuda.memory._record_memory_history(None)


def too_much():
    kept = torch.zeros(2**26, device="cuda")
    return kept, torch.empty(WHOLE_CARD, dtype=torch.uint8, device="cuda")


def test_an_oom_is_explained_and_cleaned_up_and_drawn(places):
    before = torch.cuda.memory_allocated()
    with explain_oom() as why:
        too_much()
    assert why.refused.requested == pytest.approx(WHOLE_CARD, rel=0.01)
    assert why.by_kind()["other"] >= 2**28
    assert "kept = torch.zeros(2**26" in str(why) and "larger than the whole GPU" in str(why)
    assert torch.cuda.memory_allocated() == before
    kept = torch.zeros(2**24, device="cuda")
    assert "segment" in describe_segments(0) and kept.is_cuda
