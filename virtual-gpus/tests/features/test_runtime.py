"""CUDA's runtime library by name: kernels that sleep, and cudart."""

import pytest
import torch
from virtual_gpus import NotModelled, virtual_gpus


@virtual_gpus(2, memory="1 GiB")
def test_sleep_by_cycles_and_the_runtime_library():
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    start.record()
    torch.cuda._sleep(1_980_000)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(1.0, rel=0.02)  # milliseconds: an H200 has 1.98 GHz
    with torch.cuda.profiler.profile():
        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    assert torch.cuda.cudart().cudaMemGetInfo(0)[1] == 1 << 30
    with pytest.raises(NotModelled, match=r"torch\.cuda\.cudart\(\)\.cudaHostRegister"):
        torch.cuda.cudart().cudaHostRegister(0, 1, 0)
