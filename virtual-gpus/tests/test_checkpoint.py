"""Activation checkpointing and activations kept in the computer's memory: what a GPU holds, when, and the numbers."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint as ckpt
from torch.utils.checkpoint import checkpoint
from virtual_gpus import virtual_gpus

WIDTH, ROWS, BLOCKS = 64, 256, 6
ONE = WIDTH * ROWS * 4  # bytes of one activation
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
FORMS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non-reentrant": functools.partial(checkpoint, use_reentrant=False),
}
KEEP = functools.partial(ckpt.create_selective_checkpoint_contexts, PRODUCTS)
VARIANTS = FORMS | {"selective": functools.partial(checkpoint, use_reentrant=False, context_fn=KEEP)}


def network() -> nn.ModuleList:
    """Each block saves what tanh and sigmoid return, and dropout's mask; the linear layers' inputs are saved before."""
    torch.manual_seed(0)
    parts = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Dropout(0.5)
    return nn.ModuleList(copy.deepcopy(nn.Sequential(*parts)) for _ in range(BLOCKS)).to("cuda")


def data() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)


def forward(net, x, run=None):
    for block in net:
        x = block(x) if run is None else run(block, x)
    return x


def train(run=None, steps: int = 2, autocast=False, shapes_only=False):
    """(losses, gradients, [allocated after forward, peak of the step] per step) of a few steps. By the rules of PyTorch
    2.14: one cuBLAS workspace for each thread, which stays. In 2.11, a recomputation takes one of cublasLt more, and
    2.15 takes them anew for each product."""
    with virtual_gpus(1, shapes_only=shapes_only, torch_version="2.14"):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x, losses, memory = data(), [], []
        torch.cuda.manual_seed_all(3)
        for _ in range(steps):
            torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                loss = forward(net, x, run).float().square().mean()
            memory.append(torch.cuda.memory_allocated())
            loss.backward()
            memory.append(torch.cuda.max_memory_allocated())
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.grad.tolist() for p in net.parameters()] if not shapes_only else None, memory


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_the_numbers_of_plain_training_and_the_memory_of_shapes(autocast):
    plain = train(autocast=autocast)
    found = {variant: train(run, autocast=autocast) for variant, run in VARIANTS.items()}
    for variant, run in VARIANTS.items():
        assert found[variant][:2] == plain[:2]
        assert found[variant][2] == train(run, autocast=autocast, shapes_only=True)[2]
    full, selective = (found[variant][2] for variant in ("non-reentrant", "selective"))
    assert full[3] < plain[2][3]
    if not autocast:  # a block's tanh, sigmoid and mask are gone; the selective one keeps what it was told to
        assert {plain[2][2] - found[form][2][2] for form in FORMS} == {2.25 * BLOCKS * ONE}
        assert full[2] < selective[2] and selective[2] - full[2] >= (2 * BLOCKS - 1) * ONE


def test_a_recomputation_that_differs_is_an_error():
    calls = []

    def fickle(x):
        calls.append(1)
        return x.sin().half().float().cos() if len(calls) == 1 else x.sin()[:2].cos()

    with virtual_gpus(1):
        x = torch.randn(4, device="cuda", requires_grad=True)
        with pytest.raises(ckpt.CheckpointError, match="device': device\\(type='cuda', index=0\\)"):
            checkpoint(fickle, x, use_reentrant=False).sum().backward()
        checkpoint(torch.sin, x, use_reentrant=False, determinism_check="none").sum().backward()


@pytest.mark.parametrize(("shapes_only", "pin"), [(False, False), (False, True), (True, False)])
def test_save_on_cpu_holds_no_activation(shapes_only, pin):
    with virtual_gpus(1, shapes_only=shapes_only):
        net, x, packed = network().eval(), data(), []
        (expected,) = torch.autograd.grad(forward(net, x).sum(), x)
        start, context = torch.cuda.memory_allocated(), torch.autograd.graph.save_on_cpu(pin_memory=pin)
        pack = context.pack_hook
        context.pack_hook = lambda t: packed.append(pack(t)) or packed[-1]
        with context:
            y = forward(net, x)
        assert torch.cuda.memory_allocated() - start == ONE  # the output alone
        for device, kept in packed:
            assert device == torch.device("cuda", 0)
            assert shapes_only or (kept.device.type == "cpu" and kept.is_pinned() == pin)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert gradient.device == torch.device("cuda", 0) and (shapes_only or torch.equal(gradient, expected))
        table = nn.Embedding(10, 4).to("cuda")
        with torch.autograd.graph.save_on_cpu(pin_memory=pin):  # whole numbers too
            loss = F.cross_entropy(table(torch.arange(3, device="cuda")), torch.tensor([0, 1, 2]).to("cuda"))
        loss.backward()
        assert table.weight.grad.device == torch.device("cuda", 0)
