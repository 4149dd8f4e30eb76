"""The trainers on several GPUs: the same numbers as on the CPU, and memory where it should be."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual_gpus import virtual_gpus

from helpers.models import PyramidNet, bert_small, group_norm, small_resnet
from helpers.train import DataParallelTrainer, Trainer

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

LOSS = nn.CrossEntropyLoss()


@pytest.fixture
def gpus():
    with virtual_gpus(4, memory="16 GiB"):
        yield [torch.device("cuda", number) for number in range(4)]


def images(samples=26, batch_size=8):
    """Batches of 8, 8, 8 and 2: the last one has fewer samples than there are GPUs."""
    make = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 3, 16, 16, generator=make), torch.randint(0, 5, (samples,), generator=make)
    return DataLoader(TensorDataset(x, y), batch_size, shuffle=True)


def words(samples=14, batch_size=8):
    make = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 30, (samples, 8), generator=make)
    hidden = torch.rand(samples, 8, generator=make) < torch.linspace(0.9, 0.0, samples)[:, None]
    return DataLoader(TensorDataset(tokens, tokens.masked_fill(hidden, -100)), batch_size, shuffle=True)


# Nets without BatchNorm and dropout: those are meant to differ when a batch is cut into pieces.
CASES = {
    "images": (lambda: small_resnet(5, norm=group_norm), images),
    "words": (lambda: bert_small(30, 8, dropout=0.0), words),
}
FORMS = {
    "one GPU": lambda *parts, **options: Trainer(*parts, "cuda:2", **options),
    "4 GPUs": lambda *parts, **options: DataParallelTrainer(*parts, range(4), **options),
    "GPUs 1 and 3": lambda *parts, **options: DataParallelTrainer(*parts, ["cuda:1", "cuda:3"], **options),
}


def build(case, form, optimizer=torch.optim.SGD, **options):
    net, data = CASES[case]
    torch.manual_seed(0)
    model = net()
    options = {"log": None, **options}
    return form(model, optimizer(model.parameters(), lr=0.01), LOSS, data(), **options)


def on_cpu(*parts, **options):
    return Trainer(*parts, "cpu", **options)


PAIRS = [("one GPU", "images"), ("4 GPUs", "images"), ("4 GPUs", "words")]


@pytest.mark.parametrize(("form", "case"), PAIRS)
def test_losses_accuracies_and_weights_equal_the_cpu_s(gpus, case, form):
    expected, runner = build(case, on_cpu), build(case, FORMS[form])
    for one, other in zip(runner.train(3), expected.train(3), strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-5) and one.accuracy == other.accuracy
        assert (one.steps, one.batch_size) == (other.steps, other.batch_size)
    for one, other in zip(runner.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-4)


def test_batch_norm_is_why_equality_is_not_asked_of_every_net(gpus):
    def run(form):
        torch.manual_seed(0)
        model = PyramidNet(8, 12, classes=5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return form(model, optimizer, LOSS, images(), log=None).train(1)[0].loss

    cpu, one, four = run(on_cpu), run(FORMS["one GPU"]), run(FORMS["4 GPUs"])
    assert one == pytest.approx(cpu, abs=1e-5)
    assert abs(four - cpu) > 1e-3


def test_names_in_the_log_line(gpus):
    names = [build("words", form).name for form in FORMS.values()]
    assert names == ["cuda:2", "cuda:0-3", "cuda:1,3"]
    torch.cuda.set_device(3)
    assert build("words", lambda *parts, **options: Trainer(*parts, "cuda", **options)).name == "cuda:3"


def test_the_trainer_moves_model_and_optimizer(gpus):
    runner = build("words", FORMS["GPUs 1 and 3"], torch.optim.Adam)
    runner.train(1)
    assert {parameter.device for parameter in runner.model.parameters()} == {gpus[1]}
    moments = [state["exp_avg"] for state in runner.optimizer.state.values()]
    assert moments and {moment.device for moment in moments} == {gpus[1]}


def test_inputs_never_lie_on_the_first_gpu_as_a_whole(gpus):
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            seen.append((x.device.index, len(x), torch.cuda.memory_allocated(0)))
            return super().forward(x)

    x, y = torch.randn(8, 2**18), torch.zeros(8, dtype=torch.long)
    model = Watched(2**18, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(x, y), 8)
    DataParallelTrainer(model, optimizer, LOSS, data, gpus, log=None).train(1)
    assert [(gpu, samples) for gpu, samples, _ in seen] == [(0, 2), (1, 2), (2, 2), (3, 2)]
    # 2 MiB of weights and 2 samples of 1 MiB; the whole batch would be 8 MiB.
    assert max(allocated for _, _, allocated in seen) < 6 * 2**20


def test_what_is_refused(gpus):
    for devices, text in (([0, 4], "cuda:4 does not exist: this machine has 4 GPUs"), ([0, 0], "different GPUs")):
        with pytest.raises(ValueError, match=text):
            build("words", lambda *parts, **options: DataParallelTrainer(*parts, devices, **options))  # noqa: B023


def test_memory_does_not_grow_from_epoch_to_epoch_and_goes_back(gpus):
    import gc

    start = [torch.cuda.memory_allocated(gpu) for gpu in gpus]
    runner = build("words", FORMS["4 GPUs"], torch.optim.Adam)
    seen = []
    for _ in range(3):
        runner.train(2)
        seen.append([torch.cuda.memory_allocated(gpu) for gpu in gpus])
    assert seen[0] == seen[1] == seen[2]
    del runner
    gc.collect()
    assert [torch.cuda.memory_allocated(gpu) for gpu in gpus] == start


def shapes_only_epoch(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"log": None, "stop_on_nan": False}
    (record,) = DataParallelTrainer(model, optimizer, LOSS, words(), range(4), **options).train(1)
    assert record.steps == 2 and record.loss != record.loss
    assert torch.cuda.max_memory_allocated(0) > torch.cuda.max_memory_allocated(1) > 0


def test_shapes_only_runs_the_loop_without_values():
    with virtual_gpus(4, memory="16 GiB", shapes_only=True):
        shapes_only_epoch(bert_small(30, 8).to("cuda:0"))
        shapes_only_epoch(bert_small(30, 8))  # the optimizer is older than the move


def test_shapes_only_says_why_a_loss_is_not_known():
    with virtual_gpus(1, memory="16 GiB", shapes_only=True):
        model = bert_small(30, 8).to("cuda")
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), LOSS, words(), "cuda", log=None)
        with pytest.raises(FloatingPointError, match=r"is not known: these virtual GPUs keep sizes and no values"):
            trainer.train(1)
