"""TRL's own tests of distributed training: its scripts under `accelerate launch`, with a model and data made here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from benchmarks.outside.suites import Case, python_path, virtual

NEEDS = """accelerate, transformers, datasets, jinja2, peft, and trl itself, whose version is asked for (the checkout's
own code runs). For zero2 and zero3 also deepspeed, which DS_BUILD_OPS=0 and DS_ACCELERATOR=cpu install without
compiling"""
GPUS = 2
DATA = "standard_language_modeling"
# As in its tests/distributed/test_distributed.py: by test, its script, its set of data and its other options.
TESTS = {
    "test_sft": ("sft", DATA, ()),
    "test_sft_dataset_streaming": ("sft", DATA, ("--dataset_streaming", "--max_steps", "3")),
    "test_sft_peft": ("sft", DATA, ("--use_peft",)),
    "test_dpo": ("dpo", "standard_preference", ()),
    "test_reward": ("reward", "conversational_implicit_prompt_preference", ()),
}  # fmt: skip
CONFIGURATIONS = ("ddp", "fsdp2", "zero2", "zero3")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINGS = ("a wheel", "the river", "one bird", "her letter", "this stone", "the lamp", "a small boat")
ENDS = ("turns in the wind", "is older than the road", "waits for the morning", "has no name", "comes back late")
KNOWN: dict[str, str] = {}


def about() -> str:
    """What was run, for the page."""
    return (
        f"The commands of TRL's tests/distributed/test_distributed.py on {GPUS} virtual GPUs, with accelerate "
        f"{version('accelerate')} and transformers {version('transformers')}; zero2 and zero3 are DeepSpeed's. TRL's "
        "scripts are not modified. In place of the tiny model and of the data that the tests ask a hub for, the "
        "commands have the paths of a tiny model with random weights and of data with the same columns, which the "
        "suite makes. Left out are GRPO and RLOO, which write text for minutes, another loss of SFT, DPO with "
        "log-probabilities computed before, and the tests of Liger's kernels."
    )


def cases(folder: Path | None, work: Path) -> list[Case]:
    """A case for each test and configuration."""
    if folder is None or not (folder / "trl" / "scripts").is_dir():
        raise SystemExit(f"FOLDER must be a checkout of TRL, and these be installed: {NEEDS}.")
    data(work / "data")
    model(work / "model")
    settings = {
        "PYTHONPATH": python_path(folder),
        "HF_HOME": str(work / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    configurations = folder / "tests" / "distributed" / "data" / "accelerate_configs"
    found = []
    for test, (script, kind, options) in TESTS.items():
        for name in CONFIGURATIONS:
            if "zero" in name and find_spec("deepspeed") is None:
                continue
            case = f"{test}[{name}]"
            command = virtual(GPUS, "-m", "accelerate.commands.launch",
                              "--config_file", configurations / f"{name}.yaml", f"trl/scripts/{script}.py",
                              "--output_dir", work / case, "--model_name_or_path", work / "model",
                              "--dataset_name", work / "data", "--dataset_config", kind)  # fmt: skip
            found.append(Case(case, [*command, *options], folder, settings))
    return found


def rows() -> Iterator[dict[str, dict[str, object]]]:
    """Rows for each set of data, of the columns that TRL's own sets have."""
    for number in range(19):
        thing, end = THINGS[number % len(THINGS)].capitalize(), ENDS[number % len(ENDS)]
        other = ENDS[(number + 1) % len(ENDS)]
        asks = [{"role": "user", "content": f"What of {thing.lower()}?"}]
        answers = [[*asks, {"role": "assistant", "content": f"{thing} {words}."}] for words in (end, other)]
        yield {
            DATA: {"text": f"{thing} {end}."},
            "standard_preference": {"prompt": thing, "chosen": f" {end}.", "rejected": f" {other}."},
            "conversational_implicit_prompt_preference": {"chosen": answers[0], "rejected": answers[1]},
        }


def data(folder: Path) -> None:
    """Write sets of data as a local folder that `datasets.load_dataset` reads by the names of TRL's own."""
    folder.mkdir()
    table = list(rows())
    configs = []
    for name in table[0]:
        lines = [json.dumps(row[name]) + "\n" for row in table]
        parts = {"train": lines[:17], "test": lines[17:]}
        for part, some in parts.items():
            (folder / f"{name}-{part}.jsonl").write_text("".join(some))
        files = [{"split": part, "path": f"{name}-{part}.jsonl"} for part in parts]
        configs.append({"config_name": name, "data_files": files})
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")  # JSON is YAML too


def model(folder: Path) -> None:
    """Save a tiny Qwen2 with random weights, and a tokenizer of this data."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    tokenizer.train_from_iterator([str(row[DATA]["text"]) for row in rows()], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                      chat_template=TEMPLATE)  # fmt: skip
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=len(wrapped), hidden_size=8, num_attention_heads=4, num_key_value_heads=2,
                         num_hidden_layers=2, intermediate_size=32, pad_token_id=wrapped.pad_token_id,
                         eos_token_id=wrapped.eos_token_id, bos_token_id=None)  # fmt: skip
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
