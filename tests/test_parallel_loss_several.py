"""Several losses from one criterion, and batches whose samples are not first: as on one device."""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import nn

from helpers.parallel.loss import DataParallelCriterion, DataParallelModel, LossInForward, total
from helpers.parallel.loss.shards import each
from tests.parallel_losses import counts, first, numbers

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

BATCHES = [1, 3, 10]
count = counts(0, 1, 4)


def flat(losses):
    """The losses in a tuple, list or dict of them, nested or not."""
    if isinstance(losses, torch.Tensor):
        return [losses]
    return [part for loss in (losses.values() if isinstance(losses, dict) else losses) for part in flat(loss)]


def results(model, losses):
    """What is compared: each loss, and the gradients of a mixture in which each counts differently."""
    assert all(loss.shape == () for loss in flat(losses))
    sum((number + 1) * loss for number, loss in enumerate(flat(losses))).backward()
    return [loss.detach().cpu() for loss in flat(losses)] + [p.grad.cpu() for p in model.parameters()]


def assert_same(got, expected):
    assert len(got) == len(expected) > 2
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------- several losses


class Found(NamedTuple):
    labels: torch.Tensor
    boxes: torch.Tensor


KINDS = {
    "tuple": lambda labels, boxes: (labels, boxes),
    "list": lambda labels, boxes: [labels, boxes],
    "dict": lambda labels, boxes: {"labels": labels, "boxes": boxes},
    "named tuple": Found,
    "nested": lambda labels, boxes: {"labels": labels, "rest": (boxes,)},
}


class Detection(nn.Module):
    """Labels are averaged over those that count, boxes over all samples, as a detector's two losses."""

    def __init__(self, kind):
        super().__init__()
        self.kind = KINDS[kind]

    def forward(self, outputs, targets):
        labels, boxes = targets
        each_label = nn.functional.cross_entropy(outputs[:, :4], labels, reduction="none")
        counts = labels != -100
        mean = each_label.sum() / counts.sum().clamp(min=1)
        return self.kind(mean, nn.functional.smooth_l1_loss(outputs[:, 4:], boxes))


class Weights:
    def __init__(self, kind):
        self.kind = KINDS[kind]

    def __call__(self, outputs, targets):
        return self.kind((targets[0] != -100).sum(), len(targets[1]))


def detection(samples):
    torch.manual_seed(0)
    labels = torch.arange(samples) % 4
    labels[max(1, samples // 3) :] = -100  # on the last GPUs none counts
    return nn.Linear(6, 8), numbers(samples, 6), (labels, numbers(samples, 4, seed=2))


@pytest.mark.parametrize("kind", KINDS)
def test_each_loss_of_several_is_that_of_one_device(count, kind):
    for samples in BATCHES:
        model, inputs, targets = detection(samples)
        alone = copy.deepcopy(model)
        expected = Detection(kind)(alone(inputs), targets)
        parallel = DataParallelModel(model.to(first(count)))
        got = DataParallelCriterion(Detection(kind), weight=Weights(kind))(parallel(inputs), targets)
        assert type(got) is type(expected) and str(flat(got)[0].device) == first(count)
        assert_same(results(model, got), results(alone, expected))


@pytest.mark.parametrize("wrap", [nn.DataParallel, DataParallelModel])
@pytest.mark.parametrize("kind", KINDS)
def test_several_losses_in_forward(count, kind, wrap):
    for samples in BATCHES:
        model, inputs, targets = detection(samples)
        alone = copy.deepcopy(model)
        expected = Detection(kind)(alone(inputs), targets)
        net = wrap(LossInForward(model, Detection(kind), weight=Weights(kind)).to(first(count)))
        got = total(net(inputs, targets))
        assert type(got) is (tuple if kind == "list" else type(expected))
        assert_same(results(model, got), results(alone, expected))


class Two(nn.Module):
    def __init__(self, reduction):
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs, targets):
        losses = (outputs - targets).square().mean(1), (outputs - targets).abs().sum(1)
        return losses if self.reduction == "none" else tuple(getattr(loss, self.reduction)() for loss in losses)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_one_weight_for_all_and_other_reductions(count, reduction):
    model, inputs, targets = nn.Linear(6, 4), numbers(5, 6), numbers(5, 4, seed=2)
    alone, net = copy.deepcopy(model), DataParallelModel(model.to(first(count)))
    expected = Two(reduction)(alone(inputs), targets)
    got = DataParallelCriterion(Two(reduction))(net(inputs), targets)
    for one, other in zip(got, expected, strict=True):
        assert str(one.device) == first(count)
        torch.testing.assert_close(one.cpu(), other)
    if reduction != "none":
        in_forward = nn.DataParallel(LossInForward(model, Two(reduction)))
        torch.testing.assert_close([loss.cpu() for loss in total(in_forward(inputs, targets))], list(expected))


def test_losses_that_are_not_the_same_on_every_gpu(four):
    class Uneven(nn.Module):
        def forward(self, outputs, targets):
            loss = (outputs - targets).square().mean()
            return {"loss": loss} | ({"last": loss} if outputs.device.index == 3 else {})

    outputs = DataParallelModel(nn.Linear(6, 4).to("cuda:0"))(numbers(8, 6))
    with pytest.raises(TypeError, match="a dict of loss and .* dict of loss, last. Every GPU must return the same"):
        DataParallelCriterion(Uneven())(outputs, numbers(8, 4))


@pytest.mark.parametrize("wrong", [None, 0.5, {"a": 0.5}, (None,)])
def test_what_is_no_loss(count, wrong):
    class Wrong(nn.Module):
        def forward(self, outputs, targets):
            return wrong

    outputs = DataParallelModel(nn.Linear(6, 4).to(first(count)))(numbers(8, 6))
    for reduction in ("mean", "sum"):
        with pytest.raises(TypeError, match="Wrong returned a (NoneType|float).*a tensor of one number, or several"):
            DataParallelCriterion(Wrong(), reduction=reduction)(outputs, numbers(8, 4))


def test_weights_that_do_not_fit_the_losses(four):
    outputs = DataParallelModel(nn.Linear(6, 4).to("cuda:0"))(numbers(8, 6))
    with pytest.raises(TypeError, match="2 parts and 1 parts"):
        DataParallelCriterion(Two("mean"), weight=lambda *_: (1,))(outputs, numbers(8, 4))
    with pytest.raises(TypeError, match="a Tensor and 2 parts|weight= must return one number"):
        DataParallelCriterion(nn.MSELoss(), weight=lambda *_: (1, 2))(outputs, numbers(8, 4))


def test_each_keeps_the_structure():
    found = each(sum, [{"a": (1, [2])}, {"a": (10, [20])}])
    assert found == {"a": (11, [22])} and each(sum, [Found(1, 2), Found(3, 4)]) == Found(4, 6)
    with pytest.raises(TypeError, match="2 parts and a int"):
        each(sum, [(1, 2), 3])


# ------------------------------------------------------------------------------------ samples in another dimension


class Reader(nn.Module):
    """(T, N, 6) -> (T, N, 4), with a state (1, N, 8) if wanted: as an nn.GRU without batch_first."""

    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(6, 8), nn.Linear(8, 4)

    def forward(self, texts, state=None):
        return self.head(self.gru(texts, state)[0])


def reader():
    torch.manual_seed(0)
    return Reader()


class Words(nn.Module):
    """(T, N, C) and (T, N): of one's own, since nn.CrossEntropyLoss wants classes second."""

    def forward(self, logits, labels):
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def places(logits, labels):
    return (labels != -100).sum()


@pytest.mark.parametrize("samples", BATCHES)
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.L1Loss(reduction="sum"), nn.SmoothL1Loss(reduction="none")], ids=str)
def test_time_first(count, loss, samples):
    model, texts, targets = reader(), numbers(7, samples, 6), numbers(7, samples, 4, seed=2)
    state = numbers(1, samples, 8, seed=3)
    alone = copy.deepcopy(model)
    expected = loss(alone(texts, state=state), targets)
    net = DataParallelModel(model.to(first(count)), dim=1)
    outputs = net(texts, state=state)
    assert [tuple(output.shape) for output in outputs] == [
        (7, len(piece), 4) for piece in torch.arange(samples).chunk(max(count, 1))
    ]
    got = DataParallelCriterion(loss, dim=1)(outputs, targets)
    torch.testing.assert_close(got.cpu(), expected)
    expected.sum().backward(), got.sum().backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad)


@pytest.mark.parametrize("form", ["parallel", "in forward", "in forward, parallel", "in forward, sum"])
def test_time_first_with_a_criterion_of_ones_own(count, form):
    for samples in BATCHES:
        labels = torch.randint(0, 4, (7, samples), generator=torch.Generator().manual_seed(4))
        labels[2:, samples // 2 :] = -100
        model, texts = reader(), numbers(7, samples, 6)
        alone = copy.deepcopy(model)
        expected = Words()(alone(texts), labels)
        model.to(first(count))
        if form == "parallel":
            net = DataParallelModel(model, dim=1)
            got = DataParallelCriterion(Words(), dim=1, weight=places)(net(texts), labels)
        elif form == "in forward, sum":
            net = nn.DataParallel(LossInForward(model, WordSum(), reduction="sum", dim=1), dim=1)
            expected, got = WordSum()(alone(texts), labels), total(net(texts, labels))
        else:
            wrap = nn.DataParallel if form == "in forward" else DataParallelModel
            got = total(wrap(LossInForward(model, Words(), weight=places, dim=1), dim=1)(texts, labels))
        assert got.shape == ()
        torch.testing.assert_close(got.cpu(), expected)
        expected.backward(), got.backward()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad.cpu(), other.grad)


class WordSum(nn.Module):
    def forward(self, logits, labels):
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def test_the_model_time_first_and_the_loss_samples_first(count):
    """A classifier of texts: the last state, (N, 4), and labels (N,)."""

    class Last(Reader):
        def forward(self, texts):
            return super().forward(texts)[-1]

    torch.manual_seed(0)
    model, texts, labels = Last(), numbers(7, 5, 6), torch.tensor([0, -100, 2, -100, -100])
    expected = nn.CrossEntropyLoss()(copy.deepcopy(model)(texts), labels)
    outputs = DataParallelModel(model.to(first(count)), dim=1)(texts)
    torch.testing.assert_close(DataParallelCriterion(nn.CrossEntropyLoss())(outputs, labels).cpu(), expected)


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(), nn.NLLLoss(), nn.CTCLoss(), nn.KLDivLoss(reduction="batchmean"), nn.TripletMarginLoss()],
    ids=str,
)
def test_losses_that_want_samples_first(loss):
    for build in (DataParallelCriterion, lambda *args, **options: LossInForward(nn.Linear(6, 4), *args, **options)):
        with pytest.raises(ValueError, match=f"{type(loss).__name__} has its samples first, and dim=1 says otherwise"):
            build(loss, dim=1)


def test_errors_of_dimensions(four):
    model = DataParallelModel(reader().to("cuda:0"), dim=1)
    with pytest.raises(ValueError, match=r"shape \(5,\) has no dimension 1, where samples are looked for"):
        model(numbers(5))
    criterion, outputs = DataParallelCriterion(nn.MSELoss(), dim=1), model(numbers(7, 8, 6))
    with pytest.raises(ValueError, match=r"shape \(8,\) has no dimension 1"):
        criterion(outputs, numbers(8))
    with pytest.raises(ValueError, match="target 0 has 2 samples, which make 2 pieces.*samples in dimension 1"):
        criterion(outputs, numbers(7, 2, 4))
    with pytest.raises(ValueError, match="cuda:0 have 2 and 3 samples"):
        criterion(outputs, numbers(7, 10, 4))
    with pytest.raises(ValueError, match="one row per sample, and every GPU would get all rows"):
        DataParallelCriterion(nn.BCEWithLogitsLoss(torch.ones(8, 1).to("cuda:0")), dim=1)(outputs, numbers(7, 8, 4))
    with pytest.raises(ValueError, match="inputs of 1 and 8 samples cannot be cut alike"):
        model(numbers(7, 8, 6), state=numbers(1, 1, 8))
    for wrong in (-1, 0.5):
        with pytest.raises(ValueError, match="give the number of the dimension"):
            DataParallelModel(reader(), dim=wrong)
    with pytest.raises(TypeError, match="one loss per sample"):  # (T,): the samples are summed away
        DataParallelCriterion(Summed(), reduction="none", dim=1)(outputs, numbers(7, 8, 4))


class Summed(nn.Module):
    def forward(self, outputs, targets):
        return (outputs - targets).square().sum((1, 2))
