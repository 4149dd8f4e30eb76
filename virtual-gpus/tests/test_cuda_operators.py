"""What single CUDA kernels take beyond their results, by PyTorch's sources. test_reference_memory.py has an H200's."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from measuring import MIB, bytes_of, draw, peak_of, recorded, same, sizes_of, times_of
from torch import nn
from virtual_gpus import NotModelled, record_timeline, virtual_gpus
from virtual_gpus.gpus import spec
from virtual_gpus.memory_model import reduction_scratch, round_size
from virtual_gpus.placement.storages import has_values


@pytest.fixture(params=[False, True], ids=["numbers", "shapes"])
def gpu(request):
    """One virtual H200; every test runs with numbers and with shapes only, and expects the same."""
    with virtual_gpus(1, kind="H200", shapes_only=request.param):
        yield torch.device("cuda")


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
    for shape, dims in (((8, 256), [0]), ((0, 4), [0]), ((), None)):
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


def test_rows_that_are_added_up_are_sorted_first(gpu):
    """Indices, values, indices sorted, where each was (cuda/Indexing.cu); then cub's own. It takes a sort's time."""
    x, rows, values = torch.zeros(4096, device=gpu), torch.zeros(1 << 16, device=gpu).long(), torch.ones(1, device=gpu)
    calls = [lambda accumulate=accumulate: x.index_put_((rows,), values, accumulate) for accumulate in (False, True)]
    assert [sizes_of(call) for call in calls] == [[], [8 << 16, 4 << 16, *[8 << 16] * 3, 16 << 16]]
    put, added = (span.end - span.start for call in calls for span in recorded(call).spans)
    kernel = spec("H200").reached.kernel
    assert 20 * kernel < added - put < 30 * kernel


def test_sorts_scans_searches_and_distances_take_the_buffers_of_cuda_s_kernels(gpu):
    """Sort.cpp, SortStable.cu, ScanUtils.cuh, IndexKernel.cpp, Distributions.cpp, DistanceKernel.cu, Blas.cpp and their
    like in aten/src/ATen/native. What is taken first, results among it."""
    rows, line = torch.ones(256, 8192, device=gpu), torch.ones(1 << 16, device=gpu)
    size, few, short, mask = rows.nbytes, rows[:8], line[:4096], rows[:, :1] > 0
    vectors, pairs, given = rows[:16, :512].clone(), rows[:16, :16].clone(), torch.ones(512, 512, device=gpu)[:256, ::2]
    for work, taken in (
        (rows.sort, [size, 2 * size, 2 * size, 3 * size]), (line.sort, [4 << 16, 8 << 16, 8 << 16, 12 << 16]),
        (few.sort, [1 << 18, 1 << 19, 1 << 19, 1 << 19, 1 << 18, 3 << 18]), (short.sort, [4 << 12, 8 << 12, 8 << 12]),
        (line.median, [4 << 16, 8 << 16, 8 << 16, 12 << 16, 512]), (lambda: rows.t().kthvalue(1), [32768, 65536, size]),
        (lambda: torch.randperm(8192, device=gpu), [65536, 65536, 32768]),
        (lambda: torch.randperm(1 << 16, device=gpu), [*[8 << 16] * 4, 16 << 16]),
        (lambda: rows.t().cumsum(1), [size, size]), (lambda: rows.t().cummax(1), [size, 2 * size, size]),
        (lambda: rows.count_nonzero(), [size // 4, 512, 2 * size]), (lambda: rows.t().argmax(), [512, size]),
        (lambda: rows.masked_scatter(mask, rows), [size, 2 * size, size // 4]),
        (lambda: rows.multinomial(1), [2048, size]), (lambda: rows.multinomial(2, True), [4096, size, size, size]),
        (lambda: rows.roll((1, 1), (0, 1)), [size, size]), (lambda: rows.t()[::2].mv(rows[:, 0]), [16384, size // 2]),
        (lambda: torch.mm(rows, rows.t(), out=given), [256 << 10]),
        (lambda: F.unfold(few[None, None], (2, 1)), [1 << 18, 7 << 16]),
        (lambda: F.fold(few[None, :2, :7168], (8, 1024), (2, 1)), [56 << 10, 56 << 10]),
        (lambda: torch.ops.aten._cdist_backward(pairs, vectors, vectors, 1.0, pairs), [32 << 10, 512 << 10]),
    ):  # fmt: skip
        assert sizes_of(work)[: len(taken)] == taken


def test_indices_statistics_and_norms_of_chunks_are_cudas_own(gpu):
    """TensorAdvancedIndexingUtils.h, Normalization.cu, cudnn/BatchNorm.cpp, EmbeddingBag.cu and ForeachReduceOp.cu."""
    y, values, here = torch.zeros(1 << 16, device=gpu), torch.ones(1 << 16, device=gpu), torch.arange(1 << 16)
    there, size = here.to(gpu), y.nbytes
    for index, copies in ((here, [2 * size]), (there, []), (there.int(), [2 * size]), (here.int(), [2 * size])):
        assert sizes_of(lambda i=index: y[i]) == [*copies, size]
        assert sizes_of(lambda i=index: y.index_put_((i,), values)) == copies
    for norm, kind, kept in ((nn.BatchNorm1d, torch.half, 2), (nn.BatchNorm2d, torch.float, 0)):
        x = torch.ones(8, 4096, *[2] * 2 * (not kept)).to(gpu, kind)
        assert sizes_of(partial(norm(4096).to(gpu, kind).eval(), x)) == [x.nbytes, *[4 * 4096] * kept]
    table, offsets = torch.zeros(100, 64, device=gpu), there[: 1 << 14] * 4
    for mode, largest in (("sum", []), ("mean", []), ("max", [512 << 14])):
        taken = sizes_of(lambda m=mode: F.embedding_bag(there % 100, table, offsets, mode=m))
        assert taken[1:] == [8 << 14, 8 << 16, 256 << 14, *largest]
    wide = [torch.zeros(1 << 20, dtype=torch.half, device=gpu) for _ in range(64)]
    assert sizes_of(lambda: torch._foreach_norm(wide)) == [64 * 16 * 4, *[512] * 64]
    assert sizes_of(lambda: torch._foreach_norm(wide, 3)) == [512] * 64


def test_lengths_of_a_ctc_loss_may_be_on_the_cpu():
    def loss(device, where, reduction):
        scores, targets = draw(50, 4, 20).to(device).requires_grad_(), torch.ones(4, 10).long().to(device)
        lengths = [torch.full((4,), number, device=where) for number in (50, 10)]
        result = F.ctc_loss(scores.log_softmax(2), targets, *lengths, reduction=reduction)
        return result, *torch.autograd.grad(result.sum(), scores)

    with virtual_gpus(1):
        for where, reduction in product(("cpu", "cuda"), ("none", "sum", "mean")):
            pair = loss("cpu", "cpu", reduction), loss("cuda", where, reduction)
            torch.testing.assert_close(*pair, check_device=False, atol=0, rtol=0)


def test_only_matrices_that_cublas_cannot_read_are_copied():
    copied_bytes = pytest.importorskip("virtual_gpus.features.blas").copied_bytes
    matrix = torch.empty(6, 8, device="meta")
    for readable in (matrix, matrix.t(), matrix[:, :4], matrix[::2], matrix.t()[2:], torch.empty(3, 4, 5).mT):
        assert copied_bytes(readable) == 0
    assert copied_bytes(torch.empty((), device="meta").expand(6, 8)) == 6 * 8 * 4
    assert copied_bytes(matrix[:, ::2]) == 6 * 4 * 4
    assert copied_bytes(torch.empty(2, 1, 1, device="meta").expand(2, 3, 4)) == 2 * 3 * 4 * 4


def test_losses_look_ups_and_gradients_take_nothing_beside_their_results(gpu):
    x = torch.zeros(1000, 1000, device=gpu, requires_grad=True)
    assert sizes_of(lambda: F.logsigmoid(x)) == [4_000_256]
    assert sizes_of(lambda: F.smooth_l1_loss(x, x, reduction="none")) == [4_000_256]
    _, stayed, _ = bytes_of(lambda: F.smooth_l1_loss(x, x))
    assert stayed == 4_000_256  # a mean keeps the storage of all losses
    table = nn.Embedding(1000, 64, device=gpu)
    out = table(torch.zeros(3072, dtype=torch.long, device=gpu))
    gradient = torch.zeros_like(out)
    assert sizes_of(lambda: torch.autograd.grad(out, table.weight, gradient)) == [256_000]
    # PyTorch's formula copies the zeros when a dispatch mode is on, as it is here; on CUDA it does not.
    out, gradient = x[torch.arange(10, device=gpu)], torch.zeros(10, 1000, device=gpu)
    _, stayed, peak = bytes_of(lambda: torch.autograd.grad(out, x, gradient, retain_graph=True))
    assert stayed == 4_000_256 <= peak < 4_000_256 + MIB


def test_batch_norm_of_few_rows_takes_no_partial_sums(gpu):
    norm, x = nn.BatchNorm1d(1024, device=gpu), torch.zeros(4096, 1024, device=gpu)
    sizes = sizes_of(lambda: norm(x))
    assert sum(sizes[-2:]) == 262_656 and sizes[-1] == 512
    assert len(sizes_of(lambda: norm(x[:6]))) == len(sizes) - 2  # one block of threads


def test_a_batch_norm_takes_the_memory_and_the_time_of_the_same_kernels():
    def of(x, kind=torch.float, on=True, train=True, mask=(True, True, True)):
        stats, grad = torch.ones(x.shape[1], dtype=kind or torch.float, device="cuda"), x.new_ones(()).expand(x.shape)
        weight, norm = stats if kind else None, torch.ops.aten.native_batch_norm_backward
        with torch.backends.cudnn.flags(enabled=on):
            times = times_of(lambda: torch.native_batch_norm(x, weight, weight, stats, stats, train, 0.1, 1e-5))
            back = partial(norm, grad, x, weight, *[stats] * 4, train, 1e-5, mask)
            sizes = sizes_of(lambda: times.update(times_of(back)))
        return *times.values(), sizes.count(x.nbytes)  # a packed gradient, and one of x

    with virtual_gpus(1, kind="H200", shapes_only=True):
        x, grey = torch.ones(64, 64, 32, 32, device="cuda"), torch.bfloat16
        cudnns, own = of(x.half()), of(x.to(grey))
        assert cudnns[2] == 2 and own[2] == 1 and min(own[:2]) > max(cudnns[:2])
        assert of(x.half(), torch.half) == of(x.half(), on=False) == of(x.half(), None) == own
        once, adds, _ = of(x.half(), train=False)
        assert once < cudnns[0] and adds == own[1]  # the gradients of its weights
        assert of(x.half(), train=False, mask=(True, False, False)) == (once, once, 1)
        assert of(x.to(grey).view(-1, 64)) == of(x.to(grey, memory_format=torch.channels_last))[:2] + (1,)


def test_cross_entropy_over_images_copies_logits_whose_channels_are_last(gpu):
    """SoftMax.cu takes `input_.contiguous()` after its result; NLLLoss2d.cu gets that result, which is packed."""
    logits, classes = torch.zeros(4, 8, 32, 32, device=gpu), torch.zeros(4, 32, 32, dtype=torch.long, device=gpu)
    last, size = logits.to(memory_format=torch.channels_last), logits.nbytes
    assert sizes_of(lambda: F.cross_entropy(logits, classes)) == [size, 512, 512]
    assert sizes_of(lambda: F.cross_entropy(last, classes)) == [size, size, 512, 512]
    assert sizes_of(lambda: F.nll_loss(last, classes)) == [512, 512, size]  # its own copy
    assert sizes_of(lambda: F.nll_loss(last, classes, reduction="none"))[1:] == [512]


def test_a_softmax_of_halves_in_floats_is_one_kernel_and_its_backward_takes_a_product(gpu):
    """SoftMax.cpp asks for `half_to_float`; `softmax_backward_cuda_out` of SoftMax.cu multiplies first."""
    x, given = torch.randn(1024, 1024).half().requires_grad_(), torch.randn(1024, 1024)
    copy, gradient, size = x.detach().to(gpu).requires_grad_(), given.to(gpu), x.nbytes
    for name, owner in product(("softmax", "log_softmax"), (torch, torch.Tensor, torch.special, F)):
        one, other = (getattr(owner, name)(part, -1, dtype=torch.float32) for part in (x, copy))
        assert sizes_of(partial(getattr(owner, name), copy, -1, dtype=torch.float32)) == [2 * size]
        sizes = sizes_of(lambda y=other: torch.autograd.grad(y, copy, gradient, retain_graph=True))
        assert sizes == [size, 2 * size][: 1 + (name == "softmax")]
        if has_values(copy):
            same(one, other)
            same(*torch.autograd.grad(one, x, given), *torch.autograd.grad(other, copy, gradient))
    with torch.autocast("cuda", torch.float16):
        assert sizes_of(lambda: copy.softmax(axis=-1)) == sizes_of(lambda: F.log_softmax(copy, -1)) == [2 * size]


def test_linear_adds_its_bias_in_place_but_a_learners_sum_is_new(gpu):
    """For a 3-dimensional input that is not packed, `linear` is a product and then a sum."""
    layer, whole = nn.Linear(64, 512, device=gpu), 32 * 128 * 512 * 4
    x = torch.zeros(32, 128, 64, device=gpu).transpose(0, 1)
    with torch.no_grad():
        assert sizes_of(lambda: layer(x)).count(whole) == 1
        assert sizes_of(lambda: x @ layer.weight.t() + layer.bias).count(whole) == 2
        scores = x @ layer.weight.t()
        for _ in range(2):
            assert sizes_of(lambda: scores + layer.bias).count(whole) == 1


@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norms_derivatives_are_the_cpus(weighted):
    found = []
    for device in ("cpu", "cuda"):
        with virtual_gpus(1):
            torch.manual_seed(0)
            x, weight = (torch.randn(size, device=device, requires_grad=True) for size in ((50, 8), (8,)))
            leaves = (x, weight)[: 1 + weighted]
            out = F.rms_norm(x, (8,), *leaves[1:])
            once = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
            first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
            found.append([out, *once, *first, *torch.autograd.grad(first[0].square().sum(), x)])
    torch.testing.assert_close(*found, check_device=False, atol=0, rtol=0)


def test_what_cuda_casts_finds_or_grows_first_is_in_memory_and_on_the_clock():
    with virtual_gpus(1, kind="H200"), record_timeline() as timeline:
        x = torch.ones(1024, 1024, device="cuda")
        mask, flat, out = x > 0, x.view(-1), torch.empty(0, device="cuda")
        for work, wanted in (
            (mask.sum, 8), (lambda: mask.cumsum(0), 16), (lambda: x.half().sum(dtype=torch.float32), 2),
            (lambda: x[mask], 16 + 4), (lambda: flat[mask.view(-1)], 8 + 4), (lambda: x.masked_select(mask), 16 + 4),
            (lambda: torch.equal(x, x.clone()), 4 + 1), (lambda: torch.mm(x, x, out=out), 4 + 32),
        ):  # fmt: skip
            assert wanted <= peak_of(work)[1] / MIB < wanted + 0.2
        assert sizes_of(flat.nonzero) == [512, 8 * MIB, 512]  # how many first, last what cub has (cuda/Nonzero.cu)
    assert {"_to_copy", "nonzero", "eq", "all"} <= {span.name for span in timeline.spans}


@torch.library.custom_op("of_these_tests::squared", mutates_args=())
def squared(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x, out_dtype=torch.float32) + 1


@pytest.mark.parametrize("shapes_only", [False, True])
def test_an_operator_in_python_takes_the_memory_and_time_of_what_it_calls(shapes_only):
    with virtual_gpus(1, shapes_only=shapes_only), record_timeline() as timeline:
        y = squared(torch.ones(64, 64, device="cuda", dtype=torch.bfloat16))
        assert torch.cuda.max_memory_allocated() > 32 << 20 and (shapes_only or y.unique().item() == 65)  # cuBLAS
    assert [span.name for span in timeline.spans][:3] == ["ones", "mm", "add"] and y.dtype == torch.float32


@torch.library.custom_op("of_these_tests::doubled", mutates_args=(), device_types="cuda")
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x + x


def test_a_librarys_operator_for_cuda_alone_is_refused_by_its_name():
    with virtual_gpus(1), pytest.raises(NotModelled, match="of_these_tests::doubled, which exists only for CUDA"):
        doubled(torch.ones(2, device="cuda"))
