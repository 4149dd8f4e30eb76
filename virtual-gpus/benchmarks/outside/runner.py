"""Run a program from elsewhere on virtual GPUs and beside it on the CPU or one GPU, and compare the losses."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.outside.programs import Program, Run

CALLERS = Path(__file__).parent / "callers"
WITNESS = Path(__file__).parent / "witness"
LIMIT = 600  # seconds of one run, on a busy machine
PATIENCE = 20  # seconds that a program gets to end its own processes


@dataclass
class Outcome:
    """What one run came to: `losses` holds a list of steps for each process that called backward."""

    code: int
    log: Path
    losses: list[list[float]] = field(default_factory=list)

    def why(self) -> str:
        """The line that says what went wrong: the last one that names an error."""
        if self.code == -signal.SIGALRM:
            return f"did not end within {LIMIT} s"
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        named = [found.group(1) for found in map(_NAMES_AN_ERROR.search, lines) if found]
        return (named or lines or ["no output"])[-1][:160]


_NAMES_AN_ERROR = re.compile(
    r"^(?:\[rank\d+\]:)?\s*((?:\w+\.)*(?!ChildFailed|ProcessRaised)\w*(?:Error|Modelled|Refused|Exception)\b.*)"
)
_RACE = re.compile(
    r"RaceError: Race: (.*)\n(?:\[rank\d+\]:)? *(.*:\d+): .*\n(?:\[rank\d+\]:)? *(.*:\d+): ", re.MULTILINE
)


@dataclass
class Result:
    """A program's row: whether it ran, and how far its losses are from those beside it (None: not compared)."""

    program: Program
    on: Outcome
    beside: Outcome

    @property
    def runs(self) -> bool:
        return self.on.code == 0

    @property
    def distance(self) -> float | None:
        """The largest relative difference of a step's loss. Infinite where the runs have not the same steps."""
        if self.beside.code != 0:
            return None
        return distance(self.on.losses, self.beside.losses)

    def row(self) -> dict[str, object]:
        """What the table says of this program."""
        why = "" if self.runs else self.on.why()
        beside = "" if self.beside.code == 0 else self.beside.why()
        return {"runs": self.runs, "why": why, "distance": self.distance, "beside": beside}


def distance(ours: list[list[float]], theirs: list[list[float]]) -> float | None:
    """The largest relative difference between two runs' losses, step by step. None where no process has a loss.

    Runs of the same number of processes are compared process by process. Otherwise the mean over the ranks is compared,
    which is the loss of the whole batch. Differences are relative to the largest loss of a process.
    """
    if not ours and not theirs:
        return None
    if len(ours) != len(theirs):
        ours, theirs = ([[statistics.fmean(step) for step in zip(*side, strict=False)]] for side in (ours, theirs))
    worst = 0.0
    for mine, other in zip(sorted(ours), sorted(theirs), strict=True):
        if len(mine) != len(other) or not mine:
            return math.inf
        scale = max(abs(value) for value in other) or 1.0
        differences = [abs(a - b) / scale for a, b in zip(mine, other, strict=True)]
        worst = max(worst, *(math.inf if math.isnan(difference) else difference for difference in differences))
    return worst


def command(run: Run) -> list[str]:
    """The command line of a run in the environment that runs this script."""
    line = [sys.executable]
    if run.ranks:
        line += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks)]
        line += ["-m"] if run.gpus or run.arguments.startswith("-m ") else []
    if run.gpus:
        line += (["virtual_gpus"] if run.ranks else ["-m", "virtual_gpus"]) + ["--gpus", str(run.gpus), *run.options]
    arguments = run.arguments.replace("{callers}", shlex.quote(str(CALLERS)))
    if run.ranks and not run.gpus:
        arguments = arguments.removeprefix("-m ")
    return line + shlex.split(arguments)


def environment(run: Run, work: Path) -> dict[str, str]:
    """Variables of a run: nothing is downloaded, no real GPU is used, and the witness notes the losses."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "HF_", "RANK", "WORLD_SIZE"))
    }
    path = [str(WITNESS), *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    kept |= {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hf"),
        "WANDB_MODE": "disabled",
        "MPLBACKEND": "agg",
        "OUTSIDE_LOSSES": "" if run.options else str(work / "losses"),
    }
    if not run.gpus:
        kept["CUDA_VISIBLE_DEVICES"] = ""
    kept |= dict(run.variables)
    # The empty part is the program's folder: people put their repositories on PYTHONPATH.
    kept["PYTHONPATH"] = os.pathsep.join([kept["PYTHONPATH"], kept.pop("OUTSIDE_PATH", ""), ""])
    return kept


def run_once(program: Program, run: Run, source: Path, work: Path) -> Outcome:
    """Run in a fresh copy of the program, so that no checkpoint of an earlier run is found."""
    shutil.rmtree(work, ignore_errors=True)
    (work / "losses").mkdir(parents=True)
    copy = work / "copy"
    if program.source == "packages":
        copy.mkdir()
    else:
        shutil.copytree(source, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    program.data(copy)
    for name, old, new in run.edits:
        _edit(copy / program.folder / name, old, new)
    variables = environment(run, work)
    if program.draws and run.gpus:
        variables["OUTSIDE_DRAWS"] = "as the CPU"
    log = work / "log"
    with open(log, "wb") as output:
        for arguments in program.first:
            code = _in_a_group([sys.executable, *shlex.split(arguments)], copy / program.folder, variables, output)
            if code:
                return Outcome(code, log)
        shutil.rmtree(work / "losses")
        (work / "losses").mkdir()
        code = _in_a_group(command(run), copy / program.folder, variables, output)
    notes = sorted((work / "losses").iterdir(), key=lambda note: (note.name.split(".")[0], note.stat().st_ctime_ns))
    return Outcome(code, log, [[float(line) for line in note.read_text().split()] for note in notes])


def _edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    if old not in text:
        raise ValueError(f"{file} does not hold {old!r}.")
    file.write_text(text.replace(old, new))


def _in_a_group(line: list[str], folder: Path, variables: dict[str, str], output) -> int:
    """Run a command on a terminal of its own, and end all of its processes with it."""
    leader, terminal = os.openpty()  # some programs ask how wide their terminal is
    process = subprocess.Popen(
        line,
        cwd=folder,
        env=variables,
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=terminal,
        start_new_session=True,
    )
    try:
        return process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        return -signal.SIGALRM
    finally:
        for kind in (signal.SIGTERM, signal.SIGKILL):  # torchrun ends its ranks, which are in groups of their own
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, kind)
                process.wait(PATIENCE)
        os.close(leader)
        os.close(terminal)


def hold(program: Program, source: Path, work: Path) -> Result:
    """Run `program` from the folder `source`, on virtual GPUs and beside it. Its files stay below `work`."""
    place = work / program.name.replace("/", "_").replace(" ", "_")
    on = run_once(program, program.on, source, place / "on")
    return Result(program, on, _beside(program, source, place / "beside"))


def hold_on_fakegpu(program: Program, source: Path, fakegpu: Path, work: Path) -> Result:
    """As `hold`, with FakeGPU in place of virtual GPUs."""
    place = work / program.name.replace("/", "_").replace(" ", "_")
    on = run_once(program, program.on.on_fakegpu(fakegpu), source, place / "fakegpu")
    return Result(program, on, _beside(program, source, place / "beside"))


def check_races(program: Program, source: Path, work: Path) -> dict[str, object]:
    """Run `program` on virtual GPUs that look for races: whether it ran, why not, and the first race with its lines.

    Losses are not noted, because the host waits for them, and the wait would order what the program leaves unordered.
    """
    place = work / program.name.replace("/", "_").replace(" ", "_")
    on = run_once(program, replace(program.on, options=("--check-races",)), source, place / "races")
    race = _RACE.search(on.log.read_text(errors="replace"))
    return {
        "runs": on.code == 0,
        "why": "" if on.code == 0 else on.why(),
        "race": " ".join(race.groups()) if race else "",
    }


def _beside(program: Program, source: Path, work: Path) -> Outcome:
    """The run beside it. One on the CPU uses nothing of the engine, so an earlier one in `work` is taken as it is."""
    stored, call = work / "outcome.json", repr(program.beside)
    if stored.is_file():
        kept = json.loads(stored.read_text())
        if kept["call"] == call:
            return Outcome(0, work / "log", kept["losses"])
    outcome = run_once(program, program.beside, source, work)
    if outcome.code == 0 and not program.beside.gpus:
        stored.write_text(json.dumps({"call": call, "losses": outcome.losses}))
    return outcome
