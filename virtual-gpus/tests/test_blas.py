"""Workspaces of cuBLAS and cublasLt: how large, for whom, for how long. Expected figures are derived by hand."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from measuring import MIB, table, with_and_without_numbers
from torch import nn
from virtual_gpus import active_machine, virtual_gpus

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


@pytest.mark.parametrize(("version", "settings", "product", "biased"), table("cublas_workspaces")["rules"])
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


@with_and_without_numbers
def test_an_operator_leaves_its_workspaces(shapes_only):
    takers = {
        "mm": (lambda a, v, b: torch.mm(a, a), CUBLAS),
        "bmm": (lambda a, v, b: torch.bmm(b, b), CUBLAS),
        "baddbmm": (lambda a, v, b: torch.baddbmm(b, b, b), CUBLAS),
        "mv": (lambda a, v, b: torch.mv(a, v), CUBLAS),
        "dot": (lambda a, v, b: torch.dot(v, v), CUBLAS),
        "linear": (lambda a, v, b: nn.functional.linear(a, a, v), CUBLAS + LT),
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
        "convolution": (lambda a, v, b: nn.functional.conv1d(b, b[:, :, :1]), 0),
    }
    with virtual_gpus(1, shapes_only=shapes_only):
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
