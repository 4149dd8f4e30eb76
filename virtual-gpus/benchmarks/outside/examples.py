"""The programs of pytorch/examples."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.outside import data
from benchmarks.outside.programs import ATTENTION, DROPOUT, ROUNDING, ZEROS, Program, Run


def _images(size: int = 256, each: int = 8, **keywords) -> Callable[[Path], None]:
    def make(copy: Path) -> None:
        for part in ("train", "val"):
            data.images(copy / "data" / part, size, each, **keywords)

    return make


def _words(copy: Path) -> None:
    for part, lines in (("train", 400), ("valid", 60), ("test", 60)):
        data.text(copy / "word_language_model/data/wikitext-2", f"{part}.txt", lines)


def _checkpoint(copy: Path) -> None:
    """What FSDP2's example goes on from. It loads no state of the optimizer that is not in the file."""
    folder = copy / "distributed/FSDP2"
    program = runpy.run_path(str(folder / "model.py"))
    saved = folder / "checkpoints/dtensor_api/1"
    saved.mkdir(parents=True)
    torch.manual_seed(0)
    net = program["Transformer"](program["ModelArgs"](10, vocab_size=1024, max_seq_len=64, dropout_p=0))
    torch.save(net.state_dict(), saved / "model_state_dict.pt")
    torch.save({"param_groups": [], "state": {}}, saved / "optim_state_dict.pt")


_IMAGENET = "main.py ../data -j 0 --epochs 1 -b 4 --lr 0.001 -p 1 --seed 1"
_IMAGENET_DDP = "-a vit_b_32 --multiprocessing-distributed --world-size 1 --rank 0 --dist-url tcp://127.0.0.1:23456"
_MINGPT_DDP = "data_config.path=input.txt data_config.truncate=1.0 "
_MINGPT_DDP += "data_config.train_split=0.899 data_config.block_size=32 gpt_config.n_layer=2 "
_MINGPT_DDP += "gpt_config.n_head=2 gpt_config.n_embd=32 trainer_config.max_epochs=1 trainer_config.use_amp=False "
_MINGPT_DDP += (
    "trainer_config.data_loader_workers=0 +gpt_config.embd_pdrop=0 +gpt_config.resid_pdrop=0 +gpt_config.attn_pdrop=0"
)


_FSDP_TP_ON_THE_CPU = (
    ("fsdp_tp_example.py", "if not verify_min_gpu_count", "if False and verify_min_gpu_count"),
    ("fsdp_tp_example.py", "torch.accelerator.current_accelerator().type", '"cpu"'),
    # DTensor knows the fused attention of a GPU, and not that of the CPU
    (
        "llama2_model.py",
        "F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)",
        "type(xq).from_local(F.scaled_dot_product_attention("
        "xq.to_local(), xk.to_local(), xv.to_local(), is_causal=True), xq.device_mesh, xq.placements)",
    ),
)
_BATCH_ON_THE_CPU = (
    ("reinforce.py", "Policy(batch).cuda()", "Policy(batch)"),
    ("reinforce.py", ".cuda()", ".clone()"),  # a copy, as on a GPU
)
_DDP_RPC_ON_THE_CPU = tuple(
    ("main.py", old, new)
    for old, new in (
        ("if not verify_min_gpu_count", "if False and verify_min_gpu_count"),
        ("torch.accelerator.current_accelerator()", '"cpu"'),
        ("torch.accelerator.device_index(rank)", "pass"),
        (".to(rank)", ""),
        (".to(self.rank)", ""),
    )
)


def _example(name: str, uses: str, on: Run, beside: Run, **keywords) -> Program:
    """One of PyTorch's examples; what stands after a comma in its name tells runs of one program apart."""
    return Program(f"examples/{name}", "examples", name.split(",")[0], uses, on, beside, **keywords)


def _pytorch_examples() -> list[Program]:
    return [
        _example(
            "mnist",
            "one GPU, Adadelta",
            Run("main.py --epochs 1 --log-interval 1 --lr 0.05", gpus=1),
            Run(
                "main.py --epochs 1 --log-interval 1 --lr 0.05 --no-accel",
                edits=(("main.py", "args.batch_size}", "args.batch_size, 'shuffle': True}"),),  # as on a GPU
            ),
            data=lambda copy: data.mnist(copy / "data"),
            draws=True,
        ),
        _example(
            "vae",
            "one GPU",
            Run("main.py --epochs 1", gpus=1),
            Run("main.py --epochs 1 --no-accel"),
            data=lambda copy: data.mnist(copy / "data"),
            draws=True,
        ),
        _example(
            "mnist_rnn",
            "one GPU, LSTM",
            Run("main.py --epochs 1 --accel", gpus=1),
            Run("main.py --epochs 1"),
            data=lambda copy: data.mnist(copy / "data"),
            draws=True,
        ),
        _example(
            "mnist_hogwild",
            "one GPU shared by two processes",
            Run("main.py --epochs 1 --cuda --dry-run", gpus=1),
            Run("main.py --epochs 1 --dry-run"),
            data=lambda copy: data.mnist(copy / "data"),
            within=0.1,
            note=f"two processes write without locks, and {DROPOUT}",
        ),
        _example(
            "mnist_forward_forward",
            "one GPU",
            Run("main.py --epochs 2 --train_size 256 --test_size 64 --save_model", gpus=1),
            Run(
                "main.py --epochs 2 --train_size 256 --test_size 64 --save_model --no_accel",
                edits=(
                    ("main.py", '{"batch_size": args.train_size}', '{"batch_size": args.train_size, "shuffle": True}'),
                ),
            ),
            data=lambda copy: data.mnist(copy / "mnist_forward_forward/data"),
        ),
        _example(
            "siamese_network",
            "one GPU, ResNet-18",
            Run("main.py --epochs 1 --dry-run --batch-size 8 --test-batch-size 16", gpus=1),
            Run("main.py --epochs 1 --dry-run --batch-size 8 --test-batch-size 16 --no-accel"),
            data=lambda copy: data.mnist(copy / "data"),
            within=0.5,
            note="the program chooses its pairs at random, with a generator that it does not seed",
        ),
        _example("regression", "the CPU alone while GPUs are on", Run("main.py", gpus=1), Run("main.py")),
        _example(
            "imagenet, one GPU",
            "one GPU, ResNet-18",
            Run(f"{_IMAGENET} --gpu 0", gpus=1),
            Run(f"{_IMAGENET} --no-accel"),
            data=_images(each=4),
        ),
        _example(
            "imagenet, DataParallel",
            "DataParallel on four GPUs, vit_b_32",
            Run(f"{_IMAGENET} -a vit_b_32", gpus=4),
            Run(f"{_IMAGENET} -a vit_b_32 --no-accel"),
            data=_images(each=4),
        ),
        _example(
            "imagenet, DDP",
            "DDP on two GPUs by spawn, nccl, vit_b_32",
            Run(f"{_IMAGENET} {_IMAGENET_DDP}", gpus=2),
            Run(f"{_IMAGENET} {_IMAGENET_DDP} --no-accel --dist-backend gloo"),
            data=_images(each=4, one_colour=True),  # each process cuts out parts of its images at random
        ),
        _example(
            "dcgan",
            "one GPU",
            Run("main.py --dataset fake --accel --dry-run --manualSeed 1 --workers 0 --ngf 16 --ndf 16", gpus=1),
            Run("main.py --dataset fake --dry-run --manualSeed 1 --workers 0 --ngf 16 --ndf 16"),
            draws=True,
        ),
        *(
            _example(
                f"word_language_model, {model}",
                f"one GPU, {model}",
                Run(
                    f"main.py --epochs 1 --dropout 0 --emsize 32 --nhid 32 --lr {rate} --model {model} --accel", gpus=1
                ),
                Run(f"main.py --epochs 1 --dropout 0 --emsize 32 --nhid 32 --lr {rate} --model {model}"),
                data=_words,
                **more,
            )
            for model, rate, more in (
                ("LSTM", 20, {}),
                ("GRU", 20, {}),
                ("RNN_TANH", 20, {}),
                ("Transformer", 0.1, {"within": 0.05, "note": ATTENTION}),
            )
        ),
        _example(
            "super_resolution",
            "one GPU",
            Run("main.py --upscale_factor 3 --batchSize 4 --nEpochs 1 --threads 0 --accel", gpus=1),
            Run("main.py --upscale_factor 3 --batchSize 4 --nEpochs 1 --threads 0"),
            data=lambda copy: [
                data.flat_images(copy / "super_resolution/dataset/BSDS300/images" / part, 300, 8)
                for part in ("train", "test")
            ],
        ),
        *(
            _example(f"fx, {program}", "torch.fx while GPUs are on", Run(f"{program}.py", gpus=1), Run(f"{program}.py"))
            for program in ("replace_op",)
        ),
        _example(
            "distributed/ddp",
            "DDP under torchrun on four GPUs",
            Run("example.py", gpus=4, ranks=4),
            Run("example.py", gpus=2, ranks=2),
        ),
        _example(
            "distributed/ddp-tutorial-series, single_gpu",
            "one GPU",
            Run("single_gpu.py 1 1", gpus=1),
            Run("single_gpu.py 1 1", edits=(("single_gpu.py", "device = 0 ", 'device = "cpu" '),)),
        ),
        *(
            _example(
                f"distributed/ddp-tutorial-series, {program}",
                f"DDP on two GPUs {how}",
                Run(f"{program}.py 1 1 --batch_size 16", gpus=2, ranks=ranks),
                Run("single_gpu.py 1 1 --batch_size 32", gpus=1),
            )
            for program, how, ranks in (
                ("multigpu", "by spawn", 0),
                ("multigpu_torchrun", "under torchrun", 2),
                ("multinode", "under torchrun", 2),
            )
        ),
        _example(
            "distributed/minGPT-ddp",
            "DDP under torchrun on two GPUs",
            Run(f"mingpt/main.py {_MINGPT_DDP} trainer_config.batch_size=8", gpus=2, ranks=2),
            Run(f"mingpt/main.py {_MINGPT_DDP} trainer_config.batch_size=4", gpus=4, ranks=4),
            data=lambda copy: data.text(copy / "distributed/minGPT-ddp", "input.txt", 30),
        ),
        _example(
            "distributed/FSDP2",
            "fully_shard from meta on two GPUs",
            Run("example.py", gpus=2, ranks=2, variables=ZEROS),  # its layers keep what to_empty left
            Run("example.py --explicit-prefetching", gpus=2, ranks=2, variables=ZEROS),
        ),
        *(
            _example(
                f"distributed/FSDP2, {name}",
                "fully_shard on two GPUs, DTensor checkpoints",
                Run(f"example.py {option}", gpus=2, ranks=2),
                Run(f"example.py {option}", gpus=4, ranks=4),
                data=_checkpoint,
                within=within,
                note=ROUNDING,
            )
            for name, option, within in (
                ("from a checkpoint", "", 1e-4),
                ("--mixed-precision", "--mixed-precision", 0.02),
            )
        ),
        *(
            _example(
                f"distributed/tensor_parallelism, {program}",
                what,
                Run(f"{program}_example.py", gpus=gpus, ranks=gpus),
                beside,
                within=1e-4,
                note=ROUNDING,
                draws=beside.gpus == 0,
            )
            for program, what, gpus, beside in (
                ("tensor_parallel", "DTensor, two GPUs", 2, Run("tensor_parallel_example.py", gpus=4, ranks=4)),
                ("sequence_parallel", "DTensor, two GPUs", 2, Run("sequence_parallel_example.py", gpus=4, ranks=4)),
                (
                    "fsdp_tp",
                    "fully_shard and tensor parallel on four GPUs",
                    4,
                    Run("fsdp_tp_example.py", ranks=4, edits=_FSDP_TP_ON_THE_CPU),
                ),
            )
        ),
        _example(
            "distributed/rpc/ddp_rpc",
            "DDP and RPC, four processes, two GPUs",
            Run("main.py", gpus=2),
            Run("main.py", edits=_DDP_RPC_ON_THE_CPU),
            within=0.1,
            note="two trainers write to one table without locks",
        ),
        _example(
            "distributed/rpc/rnn",
            "RPC, distributed autograd",
            Run("main.py", gpus=2, variables=ZEROS),  # its data are what torch.LongTensor(5, 6) found in memory
            Run("main.py", variables=ZEROS),
            draws=True,
        ),
        _example(
            "distributed/rpc/pipeline",
            "RPC, two GPUs",
            Run("main.py", gpus=2),
            Run(
                "main.py",
                edits=(("main.py", '"cuda:0"', '"cpu"'), ("main.py", '"cuda:1"', '"cpu"')),
                variables=(("TORCH_COMPILE_DISABLE", "1"),),
            ),
            draws=True,
        ),
        _example(
            "distributed/rpc/batch",
            "RPC on one GPU",
            Run("reinforce.py --num-episode 1 --max-world-size 3", gpus=1),
            Run("reinforce.py --num-episode 1 --max-world-size 3", edits=_BATCH_ON_THE_CPU),
            draws=True,
        ),
    ]


PROGRAMS = _pytorch_examples()
