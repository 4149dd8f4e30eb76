"""What only real GPUs can tell about the helpers. Skipped, with the reason, on machines that have none.

Virtual GPUs in the place of real ones try the tests themselves:

    GPUS=auto python -m virtual_gpus --gpus 3 -m pytest -n0 tests/test_real_gpus.py -k "not readings"
"""

import gc

import pytest
import torch

from helpers import use_gpus
from helpers.gpus import is_virtual
from helpers.measure import explain_oom, read_memory
from helpers.show import describe_segments

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def real(monkeypatch, capsys):
    monkeypatch.setenv("GPUS", "auto")
    assert use_gpus(1) == [torch.device("cuda", 0)]
    assert capsys.readouterr().out.startswith("1 real GPU (") or is_virtual()
    gc.collect()  # what another test left behind must not be freed in the middle of this one
    torch.cuda.empty_cache()


def test_readings_see_the_card():
    kept = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    (reading,) = read_memory([0])
    assert reading.allocated >= kept.numel() and reading.capacity > reading.reserved >= reading.allocated
    assert reading.driver_used is None or reading.driver_used > reading.reserved


def test_memory_that_runs_out_is_explained():
    torch.cuda.memory._record_memory_history("state", context="all", stacks="python")
    kept = torch.zeros(2**26, device="cuda")
    with explain_oom() as why:
        torch.empty(2**40, dtype=torch.uint8, device="cuda")  # more than any card has
    torch.cuda.memory._record_memory_history(None)
    assert why.refused.requested == pytest.approx(2**40, rel=0.01) and why.by_kind()["other"] >= kept.nbytes
    assert "kept = torch.zeros(2**26" in str(why) and "larger than all that PyTorch may take" in str(why)
    assert "segment" in describe_segments(0)
