"""Timelines: of the modelled clock, and of torch.profiler's trace as a machine with GPUs writes it."""

import pickle

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from torch import nn
from virtual_gpus import record_timeline as record_in_detail
from virtual_gpus import virtual_gpus

from helpers.engine import Span
from helpers.measure import describe_timeline
from helpers.measure.timeline import BLOCK, Timeline, describe_time_use, record_timeline, spans_of, time_use
from helpers.show import timeline_bars
from tests.pictures import alt_text


def of(seconds, *work, modelled=True):
    timeline = Timeline()
    timeline.seconds, timeline.modelled = seconds, modelled
    timeline.spans = [Span(gpu, 0, *rest, "") for gpu, *rest in work]
    return timeline


@pytest.fixture(scope="module")
def two_gpus():
    with virtual_gpus(2, shapes_only=True):
        nets = [nn.Linear(4096, 4096).to(gpu) for gpu in range(2)]
        sgd = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.1)
        with record_timeline() as timeline:
            x = torch.empty(8192, 4096, device="cuda:0")
            nets[1](nets[0](x).to(1)).sum().backward()
            sgd.step()
    return pickle.loads(pickle.dumps(timeline))


def test_a_modelled_timeline(two_gpus):
    kinds = {(w.gpu, w.kind) for w in two_gpus.spans}
    assert two_gpus.modelled and two_gpus.gpus == [0, 1] and describe_timeline(two_gpus).startswith("modelled ")
    assert {(gpu, kind) for gpu in (0, 1) for kind in ("forward", "backward", "step", "copy")} <= kinds
    assert two_gpus.utilisation(0) + two_gpus.utilisation(1) < 1.01  # they take turns
    for gpu in (0, 1):
        used = time_use(two_gpus, gpu)
        assert sum(used) == pytest.approx(two_gpus.seconds)
        assert used.computing == pytest.approx(two_gpus.busy_seconds(gpu))
        for same in (f"cuda:{gpu}", torch.device("cuda", gpu)):
            assert time_use(two_gpus, same) == used and two_gpus.utilisation(same) == two_gpus.utilisation(gpu)
        assert used.others > 0.3 * two_gpus.seconds and 0 < used.copying < 0.1 * two_gpus.seconds
    with pytest.raises(ValueError, match=r"GPU 2 did nothing in this timeline. The GPUs that did are \[0, 1\]"):
        time_use(two_gpus, 2)


def look(artist):
    """Colours of face and edge, and the hatch, of a bar or of its key in the legend."""
    face, edge = (to_hex(np.ravel(colour)[:4]) for colour in (artist.get_facecolor(), artist.get_edgecolor()))
    return face, edge, artist.get_hatch() or ""


def test_the_picture_has_titles_words_and_bars_that_look_like_their_keys(two_gpus):
    figure = timeline_bars({"a": two_gpus, "b": two_gpus})
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["a", "b"]
    assert figure.axes[1].get_xlabel() == "modelled time in ms"
    assert alt_text(figure.axes[0]) == f"a: {describe_timeline(two_gpus)}\nb: {describe_timeline(two_gpus)}"
    bars = {look(bar) for bar in figure.axes[0].collections if bar.get_paths()}
    keys = {key.get_label(): key for key in figure.legends[0].get_patches()}
    assert list(keys) == ["forward", "backward", "step", "copy"] and bars == set(map(look, keys.values()))
    for kind in ("backward", "step"):
        face, edge, hatch = look(keys[kind])
        assert hatch and face != edge  # a hatch is drawn in the colour of the edge
    face, edge, _ = look(keys["copy"])
    assert face == edge and keys["copy"].get_linewidth() >= 1  # a short copy is seen


def test_a_bar_is_as_high_as_the_share_of_its_time_in_which_kernels_run():
    often = [(0, tick / 1e4, tick / 1e4 + 2.5e-5, "forward") for tick in range(1000)]  # a quarter of 0.1 s
    bars = timeline_bars(of(1.0, *often, (0, 0.5, 0.9, "forward"))).axes[0].collections[1].get_paths()
    (wide, low), (whole, high) = (np.ptp(bar.vertices, axis=0) for bar in bars)
    assert (wide, low) == (pytest.approx(99.925), pytest.approx(0.18, abs=1e-3))  # ms and rows
    assert (whole, high) == (pytest.approx(400), pytest.approx(0.72)) and bars[1].vertices[0, 0] == pytest.approx(500)


def test_kernels_lie_in_front_of_the_collective_that_runs_meanwhile():
    figure = timeline_bars(of(1.0, (0, 0.2, 0.5, "backward"), (0, 0.1, 0.9, "collective")))
    keys = {key.get_label(): look(key) for key in figure.legends[0].get_patches()}
    bars = [look(bar) for bar in figure.axes[0].collections if bar.get_paths()]
    assert bars == [keys["collective"], keys["backward"]]


def test_nothing_to_draw_or_to_record_is_refused_and_errors_in_the_block_pass_through():
    for nothing, said in (({}, "no timeline"), ({"a": Timeline()}, "'a' has no work")):
        with pytest.raises(ValueError, match=said):
            timeline_bars(nothing)
    for wrong in ({"a": None}, [Timeline()], None):
        with pytest.raises(TypeError, match="Pass what record_timeline gives"):
            describe_time_use(wrong)
    with virtual_gpus(1), pytest.raises(KeyError), record_timeline():
        raise KeyError("mine")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="There is no GPU"), record_timeline():
            pass


def test_each_moment_counts_once_at_the_first_that_holds():
    first = [(0, 1, 4, "forward"), (0, 1.5, 2, "forward"), (0, 3, 7, "collective"), (0, 6, 9, "copy")]
    timeline = of(20.0, *first, (1, 8, 12, "forward"), (1, 14, 15, "copy"))
    used = time_use(timeline, 0)
    assert used == (3, 3, 2, 4, 8) and used.waiting == 17  # 1 to 4; to 7; to 9; to 12 and 14 to 15; the rest
    assert time_use(timeline, 1) == (4, 0, 1, 7, 8)
    assert sum(used) == sum(time_use(timeline, 1)) == timeline.seconds
    with pytest.raises(ValueError, match="no cuda:256. Pass one of"):  # which PyTorch takes for 0
        timeline.utilisation(256)
    assert timeline.busy_seconds(0) == 6 and timeline.utilisation(0) == 0.3 and timeline.utilisation(2) == 0


def test_a_gpu_that_waits_for_the_host():
    with virtual_gpus(1, shapes_only=True), record_in_detail() as detailed, record_timeline() as timeline:
        x = torch.empty(8, device="cuda:0")
        for _ in range(20):
            x = x + 1
    used = time_use(timeline, 0)
    assert used.nothing > 0.6 * timeline.seconds and used.others == used.copying == used.collective == 0
    assert time_use(detailed, 0).computing == pytest.approx(used.computing)  # the engine's timeline, whose host waits
    assert alt_text(timeline_bars(detailed).axes[0]) == describe_timeline(detailed)


def test_a_table_of_what_each_gpu_does():
    told = describe_time_use({"a": of(0.01, (0, 0, 0.004, "forward"), (1, 0.004, 0.01, "step")), "b": of(1.0)})
    assert told.splitlines() == [
        "modelled ms   in all  computing collective    copying     others    nothing",
        "a cuda:0        10.0        4.0        0.0        0.0        6.0        0.0",
        "a cuda:1        10.0        6.0        0.0        0.0        4.0        0.0",
    ]
    assert describe_time_use(of(1.0, (3, 0, 1, "step"), modelled=False)).startswith("measured ms")
    assert "0.0200" in describe_time_use(of(5e-5, (3, 0, 2e-5, "step")))  # ms, with more decimals
    for seconds, words in ((1.1324, "1,132 ms"), (0.0123456, "12.3 ms"), (2e-5, "0.02 ms")):
        assert describe_timeline(of(seconds)) == f"modelled {words} | busy: "


def event(category, name, start, length, thread, **args):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "tid": thread, "pid": 1, "args": args}


def kernel(number, name, start, length, device=0):
    return event("kernel", name, start, length, 7, device=device, stream=7, correlation=number)


def launch(number, start, thread):
    return event("cuda_runtime", "cudaLaunchKernel", start, 1, thread, correlation=number)


def test_a_trace_is_read_as_work():
    """In the format of PyTorch's own traces: microseconds, launches and kernels with the same correlation."""
    trace = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", BLOCK, 1000, 500, 1),
        event("gpu_user_annotation", BLOCK, 1010, 300, 7, device=0),
        event("gpu_user_annotation", "Optimizer.step#SGD.step", 1000, 200, 7, device=0),  # as late as the GPU is
        event("user_annotation", "Optimizer.step#SGD.step", 1300, 50, 1),
        launch(1, 1001, 1), kernel(1, "sgemm", 1010, 20),
        event("cpu_op", "autograd::engine::evaluate_function: on the CPU, in the same thread", 1003, 2, 1),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 1090, 20, 2),
        event("cpu_op", "autograd::engine::evaluate_function: in a checkpoint", 1091, 2, 2),
        launch(2, 1100, 2), kernel(2, "sgemm", 1110, 40, device=1),
        launch(5, 1020, 3), kernel(5, "replica", 1030, 5, device=1),  # DataParallel calls each replica in a thread
        launch(3, 1310, 1), kernel(3, "multi_tensor", 1320, 10),
        launch(4, 1050, 1), kernel(4, "ncclDevKernel_AllReduce", 1060, 30),
        event("gpu_memcpy", "Memcpy PtoP", 1200, 5, 7, fromDevice=0, inDevice=0, toDevice=1, correlation=9),
        event("gpu_memcpy", "Memcpy HtoD", 1250, 5, 7, device=1, correlation=10),
        kernel(77, "launched before the trace", 1400, 5),
    ]  # fmt: skip
    seconds, work = spans_of(trace)
    assert seconds == pytest.approx(500e-6)
    assert [(w.gpu, w.kind) for w in work] == [
        (0, "forward"), (1, "forward"), (0, "collective"), (1, "backward"), (0, "copy"), (1, "copy"), (1, "copy"),
        (0, "step"), (0, "forward"),
    ]  # fmt: skip
    assert (work[0].start, work[0].end) == (pytest.approx(10e-6), pytest.approx(30e-6))
    measured = Timeline()
    measured.seconds, measured.spans, measured.modelled = seconds, work, False
    in_us = [1e6 * part for part in time_use(measured, 0)]  # 20 + 10 + 5 computing; 40 of the other, and its copy
    assert in_us == pytest.approx([35, 30, 5, 50, 380])


def test_a_second_profiler_on_a_real_gpu_is_refused(monkeypatch):
    """PyTorch lets two begin, and then the process can end with a segmentation fault."""
    monkeypatch.setattr("helpers.measure.timeline.is_virtual", lambda: False)
    with virtual_gpus(1), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(RuntimeError, match="A profiler is on already"), record_timeline():
            pass
