"""The pictures: the right figures, no text cut off or on another, the same bytes on every run."""

from dataclasses import replace
from itertools import combinations

import matplotlib
import matplotlib.pyplot as plt
import pytest
from IPython.core.formatters import DisplayFormatter
from IPython.core.pylabtools import print_figure
from matplotlib.colors import to_hex

from helpers.measure import GiB, MiB, Reading, Readings, Refusal
from helpers.show import describe_memory, memory_bars
from helpers.show.bars import empty_figure
from tests.pictures import alt_text


@pytest.fixture(autouse=True)
def quiet_backend():
    backend = matplotlib.get_backend()
    plt.switch_backend("agg")
    yield
    plt.close("all")
    plt.switch_backend(backend)


def readings(*peaks_gib: float, capacity_gib: float = 16, context_gib: float | None = None) -> Readings:
    """Readings with these peaks. context_gib: what the driver counts beside what is reserved; None without GPUtil."""
    return Readings(
        Reading(
            i, "GPU", int(capacity_gib * GiB), MiB, int(p * GiB), MiB, int(1.05 * p * GiB),
            driver_used=None if context_gib is None else int((1.05 * p + context_gib) * GiB),
        )
        for i, p in enumerate(peaks_gib)
    )  # fmt: skip


BERT = readings(16.1, 2.4, 2.4, 2.4, capacity_gib=24, context_gib=0.5)
MOVED = readings(12, 9, 2.4, 2.4, capacity_gib=24, context_gib=0.5)
LONG = "BERT of eight layers at batch 200 under nn.DataParallel on four GPUs, with outputs gathered on GPU 0"
PICTURES = {
    "four GPUs": lambda: memory_bars(BERT, title="DataParallel"),
    "tiny, no driver": lambda: memory_bars(readings(0.05, 0)),
    "sixteen GPUs": lambda: memory_bars(readings(*range(16)), title="sixteen"),
    "many situations": lambda: memory_bars({f"{i} {LONG[:60]}": BERT for i in range(5)}, title=LONG),
    "one and four": lambda: memory_bars({1: readings(9.2), "four": readings(8, 8, 8, 8, capacity_gib=12)}),
    "over, one GPU": lambda: memory_bars(readings(13, capacity_gib=11.8), title=LONG),
    "far over": lambda: memory_bars(readings(400, 2, capacity_gib=12)),
    "hardly over": lambda: memory_bars(readings(12.01, 11.99, capacity_gib=12)),
}


def texts(figure) -> dict:
    """Every visible text of the picture with its box, in pixels, as drawn."""
    figure.canvas.draw()
    found = [figure.legends[0].get_title(), *figure.legends[0].get_texts(), figure.axes[-1].xaxis.label]
    for ax in figure.axes:
        found += [*ax.texts, ax._left_title]
        axes = [(ax.yaxis, ax.get_ylim())] + [(ax.xaxis, ax.get_xlim())] * (ax is figure.axes[-1])
        for axis, limits in axes:
            labels = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
            found += [label for place, label in labels if min(limits) <= place <= max(limits)]
    return {text: text.get_window_extent() for text in found if text.get_text()}


# Sockets that another test left for the garbage collector are not this test's business.
@pytest.mark.filterwarnings("error", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("picture", PICTURES)
def test_every_text_is_inside_the_picture_and_none_on_another(picture):
    figure = PICTURES[picture]()
    boxes = texts(figure)
    width, height = figure.canvas.get_width_height()
    assert width == 700
    for text, box in boxes.items():
        assert box.x0 >= -0.5 and box.y0 >= -0.5 and box.x1 <= width + 0.5 and box.y1 <= height + 0.5, text
    for one, two in combinations(boxes, 2):
        a, b = boxes[one], boxes[two]
        overlap = min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
        assert not overlap, (one, two)
    for ax in figure.axes:
        right = ax.get_window_extent().x1
        assert all(boxes[text].x0 >= right for text in ax.texts)


def pieces(figure) -> dict[str, list[tuple[float, float]]]:
    """By name in the legend: from where to where the bars of that colour and hatch reach, in the axis's unit."""
    looks = {(key.get_facecolor(), key.get_hatch()): key.get_label() for key in figure.legends[0].get_patches()}
    found = {name: [] for name in looks.values()}
    for bar in [bar for ax in figure.axes for bar in ax.patches]:
        name = looks[bar.get_facecolor(), bar.get_hatch()]
        found[name].append((round(bar.get_x(), 3), round(bar.get_x() + bar.get_width(), 3)))
    return found


def test_three_bars_for_each_gpu_lie_inside_one_another():
    figure = memory_bars(BERT, title="BERT")
    assert pieces(figure) == {
        "driver (GPUtil)": [(0, 17.405), *[(0, 3.02)] * 3],
        "peak reserved": [(0, 16.905), *[(0, 2.52)] * 3],
        "peak allocated": [(0, 16.1), *[(0, 2.4)] * 3],
        "capacity": [(0, 24)] * 4,
    }
    (ax,) = figure.axes
    assert ax.texts[0].get_text() == "17.4 GiB driver\n16.9 GiB reserved\n16.1 GiB allocated"
    frame, driver, reserved, allocated = ax.patches[:4]
    heights = [bar.get_height() for bar in (frame, driver, reserved, allocated)]
    assert heights == sorted(heights, reverse=True) and len(set(heights)) == 4
    looks = {(to_hex(bar.get_facecolor()), bar.get_hatch()) for bar in (driver, reserved, allocated)}
    assert len({colour for colour, _ in looks}) == len({hatch for _, hatch in looks}) == 3
    assert [label.get_text() for label in ax.get_yticklabels()][1] == "GPU 1\nof 24.0 GiB"
    assert ax.get_xlabel() == "memory in GiB" and ax.get_xlim()[1] >= 24
    assert figure.legends[0].get_title().get_text() == "BERT"
    empty = empty_figure(4)
    assert memory_bars(BERT, "BERT", empty) is empty and plt.get_fignums() == [figure.number]
    assert tuple(empty.get_size_inches()) == tuple(figure.get_size_inches())


def test_without_gputil_there_are_two_bars_and_small_peaks_are_enlarged_and_the_axis_says_so():
    figure = memory_bars(readings(0.05))
    (ax,) = figure.axes
    assert "driver (GPUtil)" not in pieces(figure)
    assert [text.get_text() for text in ax.texts] == ["53.8 MiB reserved\n51.2 MiB allocated"]
    assert ax.get_xlabel() == "memory in MiB (the axis ends before the capacity)" and ax.get_xlim()[1] < 200


def test_situations_have_the_same_scale():
    figure = memory_bars({"DataParallel": BERT, "output_device=1": MOVED})
    before, after = figure.axes
    assert before.get_title(loc="left") == "DataParallel" and before.get_xlim() == after.get_xlim()
    assert pieces(figure)["peak allocated"][::4] == [(0, 16.1), (0, 12)]


def test_what_is_over_the_capacity_is_drawn_apart_and_what_cannot_be_drawn_is_refused():
    assert pieces(memory_bars(readings(13, 3, capacity_gib=12)))["over the capacity"] == [(12, 13.65), (12, 13)]
    assert "over the capacity" not in pieces(memory_bars(readings(12 / 1.05, capacity_gib=12)))
    plt.close("all")
    for nothing in (Readings(), {}, {"a": Readings()}):
        with pytest.raises(ValueError, match="no readings to draw"):
            memory_bars(nothing)
    for draw in (memory_bars, describe_memory):
        for other, kind in ((BERT[0], "Reading"), ({"BERT": BERT[0]}, "Reading"), (None, "NoneType"), ([1], "list")):
            with pytest.raises(TypeError, match=f"Pass what read_memory or measure_memory gives.*not a {kind}"):
                draw(other)
    assert plt.get_fignums() == []  # refused before a figure is made


RAN_OUT = Readings([replace(readings(10)[0], refused=Refusal(0, 3 * GiB, 16 * GiB, GiB, 10 * GiB, 11 * GiB))])


@pytest.mark.parametrize(
    "given, words",
    [
        (BERT, "GPU 0 peaked at 16.1 GiB allocated and 16.9 GiB reserved; the driver counts 17.4 GiB of 24.0 GiB.\n"
         "GPUs 1, 2 and 3 each peaked at 2.40 GiB allocated and 2.52 GiB reserved; the driver counts 3.02 GiB of "
         "24.0 GiB."),
        (readings(8, 8), "GPUs 0 and 1 each peaked at 8.00 GiB allocated and 8.40 GiB reserved of 16.0 GiB."),
        (Readings(), "No readings yet."),
        (readings(13, capacity_gib=12), "GPU 0 would need 13.0 GiB allocated and 13.6 GiB reserved, 1.00 GiB more than "
         "its 12.0 GiB."),
        (RAN_OUT, "GPU 0 ran out of its 16.0 GiB: with 10.0 GiB allocated and 11.0 GiB reserved it was asked for 3.00 "
         "GiB more, which is 2.00 GiB too much."),
        ({"before": readings(8), "after": readings(4)},
         "before: GPU 0 peaked at 8.00 GiB allocated and 8.40 GiB reserved of 16.0 GiB.\n"
         "after: GPU 0 peaked at 4.00 GiB allocated and 4.20 GiB reserved of 16.0 GiB."),
    ],
)  # fmt: skip
def test_a_picture_in_words(given, words):
    assert describe_memory(given) == words


def test_a_picture_carries_its_words_into_the_notebook():
    """As IPython stores them, beside the PNG of a figure."""
    formatter = DisplayFormatter()
    formatter.formatters["image/png"].for_type(plt.Figure, lambda figure: print_figure(figure, base64=True))
    formatter.formatters["image/png"].enabled = formatter.mimebundle_formatter.enabled = True
    both = {"one": BERT, "two": MOVED}
    for figure, words in (
        (memory_bars(BERT, title="BERT"), f"BERT\n{describe_memory(BERT)}"),
        (memory_bars(both), describe_memory(both)),
    ):
        data, metadata = formatter.format(figure)
        assert metadata["image/png"]["alt"] == alt_text(figure.axes[0]) == words
        assert data["image/png"] and data["text/plain"].startswith("<Figure size")
