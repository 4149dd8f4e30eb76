"""Sums, scans and other reductions: partial results and copies of CUDA's kernels, by PyTorch's sources."""

import torch
from measuring import MIB, peak_of, recorded, same, sizes_of
from virtual_gpus import virtual_gpus
from virtual_gpus.memory_model import reduction_scratch, round_size


def test_partial_sums_are_those_of_an_h200_s_steps_and_depend_on_the_gpu_and_the_layout():
    # Rows, columns of matrices whose rows were added up; bytes of partial results and of semaphores, both rounded up to
    # blocks of 512, in traces of training steps on an H200.
    column_sums = [(2048, 384, 6_291_456, 512), (2608, 20_000, 143_360_000, 1024), (4096, 1024, 33_554_432, 512)]
    for rows, columns, sums, semaphores in column_sums:
        found = reduction_scratch((rows, columns), "H200", [0])
        assert tuple(map(round_size, found)) == (sums, semaphores), (rows, columns)
    assert reduction_scratch((1000, 10_000), "H200") == (4 * 528, 4)  # the mean of 10,000,000 losses: 3,072 bytes
    assert reduction_scratch((8192, 256), "H200", [0])[0] > reduction_scratch((8192, 256), "K80", [0])[0]
    assert reduction_scratch((8192, 256), "H200", [1]) == (0, 0)  # 8,192 outputs keep the GPU busy: no need to cut
    for shape, dims in (((8, 256), [0]), ((0, 4), [0]), ((), None), ((), [0])):
        assert reduction_scratch(shape, "H200", dims) == (0, 0)
    found = reduction_scratch((384, 2048), "H200", [-1], strides=(1, 384))
    assert found == reduction_scratch((2048, 384), "H200", [0])


def test_partial_results_take_the_bytes_that_cuda_s_kernels_keep(gpu):
    """`arg_t` of aten/src/ATen/native/cuda/Reduce*Kernel.cu, for as many of them as the first of the sums above has."""
    x = torch.zeros(2048, 384, device=gpu)
    half, double, mask = x.half(), x.double(), x > 0
    for size, work in (
        (1, lambda: mask.any(0)), (2, lambda: half.amin(0)), (4, lambda: x.amax(0)), (4, lambda: x.all(0)),
        (4, lambda: half.sum(0)), (4, lambda: half.prod(0)), (8, lambda: mask.sum(0)), (8, lambda: x.aminmax(dim=0)),
        (16, lambda: x.max(0)), (16, lambda: half.min(0)), (16, lambda: double.argmin(0)), (16, lambda: x.var(0)),
        (32, lambda: double.std(0)),
    ):  # fmt: skip
        assert sizes_of(work)[-2:] == [size * 6_291_456 // 4, 512]
    assert sizes_of(torch.zeros(1 << 22, device=gpu).max) == [512, 4 * 512, 512]  # 16 numbers for each of 512 x 512


def test_logsumexp_takes_its_parts(gpu):
    """The largest numbers, those of infinite ones, all differences, and only then the result (ReduceOps.cpp)."""
    x, out = torch.randn(2048, 384, device=gpu), torch.empty(0, device=gpu)
    rows, all_of_it = 4 * 2048, 4 * 2048 * 384
    assert sizes_of(lambda: x.logsumexp(1)) == [rows, rows, 2048, all_of_it, rows]
    assert peak_of(lambda: x.long().logsumexp(1))[1] == 4 * all_of_it + 2 * rows
    assert torch.logsumexp(x, 1, out=out) is out and x[:, :0].logsumexp(1).shape == (2048,)
    for one in (x, x + 1j * x):
        same(one.logsumexp((0, 1), True), one.cpu().logsumexp((0, 1), True), atol=1e-5, rtol=1e-5)
    same(out, x.cpu().logsumexp(1))


def test_scans_and_columns_take_copies_and_types_are_cast_first(gpu):
    """ScanUtils.cuh and ReduceOps.cpp. What is taken first, results among it; and the peak of what is cast, in MiB."""
    rows, x = torch.ones(256, 8192, device=gpu), torch.ones(1024, 1024, device=gpu)
    size, mask = rows.nbytes, x > 0
    for work, taken in (
        (lambda: rows.t().cumsum(1), [size, size]), (lambda: rows.t().cummax(1), [size, 2 * size, size]),
        (rows.count_nonzero, [size // 4, 512, 2 * size]), (rows.t().argmax, [512, size]),
    ):  # fmt: skip
        assert sizes_of(work)[: len(taken)] == taken
    for work, wanted in (
        (mask.sum, 8), (lambda: mask.flatten().cumsum(0), 16), (lambda: x.half().sum(dtype=torch.float32), 2),
    ):  # fmt: skip
        assert wanted <= peak_of(work)[1] / MIB < wanted + 0.2
    assert [span.name for span in recorded(mask.sum).spans] == ["_to_copy", "sum"]


def test_equal_compares_and_reduces():
    with virtual_gpus(1, kind="H200"):
        x = torch.ones(1024, 1024, device="cuda")
        assert 5 <= peak_of(lambda: torch.equal(x, x.clone()))[1] / MIB < 5.2
        assert {"eq", "all"} <= {span.name for span in recorded(lambda: torch.equal(x, x.clone())).spans}
