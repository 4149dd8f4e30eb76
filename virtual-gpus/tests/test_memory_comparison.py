"""The memory comparison prints its tables, draws its picture, and stores what a card says. The figures are tested in
test_reference_memory.py."""

import json
import sys

import pytest
from benchmarks import memory_trace
from benchmarks.reference import measure, real_gpu
from virtual_gpus import virtual_gpus

memory = pytest.importorskip("benchmarks.memory")  # needs `conv` and `rnn`
CASE = "mlp_adamw_b256"


def run(monkeypatch, capsys, *arguments):
    """What `python -m benchmarks.memory` prints, line by line."""
    monkeypatch.setattr(sys, "argv", ["memory", "--threads", "1", *map(str, arguments)])
    memory.main()
    return capsys.readouterr().out.splitlines()


def test_steps_are_printed_and_drawn(monkeypatch, capsys, tmp_path):
    lines = run(monkeypatch, capsys, CASE, "--plot", tmp_path / "memory.png")
    assert lines[0].startswith("real: NVIDIA H200, torch 2.11")
    (peaks,) = [line.split() for line in lines if line.startswith(f"{CASE} ")]
    assert peaks[1] == "545.63" and len(peaks) == 8  # real, virtual, error, MemTracker's, error
    figures = ["allocated", "peak allocated", "reserved", "peak reserved"]
    found = [line.split("  ")[0] for line in lines if line.endswith((" reached", " missed"))]
    assert found == figures * 2  # in the H200's order, and each on a card of its own
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_operators_and_allocations_are_printed(monkeypatch, capsys):
    lines = run(monkeypatch, capsys, "--operators", "dropout_fp32", "sgd")
    assert [line.split()[:2] for line in lines[-4:-2]] == [["dropout_fp32", "162.13"], ["sgd", "156.69"]]
    assert lines[-1].startswith("2 of 2 operators are within 3 %")
    lines = run(monkeypatch, capsys, "--trace", CASE, "--all")
    assert "61 allocations real, 61 virtual, 61 agree in size and order" in lines
    assert sum("|" in line for line in lines) == 62  # and the heading
    with pytest.raises(SystemExit):
        run(monkeypatch, capsys, "resnet19")
    assert "unknown: resnet19. There are: mlp_adamw_b256" in capsys.readouterr().err


def test_differences_get_names():
    ask = memory_trace.Request
    real = [ask(512, "kept"), ask(4096, "scratch"), ask(1024, "passing")]
    virtual = [ask(512, "kept", "mm"), ask(1024, "passing", "add"), ask(2048, "kept", "sum")]
    lines = memory_trace.side_by_side(real, virtual, everything=False)
    assert lines[0] == "* only real, scratch, between mm and add"
    assert lines[2] == "* only virtual, kept, in sum"
    assert "3 allocations real, 3 virtual, 2 agree in size and order" in lines


def test_what_a_card_says_is_stored_and_compared(monkeypatch, capsys, tmp_path):
    """A virtual card stands in for the real one: `--real-gpu` cannot tell, and must then find no difference."""
    file = tmp_path / "here.json"
    with virtual_gpus(1, shapes_only=True):
        lines = run(monkeypatch, capsys, CASE, "--real-gpu", file, "--without-mem-tracker")
    stored = json.loads(file.read_text())
    assert stored["meta"]["gpu"] == "NVIDIA H200" and stored["meta"]["torch"]
    known = measure.load("steps.json")["cases"][CASE]
    assert set(stored["cases"][CASE]) <= set(known)
    assert set(stored["cases"][CASE]["memory"][0]) == set(known["memory"][0])
    (peaks,) = [line for line in lines if line.startswith(f"{CASE} ")]
    assert "+0.00 %" in peaks


def test_a_card_is_compared_with_its_kind_or_the_next_older():
    kinds = {("NVIDIA A100-SXM4-80GB", (8, 0)): "A100-80GB", ("NVIDIA A100-PCIE-40GB", (8, 0)): "A100",
             ("NVIDIA GeForce RTX 4090", (8, 9)): "RTX4090", ("NVIDIA GeForce RTX 4080", (8, 9)): "L40S",
             ("NVIDIA GH200 480GB", (9, 0)): "GH200", ("NVIDIA B300", (10, 3)): "B200"}  # fmt: skip
    assert real_gpu.kind_of({"gpu": "NVIDIA H200"}) == "H200"
    for (gpu, capability), kind in kinds.items():
        assert real_gpu.kind_of({"gpu": gpu, "capability": list(capability)}) == kind, gpu


@pytest.mark.parametrize("case", ["bert_small_b16", "gpt_small_b8", "lstm_words_b32"])
def test_a_step_asks_for_the_same_blocks_in_the_same_order_as_on_the_h200(case):
    """Every allocation of the second step: bytes, rounded up to 512, order, and how long the block lives."""
    real = memory_trace.requests(memory_trace.real_events(case))
    version = measure.load("steps.json")["meta"]["torch"]
    virtual = measure.on_virtual_gpu(lambda: memory_trace.virtual_events(case), version)
    assert [block[:2] for block in memory_trace.requests(virtual)] == [block[:2] for block in real]
