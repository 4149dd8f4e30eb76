"""The checks of lesson 06: solutions pass, the broken loops are told what they keep, nothing raises."""

import traceback

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from virtual_gpus import virtual_gpus

from helpers.exercises import lesson06 as check
from tests.check_answers import STRANGE_RESULTS, explains, survives_strange_answers, told

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

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
    """What cannot be called, or raises, ends in `call` for all five alike: one check has to do with all of STRANGE."""
    assert survives_strange_answers(check.halve_until_it_fits)
    others = [loop for loop in LOOPS if loop is not check.halve_until_it_fits]
    assert survives_strange_answers(*others, answers=STRANGE_RESULTS)


def test_gpus_without_values_are_refused():
    with virtual_gpus(1, shapes_only=True):
        for loop in LOOPS:
            assert told(loop(validate), "the exercise needs them")


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


def on_the_cpu(net, batches):
    with torch.no_grad():
        net.cpu()
        found = sum(cross_entropy(net(x), y).item() for x, y in batches) / len(batches)
        net.cuda()
    return found


def without_gradients(net, batches):
    net.requires_grad_(False)
    return sum(loss_of(net, x, y).item() for x, y in batches) / len(batches)


def mean_of_losses(net, batches):
    return sum(loss_of(net, x, y) for x, y in batches) / len(batches)


def test_validation_loss_explains():
    explains(
        check.validation_loss,
        (lambda net, batches: mean_of_losses(net, batches).item(), "What still refers to tensors of earlier batches?"),
        (mean_of_losses, "Return a number"),
        (lambda net, batches: len(batches) * validate(net, batches), "is the sum. Divide it"),
        (
            lambda net, batches: sum(loss_of(net, x, y).item() for x, y in batches) / len(batches),
            "still builds a graph",
        ),
        (on_the_cpu, "The model ran on cpu. Run it on cuda:0"),
        (without_gradients, "its parameters need requires_grad=True"),
        (keeps_outside, "your function leaves behind 2.0 MiB, and 1.0 MiB are allowed"),
    )
    kept.clear()


def test_validation_loss():
    assert check.validation_loss(validate)
    assert check.validation_loss(torch.inference_mode()(lambda *job: mean_of_losses(*job).item()))
    assert check.validation_loss(lambda net, batches: validate(net.eval(), batches))


def features(net, batches, cut):
    found = []
    with torch.no_grad():
        for x, _ in batches:
            found.append(cut(net(x.cuda())))
    return torch.cat(found)


def into_one_tensor(net, batches):
    found = torch.empty(sum(len(x) for x, _ in batches), 4, device="cuda")
    with torch.no_grad():
        for number, (x, _) in enumerate(batches):
            found[number * len(x) : (number + 1) * len(x)] = net(x.cuda())[:, :4]
    return found


def test_features():
    assert check.features(lambda net, batches: features(net, batches, lambda out: out[:, :4].clone()))
    assert check.features(lambda net, batches: features(net, batches, lambda out: out[:, :4].contiguous()))
    assert check.features(into_one_tensor)
    explains(
        lambda cut: check.features(lambda net, batches: features(net, batches, cut)),
        (lambda out: out[:, :4], "Which larger tensors stay alive with them?"),
        (lambda out: out[:, :4].cpu(), "the device is cpu"),
        (lambda out: out[:, :5].clone(), "the shape is"),
        (lambda out: out[:, :4].clone().requires_grad_(), "still refer to a graph"),
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


def empties_the_cache(step, batch):
    try:
        step(batch)
        return batch
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return empties_the_cache(step, batch // 2)


def halve_with_cleared_frames(step, batch):
    """Right in another form: the error may stay, because its frames hold nothing any more."""
    while True:
        try:
            step(batch)
            return batch
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
            batch //= 2


def test_halve_until_it_fits():
    assert check.halve_until_it_fits(halve)
    assert check.halve_until_it_fits(halve_with_cleared_frames)
    still = "A batch of 100 fits on an empty GPU. What still refers to the tensors of the steps that failed?"
    explains(
        check.halve_until_it_fits,
        (halve_inside, still),
        (empties_the_cache, still),
        (lambda step, batch: 100, "Return the batch that ran"),
        (lambda step, batch: halve(step, batch // 4), "Each try should be half of the one before"),
        (lambda step, batch: step(batch), "OutOfMemoryError"),
    )


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


def weighted(weight):
    def answer(net, x, y, pieces):
        mean = 0
        for part, target in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            loss = loss_of(net, part, target)
            (loss * weight(len(part), len(x), pieces)).backward()
            mean += loss.item() * len(part) / len(x)
        return mean

    return answer


def clears_in_the_loop(net, x, y, pieces):
    for part, target in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
        net.zero_grad()
        (loss_of(net, part, target) * len(part) / len(x)).backward()
    return validate(net, [(x, y)])


def test_accumulate():
    assert check.accumulate(accumulate)
    assert check.accumulate(weighted(lambda samples, all_samples, pieces: samples / all_samples))
    explains(
        check.accumulate,
        (lambda *job: accumulate(*job, at_once=True), "Which call frees the graph of a piece?"),
        (weighted(lambda samples, all_samples, pieces: 1 / pieces), "[3, 3, 3, 1] samples count [0.25, 0.25, 0.25"),
        (weighted(lambda samples, all_samples, pieces: 1), "samples count [1.0, 1.0, 1.0, 1.0]"),
        (clears_in_the_loop, "samples count [0.0, 0.0, 0.0, 0.1]"),
        (lambda net, x, y, pieces: validate(net, [(x, y)]), "Some parameters have no gradient"),
        (lambda *job: 4 * accumulate(*job), "The loss of "),
    )


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


def in_place(net, batches):
    """Right in another form: detached, in place."""
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    starts = [parameter.detach().clone() for parameter in net.parameters()]
    found = [torch.zeros_like(start) for start in starts]
    for x, y in batches:
        sgd.zero_grad()
        loss_of(net, x, y).backward()
        sgd.step()
        for average, parameter, start in zip(found, net.parameters(), starts, strict=True):
            average.mul_(0.9).add_((parameter.detach() - start) ** 2, alpha=0.1)
    return found


def test_train_with_drift():
    assert check.train_with_drift(drift)
    assert check.train_with_drift(in_place)
    explains(
        check.train_with_drift,
        (lambda *job: drift(*job, graph=True), "What do the averages, or a list, still refer to?"),
        (lambda *job: drift(*job, rate=0.2), "values are wrong"),
        (lambda *job: drift(*job)[:2], "There are 2 averages. Return one for each parameter"),
    )


def net():
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 10))


def right():
    size = sum(p.numel() for p in net().parameters()) * 4 / 2**20
    activations = 500 * (2048 + 10 + 10) * 4 / 2**20
    data = {"parameters": size, "gradients": size, "optimizer": 2 * size, "activations": activations}
    return data | {"workspaces": 32, "context": 128}  # of an H200, and of a virtual card of 1 GiB


def test_budget_says_how_far_off_a_good_guess_is():
    verdict = check.budget(net, torch.zeros(500, 784), right())
    assert verdict and "workspaces 32.0 MiB (+0 %), context 128.0 MiB (+0 %). " in verdict.text
    guess = right() | {"context": 128 * 1.05, "optimizer": right()["optimizer"] * 0.95}
    text = check.budget(net, torch.zeros(500, 784), guess).text
    assert "context 128.0 MiB (+5 %)" in text and "(-5 %), activations" in text
    assert f"Your sum is {sum(guess.values()):,.1f} MiB. The GPU held " in text


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
    assert told(check.validation_loss(keeps_graphs), "earlier batches")


def test_budget_explains():
    explains(
        lambda changed: check.budget(net, torch.zeros(500, 784), right() | changed),
        ({"optimizer": right()["optimizer"] / 2}, "optimizer 0.50. 1 would be right. Begin with the optimizer"),
        ({"parameters": right()["parameters"] / 4}, "parameters 0.25. 1 would be right. Begin with the parameters"),
        ({"activations": 100.0}, "Add up what each layer keeps"),
        ({"workspaces": 8.0}, "workspaces 0.25."),
        ({"context": 760.0}, "context 5.94. 1 would be right. Begin with the context. It depends on the GPU"),
        ({"context": 1.0, "optimizer": 1.0}, "context 0.01"),
        ({"gradients": "much"}, "is text"),
        ({"gradients": ...}, "still contains `...`"),
    )


def test_budget_of_other_things():
    assert told(check.budget(net, torch.zeros(500, 784), {"parameters": 1}), "MiB for each of parameters, gradients")
    assert told(check.budget(lambda: 3, torch.zeros(500, 784), right()), "is not a model")
    assert told(check.budget(net, 3, right()), "is not a tensor")


class Scalar(nn.Sequential):
    def forward(self, x):
        return super().forward(x).sum()


def test_budget_of_a_net_that_returns_its_loss():
    guess = right() | {"activations": 500 * 2048 * 4 / 2**20}
    assert check.budget(lambda: Scalar(*net()), torch.zeros(500, 784), guess)
