"""The programs: where each is had, how it is called, and what its losses are held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """Where programs are had: the folder below --from, and the repository with its commit or the package's version."""

    folder: str
    had: str


@dataclass(frozen=True)
class Run:
    """One call: `arguments` after `python`, on `gpus` virtual GPUs (0: the CPU), in `ranks` processes of torchrun.

    options: further arguments of `python -m virtual_gpus`.
    edits: (file, text, other text) for a run on the CPU of a program that names a GPU in its source. A run on virtual
    GPUs has none.
    """

    arguments: str
    gpus: int = 0
    ranks: int = 0
    variables: tuple[tuple[str, str], ...] = ()
    edits: tuple[tuple[str, str, str], ...] = ()
    options: tuple[str, ...] = ()

    def on_fakegpu(self, folder: Path) -> Run:
        """The same call with FakeGPU, whose repository lies in `folder`, in place of virtual GPUs."""
        count = ("OUTSIDE_FAKEGPU", str(self.gpus))
        return replace(self, gpus=0, variables=(*self.variables, count, ("OUTSIDE_PATH", str(folder))))


@dataclass(frozen=True)
class Program:
    """A program, the data it wants, its run on virtual GPUs, and the run beside it.

    `within` is the largest relative difference of a loss that counts as equal. `note` says why it is not nought.
    `draws`: the program draws random numbers on its GPU. The GPU then stands where the CPU's generator stands, so that
    both runs get the same numbers.
    """

    name: str
    source: str
    folder: str
    uses: str
    on: Run
    beside: Run
    data: Callable[[Path], None] = lambda folder: None
    first: tuple[str, ...] = ()
    within: float = 1e-5
    note: str = ""
    draws: bool = False


# glibc fills new memory with zeros: for programs that compute with what `torch.empty` left
ZEROS = (("MALLOC_PERTURB_", "255"), ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"))

SOURCES = {
    "examples": Source("examples", "pytorch/examples at 77f55b9"),
    "nanoGPT": Source("nanoGPT", "karpathy/nanoGPT at 3adf61e"),
    "minGPT": Source("minGPT", "karpathy/minGPT at 37baab7"),
    "guide": Source(
        "distributed-training-guide",
        "LambdaLabsML/distributed-training-guide at aed7489; chapter 04 with transformers 4.57.0 and datasets "
        "4.1.1, as its requirements say",
    ),
    "pytorch-multigpu": Source("pytorch-multigpu", "dnddnjs/pytorch-multigpu at 0554bac"),
    "lightning": Source("pytorch-lightning", "Lightning-AI/pytorch-lightning at 7f0c343; the package lightning 2.6.6"),
    "accelerate": Source("accelerate", "huggingface/accelerate at 16cb6eb; the package accelerate 1.15.0"),
    "transformers": Source(
        "transformers", "the examples of huggingface/transformers 4.57; the package transformers 5.23.0"
    ),
    "timm": Source("pytorch-image-models", "huggingface/pytorch-image-models at aa4b585"),
    "deepspeed": Source("DeepSpeedExamples", "deepspeedai/DeepSpeedExamples at 45b4b71; the package deepspeed 0.19.8"),
    "encoding": Source("PyTorch-Encoding", "zhanghang1989/PyTorch-Encoding at 2d21747"),
    "picotron": Source("picotron", "huggingface/picotron at 59714b1"),
    "fakegpu": Source("FakeGPU", "FanBB2333/FakeGPU 1.5.5 at 7d5cf83, switched on before the program's first line"),
    "packages": Source("", "the packages torchtitan 0.3.0, accelerate 1.15.0 and torchmetrics 1.9.0"),
    "pytorch-cifar": Source("pytorch-cifar", "kuangliu/pytorch-cifar at 49b7aa9"),
}

DROPOUT = "dropout draws from the GPU's own generator"
ATTENTION = "a GPU's fused attention has a dropout of its own"
ROUNDING = "sums in another order"
BFLOAT16 = "bfloat16 compared with float32"

# What was found by reading the programs in which `--check-races` reports a race: all are theirs
RACES = {
    "Lightning 2.6.6: both programs with DDP": (
        "lightning/pytorch/strategies/ddp.py:196 and lightning/fabric/strategies/ddp.py:130 make "
        "DistributedDataParallel on a new stream. Its constructor copies the parameters of rank 0 there. The forward "
        "pass reads them on the default stream, which does not wait. The same pattern left models of Megatron-LM with "
        "empty parameters (NVIDIA-NeMo/Megatron-Bridge 1706)."
    ),
}

OUT_OF_SCOPE = {
    "pytorch/examples: gcn, gat, fast_neural_style, language_translation, legacy/snli, distributed/FSDP": (
        "They download data or weights when they start, even if these are on the disk."
    ),
    "pytorch/examples: rpc/parameter_server": "Its processes are started by hand, in several terminals.",
    "pytorch/examples: time_sequence_prediction": (
        "Its torch.load refuses the NumPy data that the program itself has written, on the CPU as well."
    ),
    "distributed-training-guide: chapters 05, 06 and 07": (
        "Chapter 05 loads a model of 405 billion parameters. The others use FlashAttention 2, which is a "
        "compiled extension."
    ),
    "picotron: train.py": "It imports FlashAttention, which is a compiled extension.",
    "PyTorch-Encoding: the rest of the package": "It compiles an extension when it is imported.",
    "Lightning: dcgan, meta_learning, computer_vision_fine_tuning": "They download their data.",
    "Lightning: autoencoder with ddp_spawn": (
        "It prints predictions, and Lightning returns none from spawned processes. It fails on the CPU as well."
    ),
    "Lightning: autoencoder with FSDP": (
        "Its callback calls the sharded model on rank 0 alone. FSDP on the CPU fails there as well."
    ),
    "Lightning: image classifier with FSDP": (
        "After training, Lightning wraps the model a second time, although its parameters already are shards, and "
        "loads a checkpoint. PyTorch refuses this on the CPU with the same message."
    ),
    "Lightning: tensor_parallel": "Its model needs 24 GB on each of four GPUs, which is 96 GB of the machine's memory.",
    "Lightning: fp8_distributed_transformer; Accelerate: fsdp2_fp8": (
        "They need kernels for 8-bit numbers, which are a compiled extension."
    ),
    "transformers: run_clm_no_trainer": (
        "The example of 4.57 uses a value that Accelerate 1.15 no longer has. It fails on the CPU as well."
    ),
    "Accelerate: cv_example, inference, fsdp_with_peak_mem_tracking": "They download weights.",
    "DeepSpeedExamples: cifar, gan, pipeline_parallelism, bf16_master_weight, HelloDeepSpeed": (
        "DeepSpeed compiles its own Adam for CUDA when they start."
    ),
}
