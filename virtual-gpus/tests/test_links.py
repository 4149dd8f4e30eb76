"""Links, topologies and networks, and how long bytes take on them."""

import pytest
from virtual_gpus import active_machine
from virtual_gpus.__main__ import parse
from virtual_gpus.clock.links import ARRANGEMENTS, NETWORKS, arrange, link_of
from virtual_gpus.gpus import PCIE3, PCIE4, spec

# Eight GPUs of which pairs are joined by four NVLinks, as nvidia-smi showed them to the author of a series on
# multi-GPU training.
PAIRS = """\
        GPU0    GPU1    GPU2    GPU3    GPU4    GPU5    GPU6    GPU7
GPU0     X      NV4     NODE    NODE    SYS     SYS     SYS     SYS
GPU1    NV4      X      NODE    NODE    SYS     SYS     SYS     SYS
GPU2    NODE    NODE     X      NV4     SYS     SYS     SYS     SYS
GPU3    NODE    NODE    NV4      X      SYS     SYS     SYS     SYS
GPU4    SYS     SYS     SYS     SYS      X      NV4     NODE    NODE
GPU5    SYS     SYS     SYS     SYS     NV4      X      NODE    NODE
GPU6    SYS     SYS     SYS     SYS     NODE    NODE     X      NV4
GPU7    SYS     SYS     SYS     SYS     NODE    NODE    NV4      X"""


def test_nvlink_in_pairs_is_printed_as_nvidia_smi_prints_it():
    drawn = arrange(spec("A100"), 8, "NVLink pairs").drawn()
    assert drawn.startswith(PAIRS + "\n\nLegend:") and "\n  NV#  =" in drawn
    matrix = [line.split()[1:] for line in PAIRS.splitlines()[1:]]
    assert arrange(spec("A100"), 8, matrix).drawn() == drawn


def test_roads_differ_in_speed():
    labels = [arrange(spec(kind), 2).labels[0][1] for kind in ("T4", "V100", "H100", "H200")]
    assert labels == ["PHB", "NV6", "NV18", "NV18"]
    topology = arrange(spec("A100"), 8, "NVLink pairs")
    speeds = [topology.between(0, other).bandwidth for other in (1, 2, 4)]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] == 4 * 25e9 and speeds[1] < PCIE4.bandwidth
    assert arrange(spec("A100"), 2, "PCIe 3").between(0, 1).bandwidth < PCIE3.bandwidth
    assert arrange(spec("A100"), 4, "NVSwitch").between(0, 3).bandwidth == 300e9 == link_of("NV12", PCIE4).bandwidth


def test_gpus_of_several_machines_meet_on_the_network():
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


def test_every_arrangement_works_for_any_number():
    for links in (None, *ARRANGEMENTS):
        for count in (1, 2, 3, 8):
            assert f"GPU{count - 1}" in arrange(spec("T4"), count, links).drawn()
    with pytest.raises(ValueError, match="at least one GPU"):
        arrange(spec("T4"), 0)
