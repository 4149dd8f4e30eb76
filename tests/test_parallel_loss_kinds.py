"""What else models return and criteria take: dataclasses, whole lists, lengths, rows per sample, targets that learn."""

import copy
import dataclasses
from collections import OrderedDict, UserDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from helpers.parallel.loss import DataParallelCriterion, DataParallelModel, LossInForward, total
from tests.parallel_losses import counts, first, numbers

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

count = counts(0, 1, 4)
LABELS = torch.arange(10) % 4


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


class Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.kind = net(), kind

    def forward(self, x):
        return self.kind(self.body(x))


def assert_as_alone(count, model, criterion, inputs, *targets):
    """Loss and gradients of both cures are those of one device; the loss in forward takes one target."""
    alone = copy.deepcopy(model)
    expected = criterion(alone(inputs), *targets)
    expected.sum().backward()
    parallel = DataParallelModel(copy.deepcopy(model).to(first(count)))
    losses = {parallel: DataParallelCriterion(copy.deepcopy(criterion).to(first(count)))(parallel(inputs), *targets)}
    if len(targets) == 1 and expected.shape == ():
        in_forward = nn.DataParallel(LossInForward(copy.deepcopy(model), copy.deepcopy(criterion)).to(first(count)))
        losses[in_forward.module.module] = total(in_forward(inputs, *targets))
    for wrapped, loss in losses.items():
        loss.sum().backward()
        torch.testing.assert_close(loss.detach().cpu(), expected.detach())
        for one, other in zip(wrapped.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad.cpu(), other.grad)


# ------------------------------------------------------------------------------------------- what a model returns


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class ModelOutput(OrderedDict):
    """As other libraries have it: a dict whose entries are attributes too."""

    def __getattr__(self, name):
        return self[name]


class OfLogits(nn.Module):
    def forward(self, output, labels):
        return F.cross_entropy(output.logits, labels)


@pytest.mark.parametrize("kind", [Output, lambda logits: ModelOutput(logits=logits)], ids=["dataclass", "dict"])
def test_outputs_with_attributes(count, kind):
    assert_as_alone(count, Returns(kind), OfLogits(), numbers(10, 6), LABELS)


class DeepSupervision(nn.Module):
    """Takes all outputs as one list, as segmentation nets with auxiliary heads have it."""

    def forward(self, outputs, labels):
        return F.cross_entropy(outputs[0], labels) + 0.4 * F.cross_entropy(outputs[1], labels)


@pytest.mark.parametrize("kind", [lambda x: [x, -x], lambda x: (x, -x)], ids=["list", "tuple"])
def test_a_criterion_that_takes_all_outputs_as_one(count, kind):
    assert_as_alone(count, Returns(kind), DeepSupervision(), numbers(10, 6), LABELS)


def test_a_criterion_that_takes_both_gets_several_arguments(four):
    class Either(nn.Module):
        def forward(self, first, second, third=None):
            assert isinstance(first, torch.Tensor) and third is not None
            return F.cross_entropy(first + second, third)

    outputs = DataParallelModel(Returns(lambda x: (x, 2 * x)).to("cuda:0"))(numbers(10, 6))
    loss = DataParallelCriterion(Either())(outputs, LABELS)
    torch.testing.assert_close(loss.cpu(), F.cross_entropy(3 * net()(numbers(10, 6)), LABELS))


# ------------------------------------------------------------------------------------------------ what cannot be cut


def packed():
    return pack_sequence([numbers(3, 6), numbers(2, 6)])


@pytest.mark.parametrize(
    ("whole", "name"),
    [
        (lambda: Output(numbers(10, 6)), "Output"),
        (lambda: {"a": UserDict(x=numbers(10, 6))}, "UserDict"),
        (packed, "PackedSequence"),
    ],
    ids=["dataclass", "mapping", "packed"],
)
def test_what_would_go_whole_to_every_gpu(four, whole, name):
    class First(nn.Module):
        def forward(self, x, other=None):
            return x

    model = DataParallelModel(First())
    criterion = DataParallelCriterion(OfLogits())
    for call in (
        lambda: model(numbers(10, 6), whole()),
        lambda: model(numbers(10, 6), other=whole()),
        lambda: criterion(model(numbers(10, 6)), whole()),
    ):
        with pytest.raises(ValueError, match=f"in a {name} are not cut, and each GPU would get all of them"):
            call()
    assert len(model(numbers(10, 6), "a note")) == 4


def test_rows_that_belong_to_other_samples(four):
    """7 and 8 rows make four pieces each, and yet not pieces of the same samples."""

    class Both(nn.Module):
        def forward(self, x, y, z=0):
            return (x.sum() + y.sum() + z.sum()).reshape(1)

    model, criterion = DataParallelModel(Both()), DataParallelCriterion(Both())
    with pytest.raises(ValueError, match="inputs of 7 and 8 samples cannot be cut alike"):
        model(numbers(8, 2), numbers(7, 2))
    outputs = DataParallelModel(net().to("cuda:0"))(numbers(8, 6))
    for call in (
        lambda: criterion(outputs, numbers(8, 2), numbers(7, 2)),
        lambda: criterion(outputs, numbers(8, 2), z=numbers(7, 2)),
        lambda: criterion(outputs, {"a": numbers(7, 2), "b": numbers(8, 2)}),
    ):
        with pytest.raises(ValueError, match="targets of 7 and 8 samples cannot be cut alike"):
            call()


def test_two_rows_for_each_sample(count):
    """As with two negatives per sample: 8 and 16 rows are cut at the same samples."""

    class Distance(nn.Module):
        def forward(self, outputs, targets, others):
            return (outputs - targets).square().mean() + (outputs - others.unflatten(0, (-1, 2)).sum(1)).abs().mean()

    assert_as_alone(count, net(), Distance(), numbers(8, 6), numbers(8, 4, seed=2), numbers(16, 4, seed=3))


# ----------------------------------------------------------------------------------------------- losses and modes


class Frames(nn.Module):
    """(N, 6) -> (7, N, 5): time first, as nn.CTCLoss wants it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 35)

    def forward(self, x):
        return self.body(x).reshape(len(x), 7, 5).transpose(0, 1).log_softmax(-1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("samples", [1, 5, 10])
def test_ctc_with_lengths(count, samples, reduction):
    numbers_of_letters = 1 + torch.arange(samples) % 3
    targets = 1 + torch.arange(3 * samples).reshape(samples, 3) % 4, 5 + torch.arange(samples) % 3, numbers_of_letters
    assert_as_alone(count, Frames(), nn.CTCLoss(reduction=reduction), numbers(samples, 6), *targets)


@pytest.mark.parametrize("variance", [(10, 4), (10, 1), (10,), None], ids=str)
def test_variances_of_any_shape(count, variance):
    given = 0.5 if variance is None else numbers(*variance).exp()
    assert_as_alone(count, net(), nn.GaussianNLLLoss(full=True), numbers(10, 6), numbers(10, 4, seed=2), given)


class Adaptive(nn.Module):
    """Parameters inside the criterion, and a named tuple of which the loss is one field."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tree = nn.AdaptiveLogSoftmaxWithLoss(4, 9, [3], div_value=2)

    def forward(self, outputs, labels):
        return self.tree(outputs, labels).loss


def test_an_adaptive_softmax(count):
    assert_as_alone(count, net(), Adaptive(), numbers(10, 6), torch.arange(10) % 9)


def test_targets_and_inputs_that_learn(count):
    """Gradients reach what was scattered: the outputs of a teacher, an adversarial input."""
    wanted = [numbers(10, 6).requires_grad_(), numbers(10, 4, seed=2).requires_grad_()]
    found = [tensor.detach().to(first(count)).requires_grad_() for tensor in wanted]
    F.mse_loss(net()(wanted[0]), wanted[1]).backward()
    DataParallelCriterion(nn.MSELoss())(DataParallelModel(net().to(first(count)))(found[0]), found[1]).backward()
    torch.testing.assert_close([tensor.grad.cpu() for tensor in found], [tensor.grad for tensor in wanted])


def test_frozen_parameters(count):
    model = net().to(first(count))
    model[0].requires_grad_(False)
    criterion, parallel = DataParallelCriterion(nn.CrossEntropyLoss()), DataParallelModel(model)
    criterion(parallel(numbers(10, 6)), LABELS).backward()
    assert model[0].weight.grad is None and model[2].weight.grad is not None
    model.requires_grad_(False)
    assert not criterion(parallel(numbers(10, 6)), LABELS).requires_grad


def test_modes_reach_the_replicas(count):
    class Told(nn.Module):
        found = []

        def forward(self, x, y=None):
            self.found.append(self.training)
            return x.mean(1)

    model, criterion = DataParallelModel(Told()), DataParallelCriterion(Told(), reduction="none")
    for training in (True, False):
        model.train(training), criterion.train(training)
        criterion([output[:, None] for output in model(numbers(8, 2).to(first(count)))], numbers(8)[:, None])
        assert Told.found == [training] * 2 * max(count, 1)
        Told.found.clear()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_piece_without_samples(four, reduction):
    """Cut by hand, 3, 3, 0 and 0: it adds nothing, and no nan to the gradients."""
    sizes = [3, 3, 0, 0]
    cut = [numbers(size, 4, seed=size).to(gpu).requires_grad_() for size, gpu in zip(sizes, four, strict=True)]
    targets = [numbers(size, 4, seed=9).to(gpu) for size, gpu in zip(sizes, four, strict=True)]
    loss = DataParallelCriterion(nn.MSELoss(reduction=reduction))(cut, targets)
    joined = [torch.cat([piece.detach().cpu() for piece in pieces]) for pieces in (cut, targets)]
    torch.testing.assert_close(loss.detach().cpu(), F.mse_loss(*joined, reduction=reduction))
    loss.sum().backward()
    assert all(piece.grad.isfinite().all() for piece in cut)


def test_an_error_names_the_gpu(four):
    class Breaks(nn.Module):
        def forward(self, x, y=None):
            if x.device.index == 0:
                raise ValueError("this sample is broken")
            return x.sum()

    with pytest.raises(ValueError, match="(?s)in replica 1 on device 0.*this sample is broken"):
        DataParallelModel(Breaks(), [2, 0])(numbers(10, 6))
    outputs = DataParallelModel(net().to("cuda:2"), [2, 0])(numbers(10, 6))
    with pytest.raises(ValueError, match="(?s)in replica 1 on device 0.*this sample is broken") as caught:
        DataParallelCriterion(Breaks(), [2, 0], reduction="sum")(outputs, LABELS)
    assert "GPU by GPU, tensors of the shapes [[(5, 4), (5,)], [(5, 4), (5,)]]" in caught.value.__notes__[0]


def test_parameters_on_another_gpu(four):
    for model in (net(), net().to("cuda:1"), nn.Sequential(net().to("cuda:0"), nn.Linear(4, 4).to("cuda:1"))):
        with pytest.raises(RuntimeError, match=r"on device cuda:0 \(device_ids\[0\]\) but found one of them on device"):
            DataParallelModel(model)(numbers(10, 6))
