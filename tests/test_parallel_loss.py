"""The parallel loss and the loss in forward: the loss and gradients of one device, or an error that says what to do."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.parallel import DataParallelCriterion, DataParallelModel, LossInForward, count_labels, count_samples, total
from helpers.parallel.loss import label_weight

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

# GPUs and samples: none, one; shards of 2, 2, 1; fewer samples than GPUs; 3, 3, 3, 1; shards that are all alike.
CUTS = [(0, 5), (1, 5), (3, 5), (4, 1), (4, 3), (4, 10), (2, 8)]


def machine(gpus: int, monkeypatch):
    """So many virtual GPUs; 0 is a machine without any."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False) if not gpus else None
    return virtual_gpus(gpus) if gpus else nullcontext()


def first(gpus: int) -> str:
    return "cuda:0" if gpus else "cpu"


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(samples: int) -> torch.Tensor:
    return torch.arange(samples) * 3 % 4


def some_ignored(samples: int) -> torch.Tensor:
    """Unevenly many labels count on each GPU, on some of them none."""
    labels = classes(samples)
    labels[2 : max(3, samples - 2)] = -100
    return labels


def probabilities(samples: int) -> torch.Tensor:
    return numbers(samples, 4, seed=2).softmax(1)


def signs(*shape: int) -> torch.Tensor:
    return numbers(*shape, seed=2).sign()


def net(out: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, out))


class Returns(nn.Module):
    """Several outputs of one net, as a tuple or as something else."""

    def __init__(self, make):
        super().__init__()
        self.body, self.make = net(), make

    def forward(self, x):
        return self.make(self.body(x), self.body(-x))


def pair(one, other):
    return one, other


# ---- the losses and gradients of one device -------------------------------------------------------------------------


class Words(nn.Module):
    """A criterion of one's own around a loss of torch.nn: (N, T, V) and (N, T)."""

    def __init__(self, **options):
        super().__init__()
        self.loss = nn.CrossEntropyLoss(**options)

    def forward(self, logits, labels):
        return self.loss(logits.flatten(0, 1), labels.flatten())


class Mixed(nn.Module):
    """With a parameter, a buffer, two outputs and two targets."""

    def __init__(self):
        super().__init__()
        self.mixing = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, main, extra, labels, wanted):
        return F.cross_entropy(main, labels) + self.mixing.exp() * ((extra - wanted) * self.scale).square().mean()


class OfDict(Mixed):
    def forward(self, outputs, targets):
        return super().forward(outputs["a"], outputs["b"], targets["labels"], targets["rest"][0])


class MaskedError(nn.Module):
    def forward(self, outputs, targets, mask):
        return ((outputs - targets).square() * mask).sum() / mask.sum().clamp(min=1)


class SummedError(nn.Module):
    def forward(self, outputs, targets):
        return (outputs - targets).square().sum()


def masked_targets(samples: int) -> tuple:
    return numbers(samples, 4, seed=2), (some_ignored(samples) != -100).float()[:, None].expand(-1, 4)


def words_of(samples: int) -> torch.Tensor:
    labels = torch.arange(4 * samples).reshape(samples, 4) % 4
    labels[1:, 1:] = -100
    labels[3:] = -100  # on the last GPU no label counts
    return labels


@dataclass
class Case:
    """A criterion, the model before it, its targets for a number of samples, and what the wrappers are told."""

    criterion: Any
    targets: Any
    model: Any = net
    options: Any = None


WEIGHTS = torch.tensor([0.2, 3.0, 0.0, 1.5])


def log_softmax():
    return nn.Sequential(net(), nn.LogSoftmax(1))


def sigmoid():
    return nn.Sequential(net(), nn.Sigmoid())


PAIR = partial(Returns, pair)
REST = {"labels": classes, "rest": lambda n: [numbers(n, 4, seed=5), "a note"]}
CASES = {
    "cross entropy": Case(nn.CrossEntropyLoss(), classes),
    "ignored labels": Case(nn.CrossEntropyLoss(), some_ignored),
    "nll, class weights, ignored labels": Case(nn.NLLLoss(weight=WEIGHTS + 0.1), some_ignored, log_softmax),
    "smoothing, class weights": Case(nn.CrossEntropyLoss(weight=WEIGHTS + 0.1, label_smoothing=0.2), some_ignored),
    "sum of labels": Case(nn.CrossEntropyLoss(reduction="sum"), some_ignored),
    "probabilities": Case(nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), probabilities),
    "pixels": Case(
        nn.CrossEntropyLoss(ignore_index=1),
        lambda n: torch.arange(6 * n).reshape(n, 3, 2) % 4,
        lambda: nn.Sequential(net(24), nn.Unflatten(1, (4, 3, 2))),
    ),
    "no label counts": Case(nn.CrossEntropyLoss(), lambda n: torch.full((n,), -100)),
    "kl": Case(nn.KLDivLoss(reduction="batchmean"), probabilities, log_softmax),
    "mse": Case(nn.MSELoss(), lambda n: numbers(n, 4)),
    "sum of squares": Case(nn.MSELoss(reduction="sum"), lambda n: numbers(n, 4)),
    "bce": Case(nn.BCELoss(), probabilities, sigmoid),
    "bce with logits": Case(nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS + 1), probabilities),
    "two outputs, two targets": Case(Mixed(), lambda n: (classes(n), numbers(n, 4, seed=5)), PAIR),
    "a dict": Case(
        OfDict(),
        lambda n: {name: make(n) for name, make in REST.items()},
        partial(Returns, lambda one, other: {"a": one, "b": other}),
    ),
    "a weight of one's own": Case(MaskedError(), masked_targets, options={"weight": lambda o, t, mask: mask.sum()}),
    "words": Case(Words(), words_of, lambda: nn.Sequential(net(16), nn.Unflatten(1, (4, 4))), {"weight": count_labels}),
    "a sum of one's own": Case(SummedError(), lambda n: numbers(n, 4), options={"reduction": "sum"}),
}


def several(thing: Any) -> tuple:
    return thing if isinstance(thing, tuple) else (thing,)


def gradients(*modules: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.cpu() for module in modules for parameter in module.parameters()]


def assert_same(found: list, expected: list) -> None:
    assert len(found) == len(expected) > 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_one_device(name, monkeypatch):
    case = CASES[name]
    for gpus, samples in CUTS:
        inputs, targets = numbers(samples, 6), several(case.targets(samples))
        model, criterion = case.model(), copy.deepcopy(case.criterion)
        loss = criterion(*several(model(inputs)), *targets)
        loss.backward()
        expected = [loss.detach(), *gradients(model, criterion)]
        with monkeypatch.context() as patch, machine(gpus, patch):
            model, criterion = case.model().to(first(gpus)), copy.deepcopy(case.criterion).to(first(gpus))
            parallel = DataParallelCriterion(criterion, **(case.options or {}))
            loss = parallel(DataParallelModel(model)(inputs), *targets)
            assert loss.shape == () and str(loss.device) == first(gpus)
            loss.backward()
            assert_same([loss.detach().cpu(), *gradients(model, criterion)], expected)
            if len(targets) > 1:
                continue
            model.zero_grad(), criterion.zero_grad()
            wrapped = nn.DataParallel(LossInForward(model, criterion, **(case.options or {})).to(first(gpus)))
            loss = total(wrapped(inputs, *targets))
            assert loss.shape == () and str(loss.device) == first(gpus)
            loss.backward()
            assert_same([loss.detach().cpu(), *gradients(model, criterion)], expected)


@pytest.mark.parametrize("loss", [nn.TripletMarginLoss(margin=5), nn.TripletMarginLoss(margin=5, reduction="sum")])
def test_outputs_without_targets(monkeypatch, loss):
    class Triple(nn.Sequential):
        def forward(self, *parts):
            return tuple(map(super().forward, parts))

    for gpus, samples in CUTS:
        parts = [numbers(samples, 6, seed=seed) for seed in range(3)]
        with monkeypatch.context() as patch, machine(gpus, patch):
            found = DataParallelCriterion(loss)(DataParallelModel(Triple(net()).to(first(gpus)))(*parts))
            torch.testing.assert_close(found.cpu(), loss(*Triple(net())(*parts)))


def test_the_weighting_matters():
    """The cases above can fail: a mean of means, and a mean weighted by samples, are other numbers."""
    outputs, labels = numbers(10, 4), some_ignored(10)
    means = [F.cross_entropy(o, t) for o, t in zip(outputs.chunk(4), labels.chunk(4), strict=True)]
    right = F.cross_entropy(outputs, labels)
    by_samples = [mean * len(o) / 10 for mean, o in zip(means, outputs.chunk(4), strict=True)]
    assert not torch.isclose(torch.stack(means).nanmean(), right, rtol=1e-2)
    assert not torch.isclose(torch.stack(by_samples).nansum(), right, rtol=1e-2)


@pytest.mark.parametrize("form", ["parallel", "in forward"])
def test_trains_to_the_weights_of_one_gpu(four, form):
    def train(step, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        for samples in (8, 5, 8, 1, 3):
            optimizer.zero_grad()
            step(numbers(samples, 6, seed=samples), some_ignored(samples)).backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    alone, model = net(), net().to("cuda:0")
    expected = train(lambda x, y: F.cross_entropy(alone(x), y), alone)
    if form == "parallel":
        parallel, criterion = DataParallelModel(model), DataParallelCriterion(nn.CrossEntropyLoss())
        found = train(lambda x, y: criterion(parallel(x), y), model)
    else:
        wrapped = nn.DataParallel(LossInForward(model, nn.CrossEntropyLoss()))
        found = train(lambda x, y: total(wrapped(x, y)), model)
    assert_same(found, expected)
    assert not torch.allclose(found[0], net()[0].weight)


def test_label_weights():
    labels = torch.tensor([[1, -100], [0, 3]])
    assert label_weight(F.cross_entropy, labels).item() == 3
    assert label_weight(nn.CrossEntropyLoss(ignore_index=0), labels).item() == 3
    assert label_weight(nn.NLLLoss(weight=WEIGHTS), labels).item() == pytest.approx(3.0 + 0.2 + 1.5)
    assert label_weight(nn.CrossEntropyLoss(), probabilities(5)).item() == 5


# ---- the model ------------------------------------------------------------------------------------------------------


class WithMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x, mask=None, scale=1.0):
        return self.body(x) * scale if mask is None else self.body(x) * mask


def test_keywords_also_with_fewer_samples_than_gpus(monkeypatch):
    for gpus, samples in CUTS:
        with monkeypatch.context() as patch, machine(gpus, patch):
            model, x = DataParallelModel(WithMask().to(first(gpus))), numbers(samples, 6)
            for options in ({"mask": None, "scale": 2.0}, {"mask": numbers(samples, 1)}):
                outputs = model(x, **options)
                torch.testing.assert_close(torch.cat([o.cpu() for o in outputs]), WithMask()(x, **options))
            torch.testing.assert_close(torch.cat([o.cpu() for o in model(x=x)]), WithMask()(x))


def test_outputs_stay_on_the_chosen_gpus(four):
    for devices in ([3, 1], ["cuda:3", "cuda:1"], [four[3], four[1]]):
        outputs = DataParallelModel(net().to("cuda:3"), devices)(numbers(5, 6))
        assert [str(output.device) for output in outputs] == ["cuda:3", "cuda:1"]
        loss = DataParallelCriterion(nn.CrossEntropyLoss(), devices)(outputs, classes(5).to("cuda:2"))
        assert str(loss.device) == "cuda:3"
        torch.testing.assert_close(loss.cpu(), F.cross_entropy(net()(numbers(5, 6)), classes(5)))


def test_state_dicts_are_those_of_data_parallel(four):
    parallel, plain = DataParallelModel(net().to("cuda:0")), nn.DataParallel(net().to("cuda:0"))
    assert list(parallel.state_dict()) == list(plain.state_dict()) and "module.0.weight" in parallel.state_dict()
    parallel.load_state_dict(plain.state_dict()), plain.load_state_dict(parallel.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_gpu_computes_in_the_dtype_of_autocast(four, dtype):
    model = net().to("cuda:0")
    with torch.autocast("cuda", dtype=dtype):
        outputs = DataParallelModel(model)(numbers(10, 6))
        loss = DataParallelCriterion(nn.CrossEntropyLoss())(outputs, some_ignored(10))
        in_forward = total(
            DataParallelModel(LossInForward(model, nn.CrossEntropyLoss()))(numbers(10, 6), some_ignored(10))
        )
        expected = F.cross_entropy(model(numbers(10, 6).cuda()), some_ignored(10).cuda())
    assert [output.dtype for output in outputs] == [dtype] * 4 and loss.dtype == torch.float32
    torch.testing.assert_close([loss, in_forward], [expected] * 2, rtol=2e-2, atol=0)


def test_data_parallel_itself_falls_back_to_float16(four):
    """Why the loss in forward wants DataParallelModel for bfloat16. If this fails, PyTorch has mended it: say so."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert nn.DataParallel(net().to("cuda:0"))(numbers(10, 6)).dtype == torch.float16


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients(four, off):
    model = nn.Sequential(net(), nn.BatchNorm1d(4)).to("cuda:0").eval()
    with off():
        loss = DataParallelCriterion(nn.CrossEntropyLoss())(DataParallelModel(model)(numbers(10, 6)), classes(10))
        expected = F.cross_entropy(model(numbers(10, 6).cuda()), classes(10).cuda())
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected)


# ---- memory and shapes ----------------------------------------------------------------------------------------------


def peaks(step) -> list[int]:
    for gpu in range(4):
        torch.cuda.reset_peak_memory_stats(gpu)
    held = [torch.cuda.memory_allocated(gpu) for gpu in range(4)]
    step()
    return [torch.cuda.max_memory_allocated(gpu) - before for gpu, before in enumerate(held)]


def test_no_gpu_holds_the_outputs_of_others():
    """A vocabulary of 5,000 and a small body: with nn.DataParallel, GPU 0 holds four GPUs' logits and more."""
    tokens = torch.zeros(64, 64, dtype=torch.long)
    with virtual_gpus(4, shapes_only=True):
        body = nn.Sequential(nn.Embedding(5000, 8), nn.Linear(8, 5000)).to("cuda:0")
        model, criterion = DataParallelModel(body), DataParallelCriterion(Words(), weight=count_labels)
        in_forward = nn.DataParallel(LossInForward(body, Words(), weight=count_labels))
        gathering = nn.DataParallel(body)
        ways = {
            "parallel": lambda: criterion(model(tokens), tokens).backward(),
            "in forward": lambda: total(in_forward(tokens, tokens)).backward(),
            "gather": lambda: Words()(gathering(tokens), tokens.to("cuda:0")).backward(),
        }
        found = {}
        for name, step in ways.items():
            body.zero_grad()
            found[name] = peaks(step)
    logits = 64 * 64 * 5000 * 4
    assert found["gather"][0] > 2.5 * found["gather"][1] and found["gather"][0] > 2 * logits
    for name in ("parallel", "in forward"):
        top, *others = found[name]
        assert all(abs(top - other) < 0.1 * other for other in others), found
        assert max(found[name]) < logits  # a quarter of it, forward and backward


def test_shapes_only():
    with virtual_gpus(4, shapes_only=True):
        model, loss = net().to("cuda:0"), nn.CrossEntropyLoss(WEIGHTS.to("cuda:0"), label_smoothing=0.1)
        found = DataParallelCriterion(loss)(DataParallelModel(model)(numbers(10, 6)), some_ignored(10))
        found.backward()
        assert found.shape == () and str(found.device) == "cuda:0" and model[0].weight.grad.shape == (8, 6)
        assert total(nn.DataParallel(LossInForward(model, loss))(numbers(10, 6), some_ignored(10))).shape == ()


# ---- what is refused ------------------------------------------------------------------------------------------------


class Around(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, outputs, labels):
        return self.loss(outputs, labels)


class Subclass(nn.CrossEntropyLoss):
    def forward(self, outputs, labels):
        return super().forward(outputs, labels) / 2


UNCLEAR = "not clear what the mean of .* is over.*Pass weight=.*count_labels"
LOSSES_REFUSED = {
    "no module": (F.cross_entropy, TypeError, "must be an nn.Module"),
    "each loss": (nn.MSELoss(reduction="none"), ValueError, "reduction of MSELoss is 'none', but only a mean or a sum"),
    "labels inside": (Around(nn.NLLLoss(ignore_index=0)), ValueError, UNCLEAR),
    "a subclass": (Subclass(), ValueError, UNCLEAR),
    "a sum inside": (Around(nn.MSELoss(reduction="sum")), ValueError, UNCLEAR),
}


@pytest.mark.parametrize("name", LOSSES_REFUSED)
def test_losses_that_could_be_silently_wrong(name):
    criterion, error, words = LOSSES_REFUSED[name]
    for build in (DataParallelCriterion, partial(LossInForward, net())):
        with pytest.raises(error, match=words):
            build(criterion)


def test_a_criterion_that_says_what_its_mean_is_over(four):
    outputs = DataParallelModel(net().to("cuda:0"))(numbers(10, 6))
    weighted = Around(nn.CrossEntropyLoss(WEIGHTS.to("cuda:0")))
    assert DataParallelCriterion(weighted, weight=count_samples)(outputs, classes(10)).shape == ()


def own(function, **options):
    class Own(nn.Module):
        def forward(self, outputs, targets):
            return function(outputs, targets)

    return DataParallelCriterion(Own(), **options)


def all_losses(outputs, targets):
    return (outputs - targets).square().mean(1)


def summed(outputs, targets):
    return all_losses(outputs, targets).sum()


CALLS_REFUSED = {
    "a tensor": (lambda out: own(summed)(out[0], numbers(10, 4)), TypeError,
                 "must be a list .* they are a Tensor. Wrap the model in DataParallelModel"),
    "other GPUs": (lambda out: DataParallelCriterion(nn.MSELoss(), [0, 1])(out, numbers(10, 4)), ValueError,
                   "4 outputs, but the targets were cut into 2 shards .* same device_ids"),
    "targets that broadcast": (lambda out: own(summed)(out, numbers(4, 4)), ValueError, "have 1 and 3 rows"),
    "shards that broadcast": (lambda out: own(summed)(out, numbers(12, 4)), ValueError, "have 1 and 3 rows"),
    "unlike targets": (lambda out: own(summed)(out, [numbers(10, 4), numbers(7, 4)]), ValueError, "have 2 and 3 rows"),
    "targets cut already": (lambda out: own(lambda o, t: o.sum())(out, [t.detach() for t in out]), ValueError,
                            "cut into 1 shards"),
    "several losses": (lambda out: own(all_losses)(out, numbers(10, 4)), RuntimeError, "invalid for input of size 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS_REFUSED)
def test_calls_of_the_criterion_that_cannot_be_right(four, name):
    call, error, words = CALLS_REFUSED[name]
    with pytest.raises(error, match=words):
        call(DataParallelModel(net().to("cuda:0"))(numbers(10, 6)))


class First(nn.Module):
    def forward(self, x, other=None):
        return x


def test_inputs_that_data_parallel_would_drop(four):
    """It cuts 8 rows into four pieces and one row into one, and calls the first replica alone."""
    model = DataParallelModel(First())
    assert len(model(numbers(8, 2), "a note")) == len(model(numbers(8, 2), torch.tensor(1.0).expand(8))) == 4
    for call in (
        lambda: model(numbers(8, 2), numbers(1, 2)),
        lambda: model(numbers(8, 2), other=[numbers(1, 2)]),
        lambda: nn.DataParallel(LossInForward(First(), nn.MSELoss()))(numbers(8, 2), numbers(1, 2)),
    ):
        with pytest.raises(ValueError, match="have 1 and [28] rows, so they do not belong to the same samples"):
            call()


def test_total_takes_nothing_else():
    with pytest.raises(ValueError, match="needs what LossInForward returns"):
        total(numbers(3, 4))
