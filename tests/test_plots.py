"""The pictures: the right figures, no text cut off or on another, the same bytes on every run."""

import io
from dataclasses import replace
from itertools import combinations

import matplotlib
import matplotlib.pyplot as plt
import pytest

from helpers.measure import GiB, MiB, Reading, Readings, Refusal
from helpers.show.plots import compare_bars, describe, loss_curves, memory_bars, pieces_picture
from helpers.show.plots.alt_text import alt_text, set_alt_text


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


def stopped(given: Readings, gpu: int, *, requested, free, allocated, reserved, allowed=None) -> Readings:
    """`given`, its GPU number `gpu` out of memory; all in GiB."""
    sizes = [round(size * GiB) for size in (requested, given[gpu].capacity / GiB, free, allocated, reserved)]
    refusal = Refusal(gpu, *sizes, allowed and round(allowed * GiB))
    return Readings(replace(each, refused=refusal) if each.index == gpu else each for each in given)


def assert_refused_without_a_figure(draw, reason):
    before = plt.get_fignums()
    with pytest.raises(ValueError, match=reason):
        draw()
    assert plt.get_fignums() == before


BERT = readings(16.1, 2.4, 2.4, 2.4, capacity_gib=24)
MOVED = readings(12, 9, 2.4, 2.4, capacity_gib=24)
RAN_OUT = stopped(readings(2.4, 10.4, 2.4, 2.4, capacity_gib=12), 1, requested=3, free=0.5, allocated=10, reserved=11)
LIMITED = stopped(readings(7.6, 1, capacity_gib=80), 0, requested=1, free=70, allocated=7, reserved=7.5, allowed=8)
NO_FREE = stopped(readings(1, 11, capacity_gib=12), 1, requested=2 / 1024, free=0, allocated=11, reserved=12)
FAR = stopped(readings(0.2, 0.1, capacity_gib=1), 0, requested=400, free=0.6, allocated=0.2, reserved=0.25)
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
    "over": lambda: memory_bars(BERT, capacity="12 GiB", title=LONG),
    "over, one GPU": lambda: memory_bars(readings(13, capacity_gib=11.8)),
    "over, eight GPUs": lambda: memory_bars(readings(*range(8, 16), capacity_gib=12)),
    "far over": lambda: memory_bars(readings(400, 2, capacity_gib=12)),
    "hardly over": lambda: memory_bars(readings(12.01, 11.99, capacity_gib=12)),
    "over, long words": lambda: memory_bars(readings(13, 2, 2, 2, capacity_gib=12), labels=[LONG[:60]] * 4),
    "ran out": lambda: memory_bars(RAN_OUT, title="DataParallel"),
    "ran out, one GPU": lambda: memory_bars(RAN_OUT[1:2]),
    "ran out, eight GPUs": lambda: memory_bars(Readings([*RAN_OUT, *readings(*[2.4] * 4, capacity_gib=12)])),
    "ran out of its limit": lambda: memory_bars(LIMITED),
    "ran out, nothing free": lambda: memory_bars(NO_FREE),
    "ran out, far over": lambda: memory_bars(FAR),
    "over, situations": lambda: compare_bars({"DataParallel": BERT, "output_device=1": MOVED}, capacity="12 GiB"),
    "over, reference": lambda: compare_bars({"a": BERT}, capacity="12 GiB", reference={"a": [9 * GiB, 13 * GiB]}),
    "over, many situations": lambda: compare_bars({f"{i} layers": readings(10 + i, 3) for i in range(8)}),
    "ran out, situations": lambda: compare_bars({"DataParallel": RAN_OUT, "parallel loss": MOVED}, title=LONG),
    "ran out, reserved": lambda: compare_bars({"a": RAN_OUT, "b": MOVED}, field="peak_reserved"),
    "ran out of its limit, situations": lambda: compare_bars({"limited": LIMITED, "free": LIMITED[1:]}),
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


def drawn(ax) -> list:
    """The boxes of all bars and of the lines across the capacity, in pixels; not those of empty outlines."""
    bars = [bar for bar in ax.patches if bar.get_facecolor() != (1, 1, 1, 1) or bar.get_hatch()]
    return [part.get_window_extent() for part in [*bars, *(line for line in ax.lines if len(line.get_xdata()) == 2)]]


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
    for text in ax.texts:
        assert not [other for other in drawn(ax) if lies_on(boxes[text], other)], text


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
        "capacity",
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
    assert_refused_without_a_figure(draw, reason)


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


def pieces(ax) -> dict[str, list[tuple[float, float]]]:
    """By name in the legend: from where to where the bars of that colour and hatch reach, in the axis's unit."""
    looks = {}
    for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
        if hasattr(handle, "patches"):
            looks[handle.patches[0].get_facecolor(), handle.patches[0].get_hatch()] = name
    found = {name: [] for name in looks.values()}
    for bar in ax.patches:
        name = looks.get((bar.get_facecolor(), bar.get_hatch()))
        if name:
            found[name].append((round(bar.get_x(), 3), round(bar.get_x() + bar.get_width(), 3)))
    return found


def edges(ax) -> list[float]:
    return [float(line.get_xdata()[0]) for line in ax.lines if len(line.get_xdata()) == 2]


def test_what_is_over_the_capacity_is_drawn_apart_beyond_a_line():
    ax = memory_bars(readings(13, 3, capacity_gib=12))
    assert pieces(ax) == {
        "peak allocated": [(0, 12), (0, 3)],
        "peak reserved": [(0, 12), (0, 3.15)],
        "over the edge": [(12, 13), (12, 13.65)],
    }
    assert edges(ax) == [12]  # one line, across the box of the GPU that is over
    assert [text.get_text() for text in ax.texts][:3] == [
        "13.0 GiB: 1.00 GiB over",
        "13.6 GiB: 1.65 GiB over",
        "3.00 GiB",
    ]
    assert [text.get_text() for text in ax.get_legend().get_texts()][-1] == "capacity"


def test_what_just_fits_is_not_over():
    ax = memory_bars(readings(12, capacity_gib=12), capacity=round(1.05 * 12 * GiB))
    assert "over the edge" not in pieces(ax) and edges(ax) == []


def test_readings_are_shown_on_smaller_cards():
    ax = memory_bars(BERT, capacity="12 GiB")
    assert pieces(ax)["over the edge"] == [(12, 16.1), (12, 16.905)]
    assert ax.get_yticklabels()[3].get_text() == "GPU 3\nof 12.0 GiB"
    both = compare_bars({"one": BERT, "two": MOVED}, capacity=11 * GiB, field="peak_reserved")
    assert pieces(both)["over the edge"] == [(11, 16.905), (11, 12.6)] and edges(both) == [11, 11]


def test_a_gpu_that_ran_out_shows_what_it_was_asked_for():
    ax = memory_bars(RAN_OUT)
    assert pieces(ax) == {
        "peak allocated": [(0, 2.4), (0, 10), (0, 2.4), (0, 2.4)],
        "peak reserved": [(0, 2.52), (0, 11), (0, 2.52), (0, 2.52)],
        "taken otherwise": [(11, 11.5)],
        "asked for": [(11.5, 12)],
        "over the edge": [(12, 14.5)],
    }
    assert [text.get_text() for text in ax.texts][2:4] == ["10.0 GiB", "11.0 GiB + 3.00 GiB: 2.50 GiB over"]
    assert ax.get_yticklabels()[1].get_text() == "GPU 1\nof 12.0 GiB\nas memory ran out"


@pytest.mark.parametrize("field, held", [("peak_allocated", 10), ("peak_reserved", 11), ("reserved", 11)])
def test_situations_show_what_was_held_and_asked_for(field, held):
    found = pieces(compare_bars({"ran out": RAN_OUT[1:2]}, field=field))
    assert found["ran out"] == [(0, held)] and found["taken otherwise"] == [(held, 11.5)]
    assert found["asked for"] == [(11.5, 12)] and found["over the edge"] == [(12, 14.5)]


def test_what_the_driver_saw_as_memory_ran_out():
    given = Readings(replace(each, driver_used=11 * GiB, driver_total=12 * GiB) for each in RAN_OUT[1:2])
    found = pieces(compare_bars({"ran out": given}, field="driver_used"))
    assert found == {"ran out": [(0, 11.5)], "asked for": [(11.5, 12)], "over the edge": [(12, 14.5)]}


def test_a_limit_is_the_edge_where_it_stood_in_the_way():
    ax = memory_bars(LIMITED)
    assert pieces(ax)["asked for"] == [(7.5, 8)] and pieces(ax)["over the edge"] == [(8, 8.5)] and edges(ax) == [8]
    assert [text.get_text() for text in ax.get_legend().get_texts()][-2:] == ["limit", "capacity"]


def test_the_unit_is_that_of_the_longest_bar():
    assert memory_bars(FAR).get_xlabel() == "memory in GiB" and memory_bars(FAR[1:]).get_xlabel().startswith(
        "memory in M"
    )
    between = Readings([replace(BERT[0], peak_allocated=GiB, peak_reserved=3 * GiB // 2)])
    ax = memory_bars(between)  # numbers on bars and on the axis are of one unit
    assert ax.get_xlabel().startswith("memory in GiB") and ax.texts[1].get_text() == "1.50 GiB"
    assert [text.get_text() for text in ax.get_legend().get_texts()][-1] == "capacity"  # the frame


def test_nothing_else_looks_like_what_is_over_the_edge():
    ax = PICTURES["over, many situations"]()
    over = next(
        bar for bar in ax.patches if matplotlib.colors.to_hex(bar.get_facecolor()) == "#d55e00" and bar.get_hatch()
    )
    names = {name: handle.patches[0] for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)
             if hasattr(handle, "patches")}  # fmt: skip
    others = [bar for name, bar in names.items() if name != "over the edge"]
    assert len(others) == 8 and all(bar.get_facecolor() != over.get_facecolor() for bar in others)
    assert all(bar.get_hatch() != over.get_hatch() for bar in others)
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in others}) == 8


@pytest.mark.parametrize(
    "draw, reason",
    [
        (lambda: memory_bars(BERT, capacity="twelve"), "cannot read 'twelve'"),
        (lambda: memory_bars(RAN_OUT, capacity="24 GiB"), "GPU 1 ran out of memory, so what this run needs"),
        (lambda: compare_bars({"a": BERT, "b": RAN_OUT}, capacity="24 GiB"), "GPU 1 ran out of memory"),
        (lambda: compare_bars({"a": BERT}, field="peak"), "no field 'peak': give one of peak_allocated"),
        (lambda: compare_bars({"a": BERT}, field="driver_used"), "GPU 0 has no driver used, since GPUtil"),
        (lambda: describe(BERT, "capacity"), "no field 'capacity'"),
    ],
)
def test_what_the_figures_do_not_tell_is_refused(draw, reason):
    assert_refused_without_a_figure(draw, reason)


@pytest.mark.parametrize(
    "given, words",
    [
        (readings(13, 3, 3, 3, capacity_gib=11.8),
         "GPU 0 would need 13.0 GiB (peak allocated): 1.20 GiB over its 11.8 GiB; "
         "the other 3 GPUs need 3.00 GiB each."),
        (readings(13, capacity_gib=12), "GPU 0 would need 13.0 GiB (peak allocated): 1.00 GiB over its 12.0 GiB."),
        (readings(13, 13, capacity_gib=12),
         "All 2 GPUs would need 13.0 GiB (peak allocated) each: 1.00 GiB over their 12.0 GiB."),
        (readings(13, 14, 13, 2, capacity_gib=12),
         "GPUs 0 and 2 would need 13.0 GiB (peak allocated) each: 1.00 GiB over their 12.0 GiB; "
         "GPU 1 would need 14.0 GiB: 2.00 GiB over its 12.0 GiB; the other GPU needs 2.00 GiB."),
        (readings(11.8, capacity_gib=12),
         "GPU 0 holds 11.8 GiB (peak allocated) of 12.0 GiB. Peak reserved is 399 MiB over on GPU 0: "
         "that fits only if PyTorch can give cached memory back."),
        (RAN_OUT,
         "GPU 1 ran out of its 12.0 GiB: with 10.0 GiB allocated and 11.0 GiB reserved it was asked for 3.00 GiB more, "
         "2.50 GiB over the edge. The run stopped there; until then the other 3 GPUs held 2.40 GiB (peak allocated) "
         "each."),
        (RAN_OUT[1:2],
         "GPU 1 ran out of its 12.0 GiB: with 10.0 GiB allocated and 11.0 GiB reserved it was asked for 3.00 GiB more, "
         "2.50 GiB over the edge. The run stopped there."),
    ],
)  # fmt: skip
def test_what_does_not_fit_in_words(given, words):
    assert describe(given) == words


def test_smaller_cards_in_words():
    assert describe({"a": readings(8), "b": readings(4)}, capacity="6 GiB") == (
        "a: GPU 0 would need 8.00 GiB (peak allocated): 2.00 GiB over its 6.00 GiB.\n"
        "b: GPU 0 holds 4.00 GiB (peak allocated) of 6.00 GiB."
    )


def alternative(ax) -> str:
    """What IPython stores beside the PNG of a figure."""
    from IPython.core.formatters import DisplayFormatter
    from IPython.core.pylabtools import print_figure

    formatter = DisplayFormatter()
    formatter.formatters["image/png"].for_type(type(ax.figure), lambda figure: print_figure(figure, base64=True))
    formatter.formatters["image/png"].enabled = formatter.mimebundle_formatter.enabled = True
    data, metadata = formatter.format(ax.figure)
    assert data["image/png"] and data["text/plain"].startswith("<Figure size")
    return metadata["image/png"]["alt"]


def test_a_picture_carries_its_words_into_the_notebook():
    ax = memory_bars(BERT, capacity="12 GiB", title="BERT")
    assert alternative(ax) == alt_text(ax) == f"BERT\n{describe(BERT, capacity='12 GiB')}"
    both = {"one": BERT, "two": MOVED}
    assert alternative(compare_bars(both, field="peak_reserved")) == describe(both, "peak_reserved")
    assert alternative(loss_curves({"train": [2.31, 1.9], "test": [2.4]}, xlabel="step")) == (
        "train: loss 2.3 first, 1.9 last; test: loss 2.4 first, 2.4 last (step 1 to 2)."
    )


def test_a_figure_with_several_pictures_carries_the_words_of_each():
    figure, (left, right) = plt.subplots(1, 2)
    assert alt_text(figure) == ""
    memory_bars(readings(8), ax=left)
    memory_bars(readings(9), ax=right)
    memory_bars(readings(4), ax=left)  # drawn again: its words are replaced
    assert alt_text(figure) == f"{describe(readings(4))}\n{describe(readings(9))}"
    set_alt_text(figure, "both")
    assert alt_text(right).endswith("\nboth")


# --- pieces that travel ----------------------------------------------------------------------------------

STATES = [[[1, 1], [1, 2], [2, 2]], [[1, 1], [2, 1], [2, 2]]]  # [rank][step][piece] of a ring of two


def test_pieces_show_every_count_and_outline_what_is_complete():
    figure = pieces_picture(STATES)
    assert [ax.get_title() for ax in figure.axes] == ["start", "step 1", "step 2"]
    shown = [[text.get_text() for text in ax.texts] for ax in figure.axes]
    assert shown == [["1", "1", "1", "1"], ["1", "2", "2", "1"], ["2", "2", "2", "2"]]
    assert [len(ax.patches) for ax in figure.axes] == [0, 2, 4]
    assert alt_text(figure.axes[0]) == "Complete pieces at the start and after each step: 0, 2, 4 of 4."


@pytest.mark.parametrize("states", [[], [1, 2], [[1, 2]], [[[]]]])
def test_pieces_want_three_dimensions(states):
    with pytest.raises(ValueError, match=r"states\[rank\]\[step\]\[piece\]"):
        pieces_picture(states)
