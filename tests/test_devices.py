"""use_gpus: real GPUs, virtual ones, or a clear error."""

import runpy
import sys

import pytest
import torch
from virtual_gpus import active_machine, virtual_gpus

from helpers import engine, use_gpus
from helpers import gpus as devices
from helpers.measure import measure_memory, record_timeline

GIB = 1 << 30


@pytest.fixture(autouse=True)
def virtual_unless_told(monkeypatch):
    monkeypatch.setenv("GPUS", "virtual")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield
    devices._switch_off()
    assert active_machine() is None


@pytest.fixture
def real_cards(monkeypatch):
    """A machine with two real cards, as far as `use_gpus` asks."""

    class Card:
        name, total_memory = "NVIDIA H200", 143771 << 20

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)


def test_gives_a_list_of_devices_and_says_so_in_one_line(capsys):
    assert use_gpus(4, memory="16 GiB") == [torch.device("cuda", i) for i in range(4)]
    said = capsys.readouterr().out
    assert said == "4 virtual GPUs (NVIDIA H200, 16.00 GiB each): real numbers, real errors, memory counted per GPU\n"
    assert devices.is_virtual() and torch.cuda.get_device_properties(3).total_memory == 16 * GIB
    old = torch.ones(2, device="cuda:3")
    with pytest.raises(ValueError):
        use_gpus(2, memory="plenty")
    assert torch.cuda.device_count() == 4 and old.device == torch.device("cuda:3")  # as it was
    assert use_gpus(2, memory="1 GiB") == [torch.device("cuda:0"), torch.device("cuda:1")]  # replaces the first
    assert torch.cuda.device_count() == 2 and torch.cuda.memory_allocated(1) == 0
    assert old.device.type == "cpu" and old.to("cuda:1").sum().item() == 2.0
    for block in (record_timeline, measure_memory):
        with pytest.raises(RuntimeError, match="switched to other GPUs"), block():
            use_gpus(1)


def test_one_gpu_and_shapes_only(capsys):
    use_gpus(1, kind="T4")
    said = capsys.readouterr().out
    assert said.startswith("1 virtual GPU (") and "T4" in said and "each" not in said
    use_gpus(2, shapes_only=True)
    assert "values are not kept" in capsys.readouterr().out
    kept = torch.ones(1 << 33, device="cuda:1")  # 32 GiB, which no test machine could fill
    assert torch.cuda.memory_allocated(1) == kept.nbytes == 32 * GIB


@pytest.mark.parametrize(
    ("choice", "count", "options", "words"),
    [
        *(("auto", count, {}, "integer from 1 to 128") for count in (0, 1.5, "4", True, None, 129)),
        *(("auto", 2, options, "") for options in ({"memory": "16 parsecs"}, {"memory": -1}, {"kind": "Voodoo 2"})),
        ("imaginary", 2, {}, "'imaginary'.*auto, virtual, real"),
        ("real", 3, {}, "GPUS=real, but PyTorch sees 2 of 3 GPUs"),
        ("real", 1, {"shapes_only": True}, "shapes_only=True needs virtual GPUs"),
    ],
)
def test_what_cannot_be_is_refused(monkeypatch, real_cards, choice, count, options, words):
    monkeypatch.setenv("GPUS", choice)
    with pytest.raises(RuntimeError if choice == "real" else ValueError, match=words or None):
        use_gpus(count, **options)
    assert active_machine() is None


@pytest.mark.parametrize("choice", [" AUTO ", "", "real"])
def test_real_cards_where_there_are_enough(monkeypatch, real_cards, capsys, choice):
    monkeypatch.setenv("GPUS", choice)
    assert use_gpus(2) == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert capsys.readouterr().out == "2 real GPUs (NVIDIA H200, 140.40 GiB each)\n"
    assert not devices.is_virtual()


@pytest.mark.parametrize(
    ("choice", "count", "options"), [("auto", 3, {}), ("auto", 1, {"shapes_only": True}), ("virtual", 2, {})]
)
def test_virtual_ones_where_real_cards_will_not_do(monkeypatch, real_cards, capsys, choice, count, options):
    monkeypatch.setenv("GPUS", choice)
    assert len(use_gpus(count, **options)) == count
    assert " virtual GPU" in capsys.readouterr().out and devices.is_virtual()


def test_virtual_ones_do_not_count_as_real(monkeypatch):
    """Called first with GPUS=virtual, then with GPUS=real, in one process."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    use_gpus(2)
    monkeypatch.setenv("GPUS", "real")
    with pytest.raises(RuntimeError, match="PyTorch sees 0"):
        use_gpus(2)


def test_inside_virtual_gpus_takes_those(monkeypatch, capsys):
    with virtual_gpus(4, memory="2 GiB"):
        machine = active_machine()
        assert use_gpus(2, memory="16 GiB") == [torch.device("cuda:0"), torch.device("cuda:1")]
        assert active_machine() is machine and "2 virtual GPUs (NVIDIA H200, 2.00 GiB each)" in capsys.readouterr().out
        with pytest.raises(RuntimeError, match="sees only 4 of the 5 GPUs. Start the program with --gpus 5"):
            use_gpus(5)
        with pytest.raises(RuntimeError, match="Start the program with --shapes-only"):
            use_gpus(2, shapes_only=True)
    with virtual_gpus(2, shapes_only=True):
        use_gpus(2)
        assert "values are not kept" in capsys.readouterr().out
    monkeypatch.setenv("GPUS", "real")
    with virtual_gpus(4), pytest.raises(RuntimeError, match="GPUS=real, but this program runs inside virtual GPUs"):
        use_gpus(2)


def test_virtual_gpus_inside_use_gpus_leave_it_as_it_was(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # which speaks of real cards
    use_gpus(4)
    machine = active_machine()
    with virtual_gpus(2, honour_visible_devices=False):
        assert len(use_gpus(2)) == 2 and torch.cuda.device_count() == 2
    assert active_machine() is machine and torch.cuda.device_count() == 4
    devices._ours[0].stop()  # nobody's GPUs are on now
    assert len(use_gpus(5)) == 5


def test_modelled_gpus_are_all_there_where_the_environment_names_a_real_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for settings in ({}, {"rank": 0, "world_size": 2}):
        with devices.modelled_gpus(2, "A100", "8 GiB", **settings) as gpus:
            assert torch.cuda.device_count() == len(gpus) == 2 and active_machine().shapes_only
    with devices.modelled_gpus(4, shapes_only=False, honour_visible_devices=True):
        assert torch.cuda.device_count() == 1 and not active_machine().shapes_only


def test_topology(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match=r"There is no GPU. Call use_gpus\(4\)"):
        devices.topology()
    use_gpus(4, kind="A100", links="NVLink pairs")

    def rows():
        return [" ".join(row.split()[1:]) for row in devices.topology().split("\n\n")[0].splitlines()[1:]]

    assert rows() == ["X NV4 SYS SYS", "NV4 X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X"]
    with virtual_gpus(4, kind="A100", hosts=2):  # nvidia-smi knows the machine that it runs on
        assert rows() == ["X NV12", "NV12 X"]


def test_a_missing_engine_is_told_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "virtual_gpus", None)  # its import fails, as where it is not installed
    with pytest.raises(ModuleNotFoundError, match="pip install ./virtual-gpus"):
        runpy.run_path(engine.__file__)
