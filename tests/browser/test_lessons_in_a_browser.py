"""In JupyterLab in a real browser: a lesson by Run All Cells, the explorer's slider, the live panel of a training."""

import json
import re
import time
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs Python's playwright, which the pinned environment has")
from tests.browser.lab import ROOT, chromium, jupyterlab

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium (Debian: apt install chromium)")
SCREENSHOTS = Path(__file__).parent / "screenshots"  # not in git


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    with jupyterlab(tmp_path_factory.mktemp("jupyterlab")) as lab:
        yield lab


@pytest.fixture
def lab(started, request):
    yield started
    SCREENSHOTS.mkdir(exist_ok=True)
    started.page.screenshot(path=SCREENSHOTS / f"{request.node.name}.png")


def test_the_cells_of_a_lesson_run(lab):
    """No errors except those that belong to the lesson, and the stored figures appear again."""
    cells = json.loads((ROOT / "notebooks" / "00_start_here.ipynb").read_text(encoding="utf-8"))["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    fails = [any(output["output_type"] == "error" for output in cell["outputs"]) for cell in cells]
    cells = cells[: fails.index(True) + 1]  # up to the error that belongs to the lesson, which ends a run
    lab.write("lesson", ["".join(cell["source"]) for cell in cells])
    lab.open("lesson")
    lab.run_all(timeout=480)
    outputs = [output for cell in cells for output in cell["outputs"]]
    printed = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    figures = [line for line in printed.splitlines() if re.search(r"\d [MG]iB", line)]
    failed = [output for output in outputs if output["output_type"] == "error"]
    errors = [f"{error['ename']}: {error['evalue']}".split("\n")[0] for error in failed]
    assert len(figures) > 3 and errors and lab.missing([*figures, *errors]) == []
    assert len(lab.errors()) == len(errors), lab.errors()


EXPLORED = (
    """import time
from pathlib import Path
import torch
from torch import nn
from helpers import use_gpus
from helpers.show import explore
gpus = use_gpus(2, memory="16 GiB")
def job(batch=1024, width=4096):
    net = nn.DataParallel(nn.Linear(width, width).to("cuda:0"))
    net(torch.empty(batch, width, device="cuda:0")).sum().backward()""",
    """panel = explore(job, batch=(128, 4096, 128), width=[1024, 4096], count=2, memory="4 GiB")
panel""",
    """ones = 0
while not Path("door").exists():
    ones += torch.ones(1, device="cuda:1").item() == 1
    time.sleep(0.02)
print(ones > 0, torch.cuda.get_device_properties(1).total_memory // 2**30)""",
)
# What a reader calls flicker: a panel leaves the page, its height changes, or a frame is drawn without a whole picture.
WATCH = """
(panel) => {
    const cell = document.querySelectorAll(".jp-Notebook .jp-CodeCell")[1], shown = cell.querySelector(panel);
    window.seen = {shown, removed: 0, blank: 0, frames: 0, signs: 0, heights: []};
    const look = new MutationObserver((changes) => {
        for (const change of changes) for (const node of change.removedNodes) seen.removed += node.contains(shown);
    });
    look.observe(cell, {childList: true, subtree: true});
    const frame = () => {
        const picture = cell.querySelector(".jp-OutputArea-output [role=img], .jp-OutputArea-output img");
        const height = cell.querySelector(".jp-OutputArea-child")?.getBoundingClientRect().height ?? 0;
        if (seen.heights.at(-1) !== height) seen.heights.push(height);
        seen.frames += 1;
        seen.signs += cell.innerText.includes("computing");
        seen.blank += !(picture?.getBoundingClientRect().height > 100 && (picture.naturalWidth ?? 1));
        requestAnimationFrame(frame);
    };
    frame();
}
"""
SEEN = "() => ({...seen, shown: seen.shown.isConnected})"


def test_a_slider_of_the_explorer_moves_and_the_bars_change(lab):
    """A cell that runs keeps its GPUs. Then the slider's answer comes, after a sign, and nothing flickers."""
    lab.write("explored", EXPLORED)
    lab.open("explored")
    lab.start()
    lab.page.wait_for_selector(".widget-html img")
    before, picture = lab.explorer(), lab.explorer("src")
    assert before.startswith("batch 1,024, width 4,096; 2 x NVIDIA H200, ")
    lab.page.evaluate(WATCH, ".widget-vbox")
    assert lab.move_slider("batch", -5) == "384"
    time.sleep(2)
    assert lab.explorer() == before and lab.counts()[2] == "[*]:"
    (lab.folder / "door").touch()
    lab.page.wait_for_function("() => seen.signs > 0")
    lab.wait_for_the_end(timeout=120)
    lab.page.wait_for_function("() => document.querySelector('.widget-html img').alt.startsWith('batch 384,')")
    assert lab.explorer("src") != picture and "True 16" in lab.outputs()
    assert lab.move_slider("batch", 1) == "512"
    lab.page.wait_for_function("() => document.querySelector('.widget-html img').alt.startsWith('batch 512,')")
    lab.page.wait_for_function("() => !document.querySelector('.widget-vbox').innerText.includes('computing')")
    seen = lab.page.evaluate(SEEN)
    assert seen["blank"] == 0 and len(seen["heights"]) == 1 and seen["frames"] > seen["signs"] > 0, seen
    assert lab.errors() == []


TRAINING = (
    """import itertools, time
from pathlib import Path
import torch
from torch import nn
from helpers import use_gpus
from helpers.train import train_epochs
from helpers.show import live_memory
from helpers.show.bars import empty_figure, memory_bars
from helpers.show.panel import png
numbers = itertools.count()
def gate():
    door = Path(f"door_{next(numbers)}")
    while not door.exists():
        time.sleep(0.02)
class Batches(list):
    def __iter__(self):
        gate()
        return super().__iter__()
gpus = use_gpus(2, memory="4 GiB")
net = nn.Linear(1024, 1024)
job = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), nn.CrossEntropyLoss()
batches = Batches([(torch.ones(8, 1024), torch.zeros(8, dtype=torch.long))])""",
    """with live_memory(every=0.1) as panel:
    gate()
    network = nn.DataParallel(net.to(gpus[0]), gpus)
    train_epochs(network, *job, batches, gpus[0], epochs=2, log=panel.log)""",
    """from base64 import b64encode
figure = empty_figure(2)
memory_bars(panel.readings, "Peaks of this run", figure)
print(b64encode(png(figure)).decode())""",
)
OTHER = """
(before) => {
    const texts = [...document.querySelectorAll(".jp-Notebook .widget-html div div")].map((div) => div.textContent);
    const now = texts.find((text) => text.startsWith("GPU 0: "));
    return now !== before && now;
}
"""


def test_the_live_panel_changes_without_flicker_and_leaves_the_peaks(lab):
    """While a training waits at a door, its memory is on the page; then it may go on. In the end the peaks remain."""
    lab.write("live_panel", TRAINING)
    lab.open("live_panel")
    lab.start()
    shown = ["", lab.page.wait_for_function(OTHER, arg="").json_value()]
    lab.page.evaluate(WATCH, ".widget-html")
    for door in range(2):
        (lab.folder / f"door_{door}").touch()
        shown.append(lab.page.wait_for_function(OTHER, arg=shown[-1]).json_value())
    assert shown[1].startswith("GPU 0: 0.00 MiB allocated, peak 0.00 MiB") and len(set(shown)) == 4, shown
    flicker = lab.page.evaluate(SEEN)
    assert flicker["shown"] and flicker["removed"] == flicker["blank"] == 0 and len(flicker["heights"]) == 1, flicker

    (lab.folder / "door_2").touch()
    lab.wait_for_the_end(timeout=120)
    image, words = lab.page.locator(".jp-RenderedImage img"), r"GPU 0 peaked at .* allocated and .* of 4.00 GiB"
    image.wait_for()
    flicker = lab.page.evaluate(SEEN)
    assert flicker["removed"] == 1 and flicker["blank"] == 0, flicker  # the image took its place, all at once
    assert max(flicker["heights"]) - min(flicker["heights"]) < 5, flicker
    assert image.get_attribute("src").split(",")[1].strip() in lab.outputs().split() and re.search(words, lab.outputs())
    assert lab.page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0, lab.outputs()
