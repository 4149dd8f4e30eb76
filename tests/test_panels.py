"""The interactive panels: controls, the explorer that runs any job, the live panel's thread, end and remains."""

import re
import threading
from base64 import b64decode

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from pipeline_panel import explore_pipeline
from torch import nn
from virtual_gpus import active_machine, virtual_gpus

from helpers.measure import GiB, MiB, Reading, Readings, format_bytes
from helpers.show import explore, live, live_memory
from helpers.show.bars import bars_now
from helpers.show.panel import Panel, control, size_of, view
from tests.programs import until

# ---- what panels share ----------------------------------------------------------------------------------------------


def square(side, shape):
    if side == 13:
        raise ValueError("no <13>")
    return f"{shape} of {side} & {side}", Figure(figsize=(2, side / 10))


def test_a_panel_follows_its_controls_and_says_what_cannot_be():
    panel = Panel(square, {"side": control("side", (10, 50), 12), "shape": control("shape", ["square"])})
    assert repr(panel) == panel.words == "square of 12 & 12" and "12 &amp; 12" in panel._text.value
    assert 'alt="square of 12 &amp; 12"' in panel._picture.value
    bundle, metadata = panel._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"}
    # ipywidgets 7 has no _repr_mimebundle_, from which this would come otherwise.
    assert panel._panel._repr_mimebundle_().items() >= view(panel._panel).items() <= bundle.items()
    assert metadata == {"image/png": {"alt": bundle["text/plain"]}}
    assert size_of(b64decode(bundle["image/png"])) == {"width": 280, "height": 168}
    panel.controls["side"].value = 13
    assert panel.words == "Not possible: no <13>" and "&lt;13&gt;" in panel._text.value
    assert panel._picture.layout.visibility == "hidden" and "image/png" not in panel._repr_mimebundle_()[0]
    panel.controls["side"].value = 50
    assert panel.words == "square of 50 & 50" and panel._picture.layout.visibility == "visible"
    assert "width: 280px; aspect-ratio: 280 / 700" in panel._picture.value
    panel.controls["side"].value = 12
    assert panel._repr_mimebundle_()[0]["image/png"] == bundle["image/png"]  # the same bytes each time
    with pytest.raises(TypeError, match="There is no control sides. There are side, shape"):
        panel.at(sides=3)
    before = plt.get_fignums()
    Panel(lambda side: ("", plt.figure()), {"side": control("side", (10, 50))})
    Panel(lambda side: plt.figure() and missing, {"side": control("side", (10, 50))})  # noqa: F821
    assert plt.get_fignums() == before  # pyplot would show it once more


def test_controls():
    assert control("x", (1, 9, 2), 5).step == 2 and control("x", (1.0, 9.0, 0.5), 5).value == 5.0
    assert control("x", ["a", "b"], "b").value == "b" and control("x", ["a", "b"]).value == "a"
    kinds = [type(control("x", options)).__name__ for options in ([1, 8, 64], [True, False], ["a", "b"])]
    assert kinds == ["SelectionSlider", "Dropdown", "Dropdown"]
    pair = control("x", [(1, 2), (3, 4)])
    assert pair.value == (1, 2) and control("x", range(3), 1).value == 1
    for options, value in (((1, 9), 10), ((1, 9, 2), -1), (["a", "b"], "c")):
        with pytest.raises(ValueError, match=re.escape(f"x={value!r} is none of the options")):
            control("x", options, value)
    for options in ((9, 1), "abc", [], np.arange(3)):
        with pytest.raises(ValueError, match="The options of x must be"):
            control("x", options)


def test_a_slow_panel_is_grey_with_a_sign_while_it_computes_each_answer_once_and_names_a_missing_cell():
    asked, seen = [], []

    def look(side):
        asked.append(side)
        if side == 30:
            return missing_cell, None  # noqa: F821
        seen.append(panel._state.value + panel._picture.value if len(asked) > 1 else "")
        return f"{side}", Figure(figsize=(1, 1))

    panel = Panel(look, {"side": control("side", (10, 50), 10)}, slow=True)
    assert panel.words == "10" and not panel.controls["side"].continuous_update
    for side in (20, 10, 20):
        panel.controls["side"].value = side
        assert panel.words == str(side) and "computing" not in panel._state.value
        assert "opacity" not in panel._picture.value
    assert asked == [10, 20] and "computing" in seen[1] and "opacity: 0.3" in seen[1]
    panel.controls["side"].value = 30
    assert panel.words.endswith("is not defined. If a cell above defines it, run that cell, and then this one.")


# ---- the explorer ---------------------------------------------------------------------------------------------------


def two_steps(batch=64, width=1024, wrap=nn.DataParallel):
    torch.rand(1)  # of the generator that the explorer must leave as it was
    net = wrap(nn.Linear(width, width, device="cuda:0"))
    adam = torch.optim.Adam(net.parameters())
    for _ in range(2):
        adam.zero_grad()
        net(torch.empty(batch, width, device="cuda:0")).sum().backward()
        adam.step()


def explorer():
    options = {"batch": (64, 2**20, 64), "width": [1024, 4096]}
    wrap = {"one GPU": lambda net: net, "two GPUs": nn.DataParallel}
    return explore(two_steps, **options, wrap=wrap, count=2, memory="2 GiB")


def peaks_of(batch) -> list[str]:
    """Of a run by hand, of the second step: the first has no more."""
    with virtual_gpus(2, memory="1000 GiB", shapes_only=True):
        two_steps(batch)
        return [format_bytes(torch.cuda.max_memory_allocated(gpu)) for gpu in range(2)]


def test_the_explorer_says_what_a_run_takes_or_where_it_runs_out_of_memory():
    panel, size = explorer(), peaks_of(64)
    assert panel.chosen == {"batch": 64, "width": 1024, "wrap": "two GPUs"}
    name, first, second = panel.words.splitlines()
    assert name.startswith("batch 64, width 1,024, wrap two GPUs; 2 x NVIDIA H200, ")
    assert first.startswith(f"The job runs: GPU 0 peaked at {size[0]} allocated and ")
    assert first.endswith("reserved of 1.75 GiB.") and second.startswith(f"GPU 1 peaked at {size[1]} allocated and ")
    panel.controls["wrap"].value, panel.controls["width"].value = "one GPU", 4096
    assert panel.words != panel.at(width=1024) and "GPU 1 peaked at 0.00 MiB" in panel.words
    height = size_of(panel._png)
    _, stopped, needed, _ = panel.at(batch=2**20, width=1024, wrap="two GPUs").splitlines()
    said = r"Out of memory: GPU 0 ran out of its 2\.00 GiB: with .* allocated and .* reserved it was asked for .* more"
    assert re.match(said, stopped) and f"GPU 0 would need {peaks_of(2**20)[0]} allocated" in needed
    panel.controls["batch"].value = 2**20
    assert size_of(panel._png) == height and "Out of memory" in panel.words


def test_memory_in_pieces_that_are_too_small_and_an_error_of_the_job():
    def in_pairs(size=8):  # two share a segment, of which one is freed
        kept = [torch.empty(size * MiB, dtype=torch.uint8, device="cuda") for _ in range(16)]
        del kept[::2]
        if size > 8:
            torch.empty(1)[2]  # the line
        torch.empty(40 * MiB, dtype=torch.uint8, device="cuda")

    panel = explore(in_pairs, size=(8, 9), memory="200 MiB")
    assert panel.words.startswith("size 8; 1 x NVIDIA H200")
    needed = panel.words.splitlines()[-1]
    assert needed.startswith("With more memory: GPU 0 peaked at 128 MiB")
    assert needed.endswith("too small (fragmentation).")
    panel.controls["size"].value = 9
    assert re.match(r"Not possible: IndexError in line \d+, torch.empty\(1\)\[2\].*: index 2 is out", panel.words)
    thousand = int("1000")  # equal to the choice, and another object
    missing = explore(lambda size=thousand: no_such_cell, size={"small": int("1000"), "large": 2000})  # noqa: F821
    assert missing.words.startswith("Not possible: name 'no_such_cell' is not defined. If a cell above defines it, run")


def test_the_panel_of_a_pipeline_says_what_a_step_takes_and_which_number_of_micro_batches_is_best():
    panel = explore_pipeline(stages=4, micro_batches=8, schedule="1F1B")
    idle, kept, step = panel.words.splitlines()
    assert idle == "1F1B, 4 stages, 8 micro-batches: each GPU is idle for 27.3 % of the step, 3/11."
    assert kept == "Stage 0 keeps the activations of at most 4 of 8 micro-batches, 50 % of the batch."
    # (8 + 4 - 1) tasks of each kind, of (1 + 2) / 8 + 2 % of a forward pass, in 3 * 4 of them
    assert f"takes {11 * (3 / 8 + 0.02) / 12:.2f} of one GPU's time" in step and "shortest with 21 micro-" in step
    assert "at most 8 of 8" in panel.at(schedule="GPipe") and "or more micro-batches" in panel.at(extra=0.0)
    assert size_of(panel._png)["width"] == 980
    with pytest.raises(ValueError, match="stages=9 is none of the options"):
        explore_pipeline(stages=9)


def test_the_explorer_leaves_gpus_and_random_numbers_as_they_are():
    torch.manual_seed(0)
    expected = torch.rand(3)
    with virtual_gpus(1, kind="T4", memory="1 GiB"):
        torch.manual_seed(0)
        kept, panel = torch.ones(3, device="cuda"), explorer()
        panel.controls["batch"].value = 128
        assert torch.equal(torch.rand(3), expected) and kept.sum().item() == 3
        assert torch.cuda.device_count() == 1 and torch.cuda.memory_allocated() == 512
    assert active_machine() is None


def test_bad_arguments_of_the_explorer():
    with pytest.raises(TypeError, match="heads"):
        explore(two_steps, heads=(1, 2))
    with pytest.raises(ValueError, match="GTX"):
        explore(two_steps, batch=(1, 64), kind="GTX")


# ---- the live panel -------------------------------------------------------------------------------------------------


class Page:
    """What a notebook's page would show: the bundles of one output, and what it is told of the last one's image."""

    def __init__(self, bundle):
        self.bundles, self.image = [bundle], None

    def update(self, bundle, metadata, raw):
        self.bundles.append(bundle)
        self.image = metadata["image/png"]


@pytest.fixture
def page(monkeypatch):
    """As if in a notebook. A list that gets the page of each panel."""
    pages = []

    def display(bundle, raw, display_id):
        pages.append(Page(bundle))
        return pages[-1]

    monkeypatch.setattr(live, "_in_a_notebook", lambda: True)
    monkeypatch.setattr(live, "display", display)
    yield pages
    assert not [thread for thread in threading.enumerate() if thread.name == "live_memory"]


@pytest.fixture
def gpus():
    with virtual_gpus(2, memory="2 GiB") as devices:
        yield devices


def test_it_changes_while_the_block_runs_and_the_peaks_remain(page, gpus, capsys):
    with live_memory(every=0.005) as panel:
        panel.log("epoch 0 | loss < 2.1")
        x = torch.empty(GiB, dtype=torch.uint8, device="cuda:1")
        until(lambda: "GPU 1: 1.00 GiB allocated, peak 1.00 GiB" in panel._picture.value)
        del x
        until(lambda: "GPU 1: 0.00 MiB allocated, peak 1.00 GiB" in panel._picture.value)
        height = int(re.search(r"height: (\d+)px", panel._picture.value)[1])
        assert "epoch 0 | loss &lt; 2.1" in panel._picture.value
    first, remains = page[0].bundles  # one picture that changes, and what remains
    assert [reading.peak_allocated for reading in panel.readings] == [0, GiB]
    assert capsys.readouterr().out == f"epoch 0 | loss < 2.1\n{panel.words}\n"
    assert "GPU 1 peaked at 1.00 GiB allocated and 1.00 GiB reserved; the driver counts" in panel.words
    assert set(remains) == {"image/png"} and "text/plain" not in first  # a panel would go with its kernel
    assert page[0].image == size_of(b64decode(remains["image/png"])) | {"alt": panel.words}
    assert page[0].image["height"] == height and f"/ {height}" in panel._picture.value


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_error_in_the_block_ends_it_and_passes_through(page, gpus, error):
    with pytest.raises(error), live_memory(every=0.005) as panel:
        x = torch.empty(1000, device="cuda")
        if error is torch.OutOfMemoryError:
            torch.empty(3 * GiB, dtype=torch.uint8, device="cuda")
        raise error
    assert panel.readings[0].peak_allocated == 4096 == x.nbytes + 96
    assert "image/png" in page[0].bundles[-1]


def test_a_look_that_fails_ends_neither_the_panel_nor_the_training(page, gpus, monkeypatch):
    failed = []

    def fail(*_):
        failed.append(True)
        raise RuntimeError("deque mutated during iteration")

    with live_memory(every=0.005) as panel:
        with monkeypatch.context() as broken:
            broken.setattr(live, "read_memory", fail)
            until(lambda: len(failed) > 1)
        torch.empty(1000, device="cuda")
        until(lambda: "GPU 0: 0.00 MiB allocated, peak &lt;0.01 MiB" in panel._picture.value)
    assert panel.readings[0].peak_allocated == 4096


def test_left_out(gpus, capsys):
    torch.empty(1000, device="cuda")
    with live_memory() as panel:
        assert not [thread for thread in threading.enumerate() if thread.name == "live_memory"]
        panel.log("epoch 0")
    assert torch.cuda.max_memory_allocated() == 4096  # nobody reset it
    assert capsys.readouterr().out == "epoch 0\n" and panel.words == "" and not panel.readings


def test_bad_arguments_of_the_live_panel(page):
    with pytest.raises(ValueError, match="every=0"), live_memory(every=0):
        pass
    with pytest.raises(RuntimeError, match="no GPU"), live_memory():
        pass
    assert page == []


def test_the_scale_and_the_figures_of_the_bars_are_said():
    """A learner reads off how long a frame is: a power of two, or the capacity."""
    frames = {0: "1.00 MiB", 128 * MiB: "128 MiB", 129 * MiB: "256 MiB", 2 * GiB: "16.0 GiB"}
    for reserved, frame in frames.items():
        page = bars_now(Readings([Reading(0, "GPU", 16 * GiB, 0, 0, reserved, reserved)]), "")
        assert f"frame: {frame}" in page
    page = bars_now(Readings([Reading(0, "GPU", 16 * GiB, GiB, 2 * GiB, 4 * GiB, 4 * GiB, 5 * GiB, 16 * GiB)]), "")
    said = "GPU 0: 1.00 GiB allocated, peak 2.00 GiB, 4.00 GiB reserved, driver 5.00 GiB, of 16.0 GiB"
    assert page.count(said) == 2  # one of them is for screen readers
    assert re.findall(r"width: ([\d.]+)%", page) == ["31.25", "25.00", "6.25"]  # each bar on the one before
