"""torch.autocast("cuda") on virtual GPUs: CUDA's cast lists, its weight cache, and GradScaler."""

import importlib
import itertools
import multiprocessing
import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from virtual_gpus import active_machine, virtual_gpus
from virtual_gpus.dispatch import operators
from virtual_gpus.features import autocast

BF16 = torch.bfloat16
GPUS = {"count": 3}
KINDS = [(torch.float32, BF16), (BF16, torch.float32), (BF16, BF16)]  # of floating-point arguments, in turn
KEY = torch._C.DispatchKey.AutocastCUDA


@pytest.fixture(autouse=True)
def all_as_before():
    def state():
        included = torch._C._dispatch_tls_local_include_set().has(KEY)
        kernels = [torch._C._dispatch_dump(f"aten::{name}") for name in ("linear", "softmax.int", "norm.Scalar", "dot")]
        return included, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), kernels

    before = state()
    yield
    assert state() == before and before[0] is False
    assert not autocast._library and not autocast._cast_weights


def region(low=torch.bfloat16, **options):
    return torch.autocast("cuda", dtype=low, **options)


def test_every_operator_that_cuda_casts_is_in_a_list():
    names = torch._C._dispatch_get_all_op_names()
    cast = {n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, "AutocastCUDA")}
    missing = {n.removeprefix("aten::") for n in cast if n.startswith("aten::")} - set(autocast.names())
    assert missing <= {"_cudnn_rnn", "norm.Scalar", "norm.ScalarOpt_dim", "norm.names_ScalarOpt_dim"}
    unknown = {n for n in operators.AUTOCAST if f"aten::{n}" not in names and "imname" not in n}
    assert unknown <= {"linalg_matrix_sqrth"}  # which came with 2.15, when named dimensions went
    assert {*operators.AUTOCAST.values()} == autocast._POLICIES.keys()


def pytorch_cases(device) -> dict[str, tuple]:
    """{name: (function, arguments, keywords)} of the operators in PyTorch's own tests of autocast."""
    name, stub = "torch.testing._internal.common_utils", types.ModuleType("common_utils")
    stub.TEST_WITH_ROCM, stub.TestCase = False, object  # all that the lists take from a module full of requirements
    before = sys.modules.get(name)
    sys.modules[name] = stub
    try:
        made = importlib.import_module("torch.testing._internal.autocast_test_lists").AutocastTestLists(device)
    finally:
        sys.modules.pop("torch.testing._internal.autocast_test_lists", None)
        sys.modules.pop(name) if before is None else sys.modules.update({name: before})
    groups = {name: torch for name in ("torch_fp16", "torch_fp32", "torch_need_autocast_promote")}
    groups |= {"torch_expect_builtin_promote": torch, "nn_fp16": torch._C._nn, "nn_fp32": torch._C._nn}
    groups |= {"linalg_fp16": torch._C._linalg}
    found = {}
    for group, module in groups.items():
        for number, (operator, args, *rest) in enumerate(getattr(made, group)):
            if not operator.startswith("cudnn") and operator not in ("einsum", "equal"):  # not on a CPU; not callable
                keywords = rest[0] if rest and isinstance(rest[0], dict) else {}
                found[f"{group} {number} {operator}"] = (getattr(module, operator), args, keywords)
    return found


def more_cases(device) -> dict[str, tuple]:
    """Operators that PyTorch's tests leave out."""
    image, square, query = (torch.rand(size, device=device) for size in ((1, 2, 4, 4), (4, 4), (1, 2, 4, 8)))
    norm, up = torch.linalg, torch._C._nn
    cases = [
        (F.scaled_dot_product_attention, query, query, query),
        (torch.einsum, "ij,jk->ik", square, square),
        (up.upsample_bilinear2d, image, [8, 8], False, None),
        (up.upsample_bicubic2d, image, [8, 8], False, None),
        (up._upsample_nearest_exact1d, image[0], [8], None),
        (up.upsample_trilinear3d, image[None], [8, 8, 8], False, None),
        (F.huber_loss, square, square),
        (norm.matrix_norm, square, "fro"),
        (norm.matrix_norm, square, 1),
        (partial(torch.softmax, dtype=torch.float64), square, 0),
        (partial(torch.sum, dtype=torch.float64), square),
        (torch.pow, 2.0, square),
        *((norm.matrix_sqrth, square) for _ in range(hasattr(norm, "matrix_sqrth"))),
    ]
    return {f"more {n}": (function, tuple(args), {}) for n, (function, *args) in enumerate(cases)}


def outcomes() -> dict[tuple, object]:
    """The dtypes that each case gives with these inputs, or the type of the error."""
    found = {}
    for name, (function, args, keywords) in {**pytorch_cases(torch.device("cuda")), **more_cases("cuda")}.items():
        for kind in KINDS:
            dtypes = itertools.cycle(kind)

            def convert(value, dtypes=dtypes):
                is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
                return value.to(next(dtypes)) if is_float else value

            try:
                made = pytree.tree_leaves(function(*pytree.tree_map(convert, args), **keywords))
                found[name, kind] = [part.dtype for part in made if isinstance(part, torch.Tensor)]
            except (RuntimeError, NotImplementedError) as error:
                found[name, kind] = type(error)
    return found


def in_pytorch() -> dict[tuple, object]:
    """`outcomes` of PyTorch's own kernels for AutocastCUDA, on tensors that say "cuda" to C++ and have no data."""
    before = torch.get_autocast_dtype("cuda")
    with torch._subclasses.FakeTensorMode():
        torch._C._dispatch_tls_set_dispatch_key_included(KEY, True)
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            return outcomes()
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", before)
            torch._C._dispatch_tls_set_dispatch_key_included(KEY, False)
            torch.clear_autocast_cache()


@pytest.mark.skipif(torch.version.cuda is None, reason="a CPU build of PyTorch makes no fake CUDA tensors")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process of its own, with PyTorch imported")
@pytest.mark.filterwarnings("ignore")
def test_every_result_has_the_dtype_that_pytorch_gives_it():
    # Once C++ believes in a GPU, a backward pass starts threads for it, and no fork of the process can have one.
    with multiprocessing.get_context("fork").Pool(1) as elsewhere:
        expected = elsewhere.apply(in_pytorch)
    with virtual_gpus(1, shapes_only=True), region():
        ours = outcomes()
    # Fake tensors cannot do everything that a GPU can; what gives no result there says nothing.
    expected = {key: dtypes for key, dtypes in expected.items() if isinstance(dtypes, list)}
    differ = {key: (ours[key], dtypes) for key, dtypes in expected.items() if ours[key] != dtypes}
    assert differ == {} and len(expected) > 300


def test_what_is_not_eligible_stays_as_it_is(gpus):
    host = torch.ones(2, 2)
    double, whole = host.double().cuda(), host.long().cuda()
    with region():
        assert {made.dtype for made in (double @ double, double.softmax(0), double.norm())} == {torch.float64}
        assert (host @ host).dtype == torch.float32 and whole.sum().dtype == torch.int64
        assert host.half().softmax(0).dtype == torch.float16 and host.bfloat16().norm().dtype == torch.bfloat16
        assert F.binary_cross_entropy(host, host).item() == 0.0
        with pytest.raises(RuntimeError, match="binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast"):
            F.binary_cross_entropy(host.cuda(), host.cuda())
        with pytest.raises(RuntimeError, match="at least two devices|is on cpu"):
            host.cuda() @ host


def product():
    x = torch.ones(2, 2, device="cuda")
    return (x @ x).dtype


@pytest.mark.filterwarnings("error")
def test_every_way_to_enter_and_leave(gpus):
    float32, half, bfloat16 = torch.float32, torch.float16, torch.bfloat16
    with torch.autocast("cuda"):
        assert product() == half
    with torch.amp.autocast("cuda", dtype=bfloat16):
        with torch.autocast("cuda", enabled=False):
            assert product() == float32
            with region(half):
                assert product() == half
            assert product() == float32
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.ones(2, 3, device="cuda") @ torch.ones(2, 3, device="cuda")
        assert product() == bfloat16
    with pytest.warns(FutureWarning), torch.cuda.amp.autocast(dtype=bfloat16), torch.inference_mode():
        assert product() == bfloat16
    with pytest.warns(FutureWarning):
        assert torch.cuda.amp.autocast()(product)() == half
    assert region()(product)() == bfloat16 and product() == float32
    torch.set_autocast_enabled("cuda", True)
    assert product() == half
    torch.set_autocast_enabled("cuda", False)
    with pytest.raises(ZeroDivisionError), region():
        raise ZeroDivisionError
    assert product() == float32


def test_other_threads_decide_for_themselves_and_replicas_start_as_new_ones(gpus):
    def work():
        before = product()
        with region(torch.float16):
            return before, product()

    with region(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == (torch.float32, torch.float16)
        assert product() == torch.bfloat16
    # PyTorch hands on whether autocast is enabled, but not its dtype: float16 in the replicas of nn.DataParallel.
    net = nn.Linear(4, 2).cuda()
    with region():
        made = nn.DataParallel(net)(torch.randn(6, 4, device="cuda"))
        assert product() == torch.bfloat16
    made.sum().backward()
    assert made.dtype == torch.float16 and net.weight.grad.dtype == torch.float32


def test_gpus_that_go_off_within_a_region():
    gpus = virtual_gpus(1)
    gpus.start()
    with region():
        assert product() == torch.bfloat16
        gpus.stop()
        x = torch.ones(2, 2)
        assert (x @ x).dtype == torch.float32
    with virtual_gpus(1):
        left = region()  # nobody leaves it in time
        left.__enter__()
        assert product() == torch.bfloat16
    try:
        with virtual_gpus(1):
            x = torch.ones(1, 1, 2, 2, device="cuda")
            assert product() == F.scaled_dot_product_attention(x, x, x).dtype == torch.float32
            with region(), virtual_gpus(1):
                assert product() == torch.bfloat16
    finally:
        left.__exit__(None, None, None)


def test_weights_that_need_gradients_are_cast_once_per_region(gpu, monkeypatch):
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    weight = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    x = torch.randn(4, 1024, device="cuda").bfloat16()
    others = weight * 1, weight.T, weight.detach().clone()

    def held():
        """Bytes that are kept after one more product."""
        x @ weight
        return torch.cuda.memory_allocated() - start

    with region():
        x @ weight  # workspaces
    start, half = torch.cuda.memory_allocated(), weight.numel() * 2
    with region():
        for other in others:
            x @ other
        with torch.inference_mode():
            assert held() == 0
        with torch.no_grad():
            assert held() == half
        assert held() == half
        with torch.autocast("cuda", enabled=False):
            pass  # only the outermost region's end clears
        assert torch.cuda.memory_allocated() - start == half
        torch.clear_autocast_cache()
        assert torch.cuda.memory_allocated() == start and held() == half
    assert torch.cuda.memory_allocated() == start
    with region(cache_enabled=False):
        assert held() == 0
    with region():
        with torch.no_grad():
            x @ weight
        y = x @ weight  # from the cache, with its graph all the same
    y.float().sum().backward()
    assert weight.grad is not None


def test_a_weight_that_went_is_not_mistaken_for_another(gpus):
    with region():
        for number in range(20):
            weight = torch.full((2, 2), float(number), device="cuda", requires_grad=True)
            assert (torch.ones(1, 2, device="cuda") @ weight).tolist() == [[2.0 * number] * 2]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["", "foreach", "fused"])
def test_shapes_only_counts_as_no_overflow(options):
    results = []
    for shapes_only in (False, True):
        with virtual_gpus(2, shapes_only=shapes_only):
            weights = [torch.ones(300, device=f"cuda:{i}", requires_grad=True) for i in range(2)]
            optimizer = torch.optim.Adam(weights, **options)
            scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
            for _ in range(3):
                optimizer.zero_grad()
                scaler.scale(sum(w.sum().to("cuda:0") for w in weights)).backward()
                scaler.step(optimizer)
                scaler.update()
            seconds = round(active_machine().clock.now, 12)  # the host waits for each GPU's answer
            assert scaler.get_scale() == 4.0 and all("exp_avg" in optimizer.state[w] for w in weights)
            figures = [(torch.cuda.memory_allocated(i), torch.cuda.max_memory_allocated(i)) for i in range(2)]
            results.append((figures, seconds, [scaler.state_dict()[name] for name in ("scale", "growth_factor")]))
    assert results[0] == results[1]
