"""One rank of many beside published figures: Llama 3.1 8B under torchtitan, and MPT 1B to 7B under LLM Foundry.

    python -m benchmarks.published

Llama: benchmarks/llama3_h100_202412_torchtitan.md in github.com/pytorch/torchtitan, December 2024: tables 1 and 3, FSDP
without torch.compile. Each rank has 2 sequences of 8,192 tokens, and selective checkpointing keeps attention and every
second matrix multiplication. The model here is that of `scale`, of the same shape, and not torchtitan's code. Their
H100 had 96 GB of HBM2e at 2.4 TB/s and a limit of 500 W. The data sheet of the virtual one says 80 GB of HBM3 at 3.35
TB/s and 700 W. Modelled times are therefore too short. Memory is what PyTorch reserved.

MPT: scripts/train/benchmarking/README.md in github.com/mosaicml/llm-foundry, October 2023: rows of 2,048 tokens without
checkpointing. They sharded with PyTorch's first FSDP. The model here is the GPT of `reference.networks` with MPT's
sizes, sharded with `fully_shard`. Memory was not published. The rate of an H100's tensor cores was fitted to the rows
of 8 and 16 H100 (clock/calibration.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from virtual_gpus import record_training, transformer_flops, virtual_gpus
from virtual_gpus.timeline.training import TrainingReport

from benchmarks.reference.networks import GPT
from benchmarks.scale import LENGTH, SHAPES, build, step

H100 = {"kind": "H100", "memory": "94 GiB", "network": "InfiniBand NDR", "adapters": 8}
LLAMA = {8: (82.4, 5762), 128: (67.0, 5605)}  # GPUs -> GiB, tokens per second and GPU
SAMPLES = 2
MPT = {
    "1B": {"hidden": 2048, "layers": 24, "heads": 16},
    "3B": {"hidden": 2560, "layers": 32, "heads": 20},
    "7B": {"hidden": 4096, "layers": 32, "heads": 32},
}
MPT_WORDS, MPT_LENGTH = 50_368, 2048
# Model, GPU, GPUs, sequences, micro-batches per optimizer step, tokens per second and GPU
MPT_ROWS = [
    ("1B", "A100-80GB", 8, 14, 4, 20_513),
    ("3B", "A100-80GB", 8, 10, 2, 10_811),
    ("7B", "A100-80GB", 8, 6, 2, 4641),
    ("1B", "H100", 8, 14, 1, 45_455),
    ("3B", "H100", 16, 10, 3, 24_142),
    ("7B", "H100", 8, 6, 1, 10_643),
    ("1B", "H100", 128, 12, 1, 44_123),
    ("3B", "H100", 128, 8, 1, 23_422),
    ("7B", "H100", 128, 6, 1, 10_475),
    ("7B", "H100", 512, 6, 1, 9670),
]
GIB = 2**30


def selective() -> Any:
    """The contexts of one block: attention is kept, and of matrix products every second one."""
    products = {False: 0, True: 0}  # seen in the forward pass, and when it is repeated

    def policy(context, function, *args, **kwargs):
        if function is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        else:
            keeps = "attention" in str(function) or "reduce_scatter" in str(function)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def llama(gpus: int) -> TrainingReport:
    """The report of three steps of Llama 3.1 8B as one rank of `gpus`."""
    with virtual_gpus(8, shapes_only=True, rank=0, world_size=gpus, **H100):
        with record_training() as recorded:
            model = build("8B", gpus, lambda block: checkpoint_wrapper(block, context_fn=selective))
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            words = torch.zeros(SAMPLES, LENGTH, dtype=torch.long, device="cuda")
            for _ in range(3):
                step(model, optimizer, words)
        shape, parameters = SHAPES["8B"], sum(p.numel() for p in model.parameters())
        flops = transformer_flops(parameters, shape.layers, shape.width, LENGTH)
        return recorded.report(tokens=gpus * SAMPLES * LENGTH, flops_per_unit=flops)


def mpt(size: str, kind: str, gpus: int, sequences: int, parts: int) -> TrainingReport:
    """The report of two steps of an MPT, of `parts` micro-batches of `sequences` each."""
    hardware = {"kind": kind, "memory": "79 GiB", "network": "InfiniBand NDR", "adapters": 8}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shape = MPT[size]
    with virtual_gpus(8, shapes_only=True, rank=0, world_size=gpus, **hardware):
        mesh = init_device_mesh("cuda", (gpus,))
        with record_training() as recorded:
            with torch.device("meta"):
                model = GPT(words=MPT_WORDS, length=MPT_LENGTH, **shape)
                model.head.weight = model.words.weight
            for layer in (*model.blocks, model):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            model.to_empty(device="cuda")
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            words = torch.zeros(sequences, MPT_LENGTH, dtype=torch.long, device="cuda")
            for _ in range(2):
                for _ in range(parts):
                    cross_entropy(model(words).flatten(0, 1).float(), words.flatten()).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        parameters = sum(p.numel() for p in model.parameters())
        flops = transformer_flops(parameters, shape["layers"], shape["hidden"], MPT_LENGTH)
        return recorded.report(tokens=gpus * parts * words.numel(), flops_per_unit=flops)


def speed(report: TrainingReport, gpus: int, published: int) -> str:
    """The last columns of a row."""
    assert report.units_per_second is not None and report.mfu is not None
    each = report.units_per_second / gpus
    return f"{each:,.0f} | {published:,} | {100 * (each / published - 1):+.0f} % | {100 * report.mfu:.0f} % |"


def main() -> None:
    """Print the tables."""
    print("| Llama 3.1 8B | reserved, GiB | published | error | tokens/s per GPU | published | error | MFU |")
    print("|---|---|---|---|---|---|---|---|")
    for gpus, (gib, tokens) in LLAMA.items():
        report = llama(gpus)
        reserved = report.reserved_bytes / GIB
        error = f"{100 * (reserved / gib - 1):+.0f} %"
        print(f"| {gpus} H100 | {reserved:.1f} | {gib} | {error} | {speed(report, gpus, tokens)}")
    print("\n| MPT | reserved, GiB | tokens/s per GPU | published | error | MFU |")
    print("|---|---|---|---|---|---|")
    for size, kind, gpus, sequences, parts, tokens in MPT_ROWS:
        report = mpt(size, kind, gpus, sequences, parts)
        name, reserved = f"{size}, {gpus} {kind}", report.reserved_bytes / GIB
        print(f"| {name} | {reserved:.1f} | {speed(report, gpus, tokens)}", flush=True)


if __name__ == "__main__":
    main()
