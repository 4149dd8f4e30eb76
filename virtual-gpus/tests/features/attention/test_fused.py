"""Attention and recurrent layers, whose derivatives are kernels too: what autograd and checkpoints ask of them."""

import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from virtual_gpus import virtual_gpus
from virtual_gpus.placement.storages import has_values

pytest.importorskip("virtual_gpus.features.rnn")
DTYPES = {"attention": torch.float32, "attention in bfloat16": torch.bfloat16}
NO_SECOND_DERIVATIVE = {
    "attention": "derivative for .*_efficient_attention_backward is",
    "attention in bfloat16": "derivative for .*_cudnn_attention_backward is",
    "LSTM": "trying to differentiate twice",
}
every_kind = pytest.mark.parametrize("kind", NO_SECOND_DERIVATIVE)


def layer(kind, dropout=0.0):
    """A function on cuda:0, and the leaves that it takes."""
    torch.manual_seed(0)
    if kind in DTYPES:
        leaves = [torch.randn(2, 4, 64, 64).to("cuda", DTYPES[kind]).requires_grad_() for _ in range(3)]
        return partial(F.scaled_dot_product_attention, dropout_p=dropout), leaves
    net = getattr(nn, kind)(16, 64, 2, dropout=dropout).cuda()
    names, weights = zip(*net.named_parameters(), strict=True)

    def run(x, *weights):
        return torch.func.functional_call(net, dict(zip(names, weights, strict=True)), (x,))[0]

    return run, [torch.randn(20, 8, 16, device="cuda", requires_grad=True), *weights]


@every_kind
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
def test_gradients_again_of_some_leaves_by_torch_func_and_of_gradients(kind):
    with virtual_gpus(1):
        run, leaves = layer(kind)
        loss = run(*leaves).square().sum()
        wanted = torch.autograd.grad(loss, leaves, retain_graph=True)
        by_func = torch.func.grad(lambda leaf: run(*leaves[:-1], leaf).square().sum())(leaves[-1].detach())
        torch.testing.assert_close([*torch.autograd.grad(loss, leaves), by_func], [*wanted, wanted[-1]])
        leaves[1].requires_grad_(False)
        (found,) = torch.autograd.grad(run(*leaves).square().sum(), leaves[2])
        torch.testing.assert_close(found, wanted[2])
        for leaf in leaves[1:]:
            leaf.requires_grad_(False)
        with torch.device("cpu"):  # a mode for functions
            run(*leaves).square().sum().backward()
        torch.testing.assert_close(leaves[0].grad, wanted[0])
        assert leaves[0].grad.device == leaves[0].device and leaves[1].grad is None
        run, leaves = layer(kind)  # only the plain formula has second derivatives
        first = torch.autograd.grad(run(*leaves).square().sum(), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match=NO_SECOND_DERIVATIVE[kind]):
            first[0].sum().backward()
        with pytest.raises(RuntimeError, match=r"operation: \[(torch\.cuda\.\w+Tensor|CUDABFloat16Type) \["):
            run(*leaves).mul_(2).sum().backward()
        with torch.no_grad():
            run(*leaves).mul_(2)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            first = torch.autograd.grad(run(*leaves).square().sum(), leaves, create_graph=True)
        assert torch.autograd.grad(first[0].square().sum(), leaves[1])[0].abs().sum() > 0


def with_what_is_kept_on_the_cpu(run, *leaves):
    with torch.autograd.graph.save_on_cpu():
        return run(*leaves)


@every_kind
def test_what_a_layer_keeps_is_made_anew_or_lies_on_the_cpu_and_dropout_stays_the_same(kind, gpu):
    ways = (lambda run, *leaves: run(*leaves), partial(checkpoint, use_reentrant=True),
            partial(checkpoint, use_reentrant=False), with_what_is_kept_on_the_cpu)  # fmt: skip
    found = []
    for way in ways:
        run, leaves = layer(kind, dropout=0.25)
        run(*leaves)  # makes the dropout state
        before = torch.cuda.memory_allocated()
        way(run, *leaves)
        assert torch.cuda.memory_allocated() == before
        torch.manual_seed(1)
        out = way(run, *leaves)
        gc.collect()
        kept = torch.cuda.memory_allocated() - before - out.nbytes
        out.sum().backward()
        found.append((kept, [out.detach(), *(leaf.grad for leaf in leaves)]))
        del out
    for kept, numbers in found[1:]:
        assert kept < found[0][0] / 8
        if has_values(leaves[0]):
            torch.testing.assert_close(numbers, found[0][1])


def reduction():
    return partial(torch.ones(2048, 20_000, device="cuda").sum, 0)


def recurrent():
    x, net = torch.zeros(200, 32, 64, device="cuda"), nn.LSTM(64, 256).cuda()
    return lambda: net(x)[0]


def attention(backward=False):
    x = torch.zeros(1, 1024, 16, 256, device="cuda", requires_grad=True)
    if not backward:
        return lambda: F.scaled_dot_product_attention(x, x, x)
    return partial(torch.autograd.grad, F.scaled_dot_product_attention(x, x, x).sum(), x)


@pytest.mark.parametrize(
    "work, room", [(reduction, 40), (recurrent, 40), (attention, 17), (partial(attention, True), 40)]
)
@pytest.mark.parametrize("shapes_only", [False, True], ids=["numbers", "shapes"])
def test_a_kernel_that_runs_out_of_memory_on_the_way_leaves_nothing_behind(work, room, shapes_only):
    with virtual_gpus(1, memory="1 GiB", shapes_only=shapes_only):
        run = work()
        torch.cuda.empty_cache()
        filler = torch.empty(torch.cuda.mem_get_info()[0] - (room << 20), dtype=torch.uint8, device="cuda")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with pytest.raises(torch.OutOfMemoryError):
            run()
        gc.collect()
        assert torch.cuda.max_memory_allocated() > before == torch.cuda.memory_allocated()
        del filler
        assert run() is not None
