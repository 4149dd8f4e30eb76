"""The interactive panels: the explorer's sliders, words and still picture; the live panel's thread, end and remains."""

import re
import struct
import threading
import time
import xml.etree.ElementTree as ElementTree
from base64 import b64decode

import IPython.display
import ipywidgets
import pytest
import run_all
import torch
from nbformat.v4 import new_code_cell, new_notebook
from virtual_gpus import active_machine, virtual_gpus

from helpers.measure import Reading, Readings
from helpers.show.widgets import explore_memory, live_memory, live_panel, live_picture
from helpers.show.widgets.bert_memory import METHODS, OPTIMIZERS, Job
from helpers.show.widgets.explorer import SLIDERS, MemoryExplorer
from helpers.show.widgets.panel import Panel, choice, slider
from helpers.show.widgets.scene import Look, Scene

GIB = 2**30
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [each.text for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]


# ---- scenes --------------------------------------------------------------------------------------------------------


def scene() -> Scene:
    made = Scene(200, 80, words='1 < 2 & "so on"')
    for place, hatch in enumerate(("", "////", "\\\\\\\\", "xxxx", "----", "||||", "++++", "....")):
        made.box(10 * place, 5, 8, 20, Look("#0072B2", hatch))
    made.line((0, 200), (40, 40), dotted=True)
    made.text(10, 60, "$5 & <b>", bold=True, halo=True)
    return made


def test_a_scene_as_svg_is_xml_with_the_words_as_its_label():
    root = ElementTree.fromstring(scene().svg())
    assert root.get("aria-label") == '1 < 2 & "so on"' and root.get("role") == "img"
    assert texts(scene().svg()) == ["$5 & <b>"]
    assert len(list(root.iter(f"{SVG}pattern"))) == 7


def test_two_pictures_of_a_page_share_no_names():
    names = [set(re.findall(r'id="([^"]+)"', scene().svg())) for _ in range(2)]
    assert names[0] and not names[0] & names[1]


def test_a_scene_as_png_is_the_same_every_time():
    assert scene().png() == scene().png()
    assert scene().png().startswith(b"\x89PNG") and b"Software" not in scene().png()


# ---- what panels share --------------------------------------------------------------------------------------------


class Squares(Panel):
    _words_first = True

    def __init__(self, side, shape="square"):
        super().__init__({"side": slider("side, px", side, 10, 50, 5), "shape": choice("shape", ["square"], shape)})

    def _look(self, side, shape):
        if side > 60:
            raise ValueError("too large: take <60>")
        made = scene()
        made.text(0, 0, f"{side} px")
        return f"{shape} of {side} & {side}", made


def test_a_panel_follows_its_controls_and_says_what_cannot_be():
    panel = Squares(45)
    assert repr(panel) == panel.words == "square of 45 & 45" and "45 &amp; 45" in panel._said.value
    assert panel._panel.children[1:] == (panel._said, panel._picture)
    panel.controls["side"].value = 50
    assert texts(panel._picture.value)[-1] == "50 px" and panel.chosen == {"side": 50, "shape": "square"}
    assert "image/png" in panel._repr_mimebundle_()[0]
    panel = Squares(65)
    assert panel.words == "Not possible: too large: take <60>" and "&lt;60&gt;" in panel._said.value
    assert panel._picture.value == "" and "image/png" not in panel._repr_mimebundle_()[0]


def test_controls_of_a_panel():
    assert slider("x", 12, 10, 50, 5).step == 1 and slider("x", 15, 10, 50, 5).step == 5
    beyond = slider("x", 12.5, 0.0, 10.0, 0.5)
    assert (beyond.value, beyond.max, beyond.step) == (12.5, 12.5, 0.5)
    assert type(choice("x", [1, 2, 4], 2)) is ipywidgets.SelectionSlider
    assert type(choice("x", {"a": 1, "b": 2}, "b")) is ipywidgets.Dropdown
    with pytest.raises(ValueError, match="x=3: choose one of 1, 2, 4"):
        choice("x", [1, 2, 4], 3)


# ---- the explorer --------------------------------------------------------------------------------------------------


def test_it_says_what_does_not_fit():
    """Last digits depend on PyTorch's version, which keeps workspaces or not."""
    explorer = explore_memory()
    needs, fits, held = explorer.words.splitlines()
    assert re.fullmatch(r"DataParallel on 4 GPUs, Adam, batch 200: GPU 0 allocates up to 13\.0 GiB, "
                        r"GPUs 1 to 3 allocate up to 2\.9\d GiB each\.", needs)  # fmt: skip
    assert re.fullmatch(r"The card \(NVIDIA TITAN Xp, 11\.9 GiB\) has room for 11\.6 GiB\. "
                        r"The job does not fit: GPU 0 is 1\.4\d GiB over\.", fits)  # fmt: skip
    assert held.startswith("GPU 0 is fullest in the loss, with logits 10.9 GiB, activations 1.8")
    shown = texts(explorer._picture.value)
    assert [text for text in shown if re.fullmatch(r"13\.0 GiB: 1\.4\d GiB over", text)]
    assert len([text for text in shown if re.fullmatch(r"2\.9\d GiB", text)]) == 3


@pytest.mark.parametrize("name", [*SLIDERS, "optimizer", "method"])
def test_every_control_changes_picture_and_words(name):
    explorer = explore_memory(method="parallel loss")
    picture, words, control = explorer._picture.value, explorer.words, explorer.controls[name]
    control.value = control.value + control.step if name in SLIDERS else control.options[1]
    assert explorer._picture.value != picture and explorer.words != words
    assert explorer.words.splitlines()[0] in explorer._said.value.replace("<br>", "\n").replace("\u00a0", " ")


def test_fits_and_fragmented():
    assert "The job fits." in explore_memory(method="parallel loss").words
    explorer = explore_memory(batch=170)
    assert "on GPU 0 the peak would, but what is free is in pieces, none large enough (fragmentation)" in explorer.words
    assert any(text.endswith(": fragmented") for text in texts(explorer._picture.value))
    keys = {
        batch: next(text for text in texts(explore_memory(batch=batch)._picture.value) if "box:" in text)
        for batch in (40, 170, 200)
    }
    assert ["past the dots: over" in keys[batch] for batch in keys] == [False, False, True]
    assert ["pale: in pieces" in keys[batch] for batch in keys] == [False, True, False]
    assert "8 GPUs" in explore_memory(gpus=8, kind="H200").words


def test_gpus_without_work_are_said_to_have_none():
    explorer = explore_memory(method="one GPU", batch=40)
    assert "GPUs 1 to 3 have nothing to do" in explorer.words
    assert texts(explorer._picture.value).count("nothing to do") == 3


def test_sliders_that_ask_for_the_impossible_show_a_sentence():
    explorer = explore_memory(gpus=2, method="output_device=1")
    explorer.controls["gpus"].value = 1
    assert explorer.words.startswith("Not possible: output_device=1 is the second GPU")
    assert explorer._picture.value == "" and "take 2 GPUs" in explorer._said.value
    bundle, metadata = explorer._repr_mimebundle_()
    assert metadata == {} and "image/png" not in bundle and bundle["text/plain"] == explorer.words
    explorer.controls["gpus"].value = 2
    assert "GPU 1 allocates" in explorer.words


def test_hidden_sizes_that_no_head_divides_are_a_sentence_too():
    explorer = explore_memory(hidden=200)
    explorer.controls["hidden"].value = 201
    assert "take a multiple of 8, such as 200" in explorer.words


@pytest.mark.parametrize(("name", "value"), [("batch", 2048), ("batch", 3), ("vocabulary", 28_996), ("length", 1)])
def test_values_beyond_a_slider_or_between_its_steps_are_kept(name, value):
    assert explore_memory(**{name: value}).controls[name].value == value


@pytest.mark.parametrize("arguments", [{"gpus": 0}, {"hidden": 100}, {"method": "DDP"}, {"kind": "GTX"},
                                       {"memory": "much"}, {"gpus": 1, "method": "output_device=1"}])  # fmt: skip
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError):
        explore_memory(**arguments)


def test_a_notebook_gets_panel_picture_and_words():
    bundle, metadata = explore_memory()._repr_mimebundle_()
    assert metadata == {"image/png": {"alt": bundle["text/plain"]}}
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"}
    assert b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    again, _ = explore_memory()._repr_mimebundle_()
    assert [again[kind] for kind in ("image/png", "text/plain")] == [
        bundle[kind] for kind in ("image/png", "text/plain")
    ]


def test_the_explorer_touches_no_gpu():
    explore_memory().controls["batch"].value = 8
    assert active_machine() is None and not torch.cuda.is_initialized()
    with virtual_gpus(2, kind="T4", memory="1 GiB", shapes_only=True):
        words = explore_memory().words
        assert [torch.cuda.memory_reserved(gpu) for gpu in range(2)] == [0, 0]
    assert words == explore_memory().words


def test_events_from_many_threads_end_with_what_the_sliders_say():
    explorer = explore_memory(method="parallel loss", layers=1)

    def move(name: str, values) -> None:
        for value in values:
            explorer.controls[name].value = value

    threads = [threading.Thread(target=move, args=("batch", range(8, 80, 4))),
               threading.Thread(target=move, args=("vocabulary", range(2000, 20_000, 1000)))]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fresh = explore_memory(method="parallel loss", layers=1, batch=76, vocabulary=19_000)
    assert explorer.words == fresh.words and texts(explorer._picture.value) == texts(fresh._picture.value)


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("memory", ["1 GiB", "12 GiB", "1000 GiB"])
def test_texts_and_bars_stay_inside_the_picture(gpus, memory):
    for method in METHODS[: 5 if gpus > 1 else 2]:
        svg = explore_memory(gpus=gpus, memory=memory, method=method)._picture.value
        root = ElementTree.fromstring(svg)
        width = float(root.get("width"))
        for box in root.iter(f"{SVG}rect"):
            if box.get("x"):
                assert 0 <= float(box.get("x")) <= float(box.get("x")) + float(box.get("width")) <= width
        for text in root.iter(f"{SVG}text"):
            length = 0.62 * float(text.get("font-size")) * len(text.text)  # of a wide font
            start = float(text.get("x")) - {"start": 0, "middle": length / 2, "end": length}[text.get("text-anchor")]
            assert 0 <= start and start + length <= width + 8, text.text


def test_a_job_that_is_given_is_what_the_controls_say():
    job = Job(gpus=3, batch=64, optimizer=list(OPTIMIZERS)[1], method="loss in forward")
    assert MemoryExplorer(job).job == job


# ---- the live panel ------------------------------------------------------------------------------------------------


class Page:
    """What a notebook's page would show: the bundles of one output, and how large it is told that the last one is."""

    def __init__(self, bundle):
        self.bundles, self.size = [bundle], None

    def update(self, bundle, metadata, raw):
        self.bundles.append(bundle)
        self.size = metadata["image/png"]


@pytest.fixture
def page(monkeypatch):
    """As if in a notebook. A list that gets the page of each panel."""
    pages = []

    def display(bundle, raw, display_id):
        pages.append(Page(bundle))
        return pages[-1]

    monkeypatch.setattr(live_panel, "_in_a_notebook", lambda: True)
    monkeypatch.setattr(IPython.display, "display", display)
    yield pages
    assert not [thread for thread in threading.enumerate() if thread.name == "live_memory"]


def png_size(encoded):
    """Width and height in pixels, which a PNG file's header says."""
    return struct.unpack(">II", b64decode(encoded)[16:24])


@pytest.fixture
def gpus():
    with virtual_gpus(2, memory="2 GiB") as devices:
        yield devices


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_changes_while_the_block_runs(page, gpus):
    with live_memory(every=0.005) as panel:
        x = torch.empty(GIB, dtype=torch.uint8, device="cuda:1")
        wait_until(lambda: any(text.startswith("1.00 GiB, peak") for text in texts(panel._picture.value)))
        del x
        wait_until(lambda: any(text.startswith("0.00 MiB, peak 1.00 GiB") for text in texts(panel._picture.value)))
        assert len(panel._history[0]) == len(panel._history[1]) > 1 and max(panel._history[1]) == GIB
    assert len(page) == 1 and len(page[0].bundles) == 2  # one picture that changes, and what remains


def test_what_remains_are_the_peaks(page, gpus, capsys):
    remains = []
    for _ in range(2):
        with live_memory(every=0.005) as panel:
            torch.empty(GIB, dtype=torch.uint8, device="cuda:1")
            time.sleep(0.02)
        remains.append(page[-1].bundles[-1])
        assert [reading.peak_allocated for reading in panel.readings] == [0, GIB]
        assert capsys.readouterr().out == panel.words + "\n"
        assert panel.words.startswith("GPU 1 holds 1.00 GiB (peak allocated) of 2.00 GiB")
        assert texts(panel._picture.value)[0] == "Peaks of this run"
        torch.cuda.empty_cache()
    assert remains[0] == remains[1]  # however often the thread had looked
    assert set(remains[0]) == {"image/png"}  # a panel would be gone from the page with its kernel
    assert png_size(remains[0]["image/png"]) == (page[0].size["width"], page[0].size["height"])
    assert page[0].size["alt"] == panel.words
    assert all("text/plain" not in bundle for each in page for bundle in each.bundles)


def test_some_gpus_only(page, gpus):
    with live_memory("cuda:1") as panel:
        pass
    assert [reading.index for reading in panel.readings] == [1]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_error_in_the_block_ends_it_and_passes_through(page, gpus, error):
    with pytest.raises(error), live_memory(every=0.005) as panel:
        x = torch.empty(1000, device="cuda")
        if error is torch.OutOfMemoryError:
            torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
        raise error
    assert panel.readings[0].peak_allocated == 4096 == x.nbytes + 96
    assert "image/png" in page[0].bundles[-1]


def test_an_error_of_the_thread_is_told_and_stops_no_training(page, gpus, monkeypatch):
    def fail(*_):
        raise OSError("no nvidia-smi")

    with pytest.warns(UserWarning, match="stopped before the end .OSError: no nvidia-smi.*peaks are right"):
        with live_memory(every=0.005) as panel:
            monkeypatch.setattr(live_panel, "read_memory", fail)
            torch.empty(1000, device="cuda")
            wait_until(lambda: panel.error)
    assert panel.readings[0].peak_allocated == 4096


@pytest.mark.parametrize("there", [True, False])
def test_left_out(gpus, monkeypatch, capsys, there):
    monkeypatch.setattr(live_panel, "_in_a_notebook", lambda: there)
    torch.empty(1000, device="cuda")
    with live_memory(show=not there) as panel:
        assert not [thread for thread in threading.enumerate() if thread.name == "live_memory"]
        panel.log("epoch 0")
    assert torch.cuda.max_memory_allocated() == 4096  # nobody reset it
    assert capsys.readouterr().out == "epoch 0\n" and panel.words == "" and not panel.readings


def test_without_a_notebook_nothing_is_shown_and_no_gpu_is_needed(capsys):
    with live_memory():
        pass
    assert capsys.readouterr().out == ""


def test_a_trainer_s_lines_appear_on_it(page, gpus, capsys):
    with live_memory(every=0.005) as panel:
        panel.log("epoch 0 | loss 2.1")
        wait_until(lambda: "epoch 0 | loss 2.1" in texts(panel._picture.value))
    assert capsys.readouterr().out.startswith("epoch 0 | loss 2.1\n")


def test_bad_arguments_of_the_live_panel(page):
    with pytest.raises(ValueError, match="every=0"), live_memory(every=0):
        pass
    with pytest.raises(RuntimeError, match="no GPU"), live_memory():
        pass
    with virtual_gpus(1), pytest.raises(ValueError, match="no cuda:7"), live_memory(7):
        pass
    assert page == []


def test_a_long_run_keeps_a_short_curve(page, gpus):
    with live_memory(every=60) as panel:
        for _ in range(1000):
            panel._look([0])
    assert len(panel._history[0]) <= live_panel.MOST


def of(allocated, reserved, capacity=16 * GIB):
    return Readings([Reading(0, "GPU", capacity, allocated, allocated, reserved, reserved)])


@pytest.mark.parametrize(
    ("reserved", "whole", "filled"),
    [(2**20, "1.00 MiB", 1), (100 * 2**20, "128 MiB", 100 / 128), (128 * 2**20, "128 MiB", 1), (0, "1.00 MiB", 0),
     (129 * 2**20, "256 MiB", 129 / 256), (2 * GIB, "the card", 1 / 8)],
)  # fmt: skip
def test_the_scale_of_the_bars_is_said_and_seldom_changes(reserved, whole, filled):
    """A learner reads off how long a frame is: a power of two, or the card."""
    for scene in (live_picture.now(of(0, reserved), {}), live_picture.peaks(of(0, reserved))):
        frame, *bars = [part for part in scene._parts if part_is_bar(part)]
        assert f"frame: {whole}" in texts(scene.svg())
        assert sum(bar.width for bar in bars) == pytest.approx(filled * frame.width, abs=0.01)


def part_is_bar(part):
    return getattr(part, "height", 0) in (16, 20)


def test_a_long_line_is_cut_and_a_short_one_is_not():
    for line, shown in (("epoch 3", "epoch 3"), ("x" * 96, "x" * 96), ("x" * 97, "x" * 95 + "…")):
        assert texts(live_picture.now(of(0, 0), {}, line).svg())[0] == shown


def test_what_the_driver_says_is_shown_where_it_is_known():
    reading = Reading(0, "GPU", 16 * GIB, GIB, 2 * GIB, 3 * GIB, 3 * GIB, driver_used=4 * GIB)
    shown = texts(live_picture.now(Readings([reading]), {0: [0, GIB]}).svg())
    assert "1.00 GiB, peak 2.00 GiB, reserved 3.00 GiB of 16.0 GiB; driver 4.00 GiB" in shown


# ---- in a kernel ---------------------------------------------------------------------------------------------------

CELLS = (
    "from helpers import use_gpus\nfrom helpers.show.widgets import explore_memory, live_memory\nimport torch\n"
    "_ = use_gpus(2, memory='16 GiB')",
    "explore_memory(gpus=2)",
    "with live_memory(every=0.01):\n    for _ in range(20):\n        torch.ones(1000, 1000, device='cuda:1').sum()",
)


def test_a_stored_notebook_has_pictures_and_words_that_a_second_run_repeats():
    notebook = new_notebook(cells=[new_code_cell(source) for source in (*CELLS, *CELLS[1:])])
    run_all.run(notebook)
    cells = [cell.outputs for cell in run_all.tidy(notebook).cells]
    (explorer,), (live, said) = cells[1], cells[2]
    assert set(explorer.data) == {"image/png", "text/plain"} and "GPU 0 allocates" in explorer.data["text/plain"]
    assert set(live.data) == {"image/png"} and said.text.startswith("GPU 1 holds")
    assert cells[3][0].data == explorer.data and [each.get("data") for each in cells[4]] == [live.data, None]
    assert cells[4][1].text == said.text
