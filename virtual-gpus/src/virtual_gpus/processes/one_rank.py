"""One rank of many: this process is one rank of a job whose other ranks do not exist.

    with virtual_gpus(8, kind="H100", shapes_only=True, rank=3, world_size=1024):
        train()  # a program for torchrun, as it is: rank 3 of 1,024, on cuda:3 of the first of 128 hosts

    python -m virtual_gpus --gpus 8 --kind H100 --shapes-only --as-rank 3 --of 1024 train.py

The environment has the variables of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR,
MASTER_PORT and some more. They are as they were when the GPUs go off. `torch.distributed.init_process_group`, with any
backend and any way to meet, makes PyTorch's "fake" process group of that size (torch/testing/_internal/distributed/
fake_pg.py), which sends nothing. The program uses the GPU of its LOCAL_RANK. The others of its host stay empty.

Memory and modelled time are those of this rank. All ranks are taken to reach each collective at the same moment.

Values: with `shapes_only` there are none. Without it, every other rank is taken to hold what this rank holds, see
`features.distributed.alone`. With DistributedDataParallel, numbers are those of a job whose ranks all have this rank's
data. Where ranks hold different parts of a model, as with `fully_shard`, they are meaningless.

`all_gather_object` and `gather_object` give this rank's own object from everyone. Objects that another rank would send
(`broadcast_object_list`, `scatter_object_list`, `recv_object_list`) raise an error, and so does
torch.distributed.checkpoint. A stage of a pipeline needs no other rank if `torch.distributed.pipelining.PipelineStage`
is given `input_args` and `output_args`. PyTorch 2.13 asks the other ranks even then, which needs values.
"""

from __future__ import annotations

from virtual_gpus.settings import Settings


def variables(settings: Settings) -> dict[str, str]:
    """The environment that torchrun gives to the rank of `settings`."""
    assert settings.rank is not None and settings.world_size is not None
    host, slot = settings.host_and_slot(settings.rank)
    hosts = settings.world_size // settings.count
    return {
        "RANK": str(settings.rank), "WORLD_SIZE": str(settings.world_size),
        "LOCAL_RANK": str(slot), "LOCAL_WORLD_SIZE": str(settings.count),
        "GROUP_RANK": str(host), "GROUP_WORLD_SIZE": str(hosts),
        "ROLE_NAME": "default", "ROLE_RANK": str(settings.rank), "ROLE_WORLD_SIZE": str(settings.world_size),
        "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip


def say_that_it_is_alone(settings: Settings) -> None:
    """Print what the numbers of one rank are not, if it has any."""
    if not settings.shapes_only:
        print(
            f"virtual GPUs: rank {settings.rank} of {settings.world_size} runs alone. "
            "Its numbers are not those of the job, because the others are taken to hold what it holds.",
            flush=True,
        )
