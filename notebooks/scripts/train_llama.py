"""Train a Llama on a text with one process per GPU: the program to take to a cluster. Lesson 08 explains its parts.

    torchrun --standalone --nproc-per-node 2 train_llama.py
    torchrun --standalone --nproc-per-node 2 -m virtual_gpus --gpus 2 train_llama.py     # without GPUs
    torchrun --standalone --nproc-per-node 8 train_llama.py --size 8b --sequence 4096 --batch-size 64 --micro-batch 1 \
        --tensor-parallel 2 --recompute --learning-rate 3e-4 --steps 1000 --snapshots run --export llama.pt

--tensor-parallel processes divide each layer, and all such groups share each batch and the sharded model. A token is a
byte of the file, or a number of the type --token-type. A run continues from its newest snapshot, also with another
number of processes, if all machines share the disk. No process ever holds the whole model, except to export it.
"""

import argparse
import json
import logging
import math
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, parallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

DATA = Path(__file__).parent / "../../data/pride_and_prejudice.txt"  # the novel that comes with the course
RANK, LOCAL_RANK = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
DEVICE = torch.device(f"cuda:{LOCAL_RANK}" if torch.cuda.is_available() else "cpu")
PEAKS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312, "L40S": 362, "RTX 4090": 165}  # TFLOP/s in bfloat16
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # no advice about the 2-D mesh
PARTS = ("model_state_dict", "optim_state_dict")  # of a snapshot
SIZES = {  # 1b and 8b: the sizes of Llama 3.2 1B and Llama 3.1 8B, but the output layer of 1b has weights of its own
    "tiny": {"vocabulary": 256, "width": 64, "layers": 2, "heads": 8, "kv_heads": 4, "hidden": 192},
    "1b": {"vocabulary": 128_256, "width": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "hidden": 8192},
    "8b": {"vocabulary": 128_256, "width": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14_336},
}


class Attention(nn.Module):  # Several query heads share one key head and one value head.
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.head_width = width // heads
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, kv_heads * self.head_width, bias=False) for _ in range(2))

    def forward(self, x, cosines, sines):
        layers = (self.query, self.key, self.value)  # With tensor parallelism, each process has some of the heads.
        query, key, value = (layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in layers)
        query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x, cosines, sines):  # Rotary positions: each pair of numbers turns by an angle that grows with the position.
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1).type_as(x)


class FeedForward(nn.Module):  # SwiGLU
    def __init__(self, width, hidden):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width, heads, kv_heads, hidden):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width, eps=1e-5), Attention(width, heads, kv_heads)
        self.norm2, self.feed_forward = nn.RMSNorm(width, eps=1e-5), FeedForward(width, hidden)

    def forward(self, x, cosines, sines):
        x = x + self.attention(self.norm1(x), cosines, sines)
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):  # tokens (N, T) -> logits (N, T, vocabulary)
    def __init__(self, vocabulary, width, layers, heads, kv_heads, hidden, recompute=False):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.head_width, self.recompute = width // heads, recompute

    def forward(self, tokens):
        speeds = 500_000 ** -(torch.arange(0, self.head_width, 2, device=tokens.device) / self.head_width)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), speeds)
        x = self.embedding(tokens)
        for block in self.blocks:
            inputs = (x, angles.cos(), angles.sin())
            x = checkpoint(block, *inputs, use_reentrant=False) if self.recompute else block(*inputs)
        return self.output(self.norm(x))


class Text(Dataset):  # sequences of length + 1 tokens; each begins with the last token of the one before
    def __init__(self, path, dtype, count, length):
        self.path, self.dtype, self.count, self.length = str(path), dtype, count, length

    def __len__(self):
        return (self.count - 1) // self.length

    def __getitem__(self, row):
        # The file is mapped, not read, and here, since a mapped tensor cannot be sent to a worker that is not forked.
        tokens = torch.from_file(self.path, size=self.count, dtype=self.dtype)
        return tokens[row * self.length : (row + 1) * self.length + 1]


def plan():  # how tensor parallelism divides the layers; between them, each process has some tokens
    tokens, everything = Shard(1), Replicate()
    gather = {"input_layouts": (tokens, None, None), "desired_input_layouts": (everything, None, None)}
    return {
        "embedding": parallel.RowwiseParallel(input_layouts=everything, output_layouts=tokens),
        "blocks.*.norm?": parallel.SequenceParallel(),
        "blocks.*.attention": parallel.PrepareModuleInput(**gather),
        "blocks.*.feed_forward": parallel.PrepareModuleInput(input_layouts=tokens, desired_input_layouts=everything),
        "norm": parallel.SequenceParallel(),
        # The logits stay divided by words, and `loss_parallel` computes the loss from its parts.
        "output": parallel.ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
        "blocks.*.attention.[qkv]*": parallel.ColwiseParallel(),  # query, key, value
        "blocks.*.attention.out": parallel.RowwiseParallel(output_layouts=tokens),
        "blocks.*.feed_forward.[gu]*": parallel.ColwiseParallel(),  # gate, up
        "blocks.*.feed_forward.down": parallel.RowwiseParallel(output_layouts=tokens),
    }


def build(args, mesh):  # the sharded model, whose weights do not depend on the number of processes
    with torch.device("meta"):  # shapes only, so that no process ever holds the whole model
        model = Llama(**SIZES[args.size], recompute=args.recompute)
    if args.tensor_parallel > 1:
        parallel.parallelize_module(model, mesh["tensor"], plan())
    policy = MixedPrecisionPolicy(None if args.float32 else torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["data"], mp_policy=policy)
    model.to_empty(device=DEVICE)  # memory for the shards, without values
    for number, (name, weight) in enumerate(model.named_parameters()):
        values = torch.ones(weight.shape, device=DEVICE)  # one parameter at a time, of which each keeps its shard
        if "norm" not in name:
            depth = 2 * len(model.blocks) if name.endswith(("out.weight", "down.weight")) else 1
            values.normal_(std=0.02 / math.sqrt(depth), generator=torch.Generator(DEVICE).manual_seed(number))
        weight.detach().copy_(distribute_tensor(values, weight.device_mesh, weight.placements, src_data_rank=None))
    return model


def batches(sequences, batch, steps, group, groups):
    """A group's sequences in each step. The order depends only on the epoch, so any step can be a run's first one."""
    for step in steps:
        epoch, place = divmod(step, sequences // batch)
        if place == 0 or step == steps[0]:
            order = torch.randperm(sequences, generator=torch.Generator().manual_seed(epoch))
        yield order[place * batch :][:batch].chunk(groups)[group].tolist()


class Snapshots:  # folders step_00000100, step_00000200, ..., written while the training goes on; the last two stay
    def __init__(self, folder, job):
        self.folder, self.job, self.pending = folder, job, None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.writers = dist.new_group(backend="gloo")  # their messages must not mix with those of the training

    def save(self, model, optimizer, step):
        self.finish()
        state = dict(zip(PARTS, states.get_state_dict(model, optimizer), strict=True))
        self.pending = step, dcp.async_save(state, checkpoint_id=self.folder / "temporary", process_group=self.writers)

    def finish(self):  # Wait until the snapshot is complete, and then give it its name.
        if self.pending:
            step, writing = self.pending
            writing.result()
            if RANK == 0:
                (self.folder / "temporary/job.json").write_text(json.dumps(self.job | {"step": step}))
                shutil.rmtree(self.folder / f"step_{step:08}", ignore_errors=True)  # a damaged one
                os.replace(self.folder / "temporary", self.folder / f"step_{step:08}")
                for old in sorted(self.folder.glob("step_????????"))[:-2]:
                    shutil.rmtree(old)
            dist.barrier(self.writers)
            self.pending = None

    def load(self, model, optimizer):  # Return the steps done. If a snapshot cannot be read, take the one before it.
        shutil.rmtree(self.folder / "temporary", ignore_errors=True)  # of a program that was killed
        found = [sorted(self.folder.glob("step_????????"), reverse=True)]
        dist.broadcast_object_list(found)  # All take those that rank 0 has found.
        for folder in found[0]:
            job = json.loads((folder / "job.json").read_text())
            if job | self.job != job:
                raise SystemExit(f"{folder} was saved by a run with {job}. This run has {self.job}.")
            state = dict(zip(PARTS, states.get_state_dict(model, optimizer), strict=True))
            try:
                dcp.load(state, checkpoint_id=folder, process_group=self.writers)  # pickle: load only what you trust
                states.set_state_dict(model, optimizer, **state)
                return job["step"]
            except dcp.api.CheckpointException as error:
                print(f"rank {RANK} cannot read {folder}: {[*error.failures.values()][0][0]!r:.99}", flush=True)
        if found[0]:
            raise SystemExit(f"No snapshot in {self.folder} can be read. To begin anew, name another folder.")
        return 0


def parse_arguments():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--data", type=Path, default=DATA, help="a file of tokens, one after the other")
    parser.add_argument("--token-type", choices=("uint8", "uint16", "int32"), default="uint8", help="uint8: bytes")
    parser.add_argument("--sequence", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step, on all GPUs together")
    parser.add_argument("--micro-batch", type=int, help="sequences that a process computes at once; default: its share")
    parser.add_argument("--steps", type=int, default=200, help="steps in total, including those before a restart")
    parser.add_argument("--max-steps", type=int, help="stop after this many steps of this run, and save a snapshot")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="after the warm-up, a tenth of the steps")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="processes that divide each layer")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing: less memory, more time")
    parser.add_argument("--float32", action="store_true", help="compute in float32, and not in bfloat16")
    parser.add_argument("--snapshots", type=Path, help="the folder to save snapshots to and to continue from")
    parser.add_argument("--save-every", type=int, default=100, help="steps between two snapshots")
    parser.add_argument("--export", type=Path, help="at the end, write the weights to this file")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines")
    parser.add_argument("--workers", type=int, default=1, help="processes that load sequences, for each GPU")
    return parser.parse_args()


def main():
    args = parse_arguments()
    for name, value in vars(args).items():
        if type(value) is int and value < 1 and name != "workers":
            raise SystemExit(f"--{name.replace('_', '-')} is {value}. It must be at least 1.")
    if "RANK" not in os.environ:
        raise SystemExit(f"Start this program with torchrun: torchrun --standalone --nproc-per-node 2 {__file__}")
    ranks = int(os.environ["WORLD_SIZE"])
    groups = max(1, ranks // args.tensor_parallel)
    micro_batch = args.micro_batch or max(1, args.batch_size // groups)
    if any(number % args.tensor_parallel for number in (ranks, args.sequence, SIZES[args.size]["kv_heads"])):
        raise SystemExit(f"--tensor-parallel must divide the {ranks} processes, --sequence, and the model's key heads.")
    if args.batch_size % (groups * micro_batch):
        raise SystemExit(f"--batch-size must be a multiple of {groups * micro_batch}: {groups} groups x {micro_batch}.")
    count = args.data.stat().st_size // getattr(torch, args.token_type).itemsize if args.data.is_file() else 0
    if count <= args.batch_size * args.sequence:
        raise SystemExit(f"{args.data} is not a file with enough text for one batch.")
    if RANK == 0 and args.export and (args.export.is_dir() or not args.export.parent.is_dir()):
        raise SystemExit(f"--export {args.export}: name a file in a folder that exists.")
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo")
    mesh = dist.init_device_mesh(DEVICE.type, (groups, args.tensor_parallel), mesh_dim_names=("data", "tensor"))
    model = build(args, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    job = {"size": args.size, "sequence": args.sequence, "batch_size": args.batch_size, "tokens": count}
    snapshots = Snapshots(args.snapshots, job) if args.snapshots else None
    first = snapshots.load(model, optimizer) if snapshots else 0
    last = min(args.steps, first + (args.max_steps or args.steps))
    if first and RANK == 0:
        print(f"continues after step {first} of {args.steps}", flush=True)
    text = Text(args.data, getattr(torch, args.token_type), count, args.sequence)
    own = batches(len(text), args.batch_size, range(first, last), mesh.get_local_rank("data"), groups)
    loader = DataLoader(text, batch_sampler=own, num_workers=args.workers, pin_memory=DEVICE.type == "cuda")
    weights = sum(parameter.numel() for parameter in model.parameters()) - model.embedding.weight.numel()
    operations = 6 * weights + 12 * len(model.blocks) * model.embedding.embedding_dim * args.sequence  # of a token
    kind = torch.cuda.get_device_name() if DEVICE.type == "cuda" else ""
    peak = next((1e12 * PEAKS[name] for name in PEAKS if name in kind), None)
    started, logged = time.perf_counter(), first
    for step, sequences in enumerate(loader, first + 1):
        parts = sequences.to(DEVICE, non_blocking=True).long().split(micro_batch)
        total = torch.zeros((), device=DEVICE)
        for number, part in enumerate(parts, 1):
            # Only the last micro-batch sums over the groups. Until then, each keeps gradients of the size of the model.
            model.set_requires_gradient_sync(number == len(parts))
            with parallel.loss_parallel():  # changes nothing without tensor parallelism
                logits = model(part[:, :-1]).flatten(0, 1).float()
                loss = nn.functional.cross_entropy(logits, part[:, 1:].flatten()) / len(parts)
                loss.backward()
            total += loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach()
        norm = nn.utils.get_total_norm(parameter.grad for parameter in model.parameters()).full_tensor()
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        rate = args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))  # a cosine, down to a tenth
        rate = optimizer.param_groups[0]["lr"] = rate * min(1.0, step / (0.1 * args.steps))  # a warm-up
        optimizer.step()
        optimizer.zero_grad()
        if step % args.log_every == 0 or step == last:
            dist.all_reduce(total)  # Reading `total` and `norm` waits for the GPU, hence not in every step.
            speed = (step - logged) * args.batch_size * args.sequence / (time.perf_counter() - started)
            line = f"step {step} | loss {total.item() / ranks:.4f} | norm {norm.item():.3f} | lr {rate:.1e}"
            line += f" | {speed:,.0f} tokens/s" + (f" | MFU {speed * operations / peak / ranks:.1%}" if peak else "")
            line += f" | peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if kind else ""
            if RANK == 0:
                print(line, flush=True)
            started, logged = time.perf_counter(), step
        if snapshots and (step % args.save_every == 0 or step == last):
            if not norm.isfinite():
                snapshots.finish()
                raise SystemExit(f"In step {step}, the norm of the gradients is {norm.item()}. No snapshot is saved.")
            snapshots.save(model, optimizer, step)
    if snapshots:
        snapshots.finish()
    if args.export:
        options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)  # the whole model, on rank 0 only
        weights = states.get_model_state_dict(model, options=options)
        if RANK == 0:
            torch.save(weights, args.export.with_suffix(".tmp"))
            os.replace(args.export.with_suffix(".tmp"), args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
