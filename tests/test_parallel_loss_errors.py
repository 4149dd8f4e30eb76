"""What cannot be right in a parallel loss or a loss in forward: errors that say what to do."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.parallel.loss import DataParallelCriterion, DataParallelModel, LossInForward, total
from helpers.parallel.loss.reductions import count_labels, count_samples, find_reduction, weighted_loss
from tests.parallel_losses import PerSample, Summed, numbers

WEIGHTS = torch.tensor([0.2, 3.0, 0.0, 1.5])


def net():
    return nn.Linear(6, 4)


def classes(samples):
    return torch.arange(samples) % 4


def probabilities(samples):
    return numbers(samples, 4).softmax(1)


def some_ignored(samples):
    return torch.where(torch.arange(samples) % 3 == 0, -100, classes(samples))


def batch(samples=10):
    return DataParallelModel(net().to("cuda:0"))(numbers(samples, 6))


def test_outputs_that_are_no_list(four):
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    with pytest.raises(TypeError, match="wrap the model in DataParallelModel instead of nn.DataParallel"):
        criterion(nn.DataParallel(net().to("cuda:0"))(numbers(10, 6)), classes(10))
    with pytest.raises(ValueError, match="0 outputs for 4 GPUs"):
        criterion([], classes(10))
    with pytest.raises(ValueError, match=r"outputs\[1\], a str, has no tensor that can be found"):
        criterion([batch()[0], "text"], classes(10))


def test_outputs_on_other_gpus_than_the_criterions(four):
    with pytest.raises(ValueError, match="4 outputs for 2 GPUs .* the device_ids of the model"):
        DataParallelCriterion(nn.CrossEntropyLoss(), [0, 1])(batch(), classes(10))
    with pytest.raises(ValueError, match=r"outputs\[0\] is on cuda:0, and its GPU is cuda:1"):
        DataParallelCriterion(nn.CrossEntropyLoss(), [1, 0, 2, 3])(batch(), classes(10))
    with pytest.raises(ValueError, match=r"outputs\[0\] is on cpu, and its GPU is cuda:0"):
        DataParallelCriterion(nn.CrossEntropyLoss())([numbers(10, 4)], classes(10))


def test_targets_that_do_not_fit(four):
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="target 0 has 2 samples, which make 2 pieces, and there are 4 outputs"):
        criterion(batch(), classes(2))
    with pytest.raises(ValueError, match="cuda:0 have 3 and 4 samples: CrossEntropyLoss needs the same number"):
        criterion(batch(), classes(13))
    with pytest.raises(ValueError, match="a list of 2 pieces on .*'cuda:0', 'cuda:1'.* 4 outputs"):
        criterion(batch(), [classes(3).to("cuda:0"), classes(3).to("cuda:1")])
    pieces = [piece.to(gpu) for piece, gpu in zip(classes(10).chunk(4), four[::-1], strict=True)]
    with pytest.raises(ValueError, match="one piece per output, on its GPU"):
        criterion(batch(), pieces)
    with pytest.raises(ValueError, match="have 3 and 4 samples"):
        LossInForward(net(), nn.CrossEntropyLoss())(numbers(3, 6), classes(4))
    with pytest.raises(RuntimeError) as caught:
        DataParallelCriterion(PerSample(), reduction="none")(batch(), numbers(13, 4))
    assert "do targets fit outputs" in caught.value.__notes__[0]


@pytest.mark.parametrize("reduction", ["median", 3])
def test_reductions_that_cannot_be_combined(reduction):
    class Own(PerSample):
        pass

    loss = Own()
    loss.reduction = reduction
    with pytest.raises(ValueError, match="cannot be combined over GPUs: only a mean, a sum"):
        DataParallelCriterion(loss)
    with pytest.raises(ValueError, match='built with reduction="sum": leave one out'):
        DataParallelCriterion(nn.MSELoss(reduction="sum"), reduction="mean")
    with pytest.raises(ValueError, match="a mean or a sum"):
        LossInForward(net(), nn.MSELoss(reduction="none"))


class Around(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, outputs, labels):
        return self.loss(outputs, labels)


def test_means_that_are_not_over_samples(four):
    for loss in (nn.CrossEntropyLoss(WEIGHTS), nn.NLLLoss(ignore_index=0)):
        for build in (DataParallelCriterion, partial(LossInForward, net())):
            with pytest.raises(ValueError, match="Give weight="):
                build(Around(loss))
    with pytest.raises(ValueError, match='part of it has the reduction "sum"'):
        DataParallelCriterion(Around(nn.MSELoss(reduction="sum")))
    plain, labels = Around(nn.CrossEntropyLoss()), some_ignored(10)
    for device in ("cpu", "cuda:0"):
        with pytest.raises(ValueError, match="labels of -100, which are left out"):
            DataParallelCriterion(plain)(batch(), labels.to(device))
        with pytest.raises(ValueError, match="labels of -100, which are left out"):
            nn.DataParallel(LossInForward(net(), plain).to("cuda:0"))(numbers(10, 6), labels.to(device))
    allowed = DataParallelCriterion(Around(nn.CrossEntropyLoss(WEIGHTS.to("cuda:0"))), weight=count_samples)
    assert allowed(batch(), classes(10)).shape == ()


def test_labels_without_values():
    with virtual_gpus(4, shapes_only=True):
        criterion = DataParallelCriterion(Around(nn.CrossEntropyLoss()))
        with pytest.raises(ValueError, match="these labels have no values to look at.*Give weight="):
            criterion(batch(), classes(10).to("cuda:0"))
        assert criterion(batch(), classes(10)).shape == ()


def test_a_weight_per_sample(four):
    for kind in (nn.BCEWithLogitsLoss, nn.BCELoss):
        criterion = DataParallelCriterion(kind(weight=numbers(10, 1).to("cuda:0")))
        with pytest.raises(ValueError, match="one row per sample, and every GPU would get all rows"):
            criterion(batch(), probabilities(10))


@pytest.mark.parametrize("count", [0, 1, 4])
def test_results_that_are_not_one_number(monkeypatch, count):
    if count == 0:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with virtual_gpus(count) if count else nullcontext():
        check_results(count, DataParallelModel(net().to("cuda:0" if count else "cpu"))(numbers(10, 6)))


def check_results(count, outputs):
    with pytest.raises(TypeError, match=r'returned a tensor of shape \(\d+,\).*say reduction="none"'):
        DataParallelCriterion(PerSample())(outputs, numbers(10, 4))
    if count > 1:
        with pytest.raises(TypeError, match="needs one loss per sample"):
            DataParallelCriterion(Summed(), reduction="none")(outputs, numbers(10, 4))
        with pytest.raises(TypeError, match="weight= must return one number"):
            DataParallelCriterion(Summed(), weight=lambda *_: None)(outputs, numbers(10, 4))


def test_inputs_that_cannot_be_cut_alike(four):
    """nn.DataParallel would drop samples without a word."""

    class Both(nn.Module):
        def forward(self, x, y=None):
            return x

    model = DataParallelModel(Both())
    for call in (lambda: model(numbers(8, 2), numbers(1, 2)), lambda: model(numbers(8, 2), y=numbers(1, 2))):
        with pytest.raises(ValueError, match="inputs of 1 and 8 samples cannot be cut alike"):
            call()
    assert len(model(numbers(8, 2), numbers(8, 3))) == 4 and len(model(numbers(5, 2), y="text")) == 3


def test_a_criterion_on_the_wrong_device(four):
    with pytest.raises(ValueError, match=r'parameter or buffer on cpu.*criterion.to\("cuda:0"\)'):
        DataParallelCriterion(nn.CrossEntropyLoss(WEIGHTS))(batch(), classes(10))


def test_things_that_cannot_be_copied(four):
    for wrap in (DataParallelCriterion, DataParallelModel):
        with pytest.raises(TypeError, match="need an nn.Module"):
            wrap(F.cross_entropy)
        with pytest.raises(ValueError, match="device_ids is empty"):
            wrap(nn.MSELoss(), [])


def test_gpus_that_are_asked_for_and_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"no GPU for device_ids=\[0, 1\]"):
        DataParallelModel(net(), [0, 1])


def test_calls_of_the_loss_in_forward():
    with pytest.raises(TypeError, match="the inputs of the model and then the targets"):
        LossInForward(net(), nn.MSELoss())(numbers(2, 6))
    with pytest.raises(ValueError, match=r"takes what LossInForward returns"):
        total(numbers(3, 4))


def test_weights_without_gpus():
    assert count_samples({"a": numbers(3, 2)}) == 3 and count_labels(None, some_ignored(10)).item() == 6
    assert find_reduction(nn.KLDivLoss(reduction="batchmean")) == "mean"
    share, weight = weighted_loss(Summed(), lambda *_: 0, numbers(2, 4) / 0, numbers(2, 4))
    assert (share.item(), weight.item()) == (0, 0)
    with pytest.raises(ValueError, match="no samples to count"):
        count_samples(torch.tensor(1.0))
