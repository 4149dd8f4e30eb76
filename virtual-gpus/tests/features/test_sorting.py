"""Sorts, searches and draws that sort: the buffers of CUDA's kernels, by PyTorch's sources."""

import torch
from measuring import MIB, peak_of, recorded, sizes_of, waits
from virtual_gpus import virtual_gpus


def test_sorts_and_searches_take_the_buffers_of_cuda_s_kernels(gpu):
    """Sort.cpp, SortStable.cu, Distributions.cpp and their like in aten/src/ATen/native. What is taken first, results
    among it."""
    rows, line = torch.ones(256, 8192, device=gpu), torch.ones(1 << 16, device=gpu)
    size, few, short = rows.nbytes, rows[:8], line[:4096]
    for work, taken in (
        (rows.sort, [size, 2 * size, 2 * size, 3 * size]), (line.sort, [4 << 16, 8 << 16, 8 << 16, 12 << 16]),
        (few.sort, [1 << 18, 1 << 19, 1 << 19, 1 << 19, 1 << 18, 3 << 18]), (short.sort, [4 << 12, 8 << 12, 8 << 12]),
        (line.median, [4 << 16, 8 << 16, 8 << 16, 12 << 16, 512]), (lambda: rows.t().kthvalue(1), [size, 32768, 65536]),
        (rows.mode, [1024, 2048, size, 65536, 98304]), (lambda: rows.mode(0), [32768, 65536, size]),
        (line.histc, [512, 512, 512]), (lambda: torch.randperm(8192, device=gpu), [65536, 65536, 32768]),
        (lambda: torch.randperm(1 << 16, device=gpu), [*[8 << 16] * 4, 16 << 16]),
        (lambda: rows.multinomial(1), [2048, size]), (lambda: rows.multinomial(2, True), [4096, size, size, size]),
    ):  # fmt: skip
        assert sizes_of(work)[: len(taken)] == taken
    assert peak_of(lambda: rows.t().median(0))[1] == size + 1024 + 2048
    assert sizes_of((rows > 0).mode) == [512, 2048, size // 4] and sizes_of(short.view(-1, 2048).mode) == [512, 512]


def test_what_is_counted_first_and_where_the_host_waits_for_it():
    """How many first, last what cub has (cuda/Nonzero.cu). The smallest and the largest number (cuda/SummaryOps.cu)."""
    with virtual_gpus(1, kind="H200"):
        x, numbers = torch.ones(1 << 20, device="cuda"), torch.ones(1 << 16, device="cuda").char()
        assert sizes_of(x.nonzero) == [512, 8 * MIB, 512]
        assert sizes_of(lambda: numbers.bincount(numbers.half())) == [2 << 16, 8 << 16, 512, 512, 512]
        assert waits(x.histc) and waits(numbers.bincount) and not waits(lambda: x.histc(4, 0, 1))
        assert waits(x.mode) and not waits(x.view(-1, 2048).mode)  # long rows (cuda/TensorModeKernel.cu)
        one, two = (recorded(x.view(rows, -1).mode).seconds for rows in (1, 2))
        assert two > one + 100e-6  # nine waits for each row
