"""Workspaces of cuBLAS and cublasLt: how large, for whom, for how long. Expected figures are derived by hand."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from measuring import MIB, peak_of, rows_of, seconds, sizes_of, times_of
from torch.nn import functional as F
from virtual_gpus import active_machine, virtual_gpus
from virtual_gpus.features.blas import copied_bytes

CUBLAS, LT = 32 * MIB, MIB  # on Hopper
pytestmark = pytest.mark.usefixtures("rules_of_2_11")


def matrix(*shape, **options):
    return torch.zeros(*shape, device="cuda", **options)


def kept(function, kind="H200"):
    """Bytes at the peak, and those that stay after `function(a)` with a matrix of 4 x 4, and its result, are gone."""
    with virtual_gpus(1, kind=kind):
        a = matrix(4, 4)
        torch.cuda.reset_peak_memory_stats()
        function(a)
        del a
        return torch.cuda.max_memory_allocated() // MIB * MIB, torch.cuda.memory_allocated()


def multiply(a):
    a @ a


@pytest.mark.parametrize(("version", "settings", "product", "biased"), rows_of("blas")["workspaces"]["rules"])
def test_by_version_and_environment(monkeypatch, version, settings, product, biased):
    monkeypatch.setattr("virtual_gpus.settings.INSTALLED", tuple(version))
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    stays = "TORCH_CUBLAS_WORKSPACE_CACHE" in settings or version < [2, 15]
    for function, nbytes in ((multiply, product * MIB), (lambda a: torch.addmm(a.new_zeros(4), a, a), biased * MIB)):
        assert kept(function) == (nbytes, nbytes * stays)


def test_by_kind_and_configuration(monkeypatch):
    sizes = {"K80": 8320, "T4": 8320, "A100": 8320, "RTX 4090": 8320, "H100": 32768, "B200": 32768}
    by_config = {":4096:8": 32768, ":16:8": 128, ":4096:2:16:8": 8320, "nonsense": 32768, ":0:0": 0}
    assert {kind: kept(multiply, kind)[1] for kind in sizes} == {kind: size * 1024 for kind, size in sizes.items()}
    for config, size in by_config.items():
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
        assert kept(multiply)[1] == size * 1024, config


def test_a_workspace_that_does_not_fit_raises_and_leaves_the_books_in_order(monkeypatch):
    for version in ((2, 11), (2, 15)):
        monkeypatch.setattr("virtual_gpus.settings.INSTALLED", version)
        with virtual_gpus(1, memory="30 MiB"):
            a = matrix(4, 4)
            with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 32.00 MiB"):
                a @ a
            assert torch.cuda.memory_allocated() == 512


def test_an_operator_leaves_its_workspaces(gpu):
    takers = {
        "mm": (lambda a, v, b: torch.mm(a, a), CUBLAS),
        "bmm": (lambda a, v, b: torch.bmm(b, b), CUBLAS),
        "baddbmm": (lambda a, v, b: torch.baddbmm(b, b, b), CUBLAS),
        "mv": (lambda a, v, b: torch.mv(a, v), CUBLAS),
        "dot": (lambda a, v, b: torch.dot(v, v), CUBLAS),
        "linear": (lambda a, v, b: F.linear(a, a, v), CUBLAS + LT),
        "a row as bias": (lambda a, v, b: torch.addmm(v[None], a, a), CUBLAS + LT),
        "a matrix as bias": (lambda a, v, b: torch.addmm(a, a, a), CUBLAS),
        "beta": (lambda a, v, b: torch.addmm(v, a, a, beta=2), CUBLAS),
        "one number as bias": (lambda a, v, b: torch.addmm(v[:1], a, a), CUBLAS),
        "a bias with gaps": (lambda a, v, b: torch.addmm(a[:, 0], a, a), CUBLAS),
        "one row times many": (lambda a, v, b: torch.addmm(v, a[:1], a), CUBLAS + LT),
        "complex": (lambda a, v, b: torch.addmm(v + 0j, a + 0j, a + 0j), CUBLAS),
        "half": (lambda a, v, b: torch.addmm(v.half(), a.half(), a.half()), CUBLAS + LT),
        "triangular": (lambda a, v, b: torch.linalg.solve_triangular(a + torch.eye(4).cuda(), a, upper=True), CUBLAS),
        "no columns": (lambda a, v, b: a @ a[:, :0], 0),
        "nothing to add": (lambda a, v, b: a[:, :0] @ a[:0], 0),
        "convolution": (lambda a, v, b: F.conv1d(b, b[:, :, :1]), 0),
    }
    inputs = matrix(4, 4), matrix(4), matrix(4, 4, 4)
    before = torch.cuda.memory_allocated()
    for name, (function, expected) in takers.items():
        function(*inputs)
        assert torch.cuda.memory_allocated() - before == expected, name
        torch._C._cuda_clearCublasWorkspaces()


def test_backward_and_threads_at_once_have_handles_of_their_own_and_a_later_thread_takes_what_is_left():
    with virtual_gpus(1):
        a = matrix(4, 4).requires_grad_()
        out, forward = (a @ a).sum(), torch.cuda.memory_allocated()
        for _ in range(2):
            out.backward(retain_graph=True)
        assert torch.cuda.memory_allocated() == forward + 512 + CUBLAS  # the gradient, and the workspace
    with virtual_gpus(1):
        a, meet = matrix(4, 4), threading.Barrier(2, timeout=300)

        def work():
            multiply(a)
            meet.wait()

        for _ in range(2):
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda _: work(), range(2)))
            assert torch.cuda.memory_allocated() == 512 + 2 * CUBLAS


def test_each_gpu_and_stream_has_its_own_in_segments_of_its_own_and_gives_them_back():
    with virtual_gpus(2):
        for index in (0, 1):
            a = torch.zeros(4, 4, device=index)
            torch.addmm(a[0], a, a)
            with torch.cuda.stream(torch.cuda.Stream(index)):
                for _ in range(2):
                    b = a @ a
            assert torch.cuda.memory_allocated(index) == 2 * 512 + 2 * CUBLAS + LT
            assert torch.cuda.memory_reserved(index) == 2 * 2 * MIB + 2 * CUBLAS
            del a, b
        torch._C._cuda_clearCublasWorkspaces()
        assert [torch.cuda.memory_allocated(index) for index in (0, 1)] == [0, 0]
        assert kept(multiply)[1] == CUBLAS  # on GPUs of its own


def test_versions_nest_with_their_gpus_and_the_installed_one_is_the_default():
    def left_by_a_product():
        a = matrix(64, 64)
        a @ a
        return torch.cuda.memory_allocated() - a.nbytes

    with virtual_gpus(1, torch_version="2.14.0+cu130"):
        with virtual_gpus(1, torch_version="2.15"):
            assert left_by_a_product() == 0
            with virtual_gpus(1):
                assert active_machine().settings.version == (2, 11)
        assert active_machine().settings.version == (2, 14) and left_by_a_product() == CUBLAS


def test_only_matrices_that_cublas_cannot_read_are_copied():
    matrix = torch.empty(6, 8, device="meta")
    for readable in (matrix, matrix.t(), matrix[:, :4], matrix[::2], matrix.t()[2:], torch.empty(3, 4, 5).mT):
        assert copied_bytes(readable) == 0
    assert copied_bytes(torch.empty((), device="meta").expand(6, 8)) == 6 * 8 * 4
    assert copied_bytes(matrix[:, ::2]) == 6 * 4 * 4
    assert copied_bytes(torch.empty(2, 1, 1, device="meta").expand(2, 3, 4)) == 2 * 3 * 4 * 4


def test_linear_adds_its_bias_in_place_but_a_learners_sum_is_new(gpu):
    """For a 3-dimensional input that is not packed, `linear` is a product and then a sum."""
    layer, whole = torch.nn.Linear(64, 512, device=gpu), 32 * 128 * 512 * 4
    x = torch.zeros(32, 128, 64, device=gpu).transpose(0, 1)
    with torch.no_grad():
        assert sizes_of(lambda: layer(x)).count(whole) == 1
        assert sizes_of(lambda: x @ layer.weight.t() + layer.bias).count(whole) == 2
        scores = x @ layer.weight.t()
        for _ in range(2):
            assert sizes_of(lambda: scores + layer.bias).count(whole) == 1


def test_copies_of_matrices_and_of_results_that_are_given(gpu):
    """aten/src/ATen/native/cuda/Blas.cpp."""
    rows, given = torch.ones(256, 8192, device=gpu), torch.ones(512, 512, device=gpu)[:256, ::2]
    assert sizes_of(lambda: rows.t()[::2].mv(rows[:, 0]))[:2] == [16384, rows.nbytes // 2]
    assert sizes_of(lambda: torch.mm(rows, rows.t(), out=given))[:1] == [256 << 10]
    x, out = torch.ones(1024, 1024, device=gpu), torch.empty(0, device=gpu)
    torch._C._cuda_clearCublasWorkspaces()
    assert 36 <= peak_of(lambda: torch.mm(x, x, out=out))[1] / MIB < 36.2


@virtual_gpus(1, kind="H200", shapes_only=True)
def test_a_complex_product_is_four_real_ones():
    def product(dtype):
        x = torch.empty(8192, 8192, dtype=dtype, device="cuda")
        return times_of(lambda: x @ x)["mm"]

    assert product(torch.complex64) == pytest.approx(4 * product(torch.float32), rel=0.01)
    assert product(torch.complex128) == pytest.approx(4 * product(torch.float64), rel=0.01)


@virtual_gpus(1, shapes_only=True)  # a CPU needs 40 s for the product of integers
def test_products_in_a_byte_take_the_time_of_those_in_two_and_a_decomposition_less():
    x, half = (torch.ones(2048, 2048, device="cuda", dtype=kind) for kind in (torch.int8, torch.float16))
    product = seconds(lambda: half @ half)
    assert seconds(lambda: torch._int_mm(x, x)) == pytest.approx(product, rel=1e-9) and product > 1e-5
    assert seconds(lambda: torch.linalg.cholesky_ex(torch.eye(2048, device="cuda"))) < product


@virtual_gpus(1)
def test_a_linear_layer_whose_weight_is_no_matrix():
    """As the sharded weight of FSDP is outside of a forward pass."""
    for weight in (torch.ones(4), torch.ones(())):
        with pytest.raises(RuntimeError) as refused:
            F.linear(torch.ones(2, 4), weight, torch.ones(1))
        with pytest.raises(RuntimeError, match=re.escape(str(refused.value))):
            F.linear(torch.ones(2, 4).cuda(), weight.cuda(), torch.ones(1).cuda())
