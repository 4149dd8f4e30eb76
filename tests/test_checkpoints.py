"""Checkpoints: none is lost, every form of `module.` is read, and errors name what is wrong."""

import multiprocessing
import os
import signal
import time

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


def save_for_ever(path):
    model = nn.Linear(512, 512)  # 1 MiB, and nothing of SGD's: a save takes a few ms
    for epoch in range(10**6):
        save_checkpoint(path, model, torch.optim.SGD(model.parameters()), epoch)


def test_a_process_killed_while_it_writes_leaves_the_last_whole_file(tmp_path):
    """Until one was killed with an unfinished file beside the whole one, which the next save replaces."""
    path = tmp_path / "last.pt"
    for attempt in range(60):
        process = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(path,))
        process.start()
        end = time.monotonic() + 60
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.002 * (attempt % 10))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert load_checkpoint(path, nn.Linear(512, 512)) >= 0
        if os.listdir(tmp_path) != ["last.pt"]:
            save_checkpoint(path, *trained(), epoch=0)
            assert os.listdir(tmp_path) == ["last.pt"]
            return
        path.unlink()
    pytest.fail("none of 60 processes was killed in the middle of a save")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at .*nowhere.pt"):
        load_checkpoint(tmp_path / "nowhere.pt", net())


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
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


def test_a_file_of_something_else_is_no_checkpoint(tmp_path):
    torch.save([1, 2], tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="a list, which is not a checkpoint"):
        load_checkpoint(tmp_path / "other.pt", net())


def test_another_architecture_is_named_by_its_keys_and_shapes(tmp_path):
    path = save_checkpoint(tmp_path / "last.pt", *trained(), epoch=0)
    with pytest.raises(RuntimeError, match='Missing.*"4.weight"'):
        load_checkpoint(path, nn.Sequential(*net(1), nn.Linear(3, 3)))
    with pytest.raises(RuntimeError, match="size mismatch for 0.weight"):
        load_checkpoint(path, net(1, hidden=9))


def test_another_optimizer_is_refused(tmp_path):
    path = save_checkpoint(tmp_path / "last.pt", *trained(torch.optim.SGD), epoch=0)
    model = net(1)
    with pytest.raises(CheckpointError, match="the state of SGD, not of Adam"):
        load_checkpoint(path, model, torch.optim.Adam(model.parameters()))
    with pytest.raises(ValueError, match="parameter group that doesn't match"):
        load_checkpoint(path, model, torch.optim.SGD([model[0].weight]))


def steps(optimizer, scheduler, count):
    rates = []
    for _ in range(count):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)


def test_a_scheduler_goes_on_where_it_was(tmp_path):
    model, optimizer = trained(torch.optim.SGD)
    scheduler = one_cycle(optimizer)
    steps(optimizer, scheduler, 2)
    path = save_checkpoint(tmp_path / "last.pt", model, optimizer, 1, scheduler)
    rates = steps(optimizer, scheduler, 3)
    _, optimizer = trained(torch.optim.SGD)
    scheduler = one_cycle(optimizer)
    load_checkpoint(path, net(), optimizer, scheduler)
    assert steps(optimizer, scheduler, 3) == rates and len(set(rates)) > 1


def test_another_or_no_scheduler_is_refused(tmp_path):
    model, optimizer = trained()
    path = save_checkpoint(tmp_path / "last.pt", model, optimizer, 0)
    with pytest.raises(CheckpointError, match="holds no scheduler"):
        load_checkpoint(path, model, optimizer, one_cycle(optimizer))
    save_checkpoint(path, model, optimizer, 0, one_cycle(optimizer))
    with pytest.raises(CheckpointError, match="the state of OneCycleLR, not of StepLR"):
        load_checkpoint(path, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))
