"""record_timeline: what was recorded, its picture and its file."""

import json

import matplotlib
import pytest
import torch
from virtual_gpus import record_timeline, virtual_gpus

matplotlib.use("Agg")


@pytest.fixture(scope="module")
def recorded():
    """A step of a small net over two GPUs."""
    with virtual_gpus(2, shapes_only=True):
        first, second = torch.nn.Linear(512, 512).to("cuda:0"), torch.nn.Linear(512, 512).to("cuda:1")
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        with record_timeline() as timeline:
            second(first(torch.empty(64, 512).to("cuda:0")).to("cuda:1")).sum().backward()
            optimizer.step()
    return timeline


def test_kinds_of_work_are_told_apart_and_times_add_up(recorded):
    kinds = {(s.gpu, s.kind) for s in recorded.spans}
    assert kinds >= {(g, k) for g in (0, 1) for k in ("forward", "backward", "step", "copy")}
    assert {s.name for s in recorded.spans if s.kind == "backward"} >= {"mm", "sum"}
    assert all(s.name.startswith("_foreach") for s in recorded.spans if s.kind == "step" and s.gpu is not None)
    assert {lane for gpu, lane in {(s.gpu, s.lane) for s in recorded.spans} if gpu == 1} == {0, "copy in", "copy out"}
    assert all(0 <= s.start <= s.end <= recorded.seconds + 1e-12 for s in recorded.spans)
    for gpu in (0, 1):
        kernels = sum(s.end - s.start for s in recorded.spans if s.gpu == gpu)
        assert 0 < recorded.busy_seconds(gpu) < recorded.busy_seconds(gpu, copies=True) <= kernels + 1e-12
        assert recorded.utilisation(gpu) == recorded.busy_seconds(torch.device("cuda", gpu)) / recorded.seconds < 1


def test_work_at_the_same_time_counts_once():
    with virtual_gpus(2, shapes_only=True):
        x, side = torch.empty(4096, 4096, device="cuda"), torch.cuda.Stream()
        y = torch.empty(4096, 4096).pin_memory()
        with record_timeline() as t:
            x @ x
            with torch.cuda.stream(side):
                y.to("cuda", non_blocking=True)
        both = [s.end - s.start for s in t.spans if s.gpu == 0]
        assert len(both) == 2 and max(both) <= t.busy_seconds(0, copies=True) < 0.99 * sum(both)


def test_the_file_is_in_chromes_format(recorded, tmp_path):
    recorded.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    work = [e for e in events if e["ph"] == "X"]
    assert len(work) == len(recorded.spans)
    assert all(e["dur"] >= 0 and {"ts", "pid", "tid", "cat"} <= set(e) for e in work)
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"cuda:0 (modelled)", "cuda:1 (modelled)", "host (modelled)", "stream", "copy in"} <= names
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]


def test_the_picture_has_a_row_per_stream(recorded):
    figure = recorded.plot()
    axes = figure.axes[0]
    labels = [t.get_text() for t in axes.get_yticklabels()]
    assert labels[0] == "host, waits" and {"cuda:0, stream", "cuda:1, copy in"} <= set(labels)
    legend = {t.get_text() for t in axes.get_legend().get_texts()}
    assert {"forward", "backward", "step", "copy", "wait"} == legend and "modelled" in axes.get_xlabel()


def test_what_cannot_be_asked_and_an_error_in_the_block():
    with pytest.raises(RuntimeError, match="torch.profiler"):
        record_timeline()
    with virtual_gpus(1, shapes_only=True):
        with pytest.raises(ZeroDivisionError), record_timeline() as t:
            with pytest.raises(RuntimeError, match="still recording"):
                _ = t.seconds
            torch.ones(3, device="cuda")
            raise ZeroDivisionError
        torch.ones(3, device="cuda")
        assert [s.name for s in t.spans if s.gpu == 0] == ["ones"] and t.seconds > 0
        with pytest.raises(ValueError, match="no GPU 3"):
            t.busy_seconds(3)
        with pytest.raises(RuntimeError, match="Make a new one"), t:
            pass
        with record_timeline() as empty:
            pass
        assert empty.seconds == 0.0 and empty.utilisation(0) == 0.0 and not empty.spans
