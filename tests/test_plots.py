"""The pictures: the right figures, no text cut off or on another, the same bytes on every run."""

import io
from dataclasses import replace
from itertools import combinations

import matplotlib
import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from helpers.measure import GiB, MiB, Reading, Readings, Refusal
from helpers.show import compare_bars, describe, memory_bars
from helpers.show.bars import empty_figure
from helpers.show.style import COLOURS
from tests.pictures import alt_text


@pytest.fixture(autouse=True)
def quiet_backend():
    backend = matplotlib.get_backend()
    plt.switch_backend("agg")
    yield
    plt.close("all")
    plt.switch_backend(backend)


def readings(*peaks_gib: float, capacity_gib: float = 16) -> Readings:
    return Readings(
        Reading(i, "GPU", int(capacity_gib * GiB), MiB, int(p * GiB), MiB, int(1.05 * p * GiB))
        for i, p in enumerate(peaks_gib)
    )


def stopped(given: Readings, gpu: int, *, requested, free, allocated, reserved, allowed=None) -> Readings:
    """`given`, its GPU number `gpu` out of memory; all in GiB."""
    sizes = [round(size * GiB) for size in (requested, given[gpu].capacity / GiB, free, allocated, reserved)]
    refusal = Refusal(gpu, *sizes, allowed and round(allowed * GiB))
    return Readings(replace(each, refused=refusal) if each.index == gpu else each for each in given)


BERT = readings(16.1, 2.4, 2.4, 2.4, capacity_gib=24)
MOVED = readings(12, 9, 2.4, 2.4, capacity_gib=24)
RAN_OUT = stopped(readings(2.4, 10.4, 2.4, 2.4, capacity_gib=12), 1, requested=3, free=0.5, allocated=10, reserved=11)
LIMITED = stopped(readings(7.6, 1, capacity_gib=80), 0, requested=1, free=70, allocated=7, reserved=7.5, allowed=8)
NO_FREE = stopped(readings(1, 11, capacity_gib=12), 1, requested=2 / 1024, free=0, allocated=11, reserved=12)
FAR = stopped(readings(0.2, 0.1, capacity_gib=1), 0, requested=400, free=0.6, allocated=0.2, reserved=0.25)
LONG = "BERT of eight layers at batch 200 under nn.DataParallel on four GPUs, with outputs gathered on GPU 0"
PICTURES = {
    "four GPUs": lambda: memory_bars(BERT, title="DataParallel"),
    "tiny": lambda: memory_bars(readings(0.05, 0.01)),
    "empty": lambda: memory_bars(readings(0, 0)),
    "full": lambda: memory_bars(readings(15.2, 15.2)),
    "sixteen GPUs": lambda: memory_bars(readings(*range(16)), title="sixteen"),
    "two situations": lambda: compare_bars({"DataParallel": BERT, "output_device=1": MOVED}, title="Moved"),
    "many situations": lambda: compare_bars({f"{i} {LONG[:60]}": BERT for i in range(5)}, title=LONG),
    "one and four": lambda: compare_bars({"one": readings(9.2), "four": readings(8, 8, 8, 8, capacity_gib=12)}),
    "over, one GPU": lambda: memory_bars(readings(13, capacity_gib=11.8), title=LONG),
    "far over": lambda: memory_bars(readings(400, 2, capacity_gib=12)),
    "hardly over": lambda: memory_bars(readings(12.01, 11.99, capacity_gib=12)),
    "ran out": lambda: memory_bars(RAN_OUT, title="DataParallel"),
    "ran out, nothing free": lambda: memory_bars(NO_FREE),
    "ran out, far over": lambda: memory_bars(FAR),
    "ran out, situations": lambda: compare_bars({"DataParallel": RAN_OUT, "parallel loss": MOVED}, title=LONG),
    "ran out of its limit": lambda: compare_bars({"limited": LIMITED, "free": LIMITED[1:]}, field="peak_reserved"),
}


def texts(ax) -> dict:
    """Every visible text of the picture with its box, in pixels, as drawn."""
    ax.figure.canvas.draw()
    found = [*ax.texts, ax.xaxis.label, ax.yaxis.label, ax._left_title, *ax.figure.legends[0].get_texts()]
    for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        labels = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
        found += [label for place, label in labels if min(limits) <= place <= max(limits)]
    return {text: text.get_window_extent() for text in found if text.get_text()}


def lies_on(text, other) -> bool:
    beside = text.x0 >= other.x1 - 0.5 or text.x1 <= other.x0 + 0.5
    return not beside and other.y0 < (text.y0 + text.y1) / 2 < other.y1


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
    bars = [bar.get_window_extent() for bar in ax.patches if bar.get_facecolor() != (1, 1, 1, 1) or bar.get_hatch()]
    for text in ax.texts:
        assert not [bar for bar in bars if lies_on(boxes[text], bar)], text


@pytest.mark.parametrize("picture", ["four GPUs", "two situations"])
def test_the_same_picture_has_the_same_bytes(picture):
    def png():
        stored = io.BytesIO()
        PICTURES[picture]().figure.savefig(stored, format="png")
        return stored.getvalue()

    first = png()
    assert first == png() and b"Creation Time" not in first and b"tIME" not in first


def pieces(ax) -> dict[str, list[tuple[float, float]]]:
    """By name in the legend: from where to where the bars of that colour and hatch reach, in the axis's unit."""
    keys = [key for key in ax.figure.legends[0].get_patches() if key.get_label() != "capacity"]
    looks = {(key.get_facecolor(), key.get_hatch()): key.get_label() for key in keys}
    found = {name: [] for name in looks.values()}
    for bar in ax.patches:
        name = looks.get((bar.get_facecolor(), bar.get_hatch()))
        if name:
            found[name].append((round(bar.get_x(), 3), round(bar.get_x() + bar.get_width(), 3)))
    return found


def legend(ax) -> list[str]:
    return [text.get_text() for text in ax.figure.legends[0].get_texts()]


def figures(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_memory_bars_show_the_figures_of_the_readings():
    ax = memory_bars(BERT)
    assert pieces(ax) == {
        "peak allocated": [(0, 16.1), (0, 2.4), (0, 2.4), (0, 2.4)],
        "peak reserved": [(0, 16.905), (0, 2.52), (0, 2.52), (0, 2.52)],
    }
    assert sorted(figures(ax)) == sorted(["16.1 GiB", "16.9 GiB", *["2.40 GiB", "2.52 GiB"] * 3])
    assert [label.get_text() for label in ax.get_yticklabels()][1] == "GPU 1\nof 24.0 GiB"
    assert ax.get_xlabel() == "memory in GiB" and ax.get_xlim()[1] >= 24 and legend(ax)[-1] == "capacity"


def test_small_peaks_are_enlarged_and_the_axis_says_so():
    ax = memory_bars(readings(0.05))
    assert ax.get_xlabel() == "memory in MiB (the axis ends before the capacity)"
    assert ax.get_xlim()[1] < 200 and figures(ax) == ["51.2 MiB", "53.8 MiB"]


def test_a_picture_is_drawn_into_a_figure_that_pyplot_does_not_know():
    figure = empty_figure(4)
    assert memory_bars(BERT, "DataParallel", figure).figure is figure and plt.get_fignums() == []
    assert tuple(figure.get_size_inches()) == tuple(memory_bars(BERT).figure.get_size_inches())


def test_situations_differ_in_colour_and_hatch_and_nothing_looks_like_what_is_over():
    ax = compare_bars({f"{i} layers": readings(10 + i, 3) for i in range(8)})
    keys = {
        key.get_label(): (to_hex(key.get_facecolor()), key.get_hatch()) for key in ax.figure.legends[0].get_patches()
    }
    over, _ = keys.pop("over the capacity"), keys.pop("capacity")
    assert over[0] == "#d55e00" and len(set(keys.values())) == 8
    assert all(look[0] != over[0] and look[1] != over[1] for look in keys.values())
    first = [keys[f"{i} layers"] for i in range(6)]
    assert len({colour for colour, _ in first}) == len({hatch for _, hatch in first}) == 6 == len(COLOURS) - 1


def test_another_field_can_be_compared():
    ax = compare_bars({"DataParallel": BERT}, field="peak_reserved")
    assert figures(ax)[0] == "16.9 GiB" and ax.get_xlabel() == "peak reserved, memory in GiB"


def test_what_is_over_the_capacity_is_drawn_apart():
    ax = memory_bars(readings(13, 3, capacity_gib=12))
    assert pieces(ax) == {
        "peak allocated": [(0, 12), (0, 3)],
        "over the capacity": [(12, 13), (12, 13.65)],
        "peak reserved": [(0, 12), (0, 3.15)],
    }
    assert figures(ax) == ["13.0 GiB: 1.00 GiB over", "3.00 GiB", "13.6 GiB: 1.65 GiB over", "3.15 GiB"]
    assert "over the capacity" not in pieces(memory_bars(readings(12 / 1.05, capacity_gib=12)))


def test_a_gpu_that_ran_out_shows_what_it_was_asked_for():
    ax = memory_bars(RAN_OUT)
    assert pieces(ax)["peak allocated"] == [(0, 2.4), (0, 10), (0, 2.4), (0, 2.4)]
    assert pieces(ax)["taken otherwise"] == [(10, 11.5), (11, 11.5)]
    assert pieces(ax)["asked for when memory ran out"] == [(11.5, 14.5)] * 2
    assert "11.0 GiB + 3.00 GiB: 2.50 GiB over" in figures(ax)
    given = Readings(replace(each, driver_used=11 * GiB, driver_total=12 * GiB) for each in RAN_OUT[1:2])
    found = pieces(compare_bars({"ran out": given}, field="driver_used"))
    assert found == {"ran out": [(0, 11.5)], "asked for when memory ran out": [(11.5, 14.5)]}
    limited = pieces(compare_bars({"limited": LIMITED}))
    assert limited["taken otherwise"] == [(7, 7.5)] and limited["asked for when memory ran out"] == [(7.5, 8.5)]
    assert "12.0 GiB + 2.00 MiB: 2.00 MiB over" in figures(memory_bars(NO_FREE))


def test_the_unit_is_that_of_the_longest_bar():
    assert memory_bars(FAR).get_xlabel() == "memory in GiB"
    assert memory_bars(FAR[1:]).get_xlabel().startswith("memory in MiB")


def test_no_text_lies_on_the_edge_of_its_frame():
    ax = compare_bars({"full": readings(14.5), "free": readings(2)})
    ax.figure.canvas.draw()
    edge = ax.transData.transform((16, 0))[0]
    boxes = [text.get_window_extent() for text in ax.texts]
    assert boxes[0].x0 > edge > boxes[1].x1


@pytest.mark.parametrize(
    "draw, reason",
    [
        (lambda: memory_bars(Readings()), "no readings to draw"),
        (lambda: compare_bars({}), "at least one situation"),
        (lambda: compare_bars({"a": Readings()}), "at least one situation"),
        (lambda: compare_bars({"a": BERT}, field="peak"), "no field 'peak'. Choose one of peak_allocated"),
        (lambda: compare_bars({"a": BERT}, field="driver_used"), "GPU 0 has no driver used, because GPUtil"),
        (lambda: describe(BERT, "capacity"), "no field 'capacity'"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_a_figure_is_made(draw, reason):
    with pytest.raises(ValueError, match=reason):
        draw()
    assert plt.get_fignums() == []


OF = "(allocated) of"


@pytest.mark.parametrize(
    "given, words",
    [
        (BERT, f"GPU 0 peaked at 16.1 GiB {OF} 24.0 GiB, 6.7 times as much as the emptiest; "
         "the other 3 GPUs peaked at 2.40 GiB each."),
        (readings(9, 6, 3), f"GPU 0 peaked at 9.00 GiB {OF} 16.0 GiB, 3.0 times as much as the emptiest; "
         "the other 2 GPUs peaked at 3.00 GiB to 6.00 GiB each."),
        (readings(1, 3), f"GPU 1 peaked at 3.00 GiB {OF} 16.0 GiB, 3.0 times as much as the emptiest; "
         "the other GPU peaked at 1.00 GiB."),
        (readings(0, 3), f"GPU 1 peaked at 3.00 GiB {OF} 16.0 GiB; the other GPU peaked at 0.00 MiB."),
        (readings(8, 8), f"All 2 GPUs peaked at 8.00 GiB {OF} 16.0 GiB each."),
        (readings(8, 7.99), f"GPU 0 peaked at 8.00 GiB {OF} 16.0 GiB; the other GPU peaked at 7.99 GiB."),
        (readings(8), f"GPU 0 peaked at 8.00 GiB {OF} 16.0 GiB."),
        (Readings(), "No readings yet."),
        (readings(13, 3, 3, 3, capacity_gib=11.8), "GPU 0 would need 13.0 GiB (peak allocated): 1.20 GiB over its "
         "11.8 GiB; the other 3 GPUs need 3.00 GiB each."),
        (readings(13, capacity_gib=12), "GPU 0 would need 13.0 GiB (peak allocated): 1.00 GiB over its 12.0 GiB."),
        (readings(13, 13, capacity_gib=12), "All 2 GPUs would need 13.0 GiB (peak allocated) each: 1.00 GiB over their "
         "12.0 GiB."),
        (RAN_OUT, "GPU 1 ran out of its 12.0 GiB: with 10.0 GiB allocated and 11.0 GiB reserved it was asked for 3.00 "
         "GiB more, which is 2.50 GiB too much. The run stopped there; until then the other 3 GPUs peaked at 2.40 "
         "GiB (allocated) each."),
    ],
)  # fmt: skip
def test_a_picture_in_words(given, words):
    assert describe(given) == words


def test_several_situations_in_words():
    assert describe({"before": readings(8), "after": readings(4)}, "peak_reserved") == (
        "before: GPU 0 peaked at 8.40 GiB (reserved) of 16.0 GiB.\n"
        "after: GPU 0 peaked at 4.20 GiB (reserved) of 16.0 GiB."
    )
    assert describe(readings(8), "allocated") == "GPU 0 holds 1.00 MiB (allocated) of 16.0 GiB."


def alternative(figure) -> str:
    """What IPython stores beside the PNG of a figure."""
    from IPython.core.formatters import DisplayFormatter
    from IPython.core.pylabtools import print_figure

    formatter = DisplayFormatter()
    formatter.formatters["image/png"].for_type(type(figure), lambda figure: print_figure(figure, base64=True))
    formatter.formatters["image/png"].enabled = formatter.mimebundle_formatter.enabled = True
    data, metadata = formatter.format(figure)
    assert data["image/png"] and data["text/plain"].startswith("<Figure size")
    return metadata["image/png"]["alt"]


def test_a_picture_carries_its_words_into_the_notebook():
    figure = memory_bars(BERT, title="BERT").figure
    assert alternative(figure) == alt_text(figure) == f"BERT\n{describe(BERT)}"
    both = {"one": BERT, "two": MOVED}
    assert alternative(compare_bars(both, field="peak_reserved").figure) == describe(both, "peak_reserved")
