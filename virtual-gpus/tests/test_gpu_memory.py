"""Memory figures of virtual GPUs through torch.cuda and GPUtil."""

import gc
import math

import GPUtil
import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

MIB = 2**20


@pytest.fixture(autouse=True)
def gpus():
    with virtual_gpus(2, memory="2 GiB"):
        yield


def test_allocated_reserved_and_peaks():
    x = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda:1")
    y = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda:1")
    assert torch.cuda.memory_allocated(1) == 150 * MIB == torch.cuda.memory_reserved(1)
    del y
    assert torch.cuda.memory_allocated(1) == 100 * MIB and torch.cuda.memory_reserved(1) == 150 * MIB
    assert torch.cuda.max_memory_allocated(1) == torch.cuda.max_memory_reserved(1) == 150 * MIB
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_reserved(1) == 100 * MIB == torch.cuda.max_memory_allocated(1)
    assert torch.cuda.memory_allocated(0) == 0 == torch.cuda.memory_allocated()
    assert torch.accelerator.memory_allocated(1) == 100 * MIB and torch.accelerator.max_memory_reserved(1) == 100 * MIB
    del x


def test_small_tensors_round_up_to_512_bytes_and_share_a_segment():
    xs = [torch.ones(1, device="cuda") for _ in range(3)]
    assert torch.cuda.memory_allocated() == 3 * 512 and torch.cuda.memory_reserved() == 2 * MIB
    del xs


def test_a_view_holds_the_whole_storage():
    x = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
    one = x[:1]
    del x
    assert torch.cuda.memory_allocated() == 10 * MIB
    del one
    assert torch.cuda.memory_allocated() == 0


def test_the_graph_holds_what_backward_needs():
    x = torch.ones(MIB, device="cuda", requires_grad=True)
    y = x.exp().sum()
    held = torch.cuda.memory_allocated()
    assert held >= 8 * MIB  # x and exp(x), which backward needs
    y.backward()
    del y
    assert torch.cuda.memory_allocated() == 8 * MIB  # x and its gradient


def test_resize_moves_to_a_larger_block():
    x = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    x.resize_(30 * MIB)
    assert torch.cuda.memory_allocated() == 30 * MIB
    out = torch.empty(0, device="cuda")
    torch.mul(torch.ones(MIB, device="cuda"), 2, out=out)
    assert torch.cuda.memory_allocated() == 34 * MIB


def test_stats_summary_and_snapshot():
    x = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == 3 * MIB and stats["allocation.all.current"] == 1
    assert stats["reserved_bytes.large_pool.current"] == 20 * MIB and stats["segment.all.current"] == 1
    assert stats["inactive_split_bytes.all.current"] == 17 * MIB
    assert "Allocated memory" in torch.cuda.memory_summary() and "3072 KiB" in torch.cuda.memory_summary()
    assert "3072 KiB" in torch.cuda.memory_summary(abbreviated=True)
    (segment,) = torch.cuda.memory_snapshot()
    assert segment["total_size"] == 20 * MIB and segment["allocated_size"] == 3 * MIB and segment["device"] == 0
    assert [b["state"] for b in segment["blocks"]] == ["active_allocated", "inactive"]
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
    del x


def test_freed_cache_makes_room_before_giving_up():
    for _ in range(2):  # 1.2 GiB each in cached blocks of different sizes: the second needs the first's cache back
        a = torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
        del a
        b = torch.empty(1200 * MIB, dtype=torch.uint8, device="cuda")
        del b
    assert torch.cuda.memory_stats()["num_alloc_retries"] >= 1 and torch.cuda.memory_stats()["num_ooms"] == 0


def test_memory_fraction():
    torch.cuda.set_per_process_memory_fraction(0.25, 0)
    assert torch.cuda.get_per_process_memory_fraction(0) == 0.25
    with pytest.raises(torch.OutOfMemoryError, match="512.00 MiB allowed"):
        torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.empty(600 * MIB, dtype=torch.uint8, device="cuda:1").is_cuda
    for wrong in (2.0, -1.0):
        with pytest.raises(ValueError):
            torch.cuda.set_per_process_memory_fraction(wrong)


def test_the_driver_sees_reserved_memory_and_the_context():
    assert GPUtil.getGPUs is GPUtil.GPUtil.getGPUs and [g.memoryUsed for g in GPUtil.getGPUs()] == [0, 0]
    x = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda:1")
    first, second = GPUtil.getGPUs()
    context = second.memoryUsed - 512
    assert isinstance(second, GPUtil.GPU) and first.memoryUsed == 0 and 0 < context < 1024
    assert second.memoryTotal == 2048 and second.memoryFree == 2048 - second.memoryUsed and second.id == 1
    free, total = torch.cuda.mem_get_info(1)
    assert total == 2048 * MIB and total - free == second.memoryUsed * MIB == torch.cuda.device_memory_used(1)
    del x
    assert GPUtil.getGPUs()[1].memoryUsed == second.memoryUsed  # del gives back to the cache only
    torch.cuda.empty_cache()
    assert GPUtil.getGPUs()[1].memoryUsed == context


def test_every_field_of_gputil_is_read_from_what_nvidia_smi_prints():
    x = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda:1")
    gpu = GPUtil.getGPUs()[1]
    assert (gpu.id, gpu.name, gpu.driver) == (1, torch.cuda.get_device_name(1), "virtual")
    assert gpu.uuid == f"GPU-{torch.cuda.get_device_properties(1).uuid}"
    assert gpu.memoryUtil == gpu.memoryUsed / gpu.memoryTotal and 0 <= gpu.load <= 1
    assert gpu.memoryUsed == int(gpu.memoryUsed) and gpu.memoryTotal == int(gpu.memoryTotal)  # MiB without decimals
    assert (gpu.display_mode, gpu.display_active) == ("Disabled", "Disabled")
    assert gpu.serial == "[N/A]" and math.isnan(gpu.temperature)  # as for a real GPU that has no such figure
    del x


def test_gputil_functions(capsys):
    x = torch.empty(1500 * MIB, dtype=torch.uint8, device="cuda:0")
    assert GPUtil.getAvailable(limit=4) == [1] and GPUtil.getFirstAvailable() == [1]
    GPUtil.showUtilization()
    shown = capsys.readouterr().out
    assert " ID " in shown and len(shown.splitlines()) >= 4
    GPUtil.showUtilization(all=True)
    assert "NVIDIA H200" in capsys.readouterr().out
    del x


def test_nothing_is_left_over_after_training():
    def train(steps):
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()
        optimizer = torch.optim.Adam(net.parameters())
        figures = []
        for _ in range(steps):
            loss = nn.functional.cross_entropy(
                net(torch.ones(8, 64, device="cuda")), torch.ones(8, dtype=int, device="cuda")
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            figures.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        return figures

    figures = train(200)
    assert len(set(figures[2:])) == 1
    gc.collect()
    assert torch.cuda.memory_allocated() == 0 and torch.cuda.memory_stats()["allocation.all.current"] == 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_two_gpus_do_not_share_addresses():
    xs = [torch.ones(1, device=f"cuda:{i}") for i in range(2)]
    addresses = [segment["address"] for segment in torch.cuda.memory_snapshot()]
    assert len(set(addresses)) == len(addresses) == 2
    del xs
