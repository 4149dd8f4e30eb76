"""The checks of lesson 06: the broken loops are told what they keep."""

import contextlib
from functools import partial, reduce

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from virtual_gpus import virtual_gpus

from notebooks.checks import lesson06 as check
from tests.check_answers import STRANGE_RESULTS, Answers, answers_test, changed, stored, then, told

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


@pytest.fixture
def gpu():
    with virtual_gpus(1, memory="1 GiB") as devices:
        yield devices[0]


@pytest.fixture
def empty_gpu():
    with virtual_gpus(1, memory="1 GiB", shapes_only=True) as devices:
        yield devices[0]


LESSON = "06_out_of_memory"


def by_hand(net):
    """`net`, layer by layer, so that no hook is called."""
    return lambda x: reduce(lambda x, layer: layer.forward(x), net, x)


validation = stored(LESSON, "validation_loss_solution", gpu=0, by_hand=by_hand)
validate = validation()
GRAPH, TENSOR, MEAN = ("@torch.inference_mode()\n", ""), (".item()", ""), "return total / len(batches)"
keeps_graphs = validation(*GRAPH, *TENSOR, MEAN, "return (total / len(batches)).item()")
kept = []  # by answers
CHANGED = "changes the images and labels that it gets"
DAMAGE = [
    (lambda net, *rest: net[0].weight.data.mul_(2), "changes the weights of the model"),
    (lambda net, *rest: net.requires_grad_(False), "its parameters need requires_grad=True"),
    (lambda net, *rest: net.eval(), "leaves the model in evaluation mode"),
    (lambda net, *rest: torch.set_grad_enabled(False), "leaves gradients switched off for the whole program"),
]
VALIDATION_LOSS = Answers(
    check.validation_loss,
    right=[
        validation("inference_mode", "no_grad", *TENSOR, "return total", "return total.item()"),
        then(lambda net, batches: net.train(), validation("total = 0", "total = 0\n    model.eval()")),
    ],
    wrong=[
        (keeps_graphs, "What still refers to tensors of earlier batches?"),
        (validation(*TENSOR), "Return a number"),
        (validation(MEAN, "return total"), "is the sum. Divide it"),
        (validation(*GRAPH), "still builds a graph"),
        (validation(*GRAPH, "total = 0", "model.cpu(); total = 0", ".to(gpu)", "", "return", "model.cuda(); return"),
         "The model ran on cpu. Run it on cuda:0"),
        (then(lambda *_: kept.append(torch.zeros(2**19, device="cuda")), validate),
         "your function leaves behind 2.0 MiB, and 1.0 MiB are allowed"),
        (validation("model(", "by_hand(model)("), "The model did not run"),
        (validation("total = 0", "total, batches = 0, [[*map(torch.cat, zip(*batches))]]"),
         "The model ran on 3072 images at once"),
        (lambda net, batches: 2.302585, "2.30259"),
        (then(lambda net, batches: setattr(net[4].bias, "grad", net[4].bias.detach()), validate), "leaves gradients"),
        (then(lambda net, batches: batches[0][0].zero_(), validate), CHANGED),
        (then(lambda net, batches: batches.pop(), validate), CHANGED),
        *((then(damage, validate), words) for damage, words in DAMAGE),
    ],
    strange=STRANGE_RESULTS[-2:],
    fixtures="gpu",
)  # fmt: skip


def features(cut):
    run = torch.no_grad()(lambda net, batches: [cut(net(x.cuda())) for x, _ in batches])
    return lambda *job: torch.cat(run(*job))


four_of_each = features(lambda out: out[:, :4].clone())
FEATURES = Answers(
    check.features,
    right=[four_of_each, features(lambda out: out[:, :4].contiguous())],
    wrong=[
        (features(lambda out: out[:, :4]), "Which larger tensors stay alive with them?"),
        (features(lambda out: out[:, :4].cpu()), "the device is cpu"),
        (features(lambda out: out[:, :5].clone()), "the shape is"),
        (features(lambda out: out[:, :4].clone().requires_grad_()), "still refer to a graph"),
        (features(lambda out: out[:, :4].half()), "The features are torch.float16, which rounds them"),
        (features(lambda out: out[:, :4].double()), "The features are torch.float64, which is not what the model"),
        (features(lambda out: out[:, 4:8].clone()), "values are wrong"),
        (then(lambda net, batches: batches.pop(), four_of_each), CHANGED),
    ],
    strange=STRANGE_RESULTS[-2:],
    fixtures="gpu",
)


def passes_on(error):
    """Right: what is no lack of memory ends the search, also as another error."""
    if "out of memory" not in str(error):
        raise ValueError("The step is broken.") from error


halve = stored(LESSON, "halve_solution", contextlib=contextlib, passes_on=passes_on)
ONCE_INSIDE = """with contextlib.suppress(torch.OutOfMemoryError):
                step(batch // 2)
                return batch // 2
            batch //= 2  #"""


@pytest.fixture
def odd(monkeypatch, gpu):
    """What the check draws is 333, 166, 83, 41."""
    monkeypatch.setattr(check.random, "randint", lambda low, high: 3 if high < 9 else 333)


HALVE = Answers(
    check.halve_until_it_fits,
    right=[halve(), halve("torch.OutOfMemoryError:", "RuntimeError as error:", "pass  #", "passes_on(error)  #")],
    wrong=[
        (halve("pass  #", "return halve_solution(step, batch // 2)  #"),
         "A batch of 100 fits on an empty GPU. What still refers to the tensors of the steps that"),
        (halve("batch //= 2", "batch /= 2"), "half of the one before, rounded down"),
        (lambda step, batch: 100, "Return the batch that ran"),
        (halve("    while", "    batch //= 4\n    while"), "Each try should be half of the one before"),
        (halve("pass  #", ONCE_INSIDE), "When step(200) began"),
        (halve("torch.OutOfMemoryError", "Exception"),
         ("RuntimeError(", "labels have the wrong shape", "hid it. Catch only torch.OutOfMemor")),
    ],
    fixtures="odd",
)  # fmt: skip


def with_autograd_grad(net, loss):
    """A second copy of the gradients exists for a moment."""
    for parameter, grad in zip(net.parameters(), torch.autograd.grad(loss, [*net.parameters()]), strict=True):
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def sum_of(net, x, y):
    return cross_entropy(net(x.cuda()), y.cuda(), reduction="sum")


def at_once(net, x, y, pieces, run=sum_of):
    """One backward pass for all pieces. That is right if they are computed again."""
    loss = sum(run(net, *pair) for pair in zip(x.chunk(pieces), y.chunk(pieces), strict=True)) / len(x)
    loss.backward()
    return loss.item()


def on_the_host(net, *job):
    return at_once(net.cpu(), *job, run=lambda net, x, y: cross_entropy(net(x), y, reduction="sum"))


def back_on_the_gpu(net, *_):
    net.cuda()
    for parameter in net.parameters():
        parameter.grad = parameter.grad.cuda()


accumulate = stored(LESSON, "accumulate_solution", with_autograd_grad=with_autograd_grad)
BACK, LOG = "loss.backward()", "loss.item()"
ACCUMULATE = Answers(
    check.accumulate,
    right=[
        accumulate("loss = ", "on_gpu = part.to(gpu); out = model(on_gpu); loss = ", "model(part.to(gpu))", "out"),
        accumulate(BACK, "with_autograd_grad(model, loss)"),
        partial(at_once, run=partial(checkpoint, sum_of, use_reentrant=False)),
    ],
    wrong=[
        (at_once, "Which call frees the graph of a piece?"),
        (accumulate(BACK, f"model.zero_grad(), {BACK}"), "samples count [0.0, 0.0, 0.0, 0.1]"),
        (accumulate("return total", "return 4 * total"), "The loss of "),
        (accumulate(LOG, "loss"), "still refers to a graph. Return a number"),
        (then(back_on_the_gpu, on_the_host), "The model ran on cpu"),
        (on_the_host, "The device is cpu"),
        (accumulate("total = 0", "total, x, y = 0, x.to(gpu), y.to(gpu)"), "moves all of x, 6.3 MiB, to the GPU"),
        (accumulate("model(", "by_hand(model)("), "The model did not run. Call it with each piece"),
        (accumulate("x.chunk(pieces)", "[part.to(gpu) for part in x.chunk(pieces)]"),
         "More than one piece is on the GPU at the same time: its samples"),
        (then(lambda net, x, y, pieces: x.zero_(), accumulate()), CHANGED),
    ],
    strange=STRANGE_RESULTS[-2:],
    fixtures="gpu",
)  # fmt: skip
drift = stored(LESSON, "train_with_drift_solution")
DRIFT = Answers(
    check.train_with_drift,
    right=[drift("average.lerp_(", "average.copy_(average.lerp(", "- decay)", "- decay))")],
    wrong=[
        (drift("with torch.no_grad()", "with torch.enable_grad()"), "What do the averages, or a list, still refer to?"),
        (drift("lr=0.1", "lr=0.2"), "values are wrong"),
        (drift("return drift", "return drift[:2]"), "There are 2 averages. Return one for each parameter"),
        (drift("return drift", "return [each.cpu() for each in drift]"), "The device is cpu"),
        (drift("decay=0.9", "decay=0.99"), "Every value is 0.1"),
    ],
    strange=STRANGE_RESULTS[-2:],
    fixtures="gpu",
)


def net():
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 10))


BATCH = torch.zeros(500, 784)
SIZE = 4 * (784 * 2048 + 2048 + 2048 * 10 + 10) / 2**20
RIGHT = {  # workspaces of an H200, context of a virtual card of 1 GiB
    "parameters": SIZE, "gradients": SIZE, "optimizer": 2 * SIZE, "activations": 500 * (2048 + 10) * 4 / 2**20,
    "workspaces": 32, "context": 128,
}  # fmt: skip
BUDGET = Answers(
    lambda answer: check.budget(net, BATCH, changed(RIGHT, answer)),
    scored=[
        ({"workspaces": 32}, "workspaces 32.0 MiB (+0 %), context 128.0 MiB (+0 %). "),
        ({"context": 128 * 1.02, "optimizer": 2 * SIZE * 0.98}, "context 128.0 MiB (+2 %). Your sum is "),
    ],
    wrong=[
        ({"optimizer": SIZE}, "optimizer 0.50. 1 would be right. Begin with the optimizer"),
        ({"parameters": SIZE / 4}, "parameters 0.25. 1 would be right. Begin with the parameters"),
        ({"activations": 100.0}, "Add up what each layer keeps"),
        ({"context": 760.0}, "context 5.94. 1 would be right. Begin with the context. It depends on the GPU"),
        ({name: size * 1.048576 for name, size in RIGHT.items()}, "would be right in MB. 1 MiB is 1,048,576 bytes"),
        ({"parameters": SIZE * 2**20}, "parameters would be right in bytes. 1 MiB is 1,048,576 bytes"),
        ({"gradients": "much"}, "is text"),
        ([1], "MiB for each of parameters, gradients"),
    ],
    fixtures="empty_gpu",
)


def test_budget_of_what_is_on_the_gpu_already(gpu):
    """The context needs a first touch, which the batch is; neither it nor other tensors count."""
    other = torch.zeros(2**20, device=gpu)
    assert check.budget(lambda: net().to(gpu), BATCH.to(gpu), RIGHT)
    assert torch.cuda.memory_allocated(gpu) == other.nbytes
    assert told(check.budget(lambda: 3, BATCH, RIGHT), "is not a model")
    assert told(check.budget(net, 3, RIGHT), "is not a tensor")
    without_logits = RIGHT | {"activations": 500 * 2048 * 4 / 2**20}
    assert check.budget(lambda: nn.Sequential(*net(), nn.Flatten(0)), BATCH, without_logits)


def test_kept_workspaces_make_no_target_larger(gpu, monkeypatch):
    """PyTorch before 2.15 keeps cuBLAS's workspace from the first product on: the reference must not count it."""
    monkeypatch.setattr("virtual_gpus.memory_model.keeps_workspaces", lambda version, environment: True)
    assert told(check.validation_loss(keeps_graphs), "earlier batches")


def steps_in_backward(net, batches):
    """Beats par in memory: no gradient outlives its own update."""
    net.recompute = True
    for parameter in net.parameters():
        adam = torch.optim.AdamW([parameter], lr=0.001, weight_decay=0.1, fused=True)
        for update in (adam.step, adam.zero_grad):
            parameter.register_post_accumulate_grad_hook(lambda _, update=update: update())
    for tokens in batches:
        check._chunked_loss(net, tokens).backward()


def large(train):
    """Trains small models as the exercise asks, and the one that is scored with `train`."""
    return lambda net, batches: (train if net.output.weight.is_cuda else check._naive)(net, batches)


def on_the_cpu_after_all(net, batches):
    check._naive(net.cpu(), [torch.zeros(1, 3, dtype=torch.long)])
    net.cuda()


def looks_at_the_rest(net, batches):
    with torch.no_grad():
        check._chunked_loss(net, batches[0])
    check._naive(net, [tokens[:, :3] for tokens in batches])


train = stored(LESSON, "train_solution")
LOSS = "loss = chunked_loss(model, tokens)\n        loss.backward()"
IN_PARTS = "for part in tokens.chunk(4):\n            ({} * chunked_loss(model, part)).backward()"


@pytest.fixture
def rtx(monkeypatch):
    """A GPU of 24 GB, and a model of one block that does not fit it with the naive loss: a larger batch."""
    monkeypatch.setenv("COURSE_PROGRESS", "off")
    small = {"vocabulary": 128_256, "width": 512, "layers": 1, "heads": 8, "kv_heads": 8, "hidden": 512, "tied": True}
    monkeypatch.setattr(check, "LLAMA_1B", small)
    monkeypatch.setattr(check, "SEQUENCES", 16)
    check._goals.cache_clear()
    with virtual_gpus(1, kind="RTX 4090", shapes_only=True) as devices:
        yield devices[0]
    check._goals.cache_clear()


MADE = "what AdamW makes of the whole batches"
TRAIN = Answers(
    check.train,
    scored=[
        (train(), "Naive: out of memory. You reach par in memory and time."),
        (train(LOSS, IN_PARTS.format("len(part) / len(tokens)")), "Naive: out of memory."),
        (steps_in_backward, "par in memory"),
    ],
    wrong=[
        (check._naive, "Your function runs out of memory on 23.6 GiB"),
        (train("weight_decay=0.1", "weight_decay=0.01"), MADE),
        (train(LOSS, IN_PARTS.format("1 / 4")), MADE),
        (train("model.recompute = True", "model.bfloat16()"), MADE),
        (lambda net, batches: None, "The weights have not changed"),
        (large(on_the_cpu_after_all), "ran on cpu"),
        (large(lambda net, batches: None), "Run all of them on cuda:0"),
        (large(looks_at_the_rest), "the large model was trained on 64 of 65,536 tokens"),
        (large(lambda net, batches: check._par(net.half(), batches)), "The weights are torch.float16 now"),
        (then(lambda *_: torch.set_grad_enabled(False), check._naive), "leaves gradients switched off"),
    ],
    strange=[3, ..., *STRANGE_RESULTS[-2:]],
    fixtures="rtx",
)  # fmt: skip


TABLE = {"validation_loss": VALIDATION_LOSS, "features": FEATURES, "halve_until_it_fits": HALVE, "train": TRAIN}
test_answers = answers_test(TABLE | {"accumulate": ACCUMULATE, "train_with_drift": DRIFT, "budget": BUDGET})
