"""Indexing, gathers and scatters: copies of indices, sorts of those that are added up, and where the host waits."""

import pytest
import torch
import torch.nn.functional as F
from measuring import MIB, bytes_of, peak_of, recorded, sizes_of, times_of, waits
from virtual_gpus import virtual_gpus
from virtual_gpus.gpus import spec


def test_rows_that_are_added_up_are_sorted_first(gpu):
    """Indices, values, indices sorted, where each was (cuda/Indexing.cu); then cub's own. It takes a sort's time."""
    x, rows, values = torch.zeros(4096, device=gpu), torch.zeros(1 << 16, device=gpu).long(), torch.ones(1, device=gpu)
    calls = [lambda accumulate=accumulate: x.index_put_((rows,), values, accumulate) for accumulate in (False, True)]
    assert [sizes_of(call) for call in calls] == [[], [8 << 16, 4 << 16, *[8 << 16] * 3, 16 << 16]]
    put, added = (span.end - span.start for call in calls for span in recorded(call).spans)
    kernel = spec("H200").reached.kernel
    assert 20 * kernel < added - put < 30 * kernel


def test_indices_are_copied_where_cuda_copies_them(gpu):
    """TensorAdvancedIndexingUtils.h, and masked_scatter__cuda in cuda/IndexKernel.cpp."""
    y, values, here = torch.zeros(1 << 16, device=gpu), torch.ones(1 << 16, device=gpu), torch.arange(1 << 16)
    there, size = here.to(gpu), y.nbytes
    for index, copies in ((here, [2 * size]), (there, []), (there.int(), [2 * size]), (here.int(), [2 * size])):
        assert sizes_of(lambda i=index: y[i]) == [*copies, size]
        assert sizes_of(lambda i=index: y.index_put_((i,), values)) == copies
    rows, mask = torch.ones(256, 8192, device=gpu), torch.ones(256, 1, dtype=torch.bool, device=gpu)
    scattered = sizes_of(lambda: rows.masked_scatter(mask, rows))
    assert scattered[:3] == [rows.nbytes, 2 * rows.nbytes, rows.nbytes // 4]


@pytest.mark.parametrize("shapes_only", [False, True])
def test_lists_and_masks_take_the_same_memory_with_values_and_without(shapes_only):
    with virtual_gpus(1, kind="H200", shapes_only=shapes_only):
        x, mask = torch.zeros(10000, 4, device="cuda", requires_grad=True), torch.ones(1000, device="cuda").bool()
        assert [bytes_of(lambda i=i: x[i])[1] for i in ([*range(5000)], torch.arange(5000))] == [120_832, 80_384]
        assert peak_of(lambda: x.data[:1000].__setitem__(mask, mask[0].float()))[1] == 8192 + 1024 + 512


def test_the_gradient_of_an_index_takes_its_result_alone(gpu):
    """PyTorch's formula copies the zeros when a dispatch mode is on, as it is here; on CUDA it does not."""
    x = torch.zeros(1000, 1000, device=gpu, requires_grad=True)
    out, gradient = x[torch.arange(10, device=gpu)], torch.zeros(10, 1000, device=gpu)
    _, stayed, peak = bytes_of(lambda: torch.autograd.grad(out, x, gradient, retain_graph=True))
    assert stayed == 4_000_256 <= peak < 4_000_256 + MIB


@virtual_gpus(1, kind="H200")
def test_masks_are_found_first():
    x = torch.ones(1024, 1024, device="cuda")
    mask, flat = x > 0, x.view(-1)
    for work, wanted in (
        (lambda: x[mask], 16 + 4), (lambda: flat[mask.view(-1)], 8 + 4), (lambda: x.masked_select(mask), 16 + 4)
    ):  # fmt: skip
        assert wanted <= peak_of(work)[1] / MIB < wanted + 0.2
        assert "nonzero" in times_of(work)


@virtual_gpus(1, kind="A100", shapes_only=True)
def test_few_rows_of_a_large_table_take_their_own_time():
    table, rows = (torch.empty(shape, device="cuda") for shape in ((1 << 16, 1024), (2, 1024)))
    at = rows[:, 0].long()
    assert max(times_of(lambda: (table.index_copy_(0, at, rows), table.take(at))).values()) < 1e-4


@virtual_gpus(2, memory="1 GiB")
def test_the_host_waits_for_a_gpu_where_cuda_s_does():
    x, one, mask = torch.rand(4, device="cuda"), torch.rand((), device="cuda"), torch.tensor([True, False, True, False])
    rows = torch.tensor([0, 1])
    repeats = torch.full((1,), 2, device="cuda")
    gpu_mask, gpu_rows = mask.cuda(), rows.cuda()
    pairs = [  # what does not wait, and what does
        (lambda: x.__setitem__(gpu_mask, 1.0), lambda: x.__setitem__(gpu_mask, one)),
        (lambda: x.__setitem__(mask, one), lambda: x.__setitem__(rows, one)),
        (lambda: x.__setitem__(gpu_rows, one), lambda: x[rows]),
        (lambda: x[mask], lambda: x[gpu_mask]),
        (lambda: F.one_hot(gpu_rows, 2), lambda: F.one_hot(gpu_rows)),
        (lambda: x.repeat_interleave(repeats, output_size=8), lambda: x.repeat_interleave(repeats)),
    ]
    always = (lambda: x.sum().item(), lambda: x.nonzero(), lambda: x.cpu(), lambda: x.copy_(torch.ones(4)))
    assert [waits(quiet) for quiet, _ in pairs] == [False] * len(pairs)
    assert all(map(waits, [waiting for _, waiting in pairs])) and all(map(waits, always))
    assert F.one_hot(gpu_rows, 3).tolist() == [[1, 0, 0], [0, 1, 0]]
