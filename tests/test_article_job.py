"""The article's BERT under several wrappers: the second step's peaks, GPU by GPU."""

import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

from helpers import lesson04 as article_job
from helpers.lesson04 import WordLoss, bert_peaks
from helpers.measure import MiB
from helpers.models import parameter_count
from helpers.parallel.loss import DataParallelCriterion, DataParallelModel

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


@pytest.fixture
def gpus():
    with virtual_gpus(2, memory="24 GiB", shapes_only=True) as found:
        yield found


def test_the_loss_is_the_mean_over_words():
    logits, words = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    assert torch.allclose(WordLoss()(logits, words), nn.CrossEntropyLoss()(logits.movedim(2, 1), words))


def test_data_parallel_loads_gpu_0_and_the_parallel_loss_does_not(gpus):
    gathered = bert_peaks(nn.DataParallel, 40, gpus)
    cut = bert_peaks(DataParallelModel, 40, gpus, DataParallelCriterion(WordLoss(), gpus))
    assert [reading.index for reading in gathered] == [0, 1]
    assert gathered[0].peak_allocated > 2 * gathered[1].peak_allocated
    assert cut[0].peak_allocated < gathered[0].peak_allocated
    assert cut[1].peak_allocated > gathered[1].peak_allocated  # the loss of its half is there now


def test_one_gpu_holds_weights_gradients_and_adam_s_state(gpus):
    found = bert_peaks(nn.DataParallel, 1, gpus[:1])
    weights = 4 * parameter_count(article_job.bert_article(article_job.VOCABULARY))
    assert len(found) == 1
    assert found[0].peak_allocated > 4 * weights  # weights, gradients, two states
    assert round(weights / MiB) == 83


@pytest.mark.parametrize(("batch", "devices"), [(0, 1), (4, 0)])
def test_nothing_to_measure_is_refused(gpus, batch, devices):
    with pytest.raises(ValueError, match="at least one device and one sentence"):
        bert_peaks(nn.DataParallel, batch, gpus[:devices])
