"""Every optimizer of torch.optim, on one GPU and spread over two, against the CPU's plain loop over the parameters."""

import copy
import functools
import gc
import inspect

import pytest
import torch
from measuring import allocated, seconds, sizes_of
from torch import nn
from torch.optim import lr_scheduler
from virtual_gpus import virtual_gpus

pytestmark = pytest.mark.usefixtures("workspaces_given_back", "gpus")
GPUS = {"count": 3, "memory": "16 GiB"}
SPECIAL = {"LBFGS", "SparseAdam"}  # the first has no operator of its own, the second is in PROGRAMS below
NEEDS_MATRICES = {"Muon"}  # refuses parameters that are not 2-D
CLASSES = {name: kind for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
KINDS = {name: kind for name, kind in CLASSES.items() if issubclass(kind, torch.optim.Optimizer)}
OPTIMIZERS = {name: kind for name, kind in KINDS.items() if name not in ("Optimizer", *SPECIAL)}


def accepted(name):
    return inspect.signature(OPTIMIZERS[name]).parameters


def refuses_fused_on_cuda(name):
    """Adagrad has a fused kernel for CUDA only in newer versions of PyTorch, and says so itself."""
    group = getattr(OPTIMIZERS[name], "_init_group", None)
    return group is not None and "cuda_unsupported=True" in inspect.getsource(group)


def ways(name):
    """This optimizer's own switches: a loop, foreach (the default on a GPU, see below), fused, and with capturable."""
    ways = [{"foreach": False}, {"foreach": True}] if "foreach" in accepted(name) else [{}]
    if "fused" in accepted(name) and not refuses_fused_on_cuda(name):
        ways.append({"fused": True})
    return ways + [{**way, "capturable": True} for way in ways[1:] if "capturable" in accepted(name)]


def extras(name):
    """Options that reach more of an optimizer's arithmetic than its defaults do."""
    wanted = {"momentum": 0.9, "weight_decay": 0.01, "amsgrad": True, "maximize": True}
    return {key: value for key, value in wanted.items() if key in accepted(name)}


def net_on(name, places):
    """Three layers; layer i lives on places[i % len(places)]."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=name not in NEEDS_MATRICES) for _ in range(3)]
    return nn.ModuleList(layer.to(places[i % len(places)]) for i, layer in enumerate(layers))


def forward(layers):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    for layer in layers:
        x = layer(x.to(layer.weight.device)).tanh()
    return x.square().mean()


def train(layers, optimizer, count=3):
    for _ in range(count):
        optimizer.zero_grad()
        forward(layers).backward()
        optimizer.step()


def steps(name, places, count=3, **options):
    layers = net_on(name, places)
    optimizer = OPTIMIZERS[name](layers.parameters(), lr=0.05, **extras(name), **options)
    train(layers, optimizer, count)
    return layers, optimizer


@functools.cache
def on_the_cpu(name, count=3):
    return steps(name, ["cpu"], count, **({"foreach": False} if "foreach" in accepted(name) else {}))[0]


def assert_same_weights(found, expected, atol=2e-6, rtol=1e-5):
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert one.grad.device == one.device
        torch.testing.assert_close(one.detach().cpu(), other.detach().cpu(), atol=atol, rtol=rtol)


def assert_state_beside_parameters(optimizer, way):
    """All but 0-dim counters are on the parameter's GPU; those are too where the kernels read them there."""
    assert optimizer.state or "momentum" not in optimizer.defaults
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                if value.dim() or way.get("fused") or way.get("capturable"):
                    assert value.device == parameter.device, key
                elif key == "step" and not isinstance(optimizer, torch.optim.ASGD):  # ASGD always keeps it there
                    assert value.device == torch.device("cpu"), key


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in OPTIMIZERS for way in ways(name)])
def test_weights_are_the_cpus_and_states_beside_their_parameters(name, way):
    gc.collect()
    before = allocated()
    layers, optimizer = steps(name, ["cuda:2", "cuda:0"], **way)
    assert_same_weights(layers, on_the_cpu(name))
    assert_state_beside_parameters(optimizer, way)
    held = allocated()
    assert [more > less for more, less in zip(held, before, strict=True)] == [True, False, True]
    train(layers, optimizer, 1)
    gc.collect()
    assert allocated() == held  # no step leaves anything behind
    del layers, optimizer
    gc.collect()
    assert allocated() == before


@pytest.mark.parametrize("way", [{"foreach": True}, {"fused": True}, {"capturable": True}])
def test_an_optimizer_goes_on_after_its_state_was_loaded(gpus, way):
    layers, first = steps("AdamW", ["cuda:1"], count=2, **way)
    moved = copy.deepcopy(layers).to(gpus[2])
    second = torch.optim.AdamW(moved.parameters(), lr=0.05, **extras("AdamW"), **way)
    second.load_state_dict(first.state_dict())
    assert_state_beside_parameters(second, way)
    train(moved, second, 2)
    assert_same_weights(moved, on_the_cpu("AdamW", 4))


def sparse(places, make):
    torch.manual_seed(0)
    tables = [nn.Embedding(8, 3, sparse=True).to(places[i % len(places)]) for i in range(2)]
    weights = [table.weight for table in tables]
    optimizer = make(weights, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for table in tables:
            table(torch.tensor([1, 1, step + 2], device=table.weight.device)).square().sum().backward()
        optimizer.step()
    for weight in weights:
        averages = [value for value in optimizer.state[weight].values() if torch.is_tensor(value) and value.dim()]
        assert weight.grad.is_sparse and {x.device for x in (*averages, weight.grad)} == {weight.device}
    return weights, []


def schedule(places, rate_on):
    layers, rates = net_on("SGD", places[:1]), []
    rate = torch.tensor(0.1, device="cpu" if places == ["cpu"] else rate_on)
    optimizer = torch.optim.SGD(layers.parameters(), lr=rate, momentum=0.9)
    constant, falling = lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)
    schedule = lr_scheduler.SequentialLR(optimizer, [constant, falling], [2])
    for _ in range(4):
        train(layers, optimizer, 1)
        schedule.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return [*layers.parameters()], rates


PROGRAMS = {
    "sparse": (sparse, torch.optim.SparseAdam),
    "sparse, with momentum": (sparse, functools.partial(torch.optim.SGD, momentum=0.9)),
    "a rate on the CPU": (schedule, "cpu"),
    "a rate on the GPU": (schedule, "cuda:1"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_what_it_gives_on_the_cpu(name):
    program, *options = PROGRAMS[name]
    weights, numbers = program(["cuda:1", "cuda:2"], *options)
    expected, known = program(["cpu"], *options)
    assert numbers == pytest.approx(known, abs=1e-6)
    for one, other in zip(weights, expected, strict=True):
        assert one.is_cuda
        torch.testing.assert_close(one.detach().cpu(), other.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaling(gpus, fused):
    layers = net_on("Adam", ["cuda:1", "cuda:2"])
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.05, fused=fused, **extras("Adam"))
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(forward(layers)).backward()
        if step == 1:  # one step overflows: it is left out, and the scale is halved
            layers[0].weight.grad[0, 0] = float("inf")
        else:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(layers.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0 and scaler._scale.device.type == "cuda"
    assert_same_weights(layers, on_the_cpu("Adam"), atol=1e-5, rtol=1e-4)


def test_lists_of_tensors_must_match_place_by_place(gpus):
    here, there = ([torch.ones(2, device=gpu), torch.ones(3, device=gpu)] for gpu in gpus[:2])
    for other in (there, [torch.ones(2), torch.ones(3)]):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch._foreach_add_(here, other)
    mixed = [here[0], there[1]]
    assert [t.device for t in torch._foreach_mul(mixed, [there[0].to(gpus[0]), there[1]])] == gpus[:2]
    torch._foreach_copy_(here, there)
    assert [t.device for t in here] == [gpus[0]] * 2


def test_norms_of_chunks_are_cudas_own(gpu):
    """ForeachReduceOp.cu."""
    wide = [torch.zeros(1 << 20, dtype=torch.half, device=gpu) for _ in range(64)]
    assert sizes_of(lambda: torch._foreach_norm(wide)) == [64 * 16 * 4, *[512] * 64]
    assert sizes_of(lambda: torch._foreach_norm(wide, 3)) == [512] * 64


def lists(number):
    return [[torch.empty(1 << 22, device="cuda") for _ in range(8)] for _ in range(number)]


def step(kind, **options):
    """A step of a fused optimizer."""
    parameters = [torch.nn.Parameter(part) for part in lists(1)[0]]
    optimizer = kind(parameters, lr=0.1, fused=True, **options)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()  # which makes its state
    return optimizer.step


@virtual_gpus(1, kind="H200", shapes_only=True)
def test_an_operator_on_lists_reads_each_once_and_writes_what_it_returns_or_changes():
    x, a, b = lists(3)
    optim, unit = torch.optim, seconds(lambda: torch._foreach_add_(x, a)) / 3
    scaled = step(optim.SGD)
    scaled.__self__.grad_scale, scaled.__self__.found_inf = (torch.ones(1, device="cuda") for _ in range(2))
    moved = {
        2: [lambda: torch._foreach_mul_(x, 2.0)],
        3: [lambda: torch._foreach_addcmul_(x, a, a), step(optim.SGD)],
        4: [lambda: torch._foreach_addcmul_(x, a, b), lambda: torch._foreach_addcdiv_(x, a, b), scaled],
        5: [step(optim.SGD, momentum=0.9)],
        7: [step(optim.Adam), step(optim.AdamW)],
        9: [step(optim.Adam, amsgrad=True)],
    }
    for number, calls in moved.items():
        for call in calls:
            assert seconds(call) == pytest.approx(number * unit, rel=0.02)
    assert seconds(lambda: torch._foreach_norm(x)) < 0.55 * seconds(lambda: torch._foreach_mul(x, 2.0))
