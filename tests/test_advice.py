"""helpers.lesson07.advice: the formulas against runs, the advice on cases with a known answer, the picture."""

import json

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.gpus import modelled_gpus
from helpers.lesson07 import NETS, advise, describe_guide, guide_picture
from helpers.lesson07.advice import METHODS, cut, fewest_pieces, peak_bytes, stage_bytes, step_seconds
from helpers.lesson07.methods import BERT, PYRAMIDNET, measure, step_by
from helpers.lesson07.scaling import Cluster
from helpers.measure import peak_memory
from helpers.measure.timeline import record_timeline
from helpers.models import bert_article, parameter_count, pyramidnet_article
from tests.benchmarks.methods import STORED, said
from tests.benchmarks.nets import measured_nets, net_of
from tests.pictures import alt_text

ARTICLE, SEVEN = NETS["BERT of the article"], NETS["7 billion, 2,048 tokens"]
TITAN, CLUSTER = Cluster("TITAN Xp"), Cluster("A100", 8, network="InfiniBand HDR")
SLOW = Cluster("A100", 8, network="Ethernet 10")

# ---- formulas --------------------------------------------------------------------------------------------------------

_STEPS = json.loads(STORED.read_text())
_SECONDS = {"BERT": (0.9, 1.1), "PyramidNet": (0.75, 1.05)}  # convolutions on tensor cores are said too fast


@pytest.mark.parametrize("job", _SECONDS)
def test_bytes_and_seconds_of_every_method_on_six_kinds_of_gpus(job):
    """The formulas over the runs. Stored by `python -m tests.benchmarks.methods`, two minutes."""
    for step in (step for step in _STEPS["steps"] if step["job"] == job):
        nbytes, seconds = said(step)
        least, most = (0.98, 1.01) if step["method"] != "pipeline" else (0.97, 1.13)  # it may be cut at other layers
        assert least <= nbytes / step["bytes"] <= most, step
        least, most = _SECONDS[job]
        if step["machine"] == "H200" and step["method"] == "pipeline":
            least = 0.75  # its one host is the bottleneck, and is said to be a fifth too fast
        assert least <= seconds / step["seconds"] <= most, step


@pytest.mark.parametrize("job", _SECONDS)
def test_ddp_from_one_gpu_to_64(job):
    """One batch on more and more A100s, until links or the host decide. Stored by the same command."""
    for step in (step for step in _STEPS["strong"] if step["job"] == job):
        least, most = _SECONDS[job]
        assert least <= said(step)[1] / step["seconds"] <= most, step


@pytest.mark.parametrize("method", ["DataParallel", "DDP", "pipeline"])
def test_the_stored_steps_are_those_of_now(method):
    with virtual_gpus(4, kind="TITAN Xp", memory="64 GiB", shapes_only=True, torch_version="2.15") as gpus:
        row = measure(BERT, method, gpus, TITAN)
    (stored,) = (
        step
        for step in _STEPS["steps"]
        if (step["job"], step["machine"], step["method"]) == ("BERT", "TITAN Xp", method)
    )
    assert max(row.peaks) == pytest.approx(stored["bytes"], rel=0.01)
    assert row.seconds == pytest.approx(stored["seconds"], rel=0.02)


@pytest.mark.parametrize(("job", "micro_batches"), [(BERT, 2), (PYRAMIDNET, 8)], ids=["BERT, 2", "PyramidNet, 8"])
def test_a_pipeline_of_other_micro_batches(job, micro_batches):
    """Each stage's bytes, and the step's time, with fewer and with more micro-batches than stages."""
    net = NETS[f"{job.name} of the article"]
    with modelled_gpus(4, "TITAN Xp", "64 GiB") as gpus:
        step = step_by(job, "pipeline", gpus, micro_batches)
        with record_timeline() as timeline:
            peaks = [reading.peak_allocated for reading in peak_memory(lambda: step(job.batch), gpus)]
    sizes = stage_bytes(net, job.batch, 4, TITAN, micro_batches)
    assert list(sizes) == [pytest.approx(peak, rel=0.13) for peak in peaks]
    assert max(sizes) == pytest.approx(max(peaks), rel=0.05)
    seconds = step_seconds(net, "pipeline", job.batch, 4, TITAN, micro_batches)
    assert seconds == pytest.approx(timeline.seconds, rel=0.1)


def test_gradients_that_are_accumulated_stay():
    """Four micro-batches of ten sentences: from the second on, the gradients of those before are there."""
    with virtual_gpus(1, kind="TITAN Xp", shapes_only=True, torch_version="2.15") as (gpu,):  # no cuBLAS workspaces
        step = step_by(BERT, "one GPU", [gpu])

        def accumulate():
            for _ in range(4):
                step.backward(10)

        peak = max(reading.peak_allocated for reading in peak_memory(accumulate, [gpu]))
    assert peak_bytes(ARTICLE, "one GPU", 40, 1, TITAN, 4) == pytest.approx(peak, rel=0.02)
    assert peak_bytes(ARTICLE, "one GPU", 10, 1, TITAN) < 0.95 * peak


def test_a_pipeline_has_no_more_stages_than_layers():
    assert len(cut(ARTICLE, 64, 1, TITAN)) == len(ARTICLE.layers) == 11


# ---- nets ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["BERT of the article", "ResNet-50, 224 pixels"])
def test_the_nets_are_as_measured(name):
    """Written down with four digits, neighbours that differ by less than a hundredth of the whole as their mean."""
    (found,) = measured_nets([name])
    assert (found.optimizer, found.convolutions) == (NETS[name].optimizer, NETS[name].convolutions)
    for column in found.layers.dtype.names:
        now, written = found.layers[column], NETS[name].layers[column]
        assert now.sum() == pytest.approx(written.sum(), rel=0.005)
        assert abs(now - written).max() <= 0.02 * now.sum()


def test_the_nets_have_the_parameters_of_the_models():
    for name, net in (("BERT of the article", bert_article()), ("PyramidNet of the article", pyramidnet_article())):
        assert NETS[name].weights / 4 == pytest.approx(parameter_count(net), abs=0.5)


def test_a_net_of_your_own():
    """Two linear layers: what they keep, hand on, compute and move, by hand."""
    layers = [nn.Linear(64, 256), nn.Linear(256, 1000)]
    with modelled_gpus(1, "A100") as (gpu,):
        net = net_of("mine", layers, torch.zeros(512, 64), torch.zeros(512).long(), nn.CrossEntropyLoss(), gpu)
        with pytest.raises(ValueError, match="2 layers and 1 samples"):
            net_of("mine", layers, torch.zeros(1, 64), torch.zeros(1).long(), nn.CrossEntropyLoss(), gpu)
    first, last = net.layers
    assert (first.parameters, first.tensors, last.parameters) == (65 * 256, 2, 257 * 1000)
    assert (first.activations, first.output, last.output) == (4 * 256, 4 * 256, 4 * 1000)
    assert last.activations == 8 and net.outputs == 4000  # a label
    assert last.flops == 6 * 256 * 1000
    # Inputs, outputs, and their gradients: products read or write each twice, the bias' gradient one of them once more.
    assert last.moved == pytest.approx(4 * (3 * 256 + 4 * 1000), rel=0.01)
    assert advise(net, 256, 4, TITAN).method in METHODS


# ---- advice ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("net", "batch", "gpus", "cluster", "method", "used", "pieces"),
    [
        (ARTICLE, 50, 1, TITAN, "one GPU", 1, 1),
        (ARTICLE, 200, 1, TITAN, "one GPU", 1, 2),
        (ARTICLE, 200, 4, TITAN, "DDP", 4, 1),
        (ARTICLE, 4096, 4, TITAN, "DDP", 4, 16),
        (ARTICLE, 256, 64, SLOW, "DDP", 8, 1),
        (ARTICLE, 16, 2, Cluster("A100", 1, network="Ethernet 10"), "one GPU", 1, 1),
        (SEVEN, 256, 1, CLUSTER, "more GPUs", 1, 1),
        (SEVEN, 256, 16, CLUSTER, "sharding", 16, 16),
        (SEVEN, 512, 32, SLOW, "pipeline", 32, 512),
    ],
)
def test_cases_with_a_known_answer(net, batch, gpus, cluster, method, used, pieces):
    found = advise(net, batch, gpus, cluster)
    assert (found.method, found.gpus, found.micro_batches) == (method, used, pieces)
    assert found.reasons and f"Take {method}" in str(found)


def test_sharding_pays_its_weights_for_every_micro_batch():
    """Sixteen A100s in two machines: over Ethernet 10 the weights of 7 billion would be gathered too often."""
    fast, slow = advise(SEVEN, 256, 16, CLUSTER), advise(SEVEN, 256, 16, SLOW)
    assert (fast.method, slow.method) == ("sharding", "pipeline")
    assert "sharding 22 s, pipeline 29 s" in str(advise(SEVEN, 64, 16, CLUSTER))


def test_more_gpus_of_the_same_kind_never_mean_fewer_in_use():
    """BERT large over Ethernet 10 is worth 16 of 16 GPUs, so also 16 of 32 and of 64."""
    large = NETS["BERT large, 512 tokens"]
    used = {gpus: advise(large, 512, gpus, SLOW).gpus for gpus in (8, 16, 32, 64)}
    assert used == {8: 8, 16: 16, 32: 16, 64: 16}


def test_layers_bound_the_stages():
    """Over a slow link 35 layers make a pipeline on 32 GPUs. On 64 they cannot."""
    many = advise(SEVEN, 512, 64, SLOW)
    assert "Take sharding on 64 GPUs, accumulating gradients over 4 micro-batches." in str(many)
    assert fewest_pieces(SEVEN, "pipeline", 512, 32, SLOW) and not fewest_pieces(SEVEN, "pipeline", 512, 64, SLOW)


def test_a_net_that_does_not_fit_needs_more_gpus():
    assert "Take more GPUs.\n" in str(advise(SEVEN, 64, 4, CLUSTER))
    assert advise(SEVEN, 64, 8, CLUSTER).method == "sharding"


def test_where_the_host_is_too_slow_a_network_does_not_help():
    """The PyramidNet's thousand operators take longer to launch than 32 images to compute."""
    words = str(advise(NETS["PyramidNet of the article"], 512, 16, CLUSTER))
    assert "because Python takes 64 ms to launch" in words


@pytest.mark.parametrize(("batch", "gpus"), [(0, 1), (1, 0), (1, 9)])
def test_bad_questions_are_refused(batch, gpus):
    with pytest.raises(ValueError, match="at least 1|evenly"):
        advise(ARTICLE, batch, gpus, CLUSTER)


# ---- picture --------------------------------------------------------------------------------------------------------


def test_the_picture_has_words():
    figure = guide_picture(CLUSTER)
    assert alt_text(figure.axes[0]) == describe_guide(CLUSTER) and "DDP on 2 to 64" in describe_guide(CLUSTER)
    plt.close(figure)
    slow = describe_guide(SLOW, batch=512)
    assert "BERT of the article: one GPU on 1, DDP on 2 to 8, DDP on 8 of 16 to 64" in slow
