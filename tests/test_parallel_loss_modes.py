"""The parallel loss under autocast and GradScaler, with checkpoints, without gradients, and differentiated twice."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from virtual_gpus import NotModelled, virtual_gpus

from helpers.parallel.loss import DataParallelCriterion, DataParallelModel, LossInForward, total

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

DTYPES = [torch.float16, torch.bfloat16]
FORMS = ["parallel", "in forward"]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}


@pytest.fixture(params=[1, 3])
def count(request):
    """One virtual GPU, and three, on which ten samples are cut into 4, 4 and 2."""
    with virtual_gpus(request.param):
        yield request.param


@pytest.fixture
def three():
    with virtual_gpus(3):
        yield


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).to("cuda:0")


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (10,), generator=generator)
    labels[7:] = -100
    return torch.randn(10, 6, generator=generator), labels


def losses_of(form, model):
    """A function (inputs, labels) -> loss, on all GPUs."""
    if form == "parallel":
        parallel, criterion = DataParallelModel(model), DataParallelCriterion(nn.CrossEntropyLoss())
        return lambda inputs, labels: criterion(parallel(inputs), labels)
    wrapped = DataParallelModel(LossInForward(model, nn.CrossEntropyLoss()))
    return lambda inputs, labels: total(wrapped(inputs, labels))


def on_one(model):
    return lambda inputs, labels: nn.CrossEntropyLoss()(model(inputs.to("cuda:0")), labels.to("cuda:0"))


def assert_same(model, other, dtype=torch.float32, of=lambda parameter: parameter.grad):
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert of(one).dtype == torch.float32
        torch.testing.assert_close(of(one).cpu(), of(two).cpu(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 10)


class Told(nn.Module):
    """Remembers what its replicas computed under."""

    def __init__(self, found):
        super().__init__()
        self.body, self.found = net(), found

    def forward(self, x):
        enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        self.found.append((enabled, enabled and dtype, torch.is_autocast_cache_enabled()))
        return self.body(x)


# ------------------------------------------------------------------------------------------------- mixed precision


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_gpu_computes_in_the_dtype_of_autocast(count, dtype):
    with torch.autocast("cuda", dtype=dtype):
        outputs = DataParallelModel(net())(batch()[0])
        loss = DataParallelCriterion(nn.CrossEntropyLoss())(outputs, batch()[1])
    assert [output.dtype for output in outputs] == [dtype] * count and loss.dtype == torch.float32


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_replicas_are_told_all_of_autocast(count, dtype, cached):
    model = DataParallelModel(Told([]))
    with torch.autocast("cuda", dtype=dtype, cache_enabled=cached):
        model(batch()[0])
        with torch.autocast("cuda", enabled=False):
            outputs = model(batch()[0])
    model(batch()[0])
    here, off, after = [model.module.found[start * count : (start + 1) * count] for start in range(3)]
    assert here == [(True, dtype, cached)] * count and outputs[0].dtype == torch.float32
    assert [one[:2] for one in off + after] == [(False, False)] * 2 * count
    assert not torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_and_gradients_under_autocast(count, dtype, form):
    model, alone = net(), net()
    with torch.autocast("cuda", dtype=dtype):
        got, expected = losses_of(form, model)(*batch()), on_one(alone)(*batch())
    got.backward(), expected.backward()
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=0)
    assert_same(model, alone, dtype)
    exact = net()
    on_one(exact)(*batch()).backward()
    assert not model[0].weight.grad.equal(exact[0].weight.grad)  # it was computed in less than float32


def test_data_parallel_itself_falls_back_to_float16(three):
    """Why the loss in forward wants DataParallelModel for bfloat16. If this fails, PyTorch has mended it: say so."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert nn.DataParallel(net())(batch()[0]).dtype == torch.float16
        assert net()(batch()[0].cuda()).dtype == torch.bfloat16


@pytest.mark.parametrize("form", FORMS)
def test_a_grad_scaler_trains_to_the_weights_of_one_gpu(count, form):
    def train(model, loss_of):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler, scales = torch.amp.GradScaler("cuda", init_scale=2.0**12), []
        for number in range(4):
            inputs, labels = batch(number)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_of(inputs * (1e6 if number == 1 else 1), labels)  # step 1 overflows, and is left out
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    model, alone = net(), net()
    scales = train(model, losses_of(form, model))
    assert scales == train(alone, on_one(alone)) == [2.0**12, 2.0**11, 2.0**11, 2.0**11]
    assert_same(model, alone, torch.float16, of=lambda parameter: parameter.detach())
    assert not torch.allclose(model[0].weight, net()[0].weight)


# ------------------------------------------------------------------------------------- checkpoints, compile, no grad


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.body, self.reentrant = net(), reentrant

    def forward(self, x):
        x = checkpoint(self.body[:2], x, use_reentrant=self.reentrant)
        return self.body[2](x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=str)
def test_checkpoints(count, reentrant, dtype, form):
    """The part that is computed again is computed in the same dtype."""
    model, alone = Checkpointed(reentrant), net()
    inputs, labels = batch()
    inputs = inputs.requires_grad_()  # the reentrant kind leaves parameters without gradients otherwise
    with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
        got, expected = losses_of(form, model)(inputs, labels), on_one(alone)(inputs, labels)
    got.backward(), expected.backward()
    assert_same(model, alone, dtype)


def test_torch_compile_is_refused_by_name(three):
    with pytest.raises(NotModelled, match="torch.compile"):
        DataParallelModel(torch.compile(net()))(batch()[0])
    with pytest.raises(NotModelled, match="torch.compile"):
        torch.compile(DataParallelModel(net()))(batch()[0])


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients(count, off):
    """As on one GPU, in-place operators on the inputs included."""

    class InPlace(Told):
        def forward(self, x):
            self.found.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return self.body(x.mul_(2))

    model, (inputs, labels) = InPlace([]), batch()
    parallel, criterion = DataParallelModel(model).eval(), DataParallelCriterion(nn.CrossEntropyLoss())
    with off():
        outputs = parallel(inputs.cuda())
        loss = criterion(outputs, labels)
        expected = nn.CrossEntropyLoss()(model.body(inputs.cuda() * 2), labels.cuda())
        wrapped = DataParallelModel(LossInForward(model, nn.CrossEntropyLoss()))
        again = total(wrapped(inputs.cuda(), labels))
    assert set(model.found) == {(False, off is torch.inference_mode)} and len(model.found) == 2 * count
    assert not any(tensor.requires_grad for tensor in (loss, again, *outputs))
    assert all(tensor.is_inference() == (off is torch.inference_mode) for tensor in (loss, again, *outputs))
    torch.testing.assert_close([loss, again], [expected, expected])
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


# ------------------------------------------------------------------------------------------- gradients of gradients


@pytest.mark.parametrize("form", FORMS)
def test_a_penalty_on_the_gradients_of_parameters(count, form):
    def train(model, loss_of):
        loss = loss_of(*batch())
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        (loss + penalty).backward()
        return penalty.detach()

    model, alone = net(), net()
    torch.testing.assert_close(train(model, losses_of(form, model)), train(alone, on_one(alone)))
    assert_same(model, alone)


@pytest.mark.parametrize("form", FORMS)
def test_a_penalty_on_the_gradients_of_inputs(count, form):
    def train(model, loss_of):
        inputs, labels = batch()
        inputs = inputs.cuda().requires_grad_()
        loss = loss_of(inputs, labels)
        (first,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + (first.norm(dim=1) - 1).square().mean()).backward()
        return inputs.grad

    model, alone = net(), net()
    torch.testing.assert_close(train(model, losses_of(form, model)), train(alone, on_one(alone)))
    assert_same(model, alone)


def test_the_graph_of_a_loss_can_be_used_twice(count):
    model, criterion = net(), DataParallelCriterion(nn.CrossEntropyLoss())
    loss = criterion(DataParallelModel(model)(batch()[0]), batch()[1])
    loss.backward(retain_graph=True)
    once = copy.deepcopy([parameter.grad for parameter in model.parameters()])
    loss.backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [2 * grad for grad in once])
