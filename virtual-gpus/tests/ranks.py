"""Functions in several processes of one process group, as programs for several GPUs run."""

import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def in_ranks(
    function, *arguments, count: int, seconds: float = 120, backend: str = "nccl", start: str = "fork"
) -> list:
    """What `function(rank, *arguments)` returns in each of `count` processes (forked or spawned), rank 0's first.

    Each process is in the process group (of `backend`) and on the GPU of its rank. The first error of a
    rank ends all of them and is raised here as torch.multiprocessing.ProcessRaisedException.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = (function, arguments, count, folder, backend)
        context = mp.start_processes(_rank, args=work, nprocs=count, join=False, start_method=start)
        end = time.monotonic() + seconds
        while not context.join(timeout=1):
            if time.monotonic() > end:
                for process in context.processes:
                    process.kill()
                raise AssertionError(f"{function.__name__} did not end within {seconds} s in {count} ranks")
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
        timeout=timedelta(seconds=60),
    )
    torch.save(function(rank, *arguments), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    assert not dist.is_initialized()
