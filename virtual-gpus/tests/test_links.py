"""Data sheets, links, topologies and networks, and sizes in words."""

import pytest
from measuring import table
from virtual_gpus import active_machine, figures
from virtual_gpus.__main__ import parse
from virtual_gpus.clock.links import ARRANGEMENTS, NETWORKS, arrange, link_of
from virtual_gpus.gpus import LINKS, format_bytes, kinds, parse_bytes, spec


def test_nvlink_in_pairs_is_printed_as_nvidia_smi_prints_it_and_every_arrangement_for_any_number():
    pairs, drawn = table("nvlink_pairs")["pairs"], arrange(spec("A100"), 8, "NVLink pairs").drawn()
    assert drawn.startswith(pairs + "\n\nLegend:") and "\n  NV#  =" in drawn
    matrix = [line.split()[1:] for line in pairs.splitlines()[1:]]
    assert arrange(spec("A100"), 8, matrix).drawn() == drawn
    for links in (None, *ARRANGEMENTS):
        for count in (1, 2, 3, 8):
            assert f"GPU{count - 1}" in arrange(spec("T4"), count, links).drawn()
    with pytest.raises(ValueError, match="at least one GPU"):
        arrange(spec("T4"), 0)


def test_roads_differ_in_speed_and_machines_meet_on_the_network():
    labels = [arrange(spec(kind), 2).labels[0][1] for kind in ("T4", "V100", "H100", "H200")]
    assert labels == ["PHB", "NV6", "NV18", "NV18"]
    topology = arrange(spec("A100"), 8, "NVLink pairs")
    speeds = [topology.between(0, other).bandwidth for other in (1, 2, 4)]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] == 4 * 25e9 and speeds[1] < LINKS["PCIe 4"].bandwidth
    assert arrange(spec("A100"), 2, "PCIe 3").between(0, 1).bandwidth < LINKS["PCIe 3"].bandwidth
    assert arrange(spec("A100"), 4, "NVSwitch").between(0, 3).bandwidth == 300e9
    assert link_of("NV12", LINKS["PCIe 4"]).bandwidth == 300e9
    topology = arrange(spec("H100"), 8, hosts=2, network="InfiniBand NDR")
    assert topology.between(0, 3).label == "NV18" and topology.between(3, 4) is NETWORKS["InfiniBand NDR"]
    assert topology.drawn().count("GPU") == 4 + 4  # one machine's


def test_the_command_line_takes_links_hosts_network_and_version():
    across = ["--hosts", "2", "--network", "Ethernet 25", "--adapters", "4"]
    options, _ = parse(["--gpus", "4", "--links", "PCIe 3", "--torch", "2.11", *across, __file__])
    with options.made:
        assert active_machine().settings.version == (2, 11)
        topology = active_machine().topology
        assert topology.between(0, 1).name.startswith("PCIe 3") and topology.between(1, 2) is NETWORKS["Ethernet 25"]
        assert topology.adapters == 4


def test_kinds_have_plausible_figures_in_base_units():
    for kind in kinds():
        card = spec(kind)
        assert card is spec(kind.lower()) is spec(f" {kind.upper()} ")
        assert 11 << 30 < card.memory < 192 << 30
        assert 100e9 < card.bandwidth < 10e12
        assert 1 << 20 <= card.l2_bytes <= 128 << 20
        assert 100 << 20 <= card.context < card.memory // 10
        assert card.flops.fp16 >= card.flops.fp32 >= card.flops.fp64 > 1e11
        assert card.link.bandwidth >= card.host_link.bandwidth > 1e9
        assert 1e-6 <= card.link.latency <= 1e-4 and 0.8e9 < card.core_clock < 2.8e9
        assert 0.5e-6 < card.reached.kernel < 1e-5 and all(0.2 < part < 1 for part in card.reached[1:])
    assert all(spec(kind).memory < 12 << 30 for kind in ("K80", "titan xp"))  # the 12 GB of the articles
    assert LINKS["PCIe 5"].bandwidth == 2 * LINKS["PCIe 4"].bandwidth == 4 * LINKS["PCIe 3"].bandwidth
    with pytest.raises(ValueError, match="'RTX 9090'.*A10, A100, A100-80GB, .*K80, L4, .*TITANXp, V100"):
        spec("RTX 9090")


def test_a_new_kind_is_a_file_whose_figures_have_units_and_sources(tmp_path, monkeypatch):
    text = '{{ value = 1, unit = "{}", source = "{}" }}'
    bad = {text.format("GB", "a data sheet"): "the unit 'GB' is unknown. Use B, KiB"}
    incomplete = text.format("GB/s", ""), "{ value = 1 }", "1", "[1, 2]", '1\nsource = "a data sheet"'
    bad |= dict.fromkeys(incomplete, "needs a value, a unit and a source")
    beside = [*figures.FOLDER.parent.glob("features/**/*.toml")]
    assert all(path.stem == "figures" or path.with_suffix(".py").exists() for path in beside) and len(beside) > 10
    tables = [figures.read(str(file)) for file in (*figures.FOLDER.rglob("*.toml"), *beside)]
    named = [of_file["capabilities"].keys() for of_file in tables if "capabilities" in of_file]
    assert len(named) == 2 and named[0] == named[1]  # a rule by compute capability has a row for each
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    table = '[sheet]\nsource = "a data sheet"\nunits = { size = "KiB", share = "of it" }\nsize = 2\npart.share = 3\n'
    (tmp_path / "alike.toml").write_text(table)
    assert figures.read("alike.toml") == {"sheet": {"size": 2048, "part": {"share": 3}}}
    for number, (figure, words) in enumerate(bad.items()):
        (tmp_path / f"{number}.toml").write_text(f"[sheet]\nbandwidth = {figure}\n")
        with pytest.raises(ValueError, match=f"{number}.toml: sheet: bandwidth: .*{words}"):
            figures.read(f"{number}.toml")


def test_sizes_in_words_and_bad_ones_say_what_to_write():
    right = {"16 GiB": 16 << 30, "16GiB": 16 << 30, "512 MiB": 512 << 20, " 1.5 gib ": 3 << 29, "16 GB": 16 * 10**9,
             "2 TiB": 2 << 40, "4 kB": 4000, "7 B": 7, 12345: 12345}  # fmt: skip
    wrong = {"16": "'16' has no unit", "16 G": "unknown unit 'G'.*GiB", "lots": "Cannot read 'lots'",
             "": "Cannot read ''", "0.1 B": "at least one byte", -5: "at least one byte"}  # fmt: skip
    assert {size: parse_bytes(size) for size in right} == right
    texts = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 150_109_880_320: "139.8 GiB", 3 << 19: "1.5 MiB", -2048: "-2 KiB"}
    assert {nbytes: format_bytes(nbytes) for nbytes in texts} == texts
    for size, words in wrong.items():
        with pytest.raises(ValueError, match=words):
            parse_bytes(size)
    for size in (1.5, True):
        with pytest.raises(TypeError, match="16 GiB"):
            parse_bytes(size)
