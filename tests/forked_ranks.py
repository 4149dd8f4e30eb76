"""Runs a program in forked ranks on the CPU: as torchrun does, but PyTorch is imported once and not once per rank.

python -m tests.forked_ranks RANKS PORT PROGRAM [ARGUMENTS]
"""

import os
import runpy
import sys

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.multiprocessing


def main(rank, ranks, port, command):
    """Rank `rank` of the job. Only rank 0 prints."""
    place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    sys.argv = command
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    ranks, port, *command = sys.argv[1:]
    work = (int(ranks), port, command)
    torch.multiprocessing.start_processes(main, args=work, nprocs=int(ranks), start_method="fork")
