"""The page about setting up: what it says of torchrun on Windows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REFUSING_LIBUV = """
import importlib, sys
import torch.distributed as dist

class Store(dist.TCPStore):
    def __init__(self, *args, use_libuv=True, **named):
        if use_libuv:
            raise RuntimeError("use_libuv was requested but PyTorch was built without libuv support")
        super().__init__(*args, use_libuv=False, **named)

for module in ("rendezvous", "elastic.rendezvous.c10d_rendezvous_backend"):
    importlib.import_module(f"torch.distributed.{module}").TCPStore = Store
dist.TCPStore = Store
"""


@pytest.mark.outside  # torchrun and two ranks import PyTorch
def test_the_users_own_torchrun_without_libuv(tmp_path):
    """With the options that the page about setting up gives for Windows, and not with those for other systems."""
    program = tmp_path / "program.py"
    program.write_text(
        REFUSING_LIBUV + "import torch\ndist.init_process_group('gloo')\n"
        "total = torch.ones(1)\ndist.all_reduce(total)\nprint(f'sum {total.item()}\\n', end='')"
    )
    torchrun = [sys.executable, "-c", REFUSING_LIBUV + "from torch.distributed.run import main; main(sys.argv[1:])"]
    environment = os.environ | {"USE_LIBUV": "0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    page = Path(__file__).resolve().parents[1] / "docs" / "setup.md"
    meeting = "--rdzv-backend c10d --rdzv-conf store_type=file --rdzv-endpoint meeting-1"
    assert meeting in page.read_text(encoding="utf-8")
    ended = {}
    for options in (meeting, "--standalone"):
        command = [*torchrun, "--nproc-per-node", "2", *options.split(), program]
        ended[options] = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended[meeting].stdout.count("sum 2.0") == 2 and (tmp_path / "meeting-1").exists()
    assert ended["--standalone"].returncode != 0 and "use_libuv was requested" in ended["--standalone"].stderr
