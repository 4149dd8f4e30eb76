"""The trainers on several GPUs: the same numbers as on the CPU, and memory where it should be."""

import gc
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual_gpus import virtual_gpus

from helpers.models import PyramidNet, group_norm, small_resnet
from helpers.train import DataParallelTrainer, Trainer

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

LOSS = nn.CrossEntropyLoss()


@pytest.fixture
def gpus():
    with virtual_gpus(4, memory="16 GiB"):
        yield [torch.device("cuda", number) for number in range(4)]


def images():
    """Batches of 8, 8, 8 and 2: the last one has fewer samples than there are GPUs."""
    make = torch.Generator().manual_seed(1)
    x, y = torch.randn(26, 3, 16, 16, generator=make), torch.randint(0, 5, (26,), generator=make)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def data_parallel(*numbers):
    return lambda *parts: DataParallelTrainer(*parts, [torch.device("cuda", each) for each in numbers])


FORMS = {
    "the CPU": lambda *parts: Trainer(*parts, "cpu"),
    "one GPU": lambda *parts: Trainer(*parts, "cuda:2"),
    "4 GPUs": data_parallel(0, 1, 2, 3),
    "GPUs 1 and 3": data_parallel(1, 3),
}


def build(form, optimizer=torch.optim.SGD):
    """A trainer of a net without BatchNorm: a net with it is meant to differ when a batch is cut into pieces."""
    torch.manual_seed(0)
    model = small_resnet(5, norm=group_norm)
    return FORMS[form](model, optimizer(model.parameters(), lr=0.01), LOSS, images())


@pytest.mark.parametrize("form", ["one GPU", "4 GPUs"])
def test_losses_accuracies_and_weights_equal_the_cpu_s(gpus, form):
    expected, runner = build("the CPU"), build(form)
    runner.train(3), expected.train(3)
    for (loss, accuracy), (right, share) in zip(runner.history, expected.history, strict=True):
        assert loss == pytest.approx(right, abs=1e-5) and accuracy == share
    for one, other in zip(runner.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-4)


def test_batch_norm_is_why_equality_is_not_asked_of_every_net(gpus):
    def run(form):
        torch.manual_seed(0)
        model = PyramidNet(8, 12, classes=5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        runner = FORMS[form](model, optimizer, LOSS, images())
        runner.train(1)
        return runner.history[0][0]

    cpu, one, four = run("the CPU"), run("one GPU"), run("4 GPUs")
    assert one == pytest.approx(cpu, abs=1e-5)
    assert abs(four - cpu) > 1e-3


def test_names_in_the_log_line(gpus):
    assert [build(form).name for form in FORMS] == ["cpu", "cuda:2", "cuda:0-3", "cuda:1,3"]


def test_the_trainer_moves_model_and_optimizer(gpus):
    runner = build("GPUs 1 and 3", torch.optim.Adam)
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
    DataParallelTrainer(model, optimizer, LOSS, data, gpus).train(1)
    assert [(gpu, samples) for gpu, samples, _ in seen] == [(0, 2), (1, 2), (2, 2), (3, 2)]
    # 2 MiB of weights and 2 samples of 1 MiB; the whole batch would be 8 MiB.
    assert max(allocated for _, _, allocated in seen) < 6 * 2**20


def test_memory_does_not_grow_from_epoch_to_epoch_and_goes_back(gpus):
    start = [torch.cuda.memory_allocated(gpu) for gpu in gpus]
    runner = build("4 GPUs", torch.optim.Adam)
    seen = []
    for _ in range(3):
        runner.train(2)
        seen.append([torch.cuda.memory_allocated(gpu) for gpu in gpus])
    assert seen[0] == seen[1] == seen[2]
    del runner
    gc.collect()
    assert [torch.cuda.memory_allocated(gpu) for gpu in gpus] == start


def test_shapes_only_runs_the_loop_without_values():
    with virtual_gpus(4, memory="16 GiB", shapes_only=True):
        runner = build("4 GPUs")
        runner.train(1)
        assert math.isnan(runner.history[0][0])
        assert torch.cuda.max_memory_allocated(0) > torch.cuda.max_memory_allocated(1) > 0
