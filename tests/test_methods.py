"""helpers.lesson07.methods: every method on one job, what it takes, cuts, the table."""

from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from virtual_gpus import virtual_gpus

from helpers.gpus import modelled_gpus
from helpers.lesson07.methods import (
    BERT,
    METHODS,
    Job,
    Row,
    TrainStep,
    balanced_cuts,
    compare,
    grain,
    measure,
    stages_of,
    step_by,
)
from helpers.lesson07.pictures import table
from helpers.lesson07.scaling import Cluster
from helpers.models import Bert, PyramidNet
from helpers.parallel.launching import RankError, launch

TITAN = Cluster("TITAN Xp")
LARGE = Job("large", lambda: Bert(30_000, 256, 2, 8, 128), 64, 16, (128,), (128,), True, torch.optim.Adam)
SMALL = Job("small", lambda: Bert(4000, 64, 4, 4, 32), 128, 32, (32,), (32,), True, torch.optim.Adam)
GIB = 2**30
# Before 2.15 cuBLAS keeps workspaces: larger than the small net, and in the way of the large one, as chance has it.
AS_IN_2_15 = {"kind": "TITAN Xp", "shapes_only": True, "torch_version": "2.15"}


@pytest.fixture(scope="module")
def rows():
    with virtual_gpus(4, **AS_IN_2_15) as gpus:
        return {method: measure(SMALL, method, gpus, TITAN) for method in METHODS}


def test_every_method_is_measured(rows):
    for method, row in rows.items():
        gpus = 1 if method == "one GPU" else 4
        assert len(row.peaks) == len(row.rest) == len(row.utilisation) == gpus and row.seconds > 0
        assert all(0 < share <= 1 for share in row.utilisation) and row.fits(TITAN)
        assert row.samples_per_second == pytest.approx(row.batch / row.seconds)


def test_the_order_of_article_a(rows):
    """DataParallel, parallel loss, DDP: faster, and better balanced, in this order."""
    order = [rows[name] for name in ("DataParallel", "parallel loss", "DDP")]
    assert [row.seconds for row in order] == sorted((row.seconds for row in order), reverse=True)
    spread = [max(row.peaks) / min(row.peaks) for row in order]
    assert spread == sorted(spread, reverse=True) and spread[-1] == 1


def test_ddp_holds_one_gpus_share_and_buckets(rows):
    weights = 4 * sum(p.numel() for p in SMALL.build().parameters())
    assert rows["DDP"].peaks[0] == pytest.approx(rows["one GPU"].peaks[0] + weights, rel=0.05)


def test_the_article_s_bert_under_dataparallel():
    """As in lesson 02: 13.0 GiB on GPU 0."""
    with virtual_gpus(4, kind="TITAN Xp", memory="64 GiB", shapes_only=True) as gpus:
        row = measure(BERT, "DataParallel", gpus, TITAN)
    assert row.peaks[0] / GIB == pytest.approx(13.0, rel=0.03) and not row.fits(TITAN)


@pytest.mark.parametrize("method", ["one GPU", "DDP", "pipeline"])
def test_the_largest_batch_fits_and_a_step_more_does_not(method):
    """On GPUs of that size; here it is searched for on larger ones, of which PyTorch may take a part."""
    with virtual_gpus(4, memory="64 GiB", **AS_IN_2_15) as gpus:
        row = measure(LARGE, method, gpus, TITAN, search=True)
    assert row.estimate * 0.6 < row.largest <= row.estimate * 1.1
    assert two_steps_fit(method, row.largest)
    # Two steps of the search: how memory lies in pieces differs by one between there and here.
    assert not two_steps_fit(method, row.largest + 2 * grain(row.estimate, 1 if method == "one GPU" else 4))


def two_steps_fit(method, batch):
    with virtual_gpus(4, **AS_IN_2_15) as gpus:
        if method == "DDP":
            try:
                return all(launch(a_rank_fits, batch // 4, ranks=2, show=False))
            except RankError as error:
                assert "out of memory" in str(error)
                return False
        used = gpus[:1] if method == "one GPU" else gpus
        step = step_by(LARGE, method, list(used))
        warm_up(step, LARGE.alone if method == "one GPU" else LARGE.batch)
        try:
            step(batch), step(batch)
        except torch.OutOfMemoryError:
            return False
    return True


def a_rank_fits(rank, batch):
    ddp = DistributedDataParallel(LARGE.build().to(rank), device_ids=[rank])
    step = TrainStep(LARGE, ddp, partial(LARGE.loss, ddp, gpu=torch.device("cuda", rank)))
    warm_up(step, LARGE.batch // 4)
    step(batch), step(batch)
    return True


def warm_up(step, batch):
    """As the search does, which begins after a step of the job's own batch."""
    step(batch)
    step.clear()
    torch.cuda.empty_cache()


@pytest.mark.parametrize(("line", "gpus", "step"), [(1, 1, 1), (67, 1, 2), (111, 4, 4), (1222, 4, 32), (3, 4, 4)])
def test_the_search_goes_in_steps_of_some_percent(line, gpus, step):
    assert grain(line, gpus) == step


def test_what_pytorch_may_take_is_given_back():
    with modelled_gpus(1, "TITAN Xp", "64 GiB") as gpus:
        measure(SMALL, "one GPU", gpus, replace(TITAN, kind="K80"), search=True)
        torch.zeros(20 * GIB, dtype=torch.uint8, device=gpus[0])


def test_another_method_is_refused():
    with virtual_gpus(1, kind="TITAN Xp", shapes_only=True) as gpus, pytest.raises(ValueError, match="Choose one of"):
        measure(SMALL, "Horovod", gpus, TITAN)


def test_compare_gives_what_measure_gives():
    """With GPUs of its own, for other kinds than the GPUs here, in the order that was asked for."""
    clusters, methods = {"old": Cluster("K80"), "here": TITAN}, ["one GPU"]
    with modelled_gpus(1, "H200"):
        found = compare(clusters, [BERT], methods)
    assert list(found) == [("old", "BERT"), ("here", "BERT")]
    for name, cluster in clusters.items():
        for row, method in zip(found[name, "BERT"], methods, strict=True):
            with modelled_gpus(4, cluster.kind, "64 GiB") as gpus:
                assert row == measure(BERT, method, gpus, cluster)


@pytest.mark.parametrize(
    ("costs", "parts"), [([1, 1, 1, 1, 9], 2), ([5, 1, 1, 1, 2, 3], 3), ([1, 2, 3, 4, 5, 6, 7, 8], 3), ([1, 2], 2)]
)
def test_cuts_make_the_dearest_part_cheap(costs, parts):
    """As cheap as in the best of all possible cuts."""
    found = balanced_cuts(costs, parts)
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])] and found[-1][1] == len(costs)

    def dearest(cuts):
        return max(sum(costs[start:end]) for start, end in pairwise([0, *cuts, len(costs)]))

    assert dearest([end for _, end in found[:-1]]) == min(map(dearest, combinations(range(1, len(costs)), parts - 1)))


def test_more_parts_than_layers_are_refused():
    with pytest.raises(ValueError, match="2 layers cannot be cut into 3 parts"):
        balanced_cuts([1, 1], 3)


@pytest.mark.parametrize("build", [lambda: PyramidNet(8, 9), lambda: Bert(50, 8, 3, 2, 6, dropout=0.0)])
def test_stages_are_the_net(build):
    """Values, not shapes only: the stages in turn compute what the net computes."""
    torch.manual_seed(0)
    with virtual_gpus(1) as gpus:
        net = build().to(gpus[0]).eval()
        x = torch.randint(50, (2, 6)) if isinstance(net, Bert) else torch.randn(2, 3, 8, 8)
        right = net(x.to(gpus[0]))
        stages = stages_of(net, 3, x, gpus[0])
        assert len(stages) == 3 and torch.equal(nn.Sequential(*stages)(x.to(gpus[0])), right)


def test_a_peak_that_fits_is_not_enough():
    """Memory in pieces: the PyramidNet's pipeline on TITAN Xps peaks at 11.1 of 11.6 GiB, and 768 samples fail."""
    row = Row("small", "pipeline", 768, 1.0, (1.0,) * 4, (0,) * 4, (11 * GIB,) * 4)
    assert row.fits(TITAN) and replace(row, largest=768).fits(TITAN)
    failed = replace(row, largest=704)
    assert not failed.fits(TITAN)
    found, clusters = {("TITAN Xps", "small"): [failed]}, {"TITAN Xps": TITAN}
    assert "11.00!" in table(found, clusters)


def test_the_table(rows):
    large = Row("small", "DDP", 4, 0.5, (1.0,) * 4, (0,) * 4, (13 * GIB,) * 4, largest=3, estimate=4)
    found, clusters = {("TITAN Xps", "small"): [*rows.values(), large]}, {"TITAN Xps": TITAN}
    text = table(found, clusters)
    assert all(method in text for method in METHODS) and "13.00!" in text and "500" in text
