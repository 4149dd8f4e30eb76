"""Checks of lesson 09, many machines and failures. None of them starts torchrun."""

import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.distributed.run import get_args_parser

from notebooks.checks import compare
from notebooks.checks.core import NotYet, call, exercise, given, require, show

# Exercise 1: for each failure what each rank left behind (exit code, error, where it waits), the rank that failed
# first, and a hint.
_LOST = "RuntimeError: Connection closed by peer [10.0.0.{}]:41024"
_LATE = "RuntimeError: Timed out waiting 1800000ms for recv operation to complete"
_ENDED = (-15, "", "all_reduce")
_FAILURES: dict[str, tuple[list[tuple[int, str, str]], int, str]] = {
    "a crash": (
        [(1, _LOST.format(7), "all_reduce")] * 2 + [(1, "IndexError: index 30522 is out of range", ""), _ENDED],
        2, "Which error is not a consequence of another rank's end?",
    ),
    "a kill": (
        [(1, _LOST.format(8), "all_reduce"), (-9, "", ""), _ENDED],
        1, "No rank has an error of its own. Which exit code does SIGKILL give?",
    ),
    "a hang": (
        [(1, _LATE, "all_reduce"), _ENDED, _ENDED, (-15, "", "")],
        3, "No rank has an error of its own, and none was killed by SIGKILL. Which one waits in no collective?",
    ),
    "a crash of rank 0": (
        [(1, "torch.OutOfMemoryError: CUDA out of memory", ""), (1, _LOST.format(5), "barrier")],
        0, "Rank 0 can be guilty, too.",
    ),
    "a crash while another rank computes": (
        [(-15, "", ""), (1, _LOST.format(6), "all_reduce"), (1, "RuntimeError: shapes do not match", "")],
        2, "A rank that waits in no collective may just have been computing. Which rank has an error of its own?",
    ),
    "a crash beside a rank that ignores SIGTERM": (
        [(-9, "", ""), (1, _LOST.format(6), "all_reduce"), (1, "ValueError: not an image", "")],
        2, "torchrun itself kills a rank that ignores SIGTERM. Which rank has an error of its own?",
    ),
    "a kill beside a rank that ignores SIGTERM": (
        [(-9, "", "all_reduce"), _ENDED, (-9, "", "")],
        2, "torchrun itself kills a rank that ignores SIGTERM. Which of the killed ranks waited for no other?",
    ),
    "a kill while another rank computes": (
        [(-15, "", ""), (1, _LOST.format(8), "all_reduce"), (-9, "", "")],
        2, "A rank that waits in no collective may just have been computing. Which exit code does SIGKILL give?",
    ),
}  # fmt: skip
# Errors of the guilty rank that REPORTS does not show, so that no answer can list them all.
_OTHER_ERRORS = ("KeyError: 'labels'", "RuntimeError: CUDA error: an illegal memory access was encountered")
REPORTS = {
    name: [dict(zip(("exit_code", "error", "waits_in"), rank, strict=True)) for rank in ranks]
    for name, (ranks, _, _) in _FAILURES.items()
}


@exercise
def guilty(answer):
    """Exercise 1: `answer(reports)` returns the number of the rank that failed first."""
    cases = [(f"After {name}", REPORTS[name], first, hint) for name, (_, first, hint) in _FAILURES.items()]
    for error in _OTHER_ERRORS:
        reports = [dict(report) for report in REPORTS["a crash"]]
        reports[2]["error"] = error
        cases.append((f"After a crash with {error!r}", reports, 2, _FAILURES["a crash"][2]))
    turned = [(case, reports[::-1], len(reports) - 1 - first, hint) for case, reports, first, hint in cases]
    for case, reports, first, hint in cases + turned:
        value = _result(answer, [dict(report) for report in reports])
        require(value is not None, f"{case}, your function returns None. Does it always reach a `return`? {hint}")
        number = compare.as_number(value)
        what = f"{case}, you name rank {show(value)}."
        require(number in range(len(reports)), what, f"The ranks are 0 to {len(reports) - 1}.")
        report = reports[int(number)]
        if number != first:
            lost = any(word in report["error"] for word in ("Connection", "Timed out"))
            why = "Its error only says that another rank did not answer." if lost else ""
            if not report["error"] and report["exit_code"] == -15:
                why = "It was still running when torchrun ended it."
            raise NotYet(*filter(None, (what, why, hint)))
    return "Errors of lost connections and time limits are consequences. The cause is an error, a kill, or a silence."


def _result(fn: Callable, *args) -> object:
    """What a learner's function returned; unlike `core.call`, None too."""
    require(callable(fn), f"{show(fn)} cannot be called. Pass the function itself: its name without brackets.")
    result = fn(*args)
    return result if result is None else given(result, fn)


class _Killed(BaseException):
    """Takes the place of SIGKILL: no `except Exception` catches it."""


def _state(step: int) -> dict:
    return {"step": step, "weight": torch.full((64,), float(step))}


@exercise
def snapshots(save, load):
    """Exercise 2: `save(folder, step, state)` and `load(folder)` survive a kill at any moment, and a damaged file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _returns(load, folder, None, "In an empty folder,")
        for step in (5, 10):
            _save(save, folder, step)
            _returns(load, folder, step, f"After the snapshot of step {step},")
        before = {path: path.read_bytes() for path in _files(folder)}
        for half in (True, False):
            _killed(save, folder, 15, half)
            moment = "while it saved" if half else "just before it renamed the file of"
            case = f"A process was killed {moment} step 15"
            now = {path: path.read_bytes() for path in _files(folder)}
            changed = [path.name for path, content in before.items() if now.get(path) != content]
            what = f"{case}, and {', '.join(changed)} was damaged or lost."
            why = "Write a temporary file, rename it when it is complete, and only then delete old ones."
            require(not changed, what, why)
            read = [path.name for path in _read_by(load, folder) if half and path not in before]
            what = f"{case}, and `load` reads what it left, {show(read[:1])}, as if it were complete."
            require(not read, what, "Write a file with another ending, and rename it when it is complete.")
            _returns(load, folder, 10, f"{case}. After that,")
        left = set(_files(folder)) - set(before)  # by the killed processes; it may stay
        for step in (95, 100):  # "100" comes before "95" in the order of the alphabet
            _save(save, folder, step)
        _returns(load, folder, 100, "After the snapshots of steps 95 and 100,")
        kept = [path for path in _files(folder) if path not in left and _step_of(path) is not None]
        steps = sorted(_step_of(path) for path in kept)
        what = f"The folder holds snapshots of the steps {steps}."
        require(steps == [95, 100], what, "Keep the two newest, 95 and 100.")
        newest = next(path for path in kept if _step_of(path) == 100)
        whole = newest.read_bytes()
        damage = {
            "is cut in half": whole[: len(whole) // 2],
            "is empty": b"",
            "begins with zeros": bytes(99) + whole[99:],
        }
        for how, content in damage.items():
            newest.write_bytes(content)
            _returns(load, folder, 95, f"When the file of step 100 {how},")
    return "A kill costs at most the steps since the last snapshot, and a damaged file one snapshot more."


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _step_of(path: Path) -> int | None:
    try:
        return int(torch.load(path, weights_only=True)["step"])
    except Exception:  # noqa: BLE001 - whatever torch.load says to a file that is no snapshot
        return None


def _save(save: Callable, folder: Path, step: int) -> None:
    time.sleep(0.01)  # so that the times of the files differ
    _result(save, folder, step, _state(step))


def _killed(save: Callable, folder: Path, step: int, half: bool) -> None:
    """Call `save`, and end it when torch.save has written half of the file, or when a file gets its name."""
    real = {(torch, "save"): torch.save, (os, "replace"): os.replace, (os, "rename"): os.rename}
    saved = False

    def write(obj, f, *args, **kwargs):  # the names of torch.save, for answers that use them
        nonlocal saved
        saved, file = True, f
        real[torch, "save"](obj, f, *args, **kwargs)
        if not half:
            return
        if hasattr(file, "truncate"):
            file.truncate(file.tell() // 2)
        else:
            Path(file).write_bytes(Path(file).read_bytes()[: Path(file).stat().st_size // 2])
        raise _Killed

    def rename(old, new, *args, **kwargs):
        inside = folder in Path(old).parents
        why = "That may be another disk, from which a file is copied and not renamed. Write it in `folder`."
        require(inside, f"The temporary file {Path(old).name} is in another folder.", why)
        raise _Killed

    try:
        for (module, name), instead in zip(real, (write, rename, rename), strict=True):
            setattr(module, name, instead)
        _save(save, folder, step)
    except _Killed:
        return
    finally:
        for (module, name), function in real.items():
            setattr(module, name, function)
    require(saved, "`save` does not call torch.save.", "Save with torch.save.")
    require(not half, "`save` goes on after it was killed.", "Do not catch BaseException.")
    what = "`save` does not rename a file."
    raise NotYet(what, "Only renaming gives a name to a complete file at once. Copying or writing can be interrupted.")


def _read_by(load: Callable, folder: Path) -> list[Path]:
    """The files that `load` gives to torch.load."""
    real, read = torch.load, []

    def note(file, *args, **kwargs):
        read.append(Path(getattr(file, "name", "") or "?" if hasattr(file, "read") else file))
        return real(file, *args, **kwargs)

    torch.load = note
    try:
        call(load, folder)
    except Exception:  # noqa: BLE001 - `_returns` tells the learner
        pass
    finally:
        torch.load = real
    return [path for path in read if path in _files(folder)]


def _returns(load: Callable, folder: Path, step: int | None, case: str) -> None:
    try:
        found = _result(load, folder)
    except NotYet:
        raise
    except Exception as error:
        what = f"{case} `load` stops with {type(error).__name__}."
        raise NotYet(what, "It should return a state, or None.") from error
    if step is None:
        require(found is None, f"{case} `load` returns {show(found)}. It should return None.")
        return
    what = f"{case} `load` returns {show(found, 40)}."
    require(isinstance(found, dict) and "step" in found, what, f"It should return the state of step {step}.")
    what = f"{case} `load` returns the state of step {show(found['step'])}."
    require(found["step"] == step, what, f"It should return that of step {step}, the newest that can be read.")
    same = isinstance(found.get("weight"), torch.Tensor) and torch.equal(found["weight"], _state(step)["weight"])
    require(same, f"{case} the tensor in the state has changed.")


@exercise
def interval(answer):
    """Exercise 3: `answer(save_seconds, machine_days, machines)` is the best interval in minutes."""
    for cost, days, machines in ((60, 365, 1), (30, 300, 100), (120, 50, 2048)):
        between = days * 24 * 3600 / machines
        right = math.sqrt(2 * cost * between) / 60
        mistakes = {
            right * 60: "is in seconds. Give minutes.",
            right / 60: "is in hours. Give minutes.",
            right / math.sqrt(2): "lacks the factor 2 under the root.",
            right * machines: "grows with the number of machines. More machines fail more often.",
            right * math.sqrt(machines): "is the interval of a single machine. One of several fails more often.",
            right / math.sqrt(60): "mixes seconds and minutes under the root.",
            right * math.sqrt(60): "mixes seconds and minutes under the root.",
            right - cost / 60: "leaves out the time of saving, as Daly's longer formula does. Give √(2 C M).",
            right**2: "is 2 C M without the root.",
            right / math.sqrt(24): "takes a day for an hour.",
        }
        case = f"For {cost} s, {days} days and {machines} machines, "
        compare.number(call(answer, cost, days, machines), right, "minutes", 0.015, mistakes, case)
    return "Four times as many machines need snapshots twice as often."


@exercise
def arguments(answer):
    """Exercise 4: `answer(node)` gives torchrun's arguments on each of two machines with eight GPUs."""
    options = {node: _parsed(call(answer, node), node) for node in ("node-1", "node-2")}
    for node, found in options.items():
        ranks, script = str(found.nproc_per_node), show(found.training_script)
        for right, said in (
            (found.nnodes in ("2", "2:2"), f"--nnodes is {found.nnodes}. It is the number of machines, 2."),
            (
                ranks in ("8", "gpu", "auto"),
                f"--nproc-per-node is {ranks}. Start one rank for each of the 8 GPUs of a machine.",
            ),
            (not found.standalone, "--standalone lets the machine meet nobody. It is for jobs on one machine."),
            (found.max_restarts >= 2, f"--max-restarts is {found.max_restarts}. The job must survive 2 failures."),
            (found.training_script == "train.py", f"the program is {script}, not 'train.py'."),
            (not found.module, "-m asks for a module, and train.py is a file. Leave -m out."),
            (not found.no_python, "--no-python starts train.py without Python. Leave it out."),
            *_meeting(found, int(node[-1]) - 1),
        ):
            require(right, f"On {node}, {said}")
    first, second = options.values()
    same = (first.rdzv_backend, first.rdzv_endpoint, first.rdzv_id) == (
        second.rdzv_backend, second.rdzv_endpoint, second.rdzv_id)  # fmt: skip
    require(same, "The two machines have different --rdzv options, so they do not meet. Give both the same.")
    return "Both machines meet on node-1, and a failure makes all 16 ranks start again."


def _parsed(words: object, node: str):
    require(isinstance(words, Sequence) and not isinstance(words, str), f"{show(words)} is not a list of strings.")
    program = f"On {node}, the list begins with 'torchrun'. Leave it out: these are its arguments."
    require(list(words[:1]) != ["torchrun"], program)
    wrong = [word for word in words if not isinstance(word, str)]
    require(not wrong, f"On {node}, {show(wrong[:1])} is not a string. Write numbers as strings, such as '2'.")
    lone = [word for word in words if word.startswith("-") and " " in word]
    require(not lone, f"On {node}, {show(lone[:1])} is one word with a space. Make it two strings, or use '='.")
    try:
        return get_args_parser().parse_args(list(words))
    except SystemExit as error:
        what = f"On {node}, torchrun does not understand {show(list(words))}."
        raise NotYet(what, "Its message is above.") from error


def _meeting(found, number: int) -> list[tuple[bool, str]]:
    """How machine `number` finds the others: what must hold, each with the words if it does not."""
    static = found.rdzv_backend == "static"
    place = found.rdzv_endpoint or (f"{found.master_addr}:{found.master_port}" if static else "nowhere")
    where = "--rdzv-endpoint is" if found.rdzv_endpoint else "the machines meet at"
    if not static and ":" not in place:
        place += ":29400"  # the port that c10d takes where none is given
    meets = place == "node-1:29400", f"{where} {place}. It should be node-1:29400."
    if static:
        return [meets, (found.node_rank == number, f"--node-rank is {found.node_rank}. It should be {number}.")]
    known = found.rdzv_backend == "c10d", f"--rdzv-backend is {found.rdzv_backend}. Use c10d or static."
    given = bool(found.rdzv_endpoint), "--rdzv-endpoint is missing. Name the host and the port where the machines meet."
    return [known, given, meets]
