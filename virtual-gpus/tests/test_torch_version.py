"""virtual_gpus(torch_version=...): memory as another PyTorch uses it."""

from __future__ import annotations

import pytest
import torch
from virtual_gpus import active_machine, virtual_gpus
from virtual_gpus.settings import INSTALLED


def left_by_a_product():
    """MiB of cuBLAS's workspace on an H200: kept until 2.14, given back after each operator from 2.15 on."""
    a = torch.empty(64, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    a @ a
    return (torch.cuda.memory_allocated() - before) >> 20


def test_versions_nest_with_their_gpus_and_the_installed_one_is_the_default():
    with virtual_gpus(1, torch_version="2.14.0+cu130"):
        with virtual_gpus(1, torch_version="2.15"):
            assert left_by_a_product() == 0
            with virtual_gpus(1):
                assert active_machine().settings.version == INSTALLED
        assert active_machine().settings.version == (2, 14) and left_by_a_product() == 32


@pytest.mark.parametrize("wrong", ["2.10", "3.0", "2", "2.1x", (2, 11)])
def test_a_version_that_is_not_known_is_refused(wrong):
    with pytest.raises(ValueError, match=r"torch_version must be text from '2\.11' to '2\.15', .*'2\.13', not"):
        virtual_gpus(1, torch_version=wrong)
