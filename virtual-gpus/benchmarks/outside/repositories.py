"""Small repositories that people learn from."""

from __future__ import annotations

from benchmarks.outside import data
from benchmarks.outside.programs import BFLOAT16, Program, Run

_NANO = (
    "train.py config/train_shakespeare_char.py --n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=4 "
    "--max_iters=10 --eval_iters=2 --dropout=0.0 "
)


# The program asks for the same bits from a matrix product and from its half. MKL gives them in this mode only, with
# virtual GPUs and without.
_EVERY_SIZE_ALIKE = ("MKL_CBWR", "COMPATIBLE")
_BENCH = "bench.py --real_data=False --batch_size=1 --block_size=64"
_GUIDE = "-d ../corpus -m ../tiny -s 32 --num-epochs 1 --log-freq 1"


def _guide_on_the_cpu(ranks: int) -> Run:
    edits = [
        ("torch.cuda.reset_peak_memory_stats(device)", "pass"),
        ("mem = torch.cuda.memory_stats(device)", "return __import__('collections').Counter()"),
    ]
    if ranks:
        edits += [
            ("torch.cuda.device_count()", "2"),
            ('f"cuda:{local_rank}"', '"cpu"'),
            ("torch.cuda.set_device(device)", "pass"),
            ("init_process_group(rank=rank, world_size=world_size, device_id=device)", 'init_process_group("gloo")'),
        ]
    else:
        edits.append(('torch.device("cuda")', 'torch.device("cpu")'))
    return Run(
        f"train_llm.py {_GUIDE} -b {4 if ranks else 8}",
        ranks=ranks,
        edits=tuple(("train_llm.py", old, new) for old, new in edits),
        variables=(("TORCH_COMPILE_DISABLE", "1"),),
    )


def _small_repositories() -> list[Program]:
    text = {"data": lambda copy: data.text(copy / "data/shakespeare_char", "input.txt", 800)}
    text["first"] = ("data/shakespeare_char/prepare.py",)
    return [
        Program(
            "nanoGPT, default flags",
            "nanoGPT",
            "",
            "one GPU, torch.compile, bfloat16 autocast",
            Run(_NANO, gpus=1),
            Run(f"{_NANO} --device=cpu --compile=False"),
            within=0.01,
            note="bfloat16 compared with float32",
            **text,
        ),
        Program(
            "nanoGPT, float32",
            "nanoGPT",
            "",
            "one GPU",
            Run(f"{_NANO} --compile=False --dtype=float32", gpus=1),
            Run(f"{_NANO} --device=cpu --compile=False --dtype=float32"),
            **text,
        ),
        Program(
            "nanoGPT, DDP",
            "nanoGPT",
            "",
            "DDP under torchrun on two GPUs",
            Run(f"{_NANO} --compile=False --dtype=float32 --gradient_accumulation_steps=2", gpus=2, ranks=2),
            Run(
                f"{_NANO} --compile=False --dtype=float32 --gradient_accumulation_steps=2 --backend=gloo",
                ranks=2,
                edits=(
                    ("train.py", "f'cuda:{ddp_local_rank}'", "'cpu'"),
                    ("train.py", "torch.cuda.set_device(device)", "pass"),
                    ("train.py", ", device_ids=[ddp_local_rank]", ""),
                ),
            ),
            **text,
        ),
        Program(
            "nanoGPT, bench",
            "nanoGPT",
            "",
            "one GPU, torch.compile",
            Run(f"{_BENCH} --compile=True", gpus=1),
            Run(
                f"{_BENCH} --compile=False --device=cpu --dtype=float32",
                edits=(("bench.py", "torch.cuda.synchronize()", "pass"),),
            ),
            within=0.01,
            note=BFLOAT16,
            draws=True,
        ),
        Program(
            "minGPT, chargpt",
            "minGPT",
            "",
            "one GPU",
            Run(
                "projects/chargpt/chargpt.py --model.model_type=gpt-nano --trainer.max_iters=5 --trainer.num_workers=0",
                gpus=1,
            ),
            Run(
                "projects/chargpt/chargpt.py --model.model_type=gpt-nano --trainer.max_iters=5 --trainer.num_workers=0 "
                "--trainer.device=cpu"
            ),
            data=lambda copy: data.text(copy, "input.txt", 800, last="O God, O God!"),  # its model goes on from there
            draws=True,
        ),
        Program(
            "minGPT, adder",
            "minGPT",
            "",
            "one GPU",
            Run("projects/adder/adder.py --trainer.max_iters=5 --trainer.num_workers=0", gpus=1),
            Run("projects/adder/adder.py --trainer.max_iters=5 --trainer.num_workers=0 --trainer.device=cpu"),
            draws=True,
        ),
        Program(
            "pytorch-cifar",
            "pytorch-cifar",
            "",
            "DataParallel on one GPU, SimpleDLA",
            Run("main.py --lr 0.01", gpus=1),
            Run("main.py --lr 0.01"),
            data=lambda copy: data.cifar10(copy / "data", 1),  # it trains for 200 epochs
        ),
        Program(
            "pytorch-multigpu, DDP",
            "pytorch-multigpu",
            "dist_parallel",
            "DDP on two GPUs by spawn, PyramidNet",
            Run("train.py --gpu_devices 0 1 --batch_size 32 --num_workers 0", gpus=2),
            Run(
                "train.py --gpu_devices 0 1 --batch_size 32 --num_workers 0 --dist-backend gloo",
                edits=tuple(
                    ("train.py", old, new)
                    for old, new in (
                        ("torch.cuda.device_count()", "2"),
                        ("net.cuda(args.gpu)", "net"),
                        ("torch.cuda.set_device(args.gpu)", "pass"),
                        (", device_ids=[args.gpu]", ""),
                        (".cuda(device)", ""),
                    )
                ),
            ),
            data=lambda copy: data.cifar10(copy / "data", 8),
        ),
        *(
            Program(
                f"distributed-training-guide, {chapter[:2]}",
                "guide",
                chapter,
                what,
                Run(f"train_llm.py {_GUIDE} -b {4 if ranks else 8}", gpus=max(ranks, 1), ranks=ranks),
                beside,
                data=lambda copy, kind=kind: (data.corpus(copy / "corpus"), data.model(copy / "tiny", kind)),
                within=0.02,
                note="bfloat16",
                draws=beside.gpus == 0,
            )
            for chapter, what, ranks, kind, beside in (
                ("01-single-gpu", "one GPU, torch.compile, bfloat16", 0, "gpt2", _guide_on_the_cpu(0)),
                (
                    "02-distributed-data-parallel",
                    "DDP, ZeroRedundancyOptimizer, torch.compile",
                    2,
                    "gpt2",
                    Run(f"train_llm.py {_GUIDE} -b 8", gpus=1, ranks=1),
                ),
                (
                    "04-fully-sharded-data-parallel",
                    "fully_shard from meta on two GPUs, torch.compile",
                    2,
                    "llama",
                    _guide_on_the_cpu(2),
                ),
            )
        ),
        Program(
            "PyTorch-Encoding, parallel.py",
            "encoding",
            "",
            "DataParallelModel and DataParallelCriterion on four GPUs",
            Run("{callers}/encoding_parallel.py encoding/parallel.py", gpus=4),
            Run("{callers}/encoding_parallel.py encoding/parallel.py"),
        ),
        Program(
            "torchmetrics",
            "packages",
            "",
            "four metrics gathered over two GPUs",
            Run("{callers}/torchmetrics_ddp.py", gpus=2, ranks=2),
            Run("{callers}/torchmetrics_ddp.py", ranks=2),
        ),
        Program(
            "picotron, test_tensor_parallel",
            "picotron",
            "",
            "tensor parallel on two GPUs",
            Run("tests/test_tensor_parallel.py", gpus=2, ranks=2, variables=(("DEVICE", "cuda"), _EVERY_SIZE_ALIKE)),
            Run(
                "tests/test_tensor_parallel.py",
                ranks=2,
                variables=(("DEVICE", "cpu"), _EVERY_SIZE_ALIKE),
                edits=tuple(
                    ("tests/test_tensor_parallel.py", old, new)
                    for old, new in (('"cuda", local_rank', '"cpu"'), ('backend="nccl"', 'backend="gloo"'))
                ),
            ),
            draws=True,
        ),
    ]


PROGRAMS = _small_repositories()
