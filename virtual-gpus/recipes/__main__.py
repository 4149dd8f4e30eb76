"""Runs all commands and writes docs/planning.md."""

import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "planning.md"
BEGINNING = """# Questions about a training job, and the commands that answer them

Each command runs the job's program, [train.py](../recipes/train.py), as rank 0 with sizes and no values, on a machine
without a GPU. The program is an ordinary one for torchrun: a decoder of 1.7 billion parameters with `fully_shard`,
bfloat16 and AdamW, which takes two steps. Use yours in its place. `python -m recipes`, run in the folder of the
package, runs all commands and writes this page.

Memory is counted as PyTorch's allocator would count it. Steps are modelled times. How far both are from measured ones
is in [accuracy.md](accuracy.md).
"""
JOB = "plan --gpus 8 --kind A100-80GB"
ON_8_HOSTS = f"{JOB} --adapters 8 --of 64"
SEARCH = "plan --gpus 8 --kind A100 --search 8:64"
ROWS = ("peak ", "step,", "    of it")  # of a report that is shown in part
# (question, what to know, whether all of the report is shown, commands)
RECIPES = (
    (
        "Does it fit, and which module holds the activations?",
        "The last line and the exit code say whether it fits: 0 (FITS), 3 (DOES NOT FIT), 1 (ERROR), 4 (INCOMPLETE). "
        "Activations are listed by the module that allocated them. The members of a ModuleList are one row. What "
        'autograd computes in between belongs to the "backward pass". Batch and loss are "outside modules".',
        True,
        [f"{JOB} recipes/train.py"],
    ),
    (
        "What is the largest batch?",
        "The search tries numbers in place of `{}`.",
        False,
        [f"{JOB} --search 1:64 recipes/train.py --batch {{}}"],
    ),
    (
        "What is the longest sequence?",
        "The search is for thousands of tokens.",
        False,
        [f"{JOB} --search 1:64 recipes/train.py --length {{}}000"],
    ),
    (
        "What does activation checkpointing save, and what does it cost?",
        "",
        False,
        [f"{JOB} recipes/train.py --batch 4", f"{JOB} recipes/train.py --batch 4 --recompute"],
    ),
    (
        "Is it safe not to reshard after the forward pass?",
        "The gathered layers stay until the backward pass has used them, which saves an all-gather of each.",
        False,
        [f"{JOB} recipes/train.py", f"{JOB} recipes/train.py --keep-gathered"],
    ),
    (
        "Is it better to shard over all GPUs, or over each machine (HSDP)?",
        "With 64 GPUs on 8 machines, `--replicas 8` shards over the 8 GPUs of a machine. All-gathers then stay in it. "
        "Each machine has 8 network adapters here.",
        False,
        [f"{ON_8_HOSTS} recipes/train.py", f"{ON_8_HOSTS} recipes/train.py --replicas 8"],
    ),
    (
        "How many GPUs does a larger model need?",
        "With `{}` as the number of ranks, the search tries 8, 16, 32 and so on.",
        False,
        [f"{SEARCH} --of {{}} recipes/train.py --width 4096 --heads 32 --layers 80 --recompute"],
    ),
    (
        "What if shards and optimizer are on the CPU?",
        "The step that the CPU computes takes no modelled time, so the real one is longer.",
        False,
        [f"{JOB} recipes/train.py --offload"],
    ),
    (
        "Which GPU is enough?",
        "",
        False,
        [f"plan --gpus 8 --kind '{kind}' recipes/train.py --batch 2 --recompute" for kind in ("T4", "RTX 4090")],
    ),
)


def answer(command: str, whole: bool) -> str:
    """What a command prints, in part if not `whole`. Raises RuntimeError if it ends with an error."""
    done = subprocess.run([sys.executable, "-m", "virtual_gpus", *shlex.split(command)], cwd=ROOT, capture_output=True,
                          text=True)  # fmt: skip
    if done.returncode not in (0, 3):
        raise RuntimeError(f"{command}\n{done.stdout}\n{done.stderr}")
    lines = done.stdout.strip().splitlines()
    shown = lines if whole else [line for line in lines[:-1] if line.startswith(ROWS) or line[0].isdigit()] + lines[-1:]
    return "\n".join(shown)


def main() -> None:
    """Write the page."""
    parts = [BEGINNING]
    for question, words, whole, commands in RECIPES:
        parts.append(f"## {question}\n")
        parts += [fill(words, 120) + "\n"] * bool(words)
        for command in commands:
            parts.append(f"```text\n$ python -m virtual_gpus {command}\n{answer(command, whole)}\n```\n")
    PAGE.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
