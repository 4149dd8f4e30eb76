"""The checks of lesson 06: solutions pass, the broken loops are told what they keep, nothing raises."""

import contextlib
import re
import traceback

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear_cross_entropy
from torch.utils.checkpoint import checkpoint
from virtual_gpus import virtual_gpus

from notebooks.checks import lesson06 as check
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


def switches_gradients_off(net, batches):
    torch.set_grad_enabled(False)
    return sum(loss_of(net, x, y).item() for x, y in batches) / len(batches)


def computed_by_hand_on_the_cpu(net, x):
    """The outputs of `net`, with no module called."""
    weights = [parameter.detach().cpu().requires_grad_() for parameter in net.parameters()]
    for number in range(0, len(weights), 2):
        x = nn.functional.linear(x if number == 0 else x.relu(), *weights[number : number + 2])
    return x, weights


def by_hand(net, batches):
    with torch.no_grad():
        losses = [cross_entropy(computed_by_hand_on_the_cpu(net, x)[0], y).item() for x, y in batches]
    return sum(losses) / len(losses)


def all_at_once(net, batches):
    return validate(net, [[torch.cat(each) for each in zip(*batches, strict=True)]])


def afterwards(answer, damage):
    """`answer`, but `damage(net, batches)` follows."""

    def function(net, batches):
        result = answer(net, batches)
        with torch.no_grad():
            damage(net, batches)
        return result

    return function


def doubles_a_weight(net, batches):
    net[0].weight.mul_(2)


DAMAGE = (
    (doubles_a_weight, "changes the weights of the model"),
    (lambda net, batches: batches[0][0].zero_(), "changes the images and labels that it gets"),
    (lambda net, batches: batches.pop(), "changes the images and labels that it gets"),
    (lambda net, batches: net.requires_grad_(False), "its parameters need requires_grad=True"),
    (lambda net, batches: net.eval(), "leaves the model in evaluation mode"),
)


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
        (switches_gradients_off, "leaves gradients switched off for the whole program"),
        (by_hand, "The model did not run"),
        (all_at_once, "The model ran on 3072 images at once"),
        (lambda net, batches: 2.302585, "2.30259"),
        *((afterwards(validate, damage), words) for damage, words in DAMAGE),
    )
    assert torch.is_grad_enabled()
    kept.clear()


def test_validation_loss():
    assert check.validation_loss(validate)
    assert check.validation_loss(torch.inference_mode()(lambda *job: mean_of_losses(*job).item()))
    assert check.validation_loss(as_one_should)


def as_one_should(net, batches):
    net.eval()
    found = validate(net, batches)
    net.train()
    return found


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
        (lambda out: out[:, :4].half(), "The features are torch.float16, which rounds them"),
        (lambda out: out[:, :4].double(), "The features are torch.float64, which is not what the model returns"),
        (lambda out: out[:, :4].half().float(), "values are wrong"),
        (lambda out: out[:, :4].contiguous().detach().cpu().cuda() + 1e-3, "yours is"),
        (lambda out: torch.narrow(out, 1, 0, 4), "Which larger tensors stay alive with them?"),
        (lambda out: out[:, 4:8].clone(), "values are wrong"),
    )
    right = lambda net, batches: features(net, batches, lambda out: out[:, :4].clone())  # noqa: E731
    explains(check.features, *((afterwards(right, damage), words) for damage, words in DAMAGE[:3]))
    rounded = check.features(lambda net, batches: features(net, batches, lambda out: out[:, :4].half().float())).text
    yours, right = re.search(r"yours is (\S+) and the right one is (\S+)\.", rounded).groups()
    assert yours != right


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


def halve_with_a_flag(step, batch):
    while batch:
        fitted = True
        try:
            step(batch)
        except torch.OutOfMemoryError:
            fitted = False
        if fitted:
            return batch
        batch = batch // 2


def retries_once_inside(step, batch):
    while True:
        try:
            step(batch)
            return batch
        except torch.OutOfMemoryError:
            try:
                step(batch // 2)
                return batch // 2
            except torch.OutOfMemoryError:
                pass
        batch //= 4


def halve_whatever_happens(kind):
    def answer(step, batch):
        while True:
            try:
                step(batch)
                return batch
            except kind:
                pass
            batch //= 2

    return answer


def passes_on_another_error(step, batch):
    """Right: what is no lack of memory ends the search, too."""
    while True:
        try:
            step(batch)
            return batch
        except torch.OutOfMemoryError:
            pass
        except RuntimeError as error:
            raise ValueError("The step is broken.") from error
        batch //= 2


def always_400_200_100(step, batch):
    for size in (400, 200):
        with contextlib.suppress(torch.OutOfMemoryError):
            step(size)
    step(100)
    return 100


def divides(step, batch):
    with contextlib.suppress(torch.OutOfMemoryError):
        step(batch)
        return batch
    return divides(step, batch / 2)


def halve_by_the_words(step, batch):
    """Right in another form, as before OutOfMemoryError existed."""
    while True:
        try:
            step(batch)
            return batch
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
        batch //= 2


def test_halve_until_it_fits(monkeypatch):
    monkeypatch.setattr(check.random, "randint", lambda low, high: 3 if high < 9 else 333)  # 333, 166, 83, 41
    assert told(check.halve_until_it_fits(divides), "half of the one before, rounded down")
    for right in (halve, halve_with_cleared_frames, halve_with_a_flag, halve_by_the_words, passes_on_another_error):
        assert check.halve_until_it_fits(right)
    still = "A batch of 100 fits on an empty GPU. What still refers to the tensors of the steps that failed?"
    explains(
        check.halve_until_it_fits,
        (halve_inside, still),
        (empties_the_cache, still),
        (lambda step, batch: 100, "Return the batch that ran"),
        (lambda step, batch: halve(step, batch // 4), "Each try should be half of the one before"),
        (lambda step, batch: step(batch), "OutOfMemoryError"),
        (always_400_200_100, "Your code stopped at `step(100)` with OutOfMemoryError"),
        (retries_once_inside, "When step(200) began"),
        (halve_whatever_happens(Exception), 'RuntimeError("The labels have the wrong shape."), your function hid it'),
        (halve_whatever_happens(RuntimeError), "Catch only torch.OutOfMemoryError"),
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


def on_the_cpu_at_once(net, x, y, pieces):
    net.cpu()
    loss = cross_entropy(net(x), y)
    loss.backward()
    net.cuda()
    for parameter in net.parameters():
        parameter.grad = parameter.grad.cuda()
    return loss.item()


def stays_on_the_cpu(net, x, y, pieces):
    net.cpu()
    loss = cross_entropy(net(x), y)
    loss.backward()
    return loss.item()


def all_of_x_at_once(net, x, y, pieces):
    return accumulate(net, x.cuda(), y.cuda(), pieces)


def all_by_hand(net, x, y, pieces):
    outputs, weights = computed_by_hand_on_the_cpu(net, x)
    loss = cross_entropy(outputs, y)
    loss.backward()
    for parameter, weight in zip(net.parameters(), weights, strict=True):
        parameter.grad = weight.grad.to(parameter.device)
    return loss.item()


def with_autograd_grad(net, x, y, pieces):
    """Right in another form: a second copy of the gradients exists for a moment."""
    mean, parameters = 0, list(net.parameters())
    for part, target in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
        loss = loss_of(net, part, target, reduction="sum") / len(x)
        mean += loss.item()
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
    return mean


def copies_all_pieces(net, x, y, pieces):
    parts = [(part.cuda(), target) for part, target in zip(x.chunk(pieces), y.chunk(pieces), strict=True)]
    losses = []
    for part, target in parts:
        loss = loss_of(net, part, target, reduction="sum") / len(x)
        loss.backward()
        losses.append(loss.item())
    return sum(losses)


def returns_the_graph(net, x, y, pieces):
    accumulate(net, x, y, pieces)
    return loss_of(net, x, y)


def off_afterwards(net, x, y, pieces):
    mean = accumulate(net, x, y, pieces)
    torch.set_grad_enabled(False)
    return mean


def checkpointed(net, x, y, pieces):
    parts = zip(x.chunk(pieces), y.chunk(pieces), strict=True)
    losses = [
        checkpoint(lambda part, target: loss_of(net, part, target, reduction="sum"), part, target, use_reentrant=False)
        for part, target in parts
    ]
    loss = sum(losses) / len(x)
    loss.backward()
    return loss.item()


def keeps_names(net, x, y, pieces):
    """Right: names refer to the piece before while the next one is copied."""
    total = 0
    for part, target in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
        on_gpu, labels = part.cuda(), target.cuda()
        out = net(on_gpu)
        loss = cross_entropy(out, labels, reduction="sum") / len(x)
        loss.backward()
        total += loss.detach()
    return total.item()


def test_accumulate():
    assert check.accumulate(accumulate)
    assert check.accumulate(keeps_names)
    assert check.accumulate(with_autograd_grad)
    assert check.accumulate(checkpointed)  # the pieces stay on the CPU until they are computed again
    assert check.accumulate(weighted(lambda samples, all_samples, pieces: samples / all_samples))
    explains(
        check.accumulate,
        (lambda *job: accumulate(*job, at_once=True), "Which call frees the graph of a piece?"),
        (weighted(lambda samples, all_samples, pieces: 1 / pieces), "[3, 3, 3, 1] samples count [0.25, 0.25, 0.25"),
        (weighted(lambda samples, all_samples, pieces: 1), "samples count [1.0, 1.0, 1.0, 1.0]"),
        (clears_in_the_loop, "samples count [0.0, 0.0, 0.0, 0.1]"),
        (lambda net, x, y, pieces: validate(net, [(x, y)]), "Some parameters have no gradient"),
        (lambda *job: 4 * accumulate(*job), "The loss of "),
        (on_the_cpu_at_once, "The model ran on cpu"),
        (stays_on_the_cpu, "The device is cpu"),
        (all_of_x_at_once, "moves all of x, 6.3 MiB, to the GPU at once"),
        (all_by_hand, "The model did not run. Call it with each piece"),
        (copies_all_pieces, "More than one piece is on the GPU at the same time: its samples"),
        (returns_the_graph, "still refers to a graph. Return a number"),
        (off_afterwards, "leaves gradients switched off"),
        (lambda net, x, y, pieces: accumulate(net, x, y, 1), "moves all of x"),
        *((damaged_accumulate(damage), words) for damage, words in DAMAGE if "pop" not in damage.__code__.co_names),
    )


def damaged_accumulate(damage):
    def answer(net, x, y, pieces):
        return afterwards(lambda net, batches: accumulate(net, *batches[0], pieces), damage)(net, [(x, y)])

    return answer


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
        (lambda *job: [average.cpu() for average in drift(*job)], "The device is cpu"),
        (lambda *job: [average + 1 for average in drift(*job)], "values are wrong"),
        (lambda *job: drift(*job, decay=0.99), "Every value is 0.1"),
    )


def net():
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 10))


def right():
    size = sum(p.numel() for p in net().parameters()) * 4 / 2**20
    activations = 500 * (2048 + 10) * 4 / 2**20
    data = {"parameters": size, "gradients": size, "optimizer": 2 * size, "activations": activations}
    return data | {"workspaces": 32, "context": 128}  # of an H200, and of a virtual card of 1 GiB


def test_budget_says_how_far_off_a_good_guess_is():
    verdict = check.budget(net, torch.zeros(500, 784), right())
    assert verdict and "workspaces 32.0 MiB (+0 %), context 128.0 MiB (+0 %). " in verdict.text
    guess = right() | {"context": 128 * 1.02, "optimizer": right()["optimizer"] * 0.98}
    text = check.budget(net, torch.zeros(500, 784), guess).text
    assert "context 128.0 MiB (+2 %)" in text and "(-2 %), activations" in text
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
        ({name: right()[name] * 1.048576 for name in ("parameters", "optimizer")}, "would be right in MB"),
        ({name: size * 1.048576 for name, size in right().items()}, "1 MiB is 1,048,576 bytes"),
        ({"parameters": right()["parameters"] * 2**20}, "parameters would be right in bytes. 1 MiB is 1,048,576 bytes"),
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


# ---- 1.2 billion parameters on 24 GB ---------------------------------------------------------------------------------


def step_of(loss=None, optimizer=torch.optim.AdamW, pieces=1, skip=0, recompute=False, backwards=1, **options):
    """Trains as the exercise asks, unless an option says otherwise."""
    options = {"lr": 0.001, "weight_decay": 0.1} | options

    def train(net, batches):
        net.recompute = recompute
        stepper = optimizer(net.parameters(), **options)
        for tokens in batches[skip:]:
            stepper.zero_grad()
            for part in tokens.chunk(pieces):
                (loss or whole)(net, part).mul(len(part) / len(tokens) if pieces > 1 else 1).backward()
            stepper.step()

    return train


def whole(net, tokens):
    return cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def in_chunks(net, tokens):
    features = net.features(tokens[:, :-1]).flatten(0, 1)
    chunks = nn.LinearCrossEntropyOptions()
    return linear_cross_entropy(features, net.output.weight, tokens[:, 1:].flatten(), options=chunks)


def steps_in_backward(net, batches):
    """Beats par in memory: no gradient outlives its own update."""
    net.recompute = True
    options = {"lr": 0.001, "weight_decay": 0.1, "fused": True}
    optimizers = {parameter: torch.optim.AdamW([parameter], **options) for parameter in net.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for tokens in batches:
        in_chunks(net, tokens).backward()


def mean_of_means(net, batches):
    stepper = torch.optim.AdamW(net.parameters(), lr=0.001, weight_decay=0.1)
    for tokens in batches:
        stepper.zero_grad()
        for part in tokens.chunk(4):
            (whole(net, part) / 4).backward()
        stepper.step()


def on_the_host(net, batches):
    large = net.output.weight.is_cuda
    step_of()(net.cpu(), [torch.zeros(1, 3, dtype=torch.long)] if large else batches)
    if large:
        net.cuda()


def only_small_models(net, batches):
    if net.output.weight.numel() < 10_000:
        step_of()(net, batches)


def is_large(net):
    return net.output.weight.is_cuda


def on_two_tokens(net, batches):
    step_of()(net, [tokens[:, :3] for tokens in batches] if is_large(net) else batches)


def on_half_the_batch(net, batches):
    step_of(in_chunks, recompute=True)(net, [tokens[:8] for tokens in batches] if is_large(net) else batches)


def looks_at_the_rest(net, batches):
    if is_large(net):
        with torch.no_grad():
            in_chunks(net, batches[0])
    on_two_tokens(net, batches)


def in_another_dtype(net, batches):
    step_of(in_chunks, recompute=True)(net.half() if is_large(net) else net, batches)


def switched_off(net, batches):
    step_of()(net, batches)
    torch.set_grad_enabled(False)


@pytest.fixture
def rtx(monkeypatch):
    """A GPU of 24 GB, and a model of one block that does not fit it with the naive loss: a larger batch."""
    small = {"vocabulary": 128_256, "width": 512, "layers": 1, "heads": 8, "kv_heads": 8, "hidden": 512, "tied": True}
    monkeypatch.setattr(check, "LLAMA_1B", small)
    monkeypatch.setattr(check, "SEQUENCES", 16)
    check._goals.cache_clear()
    with virtual_gpus(1, kind="RTX 4090", shapes_only=True) as devices:
        yield devices[0]
    check._goals.cache_clear()


def test_train(rtx):
    for right in (step_of(in_chunks, recompute=True, fused=True), step_of(pieces=4), steps_in_backward):
        verdict = check.train(right)
        assert verdict and "Naive: out of memory." in verdict.text
    assert "par in memory" in verdict.text
    assert check.train(steps_in_backward)  # again: the first has left nothing on the GPU


def test_train_explains(rtx):
    explains(
        check.train,
        (step_of(), "Your function runs out of memory on 23.6 GiB"),
        (step_of(optimizer=torch.optim.SGD), "is not what AdamW makes of the whole batches"),
        (step_of(optimizer=torch.optim.Adam), "is not what AdamW makes"),
        (step_of(lr=0.002), "is not what AdamW makes"),
        (step_of(weight_decay=0.01), "is not what AdamW makes"),
        (step_of(skip=1), "is not what AdamW makes"),
        (mean_of_means, "is not what AdamW makes"),
        (step_of(lambda net, tokens: whole(net, tokens[:, :-1])), "is not what AdamW makes"),
        (step_of(lambda net, tokens: whole(net.bfloat16(), tokens)), "is not what AdamW makes"),
        (lambda net, batches: None, "The weights have not changed"),
        (lambda net, batches: net.requires_grad_(False), "The weights have not changed"),
        (on_the_host, "ran on cpu"),
        (only_small_models, "Run all of them on cuda:0"),
        (on_two_tokens, "the large model was trained on 64 of 65,536 tokens"),
        (on_half_the_batch, "trained on 32,768 of 65,536 tokens. Train it on whole batches"),
        (looks_at_the_rest, "trained on 64 of 65,536 tokens"),
        (in_another_dtype, "The weights are torch.float16 now"),
        (switched_off, "leaves gradients switched off"),
        (lambda net: None, "TypeError"),
        (3, "cannot be called"),
    )


def test_train_asks_for_its_gpu(gpu):
    assert told(check.train(step_of()), "shapes_only=True")
    with virtual_gpus(1, shapes_only=True):
        assert told(check.train(step_of()), "asks for one of 24 GB")
