"""Functions in several processes of one process group, as programs for several GPUs run."""

import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HANGS_S = 300  # nothing here takes that long, however busy the machine is


def in_ranks(function, *arguments, count: int, backend: str = "nccl") -> list:
    """What `function(rank, *arguments)` returns in each of `count` forked processes, rank 0's first.

    Each process is in the process group (of `backend`) and on the GPU of its rank. The first error of a
    rank ends all of them and is raised here as torch.multiprocessing.ProcessRaisedException.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = (function, arguments, count, folder, backend)
        context = mp.start_processes(_rank, args=work, nprocs=count, join=False, start_method="fork")
        end = time.monotonic() + HANGS_S
        while not context.join(timeout=1):
            if time.monotonic() > end:
                for process in context.processes:
                    process.kill()
                raise AssertionError(f"{function.__name__} did not end within {HANGS_S} s in {count} ranks")
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(count)]


def _rank(rank, function, arguments, count, folder, backend):
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=count,
        device_id=torch.device("cuda", rank),
        timeout=timedelta(seconds=HANGS_S),
    )
    torch.save(function(rank, *arguments), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    assert not dist.is_initialized()
