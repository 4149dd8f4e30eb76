"""torchtitan's integration tests, from a checkout, with fewer and shorter steps."""

from __future__ import annotations

import importlib
import json
import random
import shlex
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.outside.suites import Case, python_path, torchrun

NEEDS = ("datasets, einops, grain, safetensors, spmd_types, tensorboard, tokenizers, torch_checkpointing, transformers "
         "and tyro")  # fmt: skip
SUITES = {"features": "build_features_test_list", "models": "build_model_tests_list"}
CONTEXT = 128  # tokens of a sequence, instead of 2048 or 4096; a microbatch has 256, instead of up to 16384
IMAGES = 512  # tokens of a sequence with images, which stays as it is, because no image would fit into less
KERNELS = {"override_fused_swiglu", "override_fused_grouped_experts", "deepseek_v3_mtp_fsdp+ep+compile",
           "deepseek_v3_fused_mla_swiglu_fsdp+ep", "qwen3_fused_qkv_fsdp+tp+cp_compile_helion_rope",
           "qwen3_5_moe_fsdp+tp+ep+pp", "qwen3_5_fsdp+tp+varlen_attn+per_op_sac"}  # fmt: skip
TORCHAO = {"float8_emulate_lora"}
VARLEN = ("features: fsdp+varlen_attn+per_op_sac", "models: gpt_oss_fsdp+tp+ep+compile",
          "models: gpt_oss_pp+fsdp+ep+sacop")  # fmt: skip
KNOWN = dict.fromkeys(
    VARLEN, "On a GPU of the kind Hopper, it needs FlashAttention 3. On older ones, `varlen_attn` is not modelled."
)


def about() -> str:
    """What was run, for the page."""
    return (
        "The integration tests of features and models of a torchtitan of 21 August 2026, on as many virtual GPUs as "
        "each asks for, 1 to 8. Its own command line makes them smaller: steps are 2 instead of 10, or 1 with a "
        "pipeline, and sequences have 128 tokens. Its CUDA graphs are off, because virtual GPUs refuse "
        "them. With torch.compile, the program runs operator by operator. The texts are random words. "
        f"{len(KERNELS)} tests need kernels in Triton or Helion and {len(TORCHAO)} needs torchao: they were not run, "
        "nor were those of Flux and those that need an H100."
    )


def cases(folder: Path | None, work: Path) -> list[Case]:
    """The tests that torchtitan has not disabled. Their data are made here, since their folder has none."""
    if folder is None:
        raise SystemExit("Give the folder of a checkout of torchtitan.")
    sys.path.insert(0, str(folder))
    _make_assets(folder, work)
    found = []
    for suite, name in SUITES.items():
        for test in getattr(importlib.import_module(f"tests.integration_tests.{suite}"), name)():
            if not test.disabled and test.test_name not in KERNELS | TORCHAO:
                found.append(_case(suite, test, folder, work))
    return found


def _case(suite: str, test: Any, folder: Path, work: Path) -> Case:
    """A test: one run of torchtitan after the other."""
    runs = [_run(test.ngpu, config, work / test.test_name) for config in test.configs]
    path = python_path(folder)
    settings = {"PYTHONPATH": path, "HF_HOME": str(work / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return Case(f"{suite}: {test.test_name}", ["sh", "-c", " && ".join(map(shlex.join, runs))], work, settings)


def _run(ranks: int, config: Callable[[], Any], output: Path) -> list[str]:
    """The command of one run. Of 10 steps it takes 2, or 1 with a pipeline, whose steps are of 8 microbatches."""
    made = config()
    steps = max(1, made.training.steps // (10 if made.parallelism.pipeline_parallel_degree > 1 else 5))
    options = ["--dump_folder", output, "--training.steps", steps, "--training.disable_cuda_graphs"]
    training, ranks_of_a_sequence = made.training, made.parallelism.context_parallel_degree
    context, tokens = training.max_context_length, training.max_context_length
    if context > IMAGES:
        context, tokens = CONTEXT, max(2 * CONTEXT, 128 * ranks_of_a_sequence)  # a block of flex_attention for each
    options += ["--training.num_tokens_per_microbatch_per_dp_rank", tokens, "--training.max_context_length", context]
    if training.num_tokens_per_train_step > 0:
        whole = training.num_tokens_per_train_step * tokens // training.num_tokens_per_microbatch_per_dp_rank
        options += ["--training.num_tokens_per_train_step", whole]
    if made.checkpoint.initial_load_path:
        options += ["--checkpoint.initial_load_path", output / "hf_checkpoint" / f"step-{steps}"]
    names = ["--module", config.__module__, "--config", config.__name__]
    return torchrun(ranks, "-m", "torchtitan.train", *names, *map(str, options))


def _make_assets(folder: Path, work: Path) -> None:
    """The folder tests/assets as the tests expect it, with sentences of random words for c4_test/data.json."""
    assets = work / "tests" / "assets"
    (assets / "c4_test").mkdir(parents=True)
    for path in (folder / "tests" / "assets").iterdir():
        if path.name != "c4_test":
            (assets / path.name).symlink_to(path)
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(500)]
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=100)) + "."}) for _ in range(2000)]
    (assets / "c4_test" / "data.json").write_text("\n".join(lines) + "\n")
