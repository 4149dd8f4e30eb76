"""Data sheets, sizes in words, and the picture of the links."""

import copy
import pickle

import pytest
from virtual_gpus.clock.links import arrange
from virtual_gpus.gpus import PCIE3, PCIE4, PCIE5, draw_topology, format_bytes, kinds, parse_bytes, spec


def test_every_kind_is_found_whatever_its_case_and_spaces():
    architectures = [spec(kind).capability for kind in kinds()]
    assert len(kinds()) == 17 and architectures == sorted(architectures)
    for kind in kinds():
        assert spec(kind) is spec(kind.lower()) is spec(f" {kind.upper()} ")
    assert spec("titan xp") is spec("TITANXp")


def test_an_unknown_kind_names_those_that_exist():
    with pytest.raises(
        ValueError, match="'RTX 9090'.*K80, TITANXp, V100, .*A10, RTX4090, .*GH200, H200, B200, RTX5090"
    ):
        spec("RTX 9090")


def test_the_h200_is_the_one_that_was_measured():
    h200 = spec("H200")
    assert (h200.name, h200.memory, h200.capability) == ("NVIDIA H200", 150_109_880_320, (9, 0))
    assert h200.multi_processor_count == 132
    assert h200.flops.bf16 / h200.flops.fp32 > 10


@pytest.mark.parametrize("kind", kinds())
def test_figures_are_plausible_and_in_base_units(kind):
    card = spec(kind)
    assert 11 << 30 < card.memory < 192 << 30
    assert 100e9 < card.bandwidth < 10e12
    assert 1 << 20 <= card.l2_bytes <= 128 << 20
    assert 100 << 20 <= card.context < card.memory // 10
    assert card.flops.fp16 >= card.flops.fp32 >= card.flops.fp64 > 1e11
    assert card.link.bandwidth >= card.host_link.bandwidth > 1e9
    assert 1e-6 <= card.link.latency <= 1e-4
    assert "estimated" in card.source or "measured" in card.source


def test_titan_and_k80_hold_the_12_gb_of_the_articles():
    for kind in ("K80", "TITAN Xp"):
        assert 11 << 30 < spec(kind).memory < 12 << 30


def test_specs_are_constants_that_can_be_sent_to_another_process():
    with pytest.raises(AttributeError):
        spec("T4").memory = 1
    assert pickle.loads(pickle.dumps(spec("T4"))) == copy.deepcopy(spec("T4")) == spec("T4")
    assert len({spec(kind) for kind in kinds()}) == len(kinds())


def test_each_pcie_generation_doubles_the_last():
    assert PCIE4.bandwidth == 2 * PCIE3.bandwidth and PCIE5.bandwidth == 2 * PCIE4.bandwidth


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        ("16 GiB", 16 << 30),
        ("16GiB", 16 << 30),
        ("512 MiB", 512 << 20),
        (" 1.5 gib ", 3 << 29),
        ("16 GB", 16 * 10**9),
        ("2 TiB", 2 << 40),
        ("4 kB", 4000),
        ("7 B", 7),
        (12345, 12345),
    ],
)
def test_sizes_in_words(size, nbytes):
    assert parse_bytes(size) == nbytes


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("16", "'16' has no unit"),
        ("16 G", "unknown unit 'G'.*GiB"),
        ("16 parsecs", "unknown unit 'parsecs'"),
        ("lots", "Cannot read 'lots'"),
        ("", "Cannot read ''"),
        ("GiB", "Cannot read 'GiB'"),
        ("0 GiB", "at least one byte"),
        ("0.1 B", "at least one byte"),
        ("-1 GiB", "at least one byte"),
        (0, "at least one byte"),
        (-5, "at least one byte"),
    ],
)
def test_bad_sizes_say_what_to_write(size, words):
    with pytest.raises(ValueError, match=words):
        parse_bytes(size)


@pytest.mark.parametrize("size", [1.5, None, True, [1]])
def test_sizes_of_another_type(size):
    with pytest.raises(TypeError, match="16 GiB"):
        parse_bytes(size)


def test_bytes_in_words():
    assert [format_bytes(n) for n in (0, 1023, 1024, 16 << 30, 150_109_880_320, 3 << 19, -2048)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "16 GiB",
        "139.8 GiB",
        "1.5 MiB",
        "-2 KiB",
    ]


@pytest.mark.parametrize("text", ["16 GiB", "512 MiB", "1.5 TiB", "7 B"])
def test_words_to_bytes_and_back(text):
    assert format_bytes(parse_bytes(text)) == text


def test_the_matrix_of_links():
    lines = arrange(spec("A100"), 3).drawn().splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["GPU0", "GPU1", "GPU2"],
        ["GPU0", "X", "NV12", "NV12"],
        ["GPU1", "NV12", "X", "NV12"],
        ["GPU2", "NV12", "NV12", "X"],
    ]
    assert "Legend:" in lines and any(line.startswith("  NV#  =") for line in lines)


@pytest.mark.parametrize(("kind", "label"), [("T4", "PHB"), ("V100", "NV6"), ("H100", "NV18"), ("H200", "NV18")])
def test_links_of_a_kind(kind, label):
    assert arrange(spec(kind), 2).labels == (("X", label), (label, "X"))


def test_one_gpu_has_no_link():
    assert arrange(spec("T4"), 1).drawn().splitlines()[1].split() == ["GPU0", "X"]
    with pytest.raises(ValueError, match="at least one GPU"):
        arrange(spec("T4"), 0)


def test_a_machine_of_pairs_can_be_drawn():
    pairs = [["X" if i == j else "NV4" if i // 2 == j // 2 else "SYS" for j in range(4)] for i in range(4)]
    assert draw_topology(pairs).splitlines()[3].split() == ["GPU2", "SYS", "SYS", "X", "NV4"]


def test_a_bad_matrix_is_refused():
    with pytest.raises(ValueError, match="square"):
        draw_topology([["X", "PHB"]])
    with pytest.raises(ValueError, match="unknown link 'NVX'"):
        draw_topology([["NVX"]])
