"""Examples of Lightning, Accelerate, transformers, timm, torchtitan and DeepSpeed, and tests in their packages."""

from __future__ import annotations

from pathlib import Path

from benchmarks.outside import data
from benchmarks.outside.programs import ATTENTION, BFLOAT16, ROUNDING, Program, Run

_FEW = "--trainer.max_epochs=1 --trainer.limit_train_batches=3 --trainer.limit_val_batches=1 "
_FEW += "--trainer.limit_test_batches=1 --trainer.limit_predict_batches=1 "


_SHORT = (("PL_TRAINER_MAX_STEPS", "8"), ("PL_TRAINER_LIMIT_TRAIN_BATCHES", "4"))  # read by Lightning
_PPO = "train_fabric.py --total-timesteps 128 --num-envs 2 --num-steps 16 --per-rank-batch-size 16"


def _lightning(name: str, folder: str, uses: str, on: Run, beside: Run, **keywords) -> Program:
    return Program(f"Lightning, {name}", "lightning", f"examples/{folder}", uses, on, beside, **keywords)


def lightning() -> list[Program]:
    def both_mnists(copy: Path) -> None:  # the examples look into one folder, Lightning's own data module into another
        data.mnist(copy / "examples/Datasets", 60000, 64)
        data.mnist(copy / "examples/pytorch/basics/data", 64, 64)

    basics = {"data": both_mnists}
    autoencoder = f"autoencoder.py {_FEW}"
    backbone = f"backbone_image_classifier.py {_FEW}"
    fabric = {"data": lambda copy: data.mnist(copy / "Datasets", 512, 64)}
    words = {"data": lambda copy: data.text(copy / "examples/pytorch/basics/data", "wikitext-2.txt", 20000)}
    return [
        _lightning(
            "bug report model",
            "pytorch/bug_report",
            "Trainer, one GPU",
            Run("bug_report_model.py", gpus=1),
            Run("bug_report_model.py"),
        ),
        _lightning(
            "autoencoder",
            "pytorch/basics",
            "LightningCLI, one GPU",
            Run(autoencoder, gpus=1),
            Run(autoencoder),
            **basics,
        ),
        _lightning(
            "autoencoder, DDP",
            "pytorch/basics",
            "ddp: Lightning starts the second process",
            Run(f"{autoencoder} --trainer.accelerator gpu --trainer.devices 2 --trainer.strategy ddp", gpus=2),
            Run(f"{autoencoder} --trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp"),
            **basics,
        ),
        _lightning(
            "image classifier",
            "pytorch/basics",
            "LightningCLI, one GPU, bfloat16 autocast",
            Run(f"{backbone} --trainer.precision bf16-mixed", gpus=1),
            Run(backbone),
            within=0.02,
            note=BFLOAT16,
            **basics,
        ),
        _lightning(
            "GAN",
            "pytorch/domain_templates",
            "manual optimization, one GPU",
            Run("generative_adversarial_net.py", gpus=1, variables=_SHORT),
            Run(
                "generative_adversarial_net.py",
                variables=_SHORT,
                edits=(("generative_adversarial_net.py", 'accelerator="gpu"', 'accelerator="cpu"'),),
            ),
            draws=True,
            data=lambda copy: data.mnist(copy / "examples/pytorch/domain_templates/data", 5064, 64),
        ),
        _lightning(
            "transformer",
            "pytorch/basics",
            "Trainer, one GPU, torch.compile",
            Run("transformer.py", gpus=1, variables=_SHORT),
            Run("transformer.py", variables=(*_SHORT, ("TORCH_COMPILE_DISABLE", "1"))),
            within=0.05,
            note=ATTENTION,
            **words,
        ),
        _lightning(
            "Fabric, image classifier",
            "fabric/image_classifier",
            "Fabric, torchmetrics, one GPU",
            Run("train_fabric.py --epochs 1", gpus=1),
            Run("train_fabric.py --epochs 1"),
            draws=True,
            **fabric,
        ),
        _lightning(
            "Fabric, image classifier, DDP",
            "fabric/image_classifier",
            "fabric run: DDP on two GPUs",
            Run(
                "-m lightning.fabric.cli --accelerator cuda --devices 2 --strategy ddp train_fabric.py --epochs 1",
                gpus=2,
            ),
            Run("-m lightning.fabric.cli --accelerator cpu --devices 2 --strategy ddp train_fabric.py --epochs 1"),
            draws=True,
            **fabric,
        ),
        _lightning(
            "Fabric, k-fold",
            "fabric/kfold_cv",
            "Fabric, one GPU",
            Run("train_fabric.py --epochs 1 --folds 2", gpus=1),
            Run("train_fabric.py --epochs 1 --folds 2"),
            draws=True,
            **fabric,
        ),
        _lightning(
            "Fabric, reinforcement learning",
            "fabric/reinforcement_learning",
            "Fabric, gymnasium, one GPU",
            Run(f"{_PPO} --cuda", gpus=1),
            Run(_PPO),
            draws=True,
        ),
    ]


def _pairs(copy: Path, folder: str) -> None:
    data.pairs(copy / folder / "nyu-mll/glue")
    data.metric(copy / folder / "glue")
    data.model(copy / folder / "bert-base-cased", "bert")


def accelerate() -> list[Program]:
    plain = {"data": lambda copy: _pairs(copy, "examples")}
    made = [
        Program(
            f"Accelerate, {name}",
            "accelerate",
            "examples",
            uses,
            on,
            beside,
            **plain,
            **more,
        )
        for name, uses, on, beside, more in (
            ("nlp_example", "one GPU", Run("nlp_example.py", gpus=1), Run("nlp_example.py --cpu"), {}),
            (
                "nlp_example, torchrun",
                "DDP on two GPUs",
                Run("nlp_example.py", gpus=2, ranks=2),
                Run("nlp_example.py --cpu", ranks=2),
                {},
            ),
            (
                "nlp_example, launcher",
                "accelerate launch, DDP on two GPUs",
                Run("-m accelerate.commands.launch --multi_gpu --num_processes 2 nlp_example.py", gpus=2),
                Run("nlp_example.py --cpu", ranks=2),
                {},
            ),
            (
                "nlp_example, bfloat16",
                "one GPU, autocast",
                Run("nlp_example.py --mixed_precision bf16", gpus=1),
                Run("nlp_example.py --cpu"),
                {"within": 0.02, "note": BFLOAT16},
            ),
            (
                "complete_nlp_example",
                "one GPU, checkpoints",
                Run("complete_nlp_example.py --checkpointing_steps epoch --output_dir out", gpus=1),
                Run("complete_nlp_example.py --checkpointing_steps epoch --output_dir out --cpu"),
                {},
            ),
        )
    ]
    features = (
        ("checkpointing", 1),
        ("ddp_comm_hook", 2),
        ("local_sgd", 2),
        ("profiler", 1),
    )
    made += [
        Program(
            f"Accelerate, {name}",
            "accelerate",
            "examples/by_feature",
            "one GPU" if ranks == 1 else "DDP on two GPUs under torchrun",
            Run(f"{name}.py", gpus=ranks, ranks=ranks if ranks > 1 else 0),
            Run(f"{name}.py --cpu", ranks=ranks if ranks > 1 else 0),
            data=lambda copy: _pairs(copy, "examples/by_feature"),
        )
        for name, ranks in features
    ]
    # On the CPU, the others wait for ever, are refused, or try less.
    on_the_cpu = {"test_script", "test_ops"}
    unseeded = {"test_sync": {"within": 1.0, "note": "it draws other data in each run, and checks its numbers itself"}}
    tests = ("test_script", "test_sync", "test_ops", "test_distributed_data_loop", "test_ddp_comm_hook")
    return made + [
        Program(
            f"Accelerate's own {name}",
            "packages",
            "",
            "two GPUs under torchrun",
            Run(f"-m accelerate.test_utils.scripts.{name}", gpus=2, ranks=2),
            (
                Run(f"-m accelerate.test_utils.scripts.{name}", ranks=2, variables=(("ACCELERATE_USE_CPU", "true"),))
                if name in on_the_cpu
                else Run(f"-m accelerate.test_utils.scripts.{name}", gpus=4, ranks=2)
            ),
            **unseeded.get(name, {}),
        )
        for name in tests
    ]


_CLM = (
    "run_clm.py --model_name_or_path ../../../tiny --train_file ../../../corpus/train.txt --do_train --block_size 32 "
)
_CLM += "--max_steps 5 --logging_steps 1 --output_dir out --report_to none --save_strategy no "


def transformers() -> list[Program]:
    text = {"data": lambda copy: (data.corpus(copy / "corpus"), data.model(copy / "tiny", "gpt2"))}
    return [
        Program(
            f"transformers, {name}",
            "transformers",
            "examples/pytorch/language-modeling",
            uses,
            on,
            beside,
            **text,
            **more,
        )
        for name, uses, on, beside, more in (
            ("run_clm", "Trainer, one GPU", Run(_CLM, gpus=1), Run(f"{_CLM} --use_cpu"), {}),
            (
                "run_clm, DataParallel",
                "Trainer, DataParallel on two GPUs",
                Run(f"{_CLM} --per_device_train_batch_size 4", gpus=2),
                Run(f"{_CLM} --per_device_train_batch_size 8 --use_cpu"),
                {},
            ),
            (
                "run_clm, DDP",
                "Trainer, DDP on two GPUs under torchrun",
                Run(f"{_CLM} --per_device_train_batch_size 4", gpus=2, ranks=2),
                Run(f"{_CLM} --per_device_train_batch_size 4 --use_cpu", ranks=2),
                {},
            ),
            (
                "run_clm, FSDP",
                "Trainer, FSDP on two GPUs under torchrun",
                Run(f"{_CLM} --per_device_train_batch_size 4 --fsdp full_shard", gpus=2, ranks=2),
                Run(f"{_CLM} --per_device_train_batch_size 4 --use_cpu", ranks=2),
                {"within": 1e-4, "note": ROUNDING},
            ),
            (
                "run_clm, bfloat16",
                "Trainer, autocast, gradient checkpointing",
                Run(f"{_CLM} --bf16 --gradient_checkpointing", gpus=1),
                Run(f"{_CLM} --use_cpu"),
                {"within": 0.02, "note": BFLOAT16},
            ),
            (
                "run_clm, torch.compile",
                "Trainer, one GPU, torch.compile",
                Run(f"{_CLM} --torch_compile", gpus=1),
                Run(f"{_CLM} --use_cpu"),
                {},
            ),
        )
    ]


_TIMM = "train.py data --model test_vit --img-size 64 -b {} --epochs 1 --sched step --lr 0.01 "
_TIMM += "--workers 1 --num-classes 2 --seed 1 "
_TIMM += "--no-aug --log-interval 1 --opt sgd --warmup-epochs 0 "


def timm() -> list[Program]:
    def images(copy: Path) -> None:
        data.images(copy / "data/train", 64, 16)
        data.images(copy / "data/validation", 64, 4)

    one, two = _TIMM.format(8), _TIMM.format(4)
    return [
        Program(f"timm, train.py{name}", "timm", "", uses, on, beside, data=images, **more)
        for name, uses, on, beside, more in (
            ("", "one GPU", Run(one, gpus=1), Run(f"{one} --device cpu"), {}),
            (
                ", AMP",
                "one GPU, bfloat16 autocast, EMA of the weights",
                Run(f"{one} --amp --amp-dtype bfloat16 --model-ema", gpus=1),
                Run(f"{one} --device cpu"),
                {"within": 0.02, "note": BFLOAT16},
            ),
            (
                ", DDP",
                "DDP on two GPUs under torchrun",
                Run(two, gpus=2, ranks=2),
                Run(f"{two} --device cpu", ranks=2, edits=(("train.py", "device_ids=[device], ", ""),)),
                {},
            ),
            (
                ", DDP, sync-BN",
                "DDP with synchronized BatchNorm on two GPUs",
                Run(f"{two.replace('test_vit', 'resnet18')} --sync-bn", gpus=2, ranks=2),
                Run(f"{_TIMM.format(2).replace('test_vit', 'resnet18')} --sync-bn", gpus=4, ranks=4),
                {"within": 1e-4, "note": ROUNDING},
            ),
        )
    ]


_TITAN = (
    "-m torchtitan.train --module llama3 --config llama3_debugmodel --training.steps 3 --training.local_batch_size {} "
    "--training.seq_len 64 --validator.freq 100 --checkpoint.interval 100 --training.disable_cuda_graphs "
)


_COPIED = "--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 1"


def torchtitan() -> list[Program]:
    def assets(copy: Path) -> None:
        data.corpus_of_json(copy / "tests/assets/c4_test")
        data.model(copy / "tests/assets/tokenizer", "llama")

    one = Run(_TITAN.format(4), gpus=1, ranks=1)
    sharded = Run(_TITAN.format(2), gpus=2, ranks=2)
    copied = Run(_TITAN.format(2) + _COPIED, gpus=2, ranks=2)
    split = Run(_TITAN.format(4) + "--parallelism.tensor_parallel_degree 2", gpus=2, ranks=2)
    return [
        Program(
            f"torchtitan, llama3 debug model{name}",
            "packages",
            "",
            uses,
            on,
            beside,
            data=assets,
            within=0.02,
            note="bfloat16",
        )
        for name, uses, on, beside in (
            ("", "one GPU", one, split),
            (", FSDP", "fully_shard on two GPUs", sharded, copied),
            (", TP", "tensor parallel on two GPUs", split, one),
        )
    ]


def deepspeed() -> list[Program]:
    options = (
        "--model_name ../tiny --tp_size 2 --dp_size 1 --seq_length 32 --num_steps 3 --precision fp32 --zero_stage {}"
    )
    return [
        Program(
            f"DeepSpeed, autotp_example, ZeRO stage {stage}",
            "deepspeed",
            "training/tensor_parallel/basic_example",
            "tensor parallel on two GPUs",
            Run(f"autotp_example.py {options.format(stage)}", gpus=2, ranks=2),
            Run(
                f"autotp_example.py {options.format(stage)}",
                ranks=2,
                edits=(("autotp_example.py", 'f"cuda:{rank % torch.cuda.device_count()}"', '"cpu"'),),
            ),
            draws=True,
            data=lambda copy: data.model(copy / "training/tensor_parallel/basic_example/../tiny", "llama"),
        )
        for stage in (0, 1)
    ]


PROGRAMS = [*lightning(), *accelerate(), *transformers(), *timm(), *torchtitan(), *deepspeed()]
