"""`python -m virtual_gpus measure --out FILE train.py`: how long the operators of a job take on a real GPU.

The program runs on virtual GPUs, which write down the operators that it needs. Then each of them is timed on the real
GPU of this computer, and FILE has them all (`help("virtual_gpus.clock.measured")`). Without a real GPU, FILE has the
operators without times. On a computer that has one, `python -m virtual_gpus.measure FILE` fills them in.

The timed tensors are full of zeros, and an operator runs 20 times in a row. Copies and collectives keep their formulas.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from virtual_gpus import features
from virtual_gpus.clock.measured import Measured
from virtual_gpus.dispatch.measured_calls import argument
from virtual_gpus.files import write_whole
from virtual_gpus.gpus import kinds, spec
from virtual_gpus.machine import VirtualMachine

_REPEATS, _WARM_UP = 20, 3
_CYCLES = 5_000_000  # of a kernel that waits while the host issues the repeats: some 3 ms


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that only `measure` has."""
    parser.add_argument("--out", type=Path, required=True, help="the file for the operators and their seconds")
    parser.add_argument("--only-list", action="store_true", help="write the operators down, and time none")


def command(arguments: list[str], out: Path) -> None:
    """The whole command: the program in a process of its own, then the times. arguments: all after "measure"."""
    done = subprocess.run([sys.executable, "-m", "virtual_gpus", "measure", "--only-list", *arguments])
    if done.returncode:
        raise SystemExit(done.returncode)
    fill_in(out)


def write_list(program: Callable[[], None], machine: VirtualMachine, out: Path) -> None:
    """Run the program and write down what its virtual GPUs were asked for."""
    machine.measured = Measured()
    try:
        program()
    finally:
        rows = []
        for asked, calls in machine.measured.asked.items():
            operator, arguments = json.loads(asked)
            rows.append({"operator": operator, "arguments": arguments, "seconds": None, "calls": calls})
        _write(out, {"gpu": machine.settings.spec.kind, "from": "", "rows": rows})


def fill_in(file: Path) -> None:
    """Time the rows of a file on the real GPU of this computer, or say why not."""
    content = json.loads(file.read_text(encoding="utf-8"))
    rows = content["rows"]
    if not torch.cuda.is_available():
        print(f"{file} lists {len(rows)} operators without times: PyTorch finds no GPU on this computer.")
        print(f"Where there is one, run: python -m virtual_gpus.measure {file}")
        return
    name = torch.cuda.get_device_name()
    known = [kind for kind in kinds() if spec(kind).name == name]
    if not known:
        raise SystemExit(f"This computer's GPU is {name!r}, which is no kind of virtual GPU. There are: {kinds()}.")
    content.update(gpu=known[0], **{"from": f"{name}, PyTorch {torch.__version__}"})
    for row in rows:
        try:
            row["seconds"] = seconds_of(row["operator"], row["arguments"])
        except (RuntimeError, TypeError, ValueError) as error:  # OutOfMemoryError too
            row["why"] = str(error).partition("\n")[0]
    _write(file, content)
    print(f"{file}: {sum(row['seconds'] is not None for row in rows)} of {len(rows)} operators were timed on {name}.")


def _write(file: Path, content: dict[str, Any]) -> None:
    rows = ",\n".join("  " + json.dumps(row) for row in content["rows"])
    head = json.dumps({name: value for name, value in content.items() if name != "rows"})
    write_whole(file, f'{head[:-1]}, "rows": [\n{rows}\n]}}\n')


def seconds_of(operator: str, arguments: list[Any]) -> float:
    """Seconds of a call of an operator on the real GPU: events around some calls that wait for a longer kernel."""
    act = prepared(operator, arguments, "cuda")
    for _ in range(_WARM_UP):
        act()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_CYCLES)
    begin.record()
    for _ in range(_REPEATS):
        act()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / _REPEATS


def prepared(operator: str, arguments: list[Any], device: str) -> Callable[[], Any]:
    """A call of a row's operator on tensors of zeros."""
    positional, by_name = arguments
    if operator in features.TIMED:
        return features.TIMED[operator](positional, by_name, device)
    function: Any = torch.ops
    for part in operator.split("."):
        function = getattr(function, part)
    args, kwargs = argument(positional, device), {name: argument(value, device) for name, value in by_name.items()}
    return lambda: function(*args, **kwargs)


if __name__ == "__main__":
    words = "Time the operators that a file lists on the real GPU of this computer."
    parser = argparse.ArgumentParser(prog="python -m virtual_gpus.measure", description=words)
    parser.add_argument("file", type=Path, help="what `python -m virtual_gpus measure --out FILE` wrote")
    fill_in(parser.parse_args().file)
