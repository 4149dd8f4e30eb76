"""Several hosts on one machine, on a PyTorch without libuv as on Windows."""

import sys

import pytest
from virtual_gpus.testing.hosts import TORCHRUN, run_hosts


@pytest.mark.usefixtures("no_libuv")
def test_torchrun_without_libuv():
    say = "import os; print('says', os.environ['RANK'], os.environ['GLOO_SOCKET_IFNAME'])"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", 1, "--no-python", sys.executable, "-c", say]
    assert "says 0 lo" in run_hosts({"A": command})["A"]
