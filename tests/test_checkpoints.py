"""Checkpoints: none is lost, every form of `module.` is read, and errors name what is wrong."""

import os

import pytest
import torch
from torch import nn

from helpers.train import checkpoints
from helpers.train.checkpoints import CheckpointError, load_checkpoint, save_checkpoint, unwrap


def net(seed=0, hidden=8):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 3))


def trained(optimizer_class=torch.optim.Adam, seed=0):
    model = net(seed)
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def same(model, other):
    pairs = zip(unwrap(model).state_dict().values(), unwrap(other).state_dict().values(), strict=True)
    return all(torch.equal(one, two) for one, two in pairs)


def test_what_is_saved_comes_back(tmp_path):
    model, optimizer = trained()
    path = save_checkpoint(tmp_path / "new" / "folder" / "last.pt", model, optimizer, epoch=7)
    other, other_optimizer = trained(seed=1)
    assert not same(model, other)
    assert load_checkpoint(path, other, other_optimizer) == 7
    assert same(model, other)
    saved, loaded = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert saved.keys() == loaded.keys() and len(saved) == 6
    assert all(torch.equal(saved[key]["exp_avg_sq"], loaded[key]["exp_avg_sq"]) for key in saved)
    assert os.listdir(path.parent) == ["last.pt"]


@pytest.mark.parametrize("saved_wrapped", [False, True])
@pytest.mark.parametrize("loaded_wrapped", [False, True])
def test_data_parallel_and_plain_read_each_other_s_files(tmp_path, saved_wrapped, loaded_wrapped):
    wrap = {False: lambda model: model, True: nn.DataParallel}
    model, optimizer = trained()
    path = save_checkpoint(tmp_path / "last.pt", wrap[saved_wrapped](model), optimizer, epoch=0)
    assert not any(key.startswith("module.") for key in torch.load(path, weights_only=True)["model"])
    other = net(1)
    load_checkpoint(path, wrap[loaded_wrapped](other))
    assert same(model, other)


@pytest.mark.parametrize("saved_wrapped", [False, True])
def test_plain_state_dicts_with_and_without_prefix_are_read(tmp_path, saved_wrapped):
    model = net()
    saved = nn.DataParallel(model) if saved_wrapped else model
    torch.save(saved.state_dict(), tmp_path / "weights.pt")
    for other in (net(1), nn.DataParallel(net(1))):
        assert load_checkpoint(tmp_path / "weights.pt", other) is None
        assert same(model, other)
    with pytest.raises(CheckpointError, match="holds no optimizer"):
        load_checkpoint(tmp_path / "weights.pt", *trained())


def test_a_layer_that_is_really_called_module_keeps_its_name(tmp_path):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

    model, other = Wrapper(), Wrapper()
    path = save_checkpoint(tmp_path / "last.pt", model, torch.optim.SGD(model.parameters()), 0)
    load_checkpoint(path, nn.DataParallel(other))
    assert same(model, other)
    torch.save(nn.DataParallel(model).state_dict(), path)
    load_checkpoint(path, other := Wrapper())
    assert same(model, other)


def fails_half_way(content, file):
    file.write(b"half a checkpoint")
    raise KeyboardInterrupt


def test_an_interrupted_save_leaves_the_old_checkpoint_and_no_rubbish(tmp_path, monkeypatch):
    model, optimizer = trained()
    path = save_checkpoint(tmp_path / "last.pt", model, optimizer, epoch=1)
    before = path.read_bytes()
    monkeypatch.setattr(checkpoints.torch, "save", fails_half_way)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, model, optimizer, epoch=2)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["last.pt"]
    assert load_checkpoint(path, net(1)) == 1


def test_at_no_moment_of_a_save_does_the_path_hold_half_a_file(tmp_path, monkeypatch):
    model, optimizer = trained()
    path = save_checkpoint(tmp_path / "last.pt", model, optimizer, epoch=1)
    seen = []

    def replace(source, target):
        seen.append((load_checkpoint(target, net()), load_checkpoint(source, net()), source.parent == path.parent))
        real(source, target)

    real = os.replace
    monkeypatch.setattr(checkpoints.os, "replace", replace)
    save_checkpoint(path, model, optimizer, epoch=2)
    # Just before the swap the old file is whole under its name, and the new one is whole beside it.
    assert seen == [(1, 2, True)] and load_checkpoint(path, net()) == 2


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at .*nowhere.pt"):
        load_checkpoint(tmp_path / "nowhere.pt", net())


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_called_damaged_and_changes_nothing(tmp_path, share):
    path = save_checkpoint(tmp_path / "last.pt", *trained(), epoch=0)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    model = net(1)
    with pytest.raises(CheckpointError, match="damaged, cut off"):
        load_checkpoint(path, model)
    assert same(model, net(1))


class Danger:
    def __reduce__(self):
        return os.mkdir, ("/nonexistent/never",)


def test_code_in_a_file_is_not_run(tmp_path):
    torch.save({"model": Danger()}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="more than numbers"):
        load_checkpoint(tmp_path / "bad.pt", net())


@pytest.mark.parametrize("content", [[1, 2], {}, 3.0])
def test_a_file_of_something_else_is_no_checkpoint(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_checkpoint(tmp_path / "other.pt", net())


def test_another_architecture_is_named_by_its_first_keys_and_shapes(tmp_path):
    path = save_checkpoint(tmp_path / "last.pt", *trained(), epoch=0)
    deeper = nn.Sequential(*net(1), nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match="2 keys missing in the file, first 4.weight"):
        load_checkpoint(path, deeper)
    with pytest.raises(CheckpointError, match="unknown to the model, first 0.weight"):
        load_checkpoint(path, nn.ModuleDict({"only": nn.Linear(4, 8)}))
    wider = net(1, hidden=9)
    before = {key: value.clone() for key, value in wider.state_dict().items()}
    message = r"first 0.weight has shape \(8, 4\) in the file, \(9, 4\) in the model"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, wider)
    assert all(torch.equal(before[key], value) for key, value in wider.state_dict().items())


def test_another_optimizer_is_refused_and_the_model_left_as_it_was(tmp_path):
    path = save_checkpoint(tmp_path / "last.pt", *trained(torch.optim.SGD), epoch=0)
    model = net(1)
    with pytest.raises(CheckpointError, match="the state of SGD, not of Adam"):
        load_checkpoint(path, model, torch.optim.Adam(model.parameters()))
    with pytest.raises(CheckpointError, match="optimizer of another training"):
        load_checkpoint(path, model, torch.optim.SGD([model[0].weight]))
    assert same(model, net(1))


SCHEDULERS = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "CosineAnnealingLR": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        [2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_common_scheduler_goes_on_where_it_was(tmp_path, name):
    def steps(optimizer, scheduler, count):
        rates = []
        for _ in range(count):
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    model, optimizer = trained(torch.optim.SGD)
    scheduler = SCHEDULERS[name](optimizer)
    steps(optimizer, scheduler, 2)
    path = save_checkpoint(tmp_path / "last.pt", model, optimizer, 1, scheduler)
    rates = steps(optimizer, scheduler, 3)
    _, optimizer = trained(torch.optim.SGD)
    scheduler = SCHEDULERS[name](optimizer)
    load_checkpoint(path, net(), optimizer, scheduler)
    assert steps(optimizer, scheduler, 3) == rates and len(set(rates)) > 1


def test_another_or_no_scheduler_is_refused(tmp_path):
    model, optimizer = trained()
    path = save_checkpoint(tmp_path / "last.pt", model, optimizer, 0)
    with pytest.raises(CheckpointError, match="holds no scheduler"):
        load_checkpoint(path, model, optimizer, SCHEDULERS["StepLR"](optimizer))
    save_checkpoint(path, model, optimizer, 0, SCHEDULERS["StepLR"](optimizer))
    with pytest.raises(CheckpointError, match="the state of StepLR, not of CosineAnnealingLR"):
        load_checkpoint(path, model, optimizer, SCHEDULERS["CosineAnnealingLR"](optimizer))


def test_generators_go_on_where_they_were(tmp_path):
    loader_generator = torch.Generator().manual_seed(5)
    path = save_checkpoint(tmp_path / "last.pt", *trained(), 0, generator=loader_generator)
    numbers = torch.rand(3), torch.rand(3, generator=loader_generator)
    other = torch.Generator().manual_seed(6)
    load_checkpoint(path, model := net(), rng=False, generator=other)
    assert not torch.equal(torch.rand(3), numbers[0])
    load_checkpoint(path, model, rng=True, generator=other)
    assert torch.equal(torch.rand(3), numbers[0]) and torch.equal(torch.rand(3, generator=other), numbers[1])
    save_checkpoint(path, *trained(), 0, rng=False)
    with pytest.raises(CheckpointError, match="holds no rng"):
        load_checkpoint(path, model, rng=True)
