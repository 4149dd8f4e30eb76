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

from helpers.measure import peak_memory
from helpers.parallel import DataParallelCriterion, DataParallelModel, LossInForward, count_labels, total
from helpers.parallel.loss import label_weight

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

# GPUs and samples: none, one; one sample; fewer samples than GPUs; shards of 3, 3, 3, 1.
CUTS = [(0, 5), (1, 5), (4, 1), (4, 3), (4, 10)]


def machine(gpus: int, monkeypatch):
    """So many virtual GPUs; 0 is a machine without any."""
    if gpus:
        return virtual_gpus(gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return nullcontext()


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


def net(out: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, out))


class Two(nn.Module):
    """Two outputs of one net."""

    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x):
        return {"a": self.body(x), "b": self.body(-x)}


# ---- the losses and gradients of one device -------------------------------------------------------------------------


class OfDict(nn.Module):
    """With a parameter and a buffer, and several outputs and targets in dicts."""

    def __init__(self):
        super().__init__()
        self.mixing = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, outputs, targets):
        error = (outputs["b"] - targets["rest"][0]) * self.scale
        return F.cross_entropy(outputs["a"], targets["labels"]) + self.mixing.exp() * error.square().mean()


class Own(nn.Module):
    """A criterion without an attribute `reduction`."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *arguments):
        return self.function(*arguments)


def all_losses(outputs, targets):
    return (outputs - targets).square().mean(1)


def summed(outputs, targets):
    return all_losses(outputs, targets).sum()


def of_words(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def masked(outputs, targets, mask):
    return ((outputs - targets).square() * mask).sum() / mask.sum().clamp(min=1)


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
CASES = {
    "ignored labels": Case(nn.CrossEntropyLoss(), some_ignored),
    "nll, class weights": Case(nn.NLLLoss(weight=WEIGHTS + 0.1), some_ignored),
    "smoothing, class weights": Case(nn.CrossEntropyLoss(weight=WEIGHTS + 0.1, label_smoothing=0.2), some_ignored),
    "sum of labels": Case(nn.CrossEntropyLoss(reduction="sum"), some_ignored),
    "probabilities": Case(nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), probabilities),
    "pixels": Case(
        nn.CrossEntropyLoss(ignore_index=1),
        lambda n: torch.arange(6 * n).reshape(n, 3, 2) % 4,
        lambda: nn.Sequential(net(24), nn.Unflatten(1, (4, 3, 2))),
    ),
    "no label counts": Case(nn.CrossEntropyLoss(), lambda n: torch.full((n,), -100)),
    "kl": Case(nn.KLDivLoss(reduction="batchmean"), probabilities),
    "mse": Case(nn.MSELoss(), lambda n: numbers(n, 4)),
    "bce with logits": Case(nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS + 1), probabilities),
    "dicts": Case(OfDict(), lambda n: {"labels": classes(n), "rest": [numbers(n, 4, seed=5), "a note"]}, Two),
    "a weight of one's own": Case(Own(masked), masked_targets, options={"weight": lambda o, t, mask: mask.sum()}),
    "words": Case(
        Own(of_words), words_of, lambda: nn.Sequential(net(16), nn.Unflatten(1, (4, 4))), {"weight": count_labels}
    ),
    "a sum of one's own": Case(Own(summed), lambda n: numbers(n, 4), options={"reduction": "sum"}),
}


def as_tuple(thing: Any) -> tuple:
    return thing if isinstance(thing, tuple) else (thing,)


def gradients(*modules: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.cpu() for module in modules for parameter in module.parameters()]


def assert_same(loss: torch.Tensor, modules: tuple, gpus: int, expected: list) -> None:
    """Whether loss and gradients are the expected ones, and the loss is one number on the first GPU."""
    assert loss.shape == () and str(loss.device) == first(gpus)
    loss.backward()
    found = [loss.detach().cpu(), *gradients(*modules)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_one_device(name, monkeypatch):
    case = CASES[name]
    for gpus, samples in CUTS:
        inputs, targets = numbers(samples, 6), as_tuple(case.targets(samples))
        model, criterion = case.model(), copy.deepcopy(case.criterion)
        loss = criterion(*as_tuple(model(inputs)), *targets)
        loss.backward()
        expected = [loss.detach(), *gradients(model, criterion)]
        assert len(expected) > 1
        with monkeypatch.context() as patch, machine(gpus, patch):
            model, criterion = case.model().to(first(gpus)), copy.deepcopy(case.criterion).to(first(gpus))
            parallel = DataParallelCriterion(criterion, **(case.options or {}))
            assert_same(parallel(DataParallelModel(model)(inputs), *targets), (model, criterion), gpus, expected)
            if len(targets) == 1:
                model.zero_grad(), criterion.zero_grad()
                wrapped = nn.DataParallel(LossInForward(model, criterion, **(case.options or {})).to(first(gpus)))
                assert_same(total(wrapped(inputs, *targets)), (model, criterion), gpus, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_outputs_without_targets(four, reduction):
    class Triple(nn.Sequential):
        def forward(self, *parts):
            return tuple(map(super().forward, parts))

    loss, parts = nn.TripletMarginLoss(margin=5, reduction=reduction), [numbers(10, 6, seed=seed) for seed in range(3)]
    found = DataParallelCriterion(loss)(DataParallelModel(Triple(net()).to("cuda:0"))(*parts))
    torch.testing.assert_close(found.cpu(), loss(*Triple(net())(*parts)))


def test_label_weights():
    labels = torch.tensor([[1, -100], [0, 3]])
    assert label_weight(F.cross_entropy, labels).item() == 3
    assert label_weight(nn.CrossEntropyLoss(ignore_index=0), labels).item() == 3
    assert label_weight(nn.NLLLoss(weight=WEIGHTS), labels).item() == pytest.approx(3.0 + 0.2 + 1.5)
    assert label_weight(nn.CrossEntropyLoss(), probabilities(5)).item() == 5


# ---- the model ------------------------------------------------------------------------------------------------------


def test_keywords_also_with_fewer_samples_than_gpus(monkeypatch):
    class WithMask(nn.Sequential):
        def forward(self, x, mask=None, scale=1.0):
            return super().forward(x) * scale if mask is None else super().forward(x) * mask

    for gpus, samples in CUTS:
        with monkeypatch.context() as patch, machine(gpus, patch):
            model, x = DataParallelModel(WithMask(net()).to(first(gpus))), numbers(samples, 6)
            for options in ({"mask": None, "scale": 2.0}, {"mask": numbers(samples, 1)}):
                for outputs in (model(x, **options), model(x=x, **options)):
                    torch.testing.assert_close(torch.cat([o.cpu() for o in outputs]), WithMask(net())(x, **options))


def test_outputs_stay_on_the_chosen_gpus(four):
    for devices in ([3, 1], ["cuda:3", four[1]]):
        outputs = DataParallelModel(net().to("cuda:3"), devices)(numbers(5, 6))
        assert [str(output.device) for output in outputs] == ["cuda:3", "cuda:1"]
        loss = DataParallelCriterion(nn.CrossEntropyLoss(), devices)(outputs, classes(5).to("cuda:2"))
        assert str(loss.device) == "cuda:3"
        torch.testing.assert_close(loss.cpu(), F.cross_entropy(net()(numbers(5, 6)), classes(5)))


def test_every_gpu_computes_in_the_dtype_of_autocast(four):
    model, inputs, labels = net().to("cuda:0"), numbers(10, 6), some_ignored(10)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        outputs = DataParallelModel(model)(inputs)
        loss = DataParallelCriterion(nn.CrossEntropyLoss())(outputs, labels)
        in_forward = total(DataParallelModel(LossInForward(model, nn.CrossEntropyLoss()))(inputs, labels))
        expected = F.cross_entropy(model(inputs.cuda()), labels.cuda())
        # Why the loss in forward wants DataParallelModel for bfloat16. If this fails, PyTorch has mended it: say so.
        assert nn.DataParallel(model)(inputs).dtype == torch.float16
    assert [output.dtype for output in outputs] == [torch.bfloat16] * 4 and loss.dtype == torch.float32
    torch.testing.assert_close([loss, in_forward], [expected] * 2, rtol=2e-2, atol=0)


def test_without_gradients(four):
    model = net().to("cuda:0")
    with torch.inference_mode():
        loss = DataParallelCriterion(nn.CrossEntropyLoss())(DataParallelModel(model)(numbers(10, 6)), classes(10))
        expected = F.cross_entropy(model(numbers(10, 6).cuda()), classes(10).cuda())
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected)


# ---- memory and shapes ----------------------------------------------------------------------------------------------


def test_no_gpu_holds_the_outputs_of_others():
    """A vocabulary of 5,000 and a small body: with nn.DataParallel, GPU 0 holds four GPUs' logits and more."""
    tokens = torch.zeros(4096, dtype=torch.long)
    with virtual_gpus(4, shapes_only=True):
        body, loss = nn.Sequential(nn.Embedding(5000, 8), nn.Linear(8, 5000)).to("cuda:0"), nn.CrossEntropyLoss()
        model, criterion = DataParallelModel(body), DataParallelCriterion(loss)
        in_forward, gathering = nn.DataParallel(LossInForward(body, loss)), nn.DataParallel(body)
        ways = {
            "parallel": lambda: criterion(model(tokens), tokens).backward(),
            "in forward": lambda: total(in_forward(tokens, tokens)).backward(),
            "gather": lambda: loss(gathering(tokens), tokens.to("cuda:0")).backward(),
        }
        found = {}
        for name, step in ways.items():
            body.zero_grad()
            found[name] = [each.peak_allocated - each.allocated for each in peak_memory(step)]
    logits = 4096 * 5000 * 4
    assert found["gather"][0] > 2.5 * found["gather"][1] and found["gather"][0] > 2 * logits
    for name in ("parallel", "in forward"):
        top, *others = found[name]
        assert all(abs(top - other) < 0.1 * other for other in others), found
        assert max(found[name]) < logits  # a quarter of it, forward and backward


# ---- what is refused ------------------------------------------------------------------------------------------------


class Subclass(nn.CrossEntropyLoss):
    def forward(self, outputs, labels):
        return super().forward(outputs, labels) / 2


UNCLEAR = "not clear what the mean of .* is over.*Pass weight=.*count_labels"
LOSSES_REFUSED = {
    "no module": (F.cross_entropy, TypeError, "must be an nn.Module"),
    "each loss": (nn.MSELoss(reduction="none"), ValueError, "reduction of MSELoss is 'none', but only a mean or a sum"),
    "labels inside": (Own(nn.NLLLoss(ignore_index=0)), ValueError, UNCLEAR),
    "a subclass": (Subclass(), ValueError, UNCLEAR),
    "a sum inside": (Own(nn.MSELoss(reduction="sum")), ValueError, UNCLEAR),
}


@pytest.mark.parametrize("name", LOSSES_REFUSED)
def test_losses_that_could_be_silently_wrong(name):
    criterion, error, words = LOSSES_REFUSED[name]
    for build in (DataParallelCriterion, partial(LossInForward, net())):
        with pytest.raises(error, match=words):
            build(criterion)


SUM = Own(summed)
CALLS_REFUSED = {
    "a tensor": (SUM, lambda out: out[0], numbers(10, 4), "must be a list .* are a Tensor. Wrap the model in Data"),
    "targets that broadcast": (SUM, list, numbers(4, 4), "have 1 and 3 rows"),
    "shards that broadcast": (SUM, list, numbers(12, 4), "have 1 and 3 rows"),
    "unlike targets": (SUM, list, [numbers(10, 4), numbers(7, 4)], "have 2 and 3 rows"),
    "targets cut already": (SUM, list, list(numbers(10, 4).chunk(4)), "cut into 1 shards .* same device_ids"),
    "several losses": (Own(all_losses), list, numbers(10, 4), "invalid for input of size 3"),
}


@pytest.mark.parametrize("name", CALLS_REFUSED)
def test_calls_of_the_criterion_that_cannot_be_right(four, name):
    criterion, change, targets, words = CALLS_REFUSED[name]
    outputs = DataParallelModel(net().to("cuda:0"))(numbers(10, 6))
    with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
        DataParallelCriterion(criterion)(change(outputs), targets)


def test_inputs_that_data_parallel_would_drop(four):
    """It cuts 8 rows into four pieces and one row into one, and calls the first replica alone."""

    class First(nn.Module):
        def forward(self, x, other=None):
            return x

    model = DataParallelModel(First())
    assert len(model(numbers(8, 2), "a note")) == len(model(numbers(8, 2), torch.tensor(1.0).expand(8))) == 4
    for call in (
        lambda: model(numbers(8, 2), numbers(1, 2)),
        lambda: model(numbers(8, 2), other=[numbers(1, 2)]),
        lambda: nn.DataParallel(LossInForward(First(), nn.MSELoss()))(numbers(8, 2), numbers(1, 2)),
    ):
        with pytest.raises(ValueError, match="have 1 and [28] rows, so they do not belong to the same samples"):
            call()
    with pytest.raises(ValueError, match="needs what LossInForward returns"):
        total(numbers(3, 4))
