"""Tests of programs for several GPUs: a function runs on several ranks, and the guilty rank is named.

    from virtual_gpus import virtual_gpus
    from virtual_gpus.testing import run_ranks

    def average(rank, start):
        x = torch.tensor([start + rank], device="cuda")  # run_ranks has made cuda:<rank> the current GPU
        torch.distributed.all_reduce(x)
        return x.item() / torch.distributed.get_world_size()

    def test_average():
        with virtual_gpus(4):
            assert run_ranks(average, ranks=4, args=(1.0,), timeout=30) == [2.5] * 4

The same function runs on real GPUs, and on the CPU if PyTorch sees no GPU.
`run_hosts` runs torchrun, as one host or as several.
"""

from virtual_gpus.features.distributed.agreement import CollectiveMismatch
from virtual_gpus.testing.failures import RankError
from virtual_gpus.testing.hosts import run_hosts
from virtual_gpus.testing.run import run_ranks

__all__ = ["CollectiveMismatch", "RankError", "run_hosts", "run_ranks"]
