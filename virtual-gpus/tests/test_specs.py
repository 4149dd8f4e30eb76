"""Data sheets, and sizes in words."""

import pytest
from virtual_gpus.gpus import PCIE3, PCIE4, PCIE5, format_bytes, kinds, parse_bytes, spec


def test_kinds_have_plausible_figures_in_base_units():
    assert len(kinds()) == 17 and [spec(k).capability for k in kinds()] == sorted(spec(k).capability for k in kinds())
    for kind in kinds():
        card = spec(kind)
        assert card is spec(kind.lower()) is spec(f" {kind.upper()} ")
        assert 11 << 30 < card.memory < 192 << 30
        assert 100e9 < card.bandwidth < 10e12
        assert 1 << 20 <= card.l2_bytes <= 128 << 20
        assert 100 << 20 <= card.context < card.memory // 10
        assert card.flops.fp16 >= card.flops.fp32 >= card.flops.fp64 > 1e11
        assert card.link.bandwidth >= card.host_link.bandwidth > 1e9
        assert 1e-6 <= card.link.latency <= 1e-4
        assert "estimated" in card.source or "measured" in card.source
    assert all(spec(kind).memory < 12 << 30 for kind in ("K80", "titan xp"))  # the 12 GB of the articles
    assert PCIE5.bandwidth == 2 * PCIE4.bandwidth == 4 * PCIE3.bandwidth
    with pytest.raises(ValueError, match="'RTX 9090'.*K80, TITANXp, V100, .*A10, RTX4090, .*GH200, H200, B200"):
        spec("RTX 9090")


SIZES = {"16 GiB": 16 << 30, "16GiB": 16 << 30, "512 MiB": 512 << 20, " 1.5 gib ": 3 << 29, "16 GB": 16 * 10**9,
         "2 TiB": 2 << 40, "4 kB": 4000, "7 B": 7, 12345: 12345}  # fmt: skip
BAD_SIZES = {"16": "'16' has no unit", "16 G": "unknown unit 'G'.*GiB", "lots": "Cannot read 'lots'",
             "": "Cannot read ''", "0.1 B": "at least one byte", -5: "at least one byte"}  # fmt: skip


def test_sizes_in_words():
    assert {size: parse_bytes(size) for size in SIZES} == SIZES
    texts = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 150_109_880_320: "139.8 GiB", 3 << 19: "1.5 MiB", -2048: "-2 KiB"}
    assert {nbytes: format_bytes(nbytes) for nbytes in texts} == texts


def test_bad_sizes_say_what_to_write():
    for size, words in BAD_SIZES.items():
        with pytest.raises(ValueError, match=words):
            parse_bytes(size)
    for size in (1.5, True):
        with pytest.raises(TypeError, match="16 GiB"):
            parse_bytes(size)
