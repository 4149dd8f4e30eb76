"""helpers.advice: the formulas against runs, the rules on cases with a known answer, picture and panel."""

import matplotlib.pyplot as plt
import pytest
import torch

from helpers.advice import METHODS, NETS, Net, advise, describe_guide, explore_advice, guide_picture, peak_bytes
from helpers.methods import BERT, measure
from helpers.models import bert_article, parameter_count, pyramidnet_article
from helpers.plots.alt_text import alt_text
from helpers.scaling import Cluster
from helpers.virtual import virtual_gpus

MIB, GIB = 2**20, 2**30
ARTICLE, SEVEN = NETS["BERT of the article"], NETS["7 billion, 2,048 tokens"]
TITAN, CLUSTER = Cluster("TITAN Xp"), Cluster("A100", 8, network="InfiniBand HDR")


@pytest.mark.parametrize("method", ["one GPU", "DataParallel", "parallel loss", "DDP", "pipeline"])
def test_formulas_against_runs(method):
    """Steps of the article's BERT on virtual GPUs. Tolerance: 10 %; the pipeline's stages differ, 30 %."""
    with virtual_gpus(4, kind="TITAN Xp", memory="64 GiB", shapes_only=True) as gpus:
        row = measure(BERT, method, gpus, TITAN)
    said = peak_bytes(ARTICLE, method, row.batch, len(row.peaks))
    assert said == pytest.approx(max(row.peaks), rel=0.3 if method == "pipeline" else 0.1)


def test_the_nets_numbers_are_the_nets():
    for name, net in (("BERT of the article", bert_article()), ("PyramidNet of the article", pyramidnet_article())):
        assert NETS[name].parameters == parameter_count(net)
    assert ARTICLE.outputs / MIB == pytest.approx(163 * 30_000 * 4 / MIB, rel=0.01)


@pytest.mark.parametrize(
    ("net", "batch", "gpus", "cluster", "method", "used", "pieces"),
    [
        (ARTICLE, 50, 1, TITAN, "one GPU", 1, 1),
        (ARTICLE, 200, 1, TITAN, "one GPU", 1, 2),
        (ARTICLE, 200, 4, TITAN, "DDP", 4, 1),
        (ARTICLE, 4096, 4, TITAN, "DDP", 4, 16),
        (ARTICLE, 256, 64, Cluster("A100", 8, network="Ethernet 10"), "DDP", 8, 1),
        (ARTICLE, 16, 2, Cluster("A100", 1, network="Ethernet 10"), "one GPU", 1, 1),
        (SEVEN, 256, 1, CLUSTER, "more GPUs", 1, 1),
        (SEVEN, 256, 16, CLUSTER, "sharding", 16, 16),
    ],
)
def test_cases_with_a_known_answer(net, batch, gpus, cluster, method, used, pieces):
    found = advise(net, batch, gpus, cluster)
    assert (found.method, found.gpus, found.micro_batches) == (method, used, pieces)
    assert found.reasons and found.headline in str(found)


def test_sharding_pays_its_weights_for_every_micro_batch():
    """Sixteen A100s in two machines: over Ethernet 10 the weights of 7 billion would be gathered too often."""
    fast, slow = (
        advise(SEVEN, 256, 16, Cluster("A100", 8, network=name)) for name in ("InfiniBand HDR", "Ethernet 10")
    )
    assert (fast.method, slow.method) == ("sharding", "pipeline")
    assert "sharding would fit as well, but is slower" in str(slow)


def test_layers_bound_the_stages():
    """Over a slow link 34 layers make a pipeline on 32 GPUs; on 64 they cannot, and it says so."""
    slow = Cluster("A100", 8, network="Ethernet 10")
    assert advise(SEVEN, 512, 32, slow).method == "pipeline"
    many = advise(SEVEN, 512, 64, slow)
    assert many.method == "sharding" and "34 layers cannot make 64 stages" in str(many)
    assert "accumulating gradients over 4 micro-batches" in many.headline


def test_long_times_are_seconds():
    assert "80 s against 41 s" in str(advise(SEVEN, 64, 16, CLUSTER))


def test_slow_links_make_it_a_pipeline():
    """No copy fits; exchanging weights over Ethernet takes longer than a pipeline's bubble."""
    net = Net("large", 4_000_000_000, 50 * MIB, 1000, 1e12, 32)
    assert advise(net, 256, 8, Cluster("A100", 1, network="Ethernet 10")).method == "pipeline"
    assert advise(net, 256, 8, Cluster("A100", 8)).method in ("pipeline", "sharding")


@pytest.mark.parametrize("batch", [1, 7, 256, 100_000])
@pytest.mark.parametrize("gpus", [1, 2, 8, 64])
@pytest.mark.parametrize("name", NETS)
def test_what_is_advised_fits(name, gpus, batch):
    """What it says fits the card by its own formula, whatever is asked."""
    net, advice = NETS[name], advise(NETS[name], batch, gpus, CLUSTER)
    if advice.method in METHODS:
        assert peak_bytes(net, advice.method, batch / advice.micro_batches, advice.gpus) <= CLUSTER.room


@pytest.mark.parametrize(("batch", "gpus"), [(0, 1), (1, 0), (1, 9)])
def test_bad_questions_are_refused(batch, gpus):
    with pytest.raises(ValueError):
        advise(ARTICLE, batch, gpus, CLUSTER)


def test_the_picture_has_words():
    figure = guide_picture(CLUSTER)
    assert alt_text(figure.axes[0]) == describe_guide(CLUSTER) and "DDP on 2 to 64" in describe_guide(CLUSTER)
    plt.close(figure)
    slow = describe_guide(Cluster("A100", 8, network="Ethernet 10"), batch=512)
    assert "BERT of the article: one GPU on 1, DDP on 2 to 8, DDP on 8 of 16 to 64" in slow


def test_the_panel_follows_its_controls():
    panel = explore_advice()
    assert "Take DDP on 4 GPUs" in panel.words
    panel.controls["gpus"].value = 1
    assert "Take one GPU" in panel.words
    panel.controls["per_machine"].value, panel.controls["gpus"].value = 8, 64
    assert "64 x NVIDIA TITAN Xp" in panel.words
    bundle = panel._repr_mimebundle_()
    assert bundle["text/plain"] == panel.words and bundle["image/png"]
    with pytest.raises(ValueError, match="choose one of"):
        explore_advice(gpus=5)


def test_the_panel_needs_no_gpu_and_leaves_none():
    explore_advice()
    assert not torch.cuda.is_initialized() or torch.cuda.device_count()
