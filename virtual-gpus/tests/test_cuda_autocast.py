"""torch.autocast("cuda") on virtual GPUs: CUDA's cast lists, its weight cache, and GradScaler."""

import importlib
import sys
import threading
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from virtual_gpus import virtual_gpus
from virtual_gpus.ops.autocast import casting, casts, lists

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
lower_precision = pytest.mark.parametrize("low", LOW.values(), ids=LOW)
with_and_without_numbers = pytest.mark.parametrize("shapes_only", [False, True], ids=["numbers", "shapes"])
KEY = torch._C.DispatchKey.AutocastCUDA


@pytest.fixture
def gpus():
    with virtual_gpus(3) as devices:
        yield devices


@pytest.fixture(autouse=True)
def all_as_before():
    def state():
        included = torch._C._dispatch_tls_local_include_set().has(KEY)
        return included, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), [
            torch._C._dispatch_dump(f"aten::{name}") for name in ("linear", "softmax.int", "norm.Scalar", "dot")
        ]  # fmt: skip

    before = state()
    yield
    assert state() == before and before[0] is False
    assert not casting._library and not casts._cast_weights


def region(low=torch.bfloat16, **options):
    return torch.autocast("cuda", dtype=low, **options)


# ---- the lists, against PyTorch's own kernels ------------------------------------------------------------------------


def test_every_operator_that_cuda_casts_is_in_a_list():
    names = torch._C._dispatch_get_all_op_names()
    cast = {n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, "AutocastCUDA")}
    missing = {n.removeprefix("aten::") for n in cast if n.startswith("aten::")} - set(casting.names())
    assert missing <= set(lists.ELSEWHERE)
    both = [n for n in lists.LOWER_PRECISION if n in lists.FP32 + lists.FP32_SET_OPT_DTYPE + lists.PROMOTE]
    assert both == []


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

    def t(*size):
        return torch.rand(size, device=device)

    nn_functions, image, square, query = torch._C._nn, t(1, 2, 4, 4), t(4, 4), t(1, 2, 4, 8)
    found = {
        "attention": (F.scaled_dot_product_attention, (query, query, query), {}),
        "attention, mask": (F.scaled_dot_product_attention, (query, query, query, square), {}),
        "einsum": (torch.einsum, ("ij,jk->ik", square, square), {}),
        "bilinear": (nn_functions.upsample_bilinear2d, (image, [8, 8], False, None), {}),
        "bicubic": (nn_functions.upsample_bicubic2d, (image, [8, 8], False, None), {}),
        "nearest exact": (nn_functions._upsample_nearest_exact1d, (image[0], [8], None), {}),
        "trilinear": (nn_functions.upsample_trilinear3d, (image[None], [8, 8, 8], False, None), {}),
        "huber": (F.huber_loss, (square, square), {}),
        "vector norm": (torch.linalg.vector_norm, (square,), {}),
        "vector norm, dtype": (torch.linalg.vector_norm, (square,), {"dtype": torch.float32}),
        "matrix norm": (torch.linalg.matrix_norm, (square, "fro"), {}),
        "matrix norm, 1": (torch.linalg.matrix_norm, (square, 1), {}),
        "norm, keepdim": (torch.norm, (square, 2), {"dim": [0], "keepdim": True}),
        "softmax, dtype": (torch.softmax, (square, 0), {"dtype": torch.float32}),
        "sum, dtype": (torch.sum, (square,), {"dtype": torch.float32}),
        "power of a number": (torch.pow, (2.0, square), {}),
        "cross entropy": (F.cross_entropy, (square, torch.zeros(4, dtype=torch.long, device=device)), {}),
        "bce with logits": (F.binary_cross_entropy_with_logits, (square, square), {}),
        "layer norm": (F.layer_norm, (square, (4,), t(4), t(4)), {}),
        "batch norm": (F.batch_norm, (image, t(2), t(2), t(2), t(2), True), {}),
        "bilinear form": (F.bilinear, (square, square, t(3, 4, 4)), {}),
        "max pool": (F.max_pool2d, (image, 2), {}),
        "cat": (torch.cat, ([square, square],), {}),
        **{function.__name__: (function, (square,), {}) for function in (F.gelu, torch.relu, torch.mean, torch.var)},
    }
    if hasattr(torch.linalg, "matrix_sqrth"):
        found["matrix_sqrth"] = (torch.linalg.matrix_sqrth, (square,), {})
    return found


def in_precision(arguments, kind: str, low):
    """The floating-point tensors among `arguments` as the test wants them: "float32", "low", "mixed", "as they are"."""
    seen = []

    def convert(value):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        seen.append(value)
        if kind == "as they are":
            return value if value.dtype == torch.float32 else value.to(low)
        return value.to(torch.float32 if kind == "float32" or (kind == "mixed" and len(seen) % 2) else low)

    return tree_map(convert, arguments)


def outcomes(cases, low) -> dict[str, object]:
    """The dtypes that each case gives under autocast, or the type of the error, for each precision of the inputs."""
    found = {}
    for name, (function, args, keywords) in cases.items():
        for kind in ("as they are", "float32", "low", "mixed"):
            given = in_precision(args, kind, low)
            try:
                made = tree_leaves(function(*given, **keywords))
                found[name, kind] = [part.dtype for part in made if isinstance(part, torch.Tensor)]
            except (RuntimeError, NotImplementedError) as error:
                found[name, kind] = type(error)
    return found


def in_pytorch(low) -> dict[str, object]:
    """`outcomes` of PyTorch's own kernels for AutocastCUDA, on tensors that say "cuda" to C++ and have no data."""
    before = torch.get_autocast_dtype("cuda")
    with FakeTensorMode():
        cases = {**pytorch_cases(torch.device("cuda")), **more_cases("cuda")}
        torch._C._dispatch_tls_set_dispatch_key_included(KEY, True)
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", low)
        try:
            return outcomes(cases, low)
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", before)
            torch._C._dispatch_tls_set_dispatch_key_included(KEY, False)
            torch.clear_autocast_cache()


@pytest.mark.skipif(
    torch.version.cuda is None, reason="a CPU build of PyTorch makes no fake CUDA tensors to compare with"
)
@pytest.mark.filterwarnings("ignore")
@lower_precision
def test_every_result_has_the_dtype_that_pytorch_gives_it(low):
    expected = in_pytorch(low)
    with virtual_gpus(1, shapes_only=True):
        cases = {**pytorch_cases(torch.device("cuda")), **more_cases("cuda")}
        with region(low):
            ours = outcomes(cases, low)
    # Fake tensors cannot do everything that a GPU can; what gives no result there says nothing.
    expected = {key: dtypes for key, dtypes in expected.items() if isinstance(dtypes, list)}
    differ = {key: (ours[key], dtypes) for key, dtypes in expected.items() if ours[key] != dtypes}
    assert differ == {} and len(expected) > 400


def test_what_is_not_eligible_stays_as_it_is(gpus):
    host = torch.ones(2, 2)
    double, whole = host.double().cuda(), host.long().cuda()
    with region():
        assert (double @ double).dtype == torch.float64 and double.softmax(0).dtype == torch.float64
        assert double.norm().dtype == torch.float64 and (host @ host).dtype == torch.float32
        assert whole.sum().dtype == torch.int64 and host.half().softmax(0).dtype == torch.float16
        assert host.bfloat16().norm().dtype == torch.bfloat16
        assert F.binary_cross_entropy(host, host).item() == 0.0
        with pytest.raises(RuntimeError, match="binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast"):
            F.binary_cross_entropy(host.cuda(), host.cuda())
        with pytest.raises(RuntimeError, match="at least two devices|is on cpu"):
            host.cuda() @ host
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            torch.dot(host[0].half().cuda(), host[0].half().cuda())


def test_gradients_come_back_in_the_dtype_of_the_weights(gpus):
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).to(gpus[1])
    x = torch.randn(5, 4, device=gpus[1], requires_grad=True)
    with region():
        loss = F.cross_entropy(net(x), torch.zeros(5, dtype=torch.long, device=gpus[1]))
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.device == gpus[1] for p in [x, *net.parameters()])
    with region():
        out = net(x).float()
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert torch.autograd.grad(first.sum(), x)[0].isfinite().all()


# ---- regions -------------------------------------------------------------------------------------------------------


def product():
    x = torch.ones(2, 2, device="cuda")
    return (x @ x).dtype


@pytest.mark.filterwarnings("error")
def test_every_way_to_enter(gpus):
    float32, half, bfloat16 = torch.float32, torch.float16, torch.bfloat16
    with torch.autocast("cuda"):
        assert product() == half
    with torch.amp.autocast("cuda", dtype=bfloat16):
        assert product() == bfloat16
        with torch.autocast("cuda", enabled=False):
            assert product() == float32
            with region(half):
                assert product() == half
            assert product() == float32
        assert product() == bfloat16
    assert product() == float32
    with pytest.warns(FutureWarning), torch.cuda.amp.autocast(dtype=bfloat16):
        assert product() == bfloat16
    with pytest.warns(FutureWarning):
        assert torch.cuda.amp.autocast()(product)() == half
    assert region()(product)() == bfloat16 and product() == float32
    torch.set_autocast_enabled("cuda", True)
    assert product() == half
    torch.set_autocast_enabled("cuda", False)
    assert product() == float32


def test_exceptions_end_a_region(gpus):
    with pytest.raises(ZeroDivisionError), region():
        raise ZeroDivisionError
    assert product() == torch.float32
    with region():
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.ones(2, 3, device="cuda") @ torch.ones(2, 3, device="cuda")
        assert product() == torch.bfloat16


def test_composites_in_inference_mode(gpus):
    x, target = torch.randn(4, 4, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")
    with torch.inference_mode(), region():
        made = F.linear(x, x)
        assert made.dtype == torch.bfloat16 and F.cross_entropy(made, target).dtype == torch.float32
        assert F.scaled_dot_product_attention(*[x[None, None]] * 3).dtype == torch.bfloat16


def test_other_threads_decide_for_themselves(gpus):
    seen = []

    def work():
        seen.append(product())
        with region(torch.float16):
            seen.append(product())
        seen.append(product())

    with region():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert product() == torch.bfloat16
    assert seen == [torch.float32, torch.float16, torch.float32]


def test_replicas_start_as_new_threads_do(gpus):
    """PyTorch hands on whether autocast is enabled, but not its dtype: float16 in the replicas of nn.DataParallel."""

    class Seen(nn.Linear):
        dtypes = []

        def forward(self, x):
            made = super().forward(x)
            Seen.dtypes.append(made.dtype)
            return made

    net = nn.DataParallel(Seen(4, 2).cuda())
    with region():
        made = net(torch.randn(6, 4, device="cuda"))
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16 and product() == torch.bfloat16
    assert Seen.dtypes == [torch.float16] * 3 and made.dtype == torch.float16
    made.sum().backward()
    assert net.module.weight.grad.dtype == torch.float32


def test_custom_functions(gpus):
    seen = []

    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x @ x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            seen.append((gradient @ ctx.saved_tensors[0]).dtype)
            return gradient

    x = torch.ones(2, 2, device="cuda", requires_grad=True)
    with region():
        y = Square.apply(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and seen == [torch.bfloat16]


def test_cpu_autocast_beside(gpus):
    host, there = torch.ones(2, 2), torch.ones(2, 2, device="cuda")
    with torch.autocast("cpu", dtype=torch.bfloat16), region(torch.float16):
        assert (host @ host).dtype == torch.bfloat16 and (there @ there).dtype == torch.float16
        assert there.half().softmax(0).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (host @ host).dtype == torch.bfloat16


def test_gpus_that_go_off_within_a_region():
    gpus = virtual_gpus(1)
    gpus.start()
    with region():
        assert product() == torch.bfloat16
        gpus.stop()
        x = torch.ones(2, 2)
        assert (x @ x).dtype == torch.float32
    with virtual_gpus(1):
        assert product() == torch.float32
        with region(), virtual_gpus(1):
            assert product() == torch.bfloat16


def test_a_region_that_nobody_left_ends_with_the_gpus():
    try:
        with virtual_gpus(1):
            left = region()
            left.__enter__()
            assert product() == torch.bfloat16
        with virtual_gpus(1):
            x = torch.ones(1, 1, 2, 2, device="cuda")
            assert product() == F.scaled_dot_product_attention(x, x, x).dtype == torch.float32
            assert casting.cast_for("linear", [x])[0] is x
    finally:
        left.__exit__(None, None, None)


# ---- the cache of cast weights ---------------------------------------------------------------------------------------


def counter():
    """A function: the bytes on cuda:0 above what was there at the start."""
    start = torch.cuda.memory_allocated()
    return lambda: torch.cuda.memory_allocated() - start


@pytest.fixture
def kept_workspaces(monkeypatch):
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")


@with_and_without_numbers
def test_weights_are_cast_once_per_region(shapes_only, kept_workspaces):
    with virtual_gpus(1, shapes_only=shapes_only):
        weight = torch.randn(1024, 1024, device="cuda", requires_grad=True)
        x = torch.randn(4, 1024, device="cuda").bfloat16()
        with region():
            x @ weight  # workspaces
        held = counter()
        half = weight.numel() * 2
        with region():
            for _ in range(3):
                x @ weight
            assert held() == half
            with torch.autocast("cuda", enabled=False):
                assert held() == half  # only the outermost region's end clears
            assert held() == half
            torch.clear_autocast_cache()
            assert held() == 0
            with region():
                x @ weight
            assert held() == half
        assert held() == 0
        with region(cache_enabled=False):
            x @ weight
            assert held() == 0


def test_only_leaves_that_need_gradients_are_kept(gpus, kept_workspaces):
    weight = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    x, made, view = torch.randn(4, 1024, device="cuda"), weight * 1, weight.T
    plain = weight.detach().clone()
    with region():
        x @ weight
    held = counter()
    with region():
        for other in (made, view, plain):
            x @ other
            assert held() == 0
        with torch.inference_mode():
            x @ weight
        assert held() == 0
        with torch.no_grad():
            x @ weight
        assert held() == 2 * weight.numel()
        y = x @ weight  # from the cache, with its graph all the same
        assert y.requires_grad
    y.float().sum().backward()
    assert weight.grad is not None


def test_a_weight_that_went_is_not_mistaken_for_another(gpus):
    with region():
        for number in range(20):
            weight = torch.full((2, 2), float(number), device="cuda", requires_grad=True)
            assert (torch.ones(1, 2, device="cuda") @ weight).tolist() == [[2.0 * number] * 2]


def test_cast_for_patches(gpus):
    weight = torch.ones(2, 2, device="cuda", requires_grad=True)
    whole, host = torch.ones(2, device="cuda").long(), torch.ones(2)
    given = [weight, None, whole, host]

    @casting.casting("scaled_dot_product_attention")
    def attend(query, *, mask=None):
        return query.dtype, mask.dtype, torch.is_autocast_enabled("cuda")

    assert all(a is b for a, b in zip(casting.cast_for("linear", given), given, strict=True))
    assert attend(weight, mask=weight) == (torch.float32, torch.float32, False)
    with region():
        made = casting.cast_for("scaled_dot_product_attention", given)
        assert made[0].dtype == torch.bfloat16 and made[1] is None and made[2] is whole and made[3] is host
        assert casting.cast_for("linear", given)[0] is made[0]  # from the cache
        assert casting.cast_for("_cudnn_rnn", given)[0].dtype == torch.float16
        assert casting.cast_for("layer_norm", [made[0]])[0].dtype == torch.float32
        assert casting.cast_for("dot", [made[0], weight])[0].dtype == torch.float32
        assert attend(weight, mask=weight) == (torch.bfloat16, torch.bfloat16, False)
        assert torch.is_autocast_enabled("cuda")


# ---- memory --------------------------------------------------------------------------------------------------------


def network():
    """Images of 16 x 16 -> 10 logits, through what autocast runs in each precision."""
    encoder = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True, norm_first=True)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 8, 2, 2), nn.PReLU(),
                         nn.GroupNorm(2, 8), nn.Upsample(scale_factor=2, mode="bilinear"), nn.MaxPool2d(2),
                         nn.AdaptiveAvgPool2d(4), nn.Flatten(2), encoder, nn.Flatten(), nn.Linear(128, 10))  # fmt: skip


def train(low):
    """[(allocated, peak, reserved) after each of two steps] with a GradScaler, then its state."""
    torch.manual_seed(0)
    net, batch = network().cuda(), torch.randn(4, 3, 16, 16).cuda()
    optimizer, scaler = torch.optim.AdamW(net.parameters()), torch.amp.GradScaler("cuda", init_scale=8.0)
    figures = []
    for _ in range(2):
        with region(low):
            loss = F.cross_entropy(net(batch), torch.zeros(len(batch), dtype=torch.long, device="cuda"))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        figures.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()))
    return figures, scaler.state_dict()


@lower_precision
def test_same_memory_with_shapes_only(low):
    results = []
    for shapes_only in (False, True):
        with virtual_gpus(1, shapes_only=shapes_only):
            results.append(train(low))
    assert results[0] == results[1] and results[1][1]["_growth_tracker"] == 2


# ---- GradScaler ----------------------------------------------------------------------------------------------------


def scaled_step(scaler, optimizer, weights, factors):
    """One step with gradients of these factors."""
    optimizer.zero_grad()
    scaler.scale(sum((w * f).sum().to(weights[0].device) for w, f in zip(weights, factors, strict=True))).backward()
    scaler.step(optimizer)
    scaler.update()


def test_grad_scaler_finds_overflow_on_any_gpu(gpus):
    weights = [torch.ones(3, device=gpu, requires_grad=True) for gpu in gpus]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
    scaled_step(scaler, optimizer, weights, [1.0, 2.0, 4.0])
    assert [w.tolist() for w in weights] == [[0.0] * 3, [-1.0] * 3, [-3.0] * 3] and scaler.get_scale() == 1024.0
    scaled_step(scaler, optimizer, weights, [1.0, 1.0, 1.0])
    assert scaler.get_scale() == 2048.0
    for place in range(3):
        scaled_step(scaler, optimizer, weights, [float("inf") if place == other else 1.0 for other in range(3)])
        assert [w.tolist() for w in weights] == [[-1.0] * 3, [-2.0] * 3, [-4.0] * 3]
        assert scaler.get_scale() == 1024.0 / 2**place and scaler._get_growth_tracker() == 0
    optimizer.zero_grad()
    scaler.scale(sum(w.sum().to(gpus[0]) for w in weights)).backward()
    scaler.unscale_(optimizer)
    found = scaler._found_inf_per_device(optimizer)
    assert {device: value.item() for device, value in found.items()} == dict.fromkeys(gpus, 0.0)
    assert all(value.device == device for device, value in found.items())
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["", "foreach", "fused"])
def test_shapes_only_counts_as_no_overflow(options):
    results = []
    for shapes_only in (False, True):
        with virtual_gpus(2, shapes_only=shapes_only):
            weights = [torch.ones(300, device=f"cuda:{i}", requires_grad=True) for i in range(2)]
            optimizer = torch.optim.Adam(weights, **options)
            scaler = torch.amp.GradScaler("cuda", init_scale=4.0, growth_interval=2)
            for _ in range(3):
                scaled_step(scaler, optimizer, weights, [1.0, 1.0])
            assert all("exp_avg" in optimizer.state[w] for w in weights)
            figures = [(torch.cuda.memory_allocated(i), torch.cuda.max_memory_allocated(i)) for i in range(2)]
            results.append((figures, scaler.state_dict()))
            again = torch.amp.GradScaler("cuda")
            again.load_state_dict(scaler.state_dict())
            assert again.get_scale() == 8.0 and again.scale(torch.ones((), device="cuda")).is_cuda
            assert again.get_scale() == 8.0 and again._get_growth_tracker() == 1
            again.update(16.0)
            assert again.get_scale() == 16.0
            scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
            assert scaler.get_scale() == 2.0
    assert results[0] == results[1]
