"""torch.compile: the same numbers and the same memory as without it, and PyTorch's own objects."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from measuring import recorded
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from virtual_gpus import record_timeline, virtual_gpus
from virtual_gpus.features.compile import compiler
from virtual_gpus.gpus import spec

LINE = "virtual GPUs: torch.compile compiles nothing for a GPU; the program runs as it is\n"
COMPILE = {
    "mode": lambda net: torch.compile(net, mode="reduce-overhead", fullgraph=True),
    "a backend of one's own": lambda net: torch.compile(net, backend=lambda *_: pytest.fail("A backend was called.")),
    "module.compile": lambda net: net.compile(dynamic=True) or net,
}


def train(compiled, shapes_only: bool = False) -> tuple[list[str], int]:
    """Losses of a training in nanoGPT's form, and its peak in bytes."""
    with virtual_gpus(2, shapes_only=shapes_only):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(10, 32), nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 10))
        optimizer = torch.optim.AdamW(net.to("cuda:1").parameters(), fused=True)
        scaler, run, losses = torch.amp.GradScaler("cuda"), compiled(net), []
        tokens = torch.arange(20, device="cuda:1") % 10
        for _ in range(2):
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(run(tokens), tokens)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            losses.append(str(loss.item()))
        return losses, torch.cuda.max_memory_allocated(1)


def test_numbers_and_memory_are_those_of_the_program_without_it():
    eager = train(lambda net: net)
    for name, how in COMPILE.items():
        assert train(how) == eager, name
        assert train(how, shapes_only=True)[1] == eager[1], name


def test_what_is_returned_is_pytorch_s_and_it_says_once_that_nothing_is_compiled(capsys):
    compiler._say_once.cache_clear()
    with virtual_gpus(1):
        net = nn.Linear(4, 2).cuda()
        assert torch.compile(net, backend="eager")(torch.ones(4, device="cuda")).is_cuda
        assert torch.compile(net, disable=True) is net
        with torch._dynamo.config.patch(disable=True):  # as TORCH_COMPILE_DISABLE=1 does
            torch.compile(net)
        assert capsys.readouterr().out == ""
        torch.compile(net)
        torch.compile(mode="max-autotune")(net)
        compiled = torch.compile(net)
        assert type(compiled) is torch._dynamo.OptimizedModule and compiled._orig_mod is net
        assert list(compiled.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]
        with pytest.raises(RuntimeError, match="Invalid backend: 'fast'"):
            torch.compile(net, backend="fast")
        with pytest.raises(RuntimeError, match="Either mode or options"):
            torch.compile(net, mode="default", options={"epilogue_fusion": True})
    assert capsys.readouterr().out == LINE


def test_functions_that_were_compiled_before_run_too_and_compile_again_afterwards():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled_before = torch.compile(lambda x: x.relu() + torch.arange(4, device=x.device))
    double = torch.compile(lambda x: x * 2, backend=backend)
    with torch.compiler.set_stance("eager_on_recompile"), virtual_gpus(2):
        y = compiled_before(torch.ones(3, 4, device="cuda:1"))
        assert y.device == torch.device("cuda:1") and y.sum().item() == 30
        assert double(torch.ones(2, device="cuda")).is_cuda and double(torch.ones(2)).sum().item() == 4
        torch.compiler.set_stance("default")
        with torch.compiler.set_stance("fail_on_recompile"):
            assert double(torch.ones(2, device="cuda")).is_cuda
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert not graphs and double(torch.ones(2)).sum().item() == 4 and len(graphs) == 1


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention():
    attention = torch.compile(flex_attention)  # which compiles for itself too
    torch.manual_seed(0)
    q, distance = torch.randn(1, 2, 128, 16), torch.arange(128)[:, None] - torch.arange(128)
    bias, wanted = distance.float().masked_fill(distance < 0, -torch.inf), q.clone().requires_grad_()
    expected = F.scaled_dot_product_attention(wanted, wanted, wanted, attn_mask=bias)
    expected.sum().backward()
    with virtual_gpus(2):
        x = q.to("cuda:1").requires_grad_()
        mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 2, 128, 128, device="cuda:1")
        y = attention(x, x, x, score_mod=lambda score, b, h, i, j: score + (i - j), block_mask=mask)
        y.sum().backward()
        assert y.device == x.grad.device == torch.device("cuda:1")
        torch.testing.assert_close(y.cpu(), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(x.grad.cpu(), wanted.grad, atol=1e-4, rtol=1e-4)


def step_seconds(compiled, values: bool = True, **options) -> tuple[float, int]:
    """Modelled seconds of a forward and a backward pass, and their peak in bytes."""
    with virtual_gpus(1, shapes_only=not values, **options):
        net = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256)).cuda()
        run, x = compiled(net), torch.ones(1024, 256, device="cuda")
        for _ in range(2):
            torch.cuda.synchronize()
            with record_timeline() as timeline:
                F.layer_norm(run(x) * 2 + x, (256,)).sum().backward()
                torch.cuda.synchronize()
        return timeline.seconds, torch.cuda.max_memory_allocated()


def test_a_compiled_module_s_operators_are_fused_if_one_asks_for_it():
    eager = step_seconds(lambda net: net)
    assert step_seconds(COMPILE["mode"]) == eager == step_seconds(lambda net: net, compile="modelled")
    fused = step_seconds(COMPILE["mode"], compile="modelled")
    assert fused[0] < 0.95 * eager[0] and fused[1] == eager[1]
    assert step_seconds(COMPILE["module.compile"], compile="modelled") == fused
    assert step_seconds(lambda net: torch.compile(dynamic=True)(net), compile="modelled") == fused
    assert step_seconds(COMPILE["mode"], values=False, compile="modelled")[0] == pytest.approx(fused[0])
    for off in ({"disable": True}, {"backend": "eager"}):
        assert step_seconds(lambda net, off=off: torch.compile(net, **off), compile="modelled") == eager
    with pytest.raises(ValueError, match='compile must be "eager" or "modelled", not \'fast\''):
        virtual_gpus(1, compile="fast")


def passes(function, *args) -> float:
    """How often the kernels of a call move 256 MiB, to one decimal."""
    timeline = recorded(lambda: (function(*args), torch.cuda.synchronize()))
    return round(timeline.busy_seconds(0) / spec("H200").seconds_to_move(2**28), 1)


def test_what_leaves_compiled_code_is_written_once_and_eager_code_stays_eager():
    chain = lambda a: ((a * 2).relu() - 1).sigmoid()  # noqa: E731
    with virtual_gpus(2, kind="H200", compile="modelled", shapes_only=True):
        x, w = (torch.empty(8192, 8192, device="cuda", requires_grad=trains) for trains in (False, True))
        eager, gradient = chain(w), torch.empty_like(w)
        before = passes(eager.backward, gradient)
        functions = (lambda a: [a * 2], lambda a: torch.zeros_like(a) + 1, lambda a: a[:4096].mul_(2))
        assert [passes(torch.compile(function), x) for function in functions] == [2, 1, 1]
        changes, sends = (torch.compile(f) for f in (lambda a: a.mul_(2), lambda a: (a * 2).to("cuda:1").sum()))
        assert passes(changes, x) == passes(changes, x) == 2 == passes(sends, x)
        result, w.grad = torch.compile(chain)(w), None
        assert passes(result.backward, gradient) == 3  # reads the gradient and the result, writes the other gradient
        eager, after = chain(w), torch.compile(chain)(w)
        w.grad = None
        assert passes(eager.backward, gradient) == before
        assert passes(after.backward, gradient) == pytest.approx(3 + 3, abs=0.1)  # added to the gradient that is there
