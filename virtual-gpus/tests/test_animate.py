"""The animated picture of a timeline: what it says, how large it is, that it needs no script and is always the same."""

import base64
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from virtual_gpus import record_timeline, virtual_gpus
from virtual_gpus.clock.clock import Span
from virtual_gpus.timeline.animate import animate
from virtual_gpus.timeline.record import name_work

SVG = "{http://www.w3.org/2000/svg}"


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
    assert (
        "what travels: 2 × send, 2 × reduce-scatter" in str(animation)
        and animation.svg.count('href="#block-send"') == 2
    )
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
