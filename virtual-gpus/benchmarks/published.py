"""One rank of many beside published figures: Llama 3.1 8B under torchtitan on 8 and on 128 H100.

    python -m benchmarks.published

The figures are those of benchmarks/llama3_h100_202412_torchtitan.md in github.com/pytorch/torchtitan, December 2024:
tables 1 and 3, FSDP without torch.compile. Each rank has 2 sequences of 8,192 tokens, and selective checkpointing keeps
attention and every second matrix product. The model here is that of `scale`, of the same shape, and not torchtitan's
code. Their H100 had 96 GB of HBM2e at 2.4 TB/s and a limit of 500 W. The data sheet of the virtual one says 80 GB of
HBM3 at 3.35 TB/s and 700 W. Modelled times are therefore too short. Memory is what PyTorch reserved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from virtual_gpus import record_training, transformer_flops, virtual_gpus

from benchmarks.scale import LENGTH, SHAPES, build, step

HARDWARE = {"kind": "H100", "memory": "94 GiB", "network": "InfiniBand NDR", "adapters": 8}
PUBLISHED = {8: (82.4, 5762), 128: (67.0, 5605)}  # GPUs -> GiB, tokens per second and GPU
SAMPLES = 2
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


def main() -> None:
    """Print the table."""
    print("| GPUs | reserved, GiB | published | error | tokens/s and GPU | published | error | MFU |")
    print("|---|---|---|---|---|---|---|---|")
    for gpus, (gib, speed) in PUBLISHED.items():
        with virtual_gpus(8, shapes_only=True, rank=0, world_size=gpus, **HARDWARE):
            with record_training() as recorded:
                model = build("8B", gpus, lambda block: checkpoint_wrapper(block, context_fn=selective))
                optimizer = torch.optim.AdamW(model.parameters(), fused=True)
                words = torch.zeros(SAMPLES, LENGTH, dtype=torch.long, device="cuda")
                for _ in range(3):
                    step(model, optimizer, words)
            shape, parameters = SHAPES["8B"], sum(p.numel() for p in model.parameters())
            flops = transformer_flops(parameters, shape.layers, shape.width, LENGTH)
            report = recorded.report(tokens=gpus * SAMPLES * LENGTH, flops_per_unit=flops)
        assert report.units_per_second is not None and report.mfu is not None
        reserved, each = report.reserved_bytes / GIB, report.units_per_second / gpus
        print(
            f"| {gpus} | {reserved:.1f} | {gib} | {reserved / gib - 1:+.0%} "
            f"| {each:,.0f} | {speed:,} | {each / speed - 1:+.0%} | {report.mfu:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
