"""torch.profiler: real times of the CPU beside modelled times of the GPUs, and NVTX ranges that nobody hears."""

import json

import pytest
import torch
import torch.distributed as dist
from measuring import recorded
from torch.profiler import ProfilerActivity, profile, record_function, schedule, supported_activities
from virtual_gpus import virtual_gpus

pytestmark = pytest.mark.usefixtures("gpus_of_the_module")
GPUS = {"count": 2}
BOTH = [ProfilerActivity.CPU, ProfilerActivity.CUDA]


def test_device_times_are_those_of_the_modelled_clock(capfd):
    def step():
        with record_function("forward"):
            y = net(x)
        y.sum().backward()

    net, x = torch.nn.Linear(100, 100).cuda(), torch.randn(64, 100, device="cuda")
    kernels = sum(span.end - span.start for span in recorded(step).spans if span.gpu == 0) * 1e6
    net.zero_grad()
    with profile(activities=BOTH) as profiled:
        step()
    found = {row.key: row for row in profiled.key_averages()}
    product, operator = found["addmm (modelled)"], found["aten::addmm"]
    assert product.device_type == torch.autograd.DeviceType.CUDA and operator.count == 1  # not the engine's own as well
    for same in (operator.self_device_time_total, found["forward"].device_time_total):
        assert product.device_time_total == pytest.approx(same)
    modelled = sum(row.self_device_time_total for row in found.values() if "(modelled)" in row.key)
    assert modelled == pytest.approx(kernels) and kernels > 0
    assert modelled == pytest.approx(sum(row.self_device_time_total for row in found.values()) / 2)
    table = profiled.key_averages().table(sort_by="cuda_time_total")
    assert "Self CUDA time total (modelled):" in table and "PythonDispatchMode" not in table
    assert len(capfd.readouterr().err.splitlines()) < 10


def test_the_trace_has_a_process_for_each_gpu(tmp_path):
    x = torch.randn(1 << 16).cuda()
    second = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=[ProfilerActivity.CUDA], schedule=second) as profiled:
        for _ in range(2):
            (x.to(1) * 2).cpu()
            profiled.step()
    names = [event.name for event in profiled.events()]
    assert names == [f"{name} (modelled)" for name in ("Memcpy PtoP", "mul", "Memcpy DtoH")]
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"cuda:0 (modelled)", "cuda:1 (modelled)"} <= named
    work = {event["name"]: event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")}
    copied, doubled, read = (work[name] for name in names)
    assert (copied["pid"], doubled["pid"], read["pid"]) == (0, 1, 1)
    assert doubled["ts"] >= copied["ts"] + copied["dur"]


def test_collectives_have_the_names_of_nccl_s_kernels():
    with virtual_gpus(2, shapes_only=True, rank=0, world_size=4):
        dist.init_process_group("nccl")
        x = torch.ones(4, device="cuda")
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            dist.all_reduce(x)
            dist.all_to_all_single(torch.empty_like(x), x)
            dist.all_gather_into_tensor(torch.empty(16, device="cuda"), x)
    names = [event.name for event in profiled.events()]
    assert names == [f"ncclDevKernel_{name} (modelled)" for name in ("AllReduce", "SendRecv", "AllGather")]


def test_other_ways_to_profile_and_nvtx_ranges_that_do_no_harm():
    x = torch.ones(4, device="cuda")
    assert supported_activities() >= set(BOTH)
    with torch.autograd.profiler.profile(use_device="cuda") as profiled:
        x + 1
    assert any(event.name == "add (modelled)" for event in profiled.function_events)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        x + 1
    assert not any("(modelled)" in event.name for event in profiled.events())
    torch.cuda.nvtx.range_push("outer")
    torch.cuda.nvtx.range_pop()
    torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("across threads"))
    torch.cuda.nvtx.mark("here")
    with torch.cuda.nvtx.range("a range of {}", 3), torch.autograd.profiler.emit_nvtx():
        x = torch.ones(4, device="cuda", requires_grad=True)
        (x * 2).sum().backward()
    assert x.grad.tolist() == [2.0] * 4
