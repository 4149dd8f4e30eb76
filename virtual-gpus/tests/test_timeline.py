"""record_timeline: what was recorded, its pictures and its file; and what fills a GPU, by kind."""

import base64
import json
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import matplotlib
import pytest
import torch
from torch import nn
from virtual_gpus import record_timeline, record_training, virtual_gpus
from virtual_gpus.clock.clock import Span
from virtual_gpus.timeline.animate import animate
from virtual_gpus.timeline.peak import ACTIVATIONS, BUFFERS, OTHER, PARAMETERS, PeakLog, kind_of
from virtual_gpus.timeline.record import name_work

matplotlib.use("Agg")
SVG = "{http://www.w3.org/2000/svg}"
INSTALLED = "/site-packages/torch"


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


def test_the_file_is_in_chromes_format_and_the_picture_has_a_row_per_stream(recorded, tmp_path):
    recorded.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    work = [e for e in events if e["ph"] == "X"]
    assert len(work) == len(recorded.spans)
    assert all(e["dur"] >= 0 and {"ts", "pid", "tid", "cat"} <= set(e) for e in work)
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"cuda:0 (modelled)", "cuda:1 (modelled)", "host (modelled)", "stream", "copy in"} <= names
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]
    axes = recorded.plot().axes[0]
    labels = [t.get_text() for t in axes.get_yticklabels()]
    assert labels[0] == "host, waits" and {"cuda:0, stream", "cuda:1, copy in"} <= set(labels)
    legend = {t.get_text() for t in axes.get_legend().get_texts()}
    assert {"forward", "backward", "step", "copy", "wait"} == legend and "modelled" in axes.get_xlabel()


def test_what_cannot_be_asked_and_an_error_in_the_block():
    with pytest.raises(RuntimeError, match="torch.profiler"), record_timeline():
        pass
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
        with record_timeline() as empty:
            pass
        assert empty.seconds == 0.0 and empty.utilisation(0) == 0.0 and not empty.spans


@pytest.fixture(scope="module")
def data_parallel():
    """A step on four GPUs; its timeline, and the peak of each GPU in bytes."""
    with virtual_gpus(4, shapes_only=True):
        net = nn.DataParallel(nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)).cuda(), range(4))
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            sgd.zero_grad()
            with record_timeline(memory=True) as timeline:
                net(torch.empty(4096, 2048, device="cuda")).sum().backward()
                sgd.step()
        return timeline, [torch.cuda.max_memory_allocated(gpu) for gpu in range(4)]


def of(seconds, *spans, measured=False):
    """What another recorder gives."""
    found = [Span(gpu, 0, *rest) for gpu, *rest in spans]
    return SimpleNamespace(seconds=seconds, spans=found, modelled=not measured, memory={})


def texts(animation):
    return [each.text for each in ElementTree.fromstring(animation.svg).iter(f"{SVG}text")]


def test_it_says_and_shows_what_each_gpu_did_held_and_sent(data_parallel):
    timeline, peaks = data_parallel
    for gpu, peak in enumerate(peaks):
        assert max(size for _, size in timeline.memory[gpu]) == peak
        assert timeline.memory[gpu] == sorted(timeline.memory[gpu], key=lambda point: point[0])
    animation = animate(timeline, title="A <step>", story={"broadcast": "GPU 0 sends & all wait."})
    words = str(animation)
    assert "modelled" in words and "4 × broadcast" not in words
    assert re.search(r"what travels: 9 × copy, \d+ × broadcast, \d+ × reduce", words)
    assert {"GPU 0", "GPU 3", "forward", "backward", "reduce", "GPU 0 sends & all wait."} <= set(texts(animation))
    tree = ElementTree.fromstring(animation.svg)
    assert tree.get("role") == "img" and tree.find(f"{SVG}title").text == tree.get("aria-label") == "A <step>"
    assert tree.find(f"{SVG}desc").text == words
    assert len(animation.svg) < 100_000
    both = animate({"one": timeline, "two": timeline}, title="Twice")
    assert {"one", "two"} <= set(texts(both)) and str(both).count("9 × copy") == 2


def test_it_is_an_image_without_script_that_has_the_same_bytes_again(data_parallel):
    """The one rule that moves the picture is not for print, and not for readers who asked for less motion."""
    animation = animate(data_parallel[0], title="A step")
    bundle = animation._repr_mimebundle_()
    inside = re.search(r'src="data:image/svg\+xml;base64,([^"]+)" alt="A step', bundle["text/html"]).group(1)
    assert base64.b64decode(inside).decode() == animation.svg
    assert bundle["text/plain"] == str(animation)
    assert "script" not in animation.svg and 'href="http' not in animation.svg
    assert animation.svg == animate(data_parallel[0], title="A step").svg
    style = ElementTree.fromstring(animation.svg).find(f"{SVG}style").text
    assert 0 < float(re.search(r"svg{--t:([\d.]+)", style)[1]) < 1  # the still picture is one of its moments
    (rule,) = re.findall(r"@media screen and \(prefers-reduced-motion:no-preference\){(.*)}", style)
    assert rule.startswith("svg{animation:t ") and style.count("animation") == 1
    named = set(re.findall(r' id="([\w-]+)"', animation.svg))
    assert set(re.findall(r"(?:url\(|href=\")#([\w-]+)", animation.svg)) <= named


def test_ranks_are_joined_and_what_each_sends_goes_to_the_next():
    """A ring in which each of two GPUs sends once, receives, adds, and has a part of the sum; with a sentence each."""
    spans = [
        (0, 1e-3, "collective", "send Pa"),
        (1e-3, 2e-3, "collective", "recv Pa"),
        (2e-3, 2.5e-3, "forward", "add F3"),
        (2.5e-3, 4e-3, "collective", "reduce_scatter, data"),
    ]
    ranks = [of(4e-3, *[(gpu, *span) for span in spans], measured=True) for gpu in range(2)]
    story = {"send": "Send.", "compute": "Add.", "reduce-scatter": "Scatter."}
    animation = animate(ranks, title="Ring", story=story)
    assert {"GPU 0", "GPU 1", "compute", "a", "3", "measured time"} <= set(texts(animation))
    assert "measured 4 ms | busy: cuda:0 100 %" in str(animation)
    assert "what travels: 2 × send, 2 × reduce-scatter" in str(animation)
    assert animation.svg.count('href="#block-send"') == 2
    told = [each for each in ElementTree.fromstring(animation.svg).iter(f"{SVG}text") if each.get("class") == "w s"]
    begins = {each.text: float(re.search(r"--a:([\d.]+)", each.get("style"))[1]) for each in told}
    assert begins == {"Send.": 0, "Add.": pytest.approx(0.5, abs=0.01), "Scatter.": pytest.approx(0.625, abs=0.01)}


def test_nothing_to_draw_is_said_and_work_is_named_in_timelines_only():
    with pytest.raises(ValueError, match="nothing to animate"):
        animate(of(1.0), title="Nothing")
    with virtual_gpus(1), record_timeline() as timeline:
        with name_work("F3"):
            torch.ones(2, device="cuda") + 1
        torch.ones(2, device="cuda")
    assert any(s.name == "add F3" for s in timeline.spans) and not timeline.spans[-1].name.endswith(" F3")
    with name_work("F1"):  # no GPUs
        pass


def test_stacks_say_the_kind_by_which_a_block_counts_at_the_peak_though_another_takes_its_address():
    call, program = (f"{INSTALLED}/nn/modules/module.py", "_call_impl"), ("train.py", "train")
    assert kind_of([]) == ACTIVATIONS  # a thread of C++: autograd's
    assert kind_of([program]) == OTHER
    assert kind_of([call, program]) == ACTIVATIONS
    assert kind_of([("C:\\torch\\nn\\modules\\module.py", "_apply")]) == PARAMETERS
    assert kind_of([(f"{INSTALLED}/nn/modules/linear.py", "__init__")]) == PARAMETERS
    # The innermost one that says something counts.
    assert kind_of([(f"{INSTALLED}/nn/parallel/replicate.py", "replicate"), call]) == PARAMETERS
    assert kind_of([("/virtual_gpus/features/distributed/reducer.py", "_rebuild_buckets"), call]) == BUFFERS
    log = PeakLog([(1, 100)])
    log.mark(PARAMETERS, 1)
    log.allocated(2, 70, OTHER)
    log.freed(2, 70)
    log.allocated(2, 50, ACTIVATIONS)
    log.freed(9, 5)  # nobody knows it
    log.fold()
    assert log.peak == 170 and (log.by_kind[PARAMETERS], log.by_kind[OTHER]) == (100, 70)


def test_the_modules_of_replicas_have_their_names():
    with virtual_gpus(2, shapes_only=True):
        net = nn.DataParallel(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda())
        with record_training() as recorded:
            net(torch.empty(4096, 512, device="cuda")).sum().backward()
        modules = recorded.report().by_module
    assert "*" in modules and not modules.keys() & {"Linear", "ReLU"}, modules
