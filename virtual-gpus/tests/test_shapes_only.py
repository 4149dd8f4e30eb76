"""shapes_only, FakeTensorMode and GPUs that were switched off: tensors without values, or without a GPU, say so."""

import math
import pickle
import warnings
import weakref
from contextlib import suppress
from functools import partial
from itertools import product

import pytest
import torch
from measuring import bytes_of, every_overload, needed, table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from virtual_gpus import active_machine, virtual_gpus
from virtual_gpus.dispatch.operators import operator
from virtual_gpus.placement.storages import tensors_in

LEFT_OUT = tuple(" ".join(table("operators")["without_values"].values()).split())
SHAPE = (4, 8, 16, 16)
OF_CHANNELS = {"weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd"}


def test_what_needs_values_says_so_and_cpu_tensors_keep_theirs(tmp_path):
    (tmp_path / "saved.pt").write_text("before")
    with virtual_gpus(2, shapes_only=True):
        x, n = torch.randn(3, device="cuda:1"), torch.ones(3, dtype=torch.long, device="cuda")
        assert x.device == torch.device("cuda", 1) and x.is_cuda and not x.is_meta
        assert math.isnan(x.sum().item()) and math.isnan(float(x[0])) and torch.isnan(x.cpu()).all()
        assert torch.isnan(torch.zeros(3).copy_(x)).all()
        reads = [lambda: n.sum().item(), lambda: bool((x > 0).any()), n.cpu, x.tolist, x.nonzero, lambda: x[x > 0],
                 lambda: torch.equal(x, x), lambda: torch.zeros(3, dtype=torch.long).copy_(n),
                 lambda: torch.save(x, tmp_path / "new.pt"), lambda: torch.tensor([x[0], x[1]])]  # fmt: skip
        for read in reads:
            with pytest.raises(RuntimeError, match="shapes_only=True, virtual GPUs keep no values"):
                read()
        with pytest.warns(UserWarning, match=r"leaves .*saved\.pt as it is"):
            torch.save(x.cpu(), tmp_path / "saved.pt")
    assert (tmp_path / "saved.pt").read_text() == "before" and not (tmp_path / "new.pt").exists()
    with virtual_gpus(2, shapes_only=True):
        assert torch.tensor([1, 2]).sum().item() == 3
        x = torch.zeros(4, 2, device="cuda")
        assert x[torch.tensor([0, 1])].shape == x[torch.ones(4) > 0][:2].shape == (2, 2) and x[0].shape == (2,)
        assert (x + torch.tensor(1.0)).device.index == 0 and x.to("meta").is_meta
        assert torch.func.hessian(lambda y: y.sin().sum())(x[0]).shape == (2, 2)


def argument(given, dtype):
    """Something that most operators take in its place."""
    shape = SHAPE[1:2] if given.name in OF_CHANNELS else SHAPE
    kinds = {"Tensor": lambda: torch.ones(shape, dtype=dtype, device="cuda"), "bool": lambda: True,
             "int": lambda: dtype if "dtype" in given.name else 1, "number": lambda: 2, "float": lambda: 0.5,
             "str": lambda: "sum", "List[int]": lambda: SHAPE if given.name == "size" else [1]}  # fmt: skip
    kind = str(given.type).replace("Optional[Tensor]", "Tensor").replace("Optional[bool]", "bool")
    return None if kind.startswith("Optional") else kinds[kind]()


def bytes_of_operators(shapes_only):
    """([allocated, peak], strides, ns) of each ATen operator that takes what is guessed."""
    taken = {}
    with virtual_gpus(1, kind="H200", shapes_only=shapes_only):
        for func, dtype in product(every_overload(), (torch.float32, torch.float16)):
            if operator(func).base.startswith(LEFT_OUT):
                continue
            with suppress(RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError):
                given = [argument(a, dtype) for a in needed(func)]
                made, *memory = bytes_of(partial(func, *given))
                strides, before = list(map(torch.Tensor.stride, tensors_in(made))), active_machine().clock.now
                func(*given)
                taken[func, dtype] = memory, strides, round((active_machine().clock.now - before) * 1e9)
    return taken


@pytest.mark.filterwarnings("ignore")
def test_operators_take_the_same_bytes_strides_and_time_with_and_without_values():
    values, shapes = map(bytes_of_operators, (False, True))
    both = values.keys() & shapes.keys()
    assert len(both) > 1000 and {key: (values[key], shapes[key]) for key in both if values[key] != shapes[key]} == {}


class Quantized(nn.Parameter):  # as those of bitsandbytes, which quantize themselves on their way to a GPU
    def cuda(self, device=None):
        return Quantized(super().cuda(device))


@virtual_gpus(1, shapes_only=True)
def test_a_parameter_keeps_its_class_its_references_and_its_gradient():
    net = nn.Linear(2, 2)
    net.weight = Quantized(net.weight.detach())
    weight, seen = weakref.ref(net.weight), []
    net(torch.ones(1, 2)).sum().backward()
    net.weight.register_hook(seen.append)
    net.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    net.to("cuda", torch.bfloat16)(torch.ones(1, 2, device="cuda", dtype=torch.bfloat16)).sum().backward()
    assert len(seen) == 2 and all(gradient.is_cuda and gradient.dtype == torch.bfloat16 for gradient in seen)
    assert net.weight is weight() and type(net.weight) is Quantized and net.weight.is_cuda and net.weight.grad.is_cuda


@virtual_gpus(2, shapes_only=True)
def test_a_tensor_prints_its_form_and_a_loss_in_a_training_loop_that_values_are_not_kept():
    x = torch.randn(3, 4, device="cuda:1", requires_grad=True)
    assert str(x) == "tensor(values are not kept, size=(3, 4), device='cuda:1', requires_grad=True)"
    assert "values are not kept, size=(2, 4)" in repr(nn.Linear(4, 2).cuda().weight)
    assert str(torch.arange(4, device="cuda")) == "tensor(values are not kept, size=(4,), device='cuda:0')"
    assert "values are not kept, size=()" in str(nn.BatchNorm1d(4).cuda().state_dict())
    assert str(torch.ones(2)) == "tensor([1., 1.])"
    loss, total = nn.Linear(4, 2).cuda()(torch.ones(3, 4, device="cuda")).square().mean().detach(), 0.0
    for _ in range(2):
        total += loss.item() * 3
    assert f"{total / 6:.4f} {loss.item()} {loss:.3f}" == " ".join(["(values are not kept)"] * 3)
    assert math.isnan(total) and isinstance(total, float) and type(float(loss)) is float
    assert math.isnan(pickle.loads(pickle.dumps(total))) and not total < 1 and not total > 1


@pytest.mark.parametrize("shapes_only", [False, True])
def test_fake_tensors_are_nobody_s_memory(shapes_only):
    """FakeTensorMode is what torch.compile, DTensor's sharding propagation and MemTracker use."""
    with virtual_gpus(2, memory="1 GiB", shapes_only=shapes_only):
        real = torch.ones(4, device="cuda:1")
        before = torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            x, net = torch.empty(1 << 30, device="cuda"), nn.Linear(8, 4, device="cuda:1")
            y = net(torch.empty(1 << 20, 8).to("cuda:1"))
            y.sum().backward()
            made = [x, x + x, y, net.weight.grad, x.cpu(), torch.empty(5).cuda(1), fake.from_tensor(real)]
            if not shapes_only:
                made += [real * 2, real.expand(1 << 30, 4).contiguous(), made[-1].expand(1 << 30, 4).contiguous() + 1]
        made += [x.cuda(), x * 2, torch.empty_like(x), x.new_empty(1 << 30), made[-1] @ made[-1].T]  # after it as well
        assert all(isinstance(tensor, FakeTensor) and tensor.device.type != "cuda" for tensor in made)
        assert made[1].shape == (1 << 30,) and made[3].shape == (4, 8)
        assert before == tuple(torch.cuda.max_memory_allocated(i) for i in range(2))


def test_a_storage_of_the_meta_device_says_that_it_has_no_data():
    with virtual_gpus(1):
        storage = torch.ones(3, device="cuda").to("meta").untyped_storage()
        for read in (storage.cpu, storage.cuda, lambda: storage[0]):
            with pytest.raises(NotImplementedError, match="Cannot copy out of meta|Not available"):
                read()


def made_before(shapes_only=False):
    with virtual_gpus(2, shapes_only=shapes_only):
        return nn.Linear(4, 2).to("cuda:1")


@pytest.mark.parametrize("shapes_only", [False, True])
def test_a_tensor_of_gpus_that_are_off_is_named_where_it_meets_one_that_is_on(shapes_only):
    net, without_values = made_before(), made_before(shapes_only=True)
    with virtual_gpus(2, shapes_only=shapes_only):
        x = torch.ones(3, 4, device="cuda:0")
        with pytest.raises(RuntimeError, match=r"same device, but one of them was made on cuda:1 of virtual GPUs that"):
            net(x)
        assert net.to("cuda:0")(x).shape == (3, 2)
        with pytest.raises(RuntimeError, match="has no values, because those GPUs kept none"):
            without_values(x)


def test_computing_with_it_on_the_cpu_warns_once_at_the_caller_s_line():
    net = made_before()
    with virtual_gpus(1), pytest.warns(UserWarning, match="made on cuda:1 of virtual GPUs that are off") as told:
        net.weight + 1
        net.weight + 1
    assert len(told) == 1 and told[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        assert made_before()(torch.ones(3, 4)).shape == (3, 2)  # no virtual GPUs are on: they are plain CPU tensors
