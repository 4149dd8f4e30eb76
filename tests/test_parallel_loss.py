"""The parallel loss and the loss in forward: the same loss and gradients as on one device, however a batch is cut."""

import copy
import pickle
import warnings
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.models import bert_small
from helpers.parallel.loss import DataParallelCriterion, DataParallelModel, LossInForward, count_labels, total
from tests.parallel_losses import PerSample, Summed, counts, first, numbers

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

count = counts(0, 1, 2, 3, 4)
BATCHES = [1, 2, 3, 5, 10]  # on 4 GPUs: fewer samples than GPUs; 2, 2, 1; 3, 3, 3, 1


def gradients(*modules):
    return [p.grad.cpu().double() for module in modules for p in module.parameters() if p.grad is not None]


def assert_same(got, expected):
    assert len(got) == len(expected) > 0
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True, check_dtype=False)


def net(out=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, out))


def on_one_device(model, criterion, inputs, targets, call):
    model, criterion = copy.deepcopy(model), copy.deepcopy(criterion)
    loss = call(criterion, model(*inputs), *targets)
    loss.sum().backward()
    return loss.detach(), gradients(model, criterion)


def splat(criterion, outputs, *targets):
    outputs = outputs if isinstance(outputs, tuple) and not hasattr(outputs, "_fields") else (outputs,)
    return criterion(*outputs, *targets)


def check(count, model, criterion, inputs, targets, **options):
    """The parallel loss of one batch against one device's: loss, gradients of net and criterion, where they are."""
    expected = on_one_device(model, criterion, inputs, targets, splat)
    parallel = DataParallelModel(copy.deepcopy(model).to(first(count)))
    loss = DataParallelCriterion(copy.deepcopy(criterion).to(first(count)), **options)
    got = loss(parallel(*inputs), *targets)
    assert got.shape == expected[0].shape and str(got.device) == first(count)
    got.sum().backward()
    assert_same([got.detach().cpu(), *gradients(parallel, loss)], [expected[0], *expected[1]])


def check_in_forward(count, model, criterion, inputs, targets, **options):
    """The same for the loss in forward under nn.DataParallel."""
    expected = on_one_device(model, criterion, inputs, targets, splat)
    wrapped = LossInForward(copy.deepcopy(model), copy.deepcopy(criterion), **options).to(first(count))
    got = total(nn.DataParallel(wrapped)(*inputs, *targets))
    assert got.shape == () and str(got.device) == first(count)
    got.backward()
    assert_same([got.detach().cpu(), *gradients(wrapped.module, wrapped.criterion)], [expected[0], *expected[1]])


def seeded(number=1):
    return torch.Generator().manual_seed(number)


def classes(samples, *rest, seed=2):
    return torch.randint(0, 4, (samples, *rest), generator=seeded(seed))


def some_ignored(samples):
    """Few labels count, unevenly many on each GPU, none on some; one at least."""
    labels = torch.where(torch.rand(samples, generator=seeded(3)) < 0.6, -100, classes(samples))
    labels[0] = 2
    return labels


def probabilities(samples):
    return numbers(samples, 4, seed=2).softmax(1)


WEIGHTS = torch.tensor([0.2, 3.0, 0.0, 1.5])
LOSSES = {
    "cross entropy": (nn.CrossEntropyLoss, classes),
    "ignored": (nn.CrossEntropyLoss, some_ignored),
    "other ignored class": (
        partial(nn.CrossEntropyLoss, ignore_index=0),
        lambda n: classes(n).index_fill_(0, torch.tensor(0), 1),
    ),  # fmt: skip
    "class weights": (
        partial(nn.CrossEntropyLoss, weight=WEIGHTS),
        lambda n: classes(n).index_fill_(0, torch.tensor(0), 1),
    ),  # fmt: skip
    "class weights, ignored": (partial(nn.CrossEntropyLoss, weight=WEIGHTS + 0.1), some_ignored),
    "smoothing, ignored": (partial(nn.CrossEntropyLoss, label_smoothing=0.2), some_ignored),
    "smoothing, weights, ignored": (
        partial(nn.CrossEntropyLoss, label_smoothing=0.2, weight=WEIGHTS + 0.1),
        some_ignored,
    ),  # fmt: skip
    "class probabilities": (nn.CrossEntropyLoss, probabilities),
    "weighted class probabilities": (partial(nn.CrossEntropyLoss, weight=WEIGHTS, label_smoothing=0.1), probabilities),
    "mse": (nn.MSELoss, lambda n: numbers(n, 4)),
    "l1": (nn.L1Loss, lambda n: numbers(n, 4)),
    "smooth l1": (nn.SmoothL1Loss, lambda n: numbers(n, 4)),
    "huber": (partial(nn.HuberLoss, delta=0.3), lambda n: numbers(n, 4)),
    "bce with logits": (partial(nn.BCEWithLogitsLoss, weight=WEIGHTS, pos_weight=WEIGHTS + 1), probabilities),
    "poisson": (nn.PoissonNLLLoss, lambda n: classes(n, 4).float()),
    "hinge embedding": (nn.HingeEmbeddingLoss, lambda n: numbers(n, 4).sign()),
    "soft margin": (nn.SoftMarginLoss, lambda n: numbers(n, 4).sign()),
    "multi margin": (partial(nn.MultiMarginLoss, weight=WEIGHTS), classes),
    "multi label margin": (nn.MultiLabelMarginLoss, lambda n: torch.tensor([[1, 3, -1, 0]]).repeat(n, 1)),
    "multi label soft margin": (
        partial(nn.MultiLabelSoftMarginLoss, weight=WEIGHTS),
        lambda n: numbers(n, 4).gt(0).float(),
    ),  # fmt: skip
}
LOG_LOSSES = {
    "nll": (nn.NLLLoss, some_ignored),
    "weighted nll": (partial(nn.NLLLoss, weight=WEIGHTS + 0.1), some_ignored),
    "kl": (nn.KLDivLoss, probabilities),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", [*LOSSES, *LOG_LOSSES])
def test_losses_of_torch(count, name, reduction):
    loss, targets = {**LOSSES, **LOG_LOSSES}[name]
    model = nn.Sequential(net(), nn.LogSoftmax(1)) if name in LOG_LOSSES else net()
    for samples in BATCHES:
        batch = model, loss(reduction=reduction), [numbers(samples, 6)], [targets(samples)]
        check(count, *batch)
        if reduction != "none":
            check_in_forward(count, *batch)


@pytest.mark.parametrize(
    ("criterion", "targets"),
    [(nn.BCELoss(), probabilities), (nn.GaussianNLLLoss(), None), (nn.KLDivLoss(reduction="batchmean"), probabilities)],
)
def test_more_losses_of_torch(count, criterion, targets):
    for samples in BATCHES:
        if targets is None:
            given = [numbers(samples, 4), numbers(samples, 4).exp()]  # targets and their variances
        else:
            given = [targets(samples)]
        model = nn.Sequential(net(), nn.LogSoftmax(1) if "KL" in str(criterion) else nn.Sigmoid())
        check(count, model, criterion, [numbers(samples, 6)], given)


def test_the_weighting_matters(four):
    """What a mean of means would have given instead: the tests above can fail."""
    outputs, labels = numbers(10, 4), some_ignored(10)
    means = [F.cross_entropy(o, t) for o, t in zip(outputs.chunk(4), labels.chunk(4), strict=True)]
    assert not torch.isclose(torch.stack(means).nanmean(), F.cross_entropy(outputs, labels), rtol=1e-2)
    shares = [mean * len(o) / 10 for mean, o in zip(means, outputs.chunk(4), strict=True)]
    assert not torch.isclose(torch.stack(shares).nansum(), F.cross_entropy(outputs, labels), rtol=1e-2)


class Pixels(nn.Module):
    def forward(self, x):
        return torch.stack([x[:, :4], x[:, 1:5].exp(), x[:, 2:6]], 2)[..., None]


def test_labels_of_pixels(count):
    """(N, C, H, W) and (N, H, W)."""
    for reduction in ("mean", "sum", "none"):
        labels = torch.where(torch.rand(5, 3, 1, generator=seeded()) < 0.5, 1, classes(5, 3, 1))
        model = nn.Sequential(nn.Linear(6, 6), Pixels())
        check(count, model, nn.CrossEntropyLoss(ignore_index=1, reduction=reduction), [numbers(5, 6)], [labels])


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)], ids=str)
def test_no_label_counts_at_all(count, criterion):
    """nan, as on a single GPU, and the same gradients."""
    check(count, net(), criterion, [numbers(5, 6)], [torch.full((5,), -100)])


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this PyTorch has no LinearCrossEntropyLoss")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_criterion_with_parameters_of_torch(count, reduction):
    for options in ({}, {"weight": WEIGHTS + 0.1}):
        loss = nn.LinearCrossEntropyLoss(5, 4, reduction=reduction, **options)
        check(count, net(5), loss, [numbers(10, 6)], [some_ignored(10)])


class Triple(nn.Module):
    """Three inputs, three outputs, as one tuple."""

    def __init__(self):
        super().__init__()
        self.embed = net()

    def forward(self, anchor, positive, negative):
        return self.embed(anchor), self.embed(positive), self.embed(negative)


TRIPLETS = [
    nn.TripletMarginLoss(margin=5),
    nn.TripletMarginLoss(margin=5, reduction="sum"),
    nn.TripletMarginLoss(margin=5, reduction="none"),
    nn.TripletMarginWithDistanceLoss(distance_function=nn.PairwiseDistance(p=1), margin=5),
]


@pytest.mark.parametrize("loss", TRIPLETS, ids=["mean", "sum", "none", "distance"])
@pytest.mark.parametrize("samples", BATCHES)
def test_triplets(count, loss, samples):
    triple = [numbers(samples, 6, seed=number) for number in range(3)]
    check(count, Triple(), loss, triple, [])


@pytest.mark.parametrize("loss", [nn.CosineEmbeddingLoss(), nn.MarginRankingLoss(0.1)], ids=str)
def test_pairs(count, loss):
    """Two outputs and a target of 1 or -1; for the ranking, of each number."""
    sign = numbers(5, seed=7).sign() if "Cosine" in str(loss) else numbers(5, 4, seed=7).sign()
    check(count, TwoHeads(lambda *both: both), loss, [numbers(5, 6)], [sign])
    check_in_forward(count, TwoHeads(lambda *both: both), loss, [numbers(5, 6)], [sign])


def test_triplets_from_three_calls(count):
    triple = [numbers(5, 6, seed=number) for number in range(3)]
    alone = net()
    expected = TRIPLETS[0](*map(alone, triple))
    expected.backward()
    model = DataParallelModel(net().to(first(count)))
    loss = DataParallelCriterion(TRIPLETS[0])(*map(model, triple))
    loss.backward()
    assert_same([loss.detach().cpu(), *gradients(model)], [expected.detach(), *gradients(alone)])


class TwoHeads(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.kind = net(), kind

    def forward(self, x):
        return self.kind(self.body(x), self.body(-x))


class Heads(NamedTuple):
    main: torch.Tensor
    extra: torch.Tensor


class Mixed(nn.Module):
    """Of one's own: parameters, several outputs, several targets."""

    def __init__(self):
        super().__init__()
        self.mixing = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.classes = nn.CrossEntropyLoss()

    def forward(self, main, extra, labels, wanted):
        return self.classes(main, labels) + self.mixing.exp() * ((extra - wanted) * self.scale).square().mean()


class MixedOne(Mixed):
    def forward(self, outputs, targets):
        main, extra = outputs.values() if isinstance(outputs, dict) else outputs
        return super().forward(main, extra, targets["labels"], targets["rest"][0])


def test_tuples_are_several_arguments_and_criteria_have_parameters(count):
    for samples in BATCHES:
        targets = [classes(samples), numbers(samples, 4, seed=5)]
        check(count, TwoHeads(lambda *both: both), Mixed(), [numbers(samples, 6)], targets)


@pytest.mark.parametrize("kind", [lambda a, b: {"a": a, "b": b}, Heads], ids=["dict", "named tuple"])
def test_dicts_and_named_tuples_and_nested_targets(count, kind):
    for samples in BATCHES:
        targets = {"labels": classes(samples), "rest": (numbers(samples, 4, seed=5), ["a note"])}
        check(count, TwoHeads(kind), MixedOne(), [numbers(samples, 6)], [targets])
        check_in_forward(count, TwoHeads(kind), MixedOne(), [numbers(samples, 6)], [targets])


def test_nested_outputs(count):
    class Nested(MixedOne):
        def forward(self, outputs, targets):
            return super().forward((outputs["deep"][0], outputs["b"]), targets)

    targets = {"labels": classes(5), "rest": (numbers(5, 4),)}
    check(count, TwoHeads(lambda a, b: {"deep": [a], "b": b}), Nested(), [numbers(5, 6)], [targets])


def test_targets_given_by_name(count):
    model, loss = DataParallelModel(net().to(first(count))), DataParallelCriterion(nn.CrossEntropyLoss())
    expected = F.cross_entropy(net()(numbers(5, 6)), some_ignored(5))
    torch.testing.assert_close(loss(model(numbers(5, 6)), target=some_ignored(5)).cpu(), expected)


class Words(nn.Module):
    """A cross entropy of masked words, (N, T, V) and (N, T), that counts labels."""

    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss()

    def forward(self, logits, labels):
        return self.loss(logits.flatten(0, 1), labels.flatten())


def test_own_criteria_with_a_weight(count):
    model = bert_small(11, 4, dropout=0.0)
    tokens = torch.randint(0, 11, (5, 4), generator=seeded())
    labels = torch.where(torch.rand(5, 4, generator=seeded(3)) < 0.6, -100, tokens)
    labels[4] = -100  # alone on its GPU, where four of them are
    check(count, model, Words(), [tokens], [labels], weight=count_labels)
    check_in_forward(count, model, Words(), [tokens], [labels], weight=count_labels)


def test_own_reductions(count):
    check(count, net(), PerSample(), [numbers(5, 6)], [numbers(5, 4)], reduction="none")
    check(count, net(), Summed(), [numbers(5, 6)], [numbers(5, 4)], reduction="sum")


def test_ctc_with_time_first(count):
    class Speech(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net(24)

        def forward(self, x):
            return self.body(x).unflatten(1, (6, 4)).transpose(0, 1).log_softmax(2)

    targets = torch.randint(1, 4, (5, 3), generator=seeded())
    lengths = [targets, torch.full((5,), 6), torch.tensor([1, 2, 3, 2, 1])]
    for reduction in ("mean", "sum", "none"):
        check(count, Speech(), nn.CTCLoss(reduction=reduction), [numbers(5, 6)], lengths)


# ------------------------------------------------------------------------------------------------------- the model


class WithMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x, mask=None, scale=1.0):
        return self.body(x) * scale if mask is None else self.body(x) * mask


@pytest.mark.parametrize("samples", BATCHES)
def test_keywords_also_with_fewer_samples_than_gpus(count, samples):
    model, x = DataParallelModel(WithMask().to(first(count))), numbers(samples, 6)
    for options in ({"mask": None, "scale": 2.0}, {"mask": numbers(samples, 1)}, {}):
        outputs = model(x, **options)
        torch.testing.assert_close(torch.cat([o.cpu() for o in outputs]), WithMask()(x, **options))
    torch.testing.assert_close(torch.cat([o.cpu() for o in model(x=x)]), WithMask()(x))


def test_outputs_stay_on_their_gpus(count):
    outputs = DataParallelModel(net().to(first(count)))(numbers(10, 6))
    expected = [f"cuda:{number}" for number in range(count)] or ["cpu"]
    assert [str(output.device) for output in outputs] == expected
    assert len(DataParallelModel(net().to(first(count)))(numbers(1, 6))) == 1


def test_a_model_without_inputs(four):
    class Constant(nn.Module):
        def forward(self):
            return torch.ones(2, device="cuda")

    assert len(DataParallelModel(Constant())()) == 1


def test_evaluation(count):
    model = nn.Sequential(net(), nn.Dropout(0.5), nn.BatchNorm1d(4))
    parallel, criterion = DataParallelModel(copy.deepcopy(model).to(first(count))), DataParallelCriterion(Mixed())
    criterion.to(first(count))
    model.eval(), parallel.eval(), criterion.eval()
    x, targets = numbers(5, 6), (classes(5), numbers(5, 4))
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            outputs = parallel(x)
            pairs = [(output, output) for output in outputs]
            loss = criterion(pairs, *targets)
            expected = Mixed()(model(x), model(x), *targets)
        assert not loss.requires_grad and not parallel.module.training
        torch.testing.assert_close(loss.cpu(), expected)


def test_state_dicts_are_those_of_data_parallel(count, tmp_path):
    parallel, plain = DataParallelModel(net().to(first(count))), nn.DataParallel(net(4).to(first(count)))
    assert list(parallel.state_dict()) == list(plain.state_dict()) and "module.0.weight" in parallel.state_dict()
    with torch.no_grad():
        parallel.module[0].weight.fill_(7.0)
    torch.save(parallel.state_dict(), tmp_path / "net.pt")
    plain.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    assert plain.module[0].weight.eq(7).all()
    parallel.load_state_dict(plain.state_dict())
    assert list(DataParallelCriterion(Mixed()).state_dict()) == ["module.mixing", "module.scale"]


def test_pickles(count):
    both = (
        DataParallelModel(net().to(first(count))),
        DataParallelCriterion(Words().to(first(count)), weight=count_labels),
    )
    model, loss = pickle.loads(pickle.dumps(both))
    assert loss.weight is count_labels
    assert_same([o.cpu() for o in model(numbers(5, 6))], [o.cpu() for o in both[0](numbers(5, 6))])


def test_chosen_gpus(four):
    x, labels = numbers(5, 6), classes(5)
    for devices in ([3, 1], ["cuda:3", "cuda:1"], [four[3], four[1]]):
        model = DataParallelModel(net().to("cuda:3"), devices)
        outputs = model(x)
        assert [str(output.device) for output in outputs] == ["cuda:3", "cuda:1"]
        loss = DataParallelCriterion(nn.CrossEntropyLoss(), devices)(outputs, labels.to("cuda:2"))
        assert str(loss.device) == "cuda:3"
        torch.testing.assert_close(loss.cpu(), F.cross_entropy(net()(x), labels))


def test_targets_that_are_cut_already(four):
    outputs, labels = DataParallelModel(net().to("cuda:0"))(numbers(10, 6)), some_ignored(10)
    pieces = [piece.to(gpu) for piece, gpu in zip(labels.chunk(4), four, strict=True)]
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    torch.testing.assert_close(criterion(outputs, pieces), criterion(outputs, labels))


def test_a_shard_cut_by_hand(four):
    """Other sizes than the model's own, since both lists are cut alike."""
    x, labels, model = numbers(10, 6), some_ignored(10), net()
    sizes = [1, 6, 1, 2]
    cut = [piece.to(gpu) for piece, gpu in zip(labels.split(sizes), four, strict=True)]
    outputs = [piece.to(gpu) for piece, gpu in zip(model(x).split(sizes), four, strict=True)]
    loss = DataParallelCriterion(nn.CrossEntropyLoss())(outputs, cut)
    torch.testing.assert_close(loss.cpu(), F.cross_entropy(model(x), labels))


@pytest.mark.parametrize("form", ["parallel", "in forward"])
def test_trains_to_the_weights_of_one_gpu(count, form):
    def train(step, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        for samples in (8, 8, 8, 5, 8, 1, 8, 3):
            optimizer.zero_grad()
            step(numbers(samples, 6, seed=samples), some_ignored(samples)).backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    alone = net()
    expected = train(lambda x, y: F.cross_entropy(alone(x), y), alone)
    model = net().to(first(count))
    if form == "parallel":
        parallel, criterion = DataParallelModel(model), DataParallelCriterion(nn.CrossEntropyLoss())
        got = train(lambda x, y: criterion(parallel(x), y), model)
    else:
        wrapped = nn.DataParallel(LossInForward(model, nn.CrossEntropyLoss()))
        got = train(lambda x, y: total(wrapped(x, y)), model)
    assert_same(got, expected)
    assert not torch.allclose(got[0], net()[0].weight)


# ------------------------------------------------------------------------------------------------- memory and shapes


def peaks(step):
    for gpu in range(4):
        torch.cuda.reset_peak_memory_stats(gpu)
    held = [torch.cuda.memory_allocated(gpu) for gpu in range(4)]
    step()
    return [torch.cuda.max_memory_allocated(gpu) - before for gpu, before in enumerate(held)]


def test_no_gpu_holds_the_outputs_of_others():
    """A vocabulary of 5,000 and a small body: with nn.DataParallel, GPU 0 holds four GPUs' logits and more."""
    tokens = torch.randint(0, 5000, (64, 64), generator=seeded())
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
        model, loss = (
            DataParallelModel(net().to("cuda:0")),
            nn.CrossEntropyLoss(WEIGHTS.to("cuda:0"), label_smoothing=0.1),
        )
        for reduction, shape in (("mean", ()), ("sum", ()), ("none", (10,))):
            loss.reduction = reduction
            got = DataParallelCriterion(loss)(model(numbers(10, 6)), some_ignored(10))
            got.sum().backward()
            assert got.shape == shape and str(got.device) == "cuda:0"
        assert model.module[0].weight.grad.shape == (8, 6)
        loss.reduction = "mean"
        wrapped = LossInForward(model.module, loss)
        assert total(nn.DataParallel(wrapped)(numbers(10, 6), some_ignored(10))).shape == ()


def test_half_precision_sums_do_not_overflow(four):
    """30,000 losses of about 3 on each GPU: their sum is more than float16 holds, their mean is not."""
    x, labels = numbers(120_000, 4).half(), classes(120_000)
    x[range(120_000), labels] -= 2
    outputs = [piece.to(gpu) for piece, gpu in zip(x.chunk(4), four, strict=True)]
    loss = DataParallelCriterion(nn.CrossEntropyLoss())(outputs, labels)
    torch.testing.assert_close(loss.cpu(), F.cross_entropy(x.float(), labels), rtol=2e-3, atol=0)
    assert F.cross_entropy(x[:30_000], labels[:30_000], reduction="sum").isinf()


def test_nothing_is_gathered_and_no_warning_is_given(four):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(4, net(), nn.CrossEntropyLoss(), [numbers(10, 6)], [classes(10)])
        check_in_forward(4, net(), nn.CrossEntropyLoss(), [numbers(10, 6)], [classes(10)])
