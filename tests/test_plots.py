"""The pictures: the right figures, no text cut off or on another, the same bytes on every run."""

import io
from itertools import combinations

import matplotlib
import matplotlib.pyplot as plt
import pytest

from helpers.memory import GiB, MiB, Reading, Readings
from helpers.plots import compare_bars, describe, loss_curves, memory_bars


@pytest.fixture(autouse=True)
def quiet_backend():
    backend = matplotlib.get_backend()
    plt.switch_backend("agg")
    yield
    plt.close("all")
    plt.switch_backend(backend)


def readings(*peaks_gib: float, capacity_gib: float = 16) -> Readings:
    return Readings(
        Reading(i, "Card", int(capacity_gib * GiB), MiB, int(p * GiB), MiB, int(1.05 * p * GiB))
        for i, p in enumerate(peaks_gib)
    )


BERT = readings(16.1, 2.4, 2.4, 2.4, capacity_gib=24)
MOVED = readings(12, 9, 2.4, 2.4, capacity_gib=24)
LONG = "BERT of eight layers at batch 200 under nn.DataParallel on four GPUs, with outputs gathered on GPU 0"
PICTURES = {
    "four GPUs": lambda: memory_bars(BERT, title="DataParallel"),
    "one GPU": lambda: memory_bars(readings(8)),
    "tiny": lambda: memory_bars(readings(0.05, 0.01)),
    "empty": lambda: memory_bars(readings(0, 0)),
    "full": lambda: memory_bars(readings(15.2, 15.2)),
    "sixteen GPUs": lambda: memory_bars(readings(*range(16)), title="sixteen"),
    "long words": lambda: memory_bars(BERT, labels=[f"stage {i}: embedding and layers" for i in range(4)], title=LONG),
    "two situations": lambda: compare_bars({"DataParallel": BERT, "output_device=1": MOVED}, title="Moved"),
    "reference": lambda: compare_bars(
        {"DataParallel": BERT, "output_device=1": MOVED},
        reference={"DataParallel": [10 * GiB, 4 * GiB, None, 23.5 * GiB], "output_device=1": [9 * GiB]},
    ),
    "many situations": lambda: compare_bars({f"{i} {LONG}": BERT for i in range(5)}, title=LONG),
    "one and four": lambda: compare_bars({"one": readings(9.2), "four": readings(8, 8, 8, 8, capacity_gib=12)}),
    "losses": lambda: loss_curves({"single GPU": [2.3, 1.9], "DataParallel": [2.3, 1.8]}, title=LONG),
    "long losses": lambda: loss_curves({LONG: [1 / (i + 1) for i in range(500)]}, xlabel="step"),
}


def texts(ax) -> dict:
    """Every visible text of the picture with its box, in pixels, as drawn."""
    figure = ax.figure
    figure.canvas.draw()
    legend = ax.get_legend()
    found = [
        *ax.texts,
        ax.xaxis.label,
        ax.yaxis.label,
        ax._left_title,
        *(legend.get_texts() if legend else []),
    ]
    limits = {"x": sorted(ax.get_xlim()), "y": sorted(ax.get_ylim())}
    for axis, (low, high) in ((ax.xaxis, limits["x"]), (ax.yaxis, limits["y"])):
        found += [
            label for tick, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True) if low <= tick <= high
        ]
    return {text: text.get_window_extent() for text in found if text.get_text()}


# Sockets that another test left for the garbage collector are not this test's business.
@pytest.mark.filterwarnings("error", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("picture", PICTURES)
def test_every_text_is_inside_the_picture_and_none_on_another(picture):
    ax = PICTURES[picture]()
    boxes = texts(ax)
    width, height = ax.figure.canvas.get_width_height()
    assert width == 700
    for text, box in boxes.items():
        assert box.x0 >= -0.5 and box.y0 >= -0.5 and box.x1 <= width + 0.5 and box.y1 <= height + 0.5, text
    for one, two in combinations(boxes, 2):
        a, b = boxes[one], boxes[two]
        overlap = min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
        assert not overlap, (one, two)


@pytest.mark.parametrize("picture", ["four GPUs", "reference", "losses"])
def test_the_same_picture_has_the_same_bytes(picture):
    def png():
        stored = io.BytesIO()
        PICTURES[picture]().figure.savefig(stored, format="png")
        return stored.getvalue()

    first = png()
    assert first == png() and b"Creation Time" not in first and b"tIME" not in first


def widths(ax, colour: str) -> list[float]:
    """The lengths of the bars of one colour, from the top."""
    bars = [bar for bar in ax.patches if matplotlib.colors.to_hex(bar.get_facecolor()) == colour.lower()]
    return [round(bar.get_width(), 3) for bar in bars]


def test_memory_bars_show_the_figures_of_the_readings():
    ax = memory_bars(BERT)
    assert widths(ax, "#0072B2") == [16.1, 2.4, 2.4, 2.4]
    assert widths(ax, "#56B4E9") == [16.905, 2.52, 2.52, 2.52]
    assert [text.get_text() for text in ax.texts][:4] == ["16.1 GiB", "16.9 GiB", "2.40 GiB", "2.52 GiB"]
    assert [label.get_text() for label in ax.get_yticklabels()][1] == "GPU 1\nof 24.0 GiB"
    assert ax.get_xlabel() == "memory in GiB" and ax.get_xlim()[1] >= 24


def test_small_peaks_are_enlarged_and_the_axis_says_so():
    ax = memory_bars(readings(0.05))
    assert ax.get_xlabel() == "memory in MiB (the axis ends before the capacity)"
    assert ax.get_xlim()[1] < 200 and [text.get_text() for text in ax.texts] == ["51.2 MiB", "53.8 MiB"]


def test_colours_always_come_with_another_hatch():
    ax = PICTURES["many situations"]()
    looks = {(bar.get_facecolor(), bar.get_hatch()) for bar in ax.patches if bar.get_facecolor() != (1, 1, 1, 1)}
    assert len(looks) == len({colour for colour, _ in looks}) == len({hatch for _, hatch in looks}) == 5


def test_a_reference_appears_as_markers_and_in_words():
    ax = PICTURES["reference"]()
    told = [text.get_text() for text in ax.texts]
    assert "16.1 GiB (article: 10 GiB)" in told and "2.40 GiB (article: 23.5 GiB)" in told
    assert told.count("2.40 GiB") == 3  # where the article says nothing
    assert sorted(float(line.get_xdata()[0]) for line in ax.lines if len(line.get_xdata())) == [
        4,
        9,
        10,
        23.5,
    ]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "DataParallel",
        "output_device=1",
        "article",
    ]
    assert ax.get_xlabel() == "peak allocated, memory in GiB"


def test_another_field_can_be_compared():
    ax = compare_bars({"DataParallel": BERT}, field="peak_reserved")
    assert ax.texts[0].get_text() == "16.9 GiB" and ax.get_xlabel() == "peak reserved, memory in GiB"


def test_pictures_are_drawn_into_given_axes():
    _, (left, right) = plt.subplots(1, 2, figsize=(14, 4), layout="constrained")
    assert memory_bars(BERT, ax=left) is left and compare_bars({"a": BERT}, ax=right) is right
    lowest = loss_curves({"a": [1.0]}, ax=plt.subplots()[1])
    assert lowest.lines[0].get_ydata().tolist() == [1.0]


@pytest.mark.parametrize(
    "draw, reason",
    [
        (lambda: memory_bars(Readings()), "no readings to draw"),
        (lambda: memory_bars(BERT, labels=["one"]), "1 labels for 4 GPUs"),
        (lambda: compare_bars({}), "at least one situation"),
        (lambda: compare_bars({"a": Readings()}), "at least one situation"),
        (lambda: compare_bars({"a": BERT}, reference={"b": [1]}), "The reference names"),
        (lambda: compare_bars({"a": BERT}, reference={"a": [1] * 5}), "4 GPU.*5 figures"),
        (lambda: loss_curves({}), "at least one history"),
        (lambda: loss_curves({"a": []}), "at least one value"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_a_figure_is_made(draw, reason):
    before = plt.get_fignums()
    with pytest.raises(ValueError, match=reason):
        draw()
    assert plt.get_fignums() == before


@pytest.mark.parametrize(
    "given, words",
    [
        (BERT, "GPU 0 holds 16.1 GiB {} 24.0 GiB, 6.7 times the emptiest; "
         + "the other 3 GPUs hold 2.40 GiB each."),
        (readings(9, 6, 3), "GPU 0 holds 9.00 GiB {} 16.0 GiB, 3.0 times the emptiest; "
         + "the other 2 GPUs hold 3.00 GiB to 6.00 GiB each."),
        (readings(1, 3), "GPU 1 holds 3.00 GiB {} 16.0 GiB, 3.0 times the emptiest; "
         + "the other GPU holds 1.00 GiB."),
        (readings(0, 3), "GPU 1 holds 3.00 GiB {} 16.0 GiB; the other GPU holds 0.00 MiB."),
        (readings(8, 8), "All 2 GPUs hold 8.00 GiB {} 16.0 GiB each."),
        (readings(8), "GPU 0 holds 8.00 GiB {} 16.0 GiB."),
        (Readings(), "No readings yet."),
    ],
)  # fmt: skip
def test_a_picture_in_words(given, words):
    assert describe(given) == words.format("(peak allocated) of")


def test_several_situations_in_words():
    assert describe({"before": readings(8), "after": readings(4)}, "peak_reserved") == (
        "before: GPU 0 holds 8.40 GiB (peak reserved) of 16.0 GiB.\n"
        "after: GPU 0 holds 4.20 GiB (peak reserved) of 16.0 GiB."
    )


def test_no_text_lies_on_the_edge_of_its_box():
    ax = compare_bars({"full": readings(12, capacity_gib=16), "free": readings(2, capacity_gib=16)},
                      reference={"full": [13.5 * GiB]})  # fmt: skip
    ax.figure.canvas.draw()
    edge = ax.transData.transform((16, 0))[0]
    boxes = [text.get_window_extent() for text in ax.texts]
    assert boxes[0].x0 > edge > boxes[1].x1


def test_the_axis_is_no_longer_than_the_texts_need():
    ax = compare_bars({"full": readings(15, capacity_gib=16)}, reference={"full": [15 * GiB]})
    ax.figure.canvas.draw()
    free = ax.get_window_extent().x1 - ax.texts[0].get_window_extent().x1
    assert 0 <= free < 30  # pixels
