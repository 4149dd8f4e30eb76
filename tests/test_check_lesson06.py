"""The checks of lesson 06: solutions pass, the broken loops are told what they keep, nothing raises."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from virtual_gpus import virtual_gpus

from helpers.exercises import lesson06 as check
from tests.check_answers import explains, survives_strange_answers, told

pytestmark = pytest.mark.usefixtures("workspaces_given_back", "small_program")

LOOPS = (
    check.validation_loss,
    check.features,
    check.halve_until_it_fits,
    check.accumulate,
    check.train_with_drift,
)


@pytest.fixture(autouse=True)
def gpu():
    with virtual_gpus(1, memory="1 GiB") as devices:
        yield devices[0]


def test_no_answer_makes_a_check_raise():
    assert survives_strange_answers(*LOOPS)


def test_gpus_without_values_are_refused():
    with virtual_gpus(1, shapes_only=True):
        for loop in LOOPS:
            assert told(loop(validate), "the exercise needs values")


def loss_of(net, x, y, **how):
    return cross_entropy(net(x.cuda()), y.cuda(), **how)


def validate(net, batches):
    with torch.no_grad():
        return sum(loss_of(net, x, y).item() for x, y in batches) / len(batches)


kept = []


def keeps_outside(net, batches):
    mean = validate(net, batches)
    kept.append(torch.zeros(2**19, device="cuda"))
    return mean


def test_validation_loss_explains():
    explains(
        check.validation_loss,
        (lambda net, batches: (sum(loss_of(net, x, y) for x, y in batches) / len(batches)).item(), "the peak is"),
        (lambda net, batches: sum(loss_of(net, x, y) for x, y in batches) / len(batches), "a number is asked for"),
        (lambda net, batches: len(batches) * validate(net, batches), "divide by the batches"),
        (keeps_outside, "leaves behind"),
    )
    kept.clear()


def test_validation_loss():
    assert check.validation_loss(validate)
    assert check.validation_loss(torch.inference_mode()(validate))


def features(net, batches, cut):
    found = []
    with torch.no_grad():
        for x, _ in batches:
            found.append(cut(net(x.cuda())))
    return torch.cat(found)


def test_features():
    assert check.features(lambda net, batches: features(net, batches, lambda out: out[:, :4].clone()))
    explains(
        lambda cut: check.features(lambda net, batches: features(net, batches, cut)),
        (lambda out: out[:, :4], "what else is alive with them"),
        (lambda out: out[:, :4].detach(), "what else is alive with them"),
        (lambda out: out[:, :4].cpu(), "the device is cpu"),
        (lambda out: out[:, :5].clone(), "the shape is"),
    )


def halve(step, batch):
    while True:
        try:
            step(batch)
            return batch
        except torch.OutOfMemoryError:
            pass
        batch //= 2


def halve_inside(step, batch):
    try:
        step(batch)
        return batch
    except torch.OutOfMemoryError:
        return halve_inside(step, batch // 2)


def test_halve_until_it_fits():
    assert check.halve_until_it_fits(halve)
    assert told(check.halve_until_it_fits(halve_inside))
    assert told(check.halve_until_it_fits(lambda step, batch: 100), "the batch that ran")
    assert told(check.halve_until_it_fits(lambda step, batch: step(batch)), "OutOfMemoryError")


def accumulate(net, x, y, pieces, at_once=False):
    losses = []
    for part, target in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
        loss = loss_of(net, part, target, reduction="sum") / len(x)
        losses.append(loss if at_once else loss.item())
        if not at_once:
            loss.backward()
    if at_once:
        sum(losses).backward()
    return sum(losses).item() if at_once else sum(losses)


def mean_of_means(net, x, y, pieces):
    for part, target in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
        loss_of(net, part, target).backward()
    return validate(net, [(x, y)])


def test_accumulate():
    assert check.accumulate(accumulate)
    assert told(check.accumulate(lambda *job: accumulate(*job, at_once=True)), "until when does each graph live")
    assert told(check.accumulate(mean_of_means))
    assert told(check.accumulate(lambda net, x, y, pieces: validate(net, [(x, y)])), "no gradient")


def drift(net, batches, decay=0.9, graph=False, rate=0.1):
    sgd = torch.optim.SGD(net.parameters(), lr=rate)
    starts = [parameter.detach().clone() for parameter in net.parameters()]
    found = [torch.zeros_like(start) for start in starts]
    for x, y in batches:
        sgd.zero_grad()
        loss_of(net, x, y).backward()
        sgd.step()
        with torch.set_grad_enabled(graph):
            moved = [(p - start).square() for p, start in zip(net.parameters(), starts, strict=True)]
            found = [decay * d + (1 - decay) * m for d, m in zip(found, moved, strict=True)]
    return found


def test_train_with_drift():
    assert check.train_with_drift(drift)
    assert told(check.train_with_drift(lambda *job: drift(*job, graph=True)), "with every batch")
    assert told(check.train_with_drift(lambda *job: drift(*job, rate=0.2)), "values are wrong")
    assert told(check.train_with_drift(lambda *job: drift(*job)[:2]), "2 averages")


def net():
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 10))


def right():
    size = sum(p.numel() for p in net().parameters()) * 4 / 2**20
    activations = 500 * (2048 + 10 + 10) * 4 / 2**20
    data = {"parameters": size, "gradients": size, "optimizer": 2 * size, "activations": activations}
    return data | {"workspaces": 32, "context": 128}  # of an H200, and of a virtual card of 1 GiB


def test_budget_says_how_far_off_a_good_guess_is():
    verdict = check.budget(net, torch.zeros(500, 784), right())
    assert verdict and "workspaces 32.0 MiB, context 128.0 MiB; " in verdict.text
    guess = right() | {"context": 128 * 1.05, "optimizer": right()["optimizer"] * 0.95}
    text = check.budget(net, torch.zeros(500, 784), guess).text
    assert "context 128.0 MiB (+5 %)" in text and "(-5 %), activations" in text
    assert f"{sum(guess.values()):,.1f} MiB together, and " in text


def test_budget_of_what_is_on_the_gpu_already(gpu):
    """The context needs a first touch, which the batch is; neither it nor other tensors count."""
    other = torch.zeros(2**20, device=gpu)
    assert check.budget(lambda: net().to(gpu), torch.zeros(500, 784, device=gpu), right())
    assert torch.cuda.memory_allocated(gpu) == other.nbytes
    with virtual_gpus(1, memory="1 GiB", shapes_only=True):
        assert check.budget(net, torch.zeros(500, 784), right())


def test_kept_workspaces_make_no_target_larger(monkeypatch):
    """PyTorch before 2.15 keeps cuBLAS's workspace from the first product on: the reference must not count it."""
    monkeypatch.setattr("virtual_gpus.memory_model.keeps_workspaces", lambda version, environment: True)
    keeps_graphs = lambda net, batches: (sum(loss_of(net, x, y) for x, y in batches) / len(batches)).item()  # noqa: E731
    assert told(check.validation_loss(keeps_graphs), "the peak is")


def test_budget_explains():
    explains(
        lambda changed: check.budget(net, torch.zeros(500, 784), right() | changed),
        ({"optimizer": 1.0}, "two numbers for each parameter"),
        ({"parameters": right()["parameters"] / 4}, "four bytes"),
        ({"activations": 100.0}, "what each layer keeps"),
        ({"workspaces": 8.0}, "workspaces 0.25 times"),
        ({"context": 1.0, "optimizer": 1.0}, "context 0.01 times"),
        ({"gradients": "much"}, "is text"),
        ({"gradients": ...}, "still contains `...`"),
    )


def test_budget_of_other_things():
    assert told(check.budget(net, torch.zeros(500, 784), {"parameters": 1}), "MiB for each of parameters, gradients")
    assert told(check.budget(lambda: 3, torch.zeros(500, 784), right()), "is not a net")
    assert told(check.budget(net, 3, right()), "is not a tensor")


class Scalar(nn.Sequential):
    def forward(self, x):
        return super().forward(x).sum()


def test_budget_of_a_net_that_returns_its_loss():
    guess = right() | {"activations": 500 * 2048 * 4 / 2**20}
    assert check.budget(lambda: Scalar(*net()), torch.zeros(500, 784), guess)
