"""What a process pays before its first step: CPU seconds (user and system) of small programs, taken in one run.

    python -m benchmarks.start_up                # five rounds, about two minutes
    python -m benchmarks.start_up --rounds 1

Each program runs in a process of its own. Each round runs all of them one after the other, and the median of the rounds
is shown. "Beyond" is the difference to `import torch` in the same round.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys

TORCH = "import torch"
STEP = "; net = torch.nn.Linear(2, 2).{where}(); torch.optim.SGD(net.parameters()).step()"
ON = "; from virtual_gpus import virtual_gpus; virtual_gpus(4).start()"
PROGRAMS = {
    "import torch": TORCH,
    "a step of an optimizer on the CPU": TORCH + STEP.format(where="cpu"),
    "import virtual_gpus": TORCH + "; import virtual_gpus",
    "virtual GPUs on": TORCH + ON,
    "virtual GPUs on, and a step of an optimizer": TORCH + ON + STEP.format(where="cuda"),
    "virtual GPUs on, and import torch._dynamo": TORCH + ON + "; import torch._dynamo.config",
}


def cpu_seconds(program: str) -> float:
    """User and system seconds of one process that runs `program`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def table(rounds: int, programs: dict[str, str] = PROGRAMS) -> list[str]:
    """One row per program. The first one is the baseline."""
    taken = [[cpu_seconds(program) for program in programs.values()] for _ in range(rounds)]
    lines = ["| program | CPU seconds | beyond |", "|---|---|---|"]
    for number, name in enumerate(programs):
        seconds = statistics.median(row[number] for row in taken)
        beyond = statistics.median(row[number] - row[0] for row in taken)
        lines.append(f"| {name} | {seconds:.2f} | {beyond:.2f} |")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often each program runs (default 5)")
    print("\n".join(table(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
