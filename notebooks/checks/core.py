"""`@exercise` makes a check of a function: whatever is passed, it prints a sentence and does not raise."""

import functools
import html
import importlib.util
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import helpers
from notebooks.checks import scores

# Errors and stacks leave the engine's frames out, because real GPUs have no such frames.
ENGINE_FOLDER = str(Path(importlib.util.find_spec("virtual_gpus").origin).parent / "_")[:-1]
# Two colours that can be told apart without red and green, and be read on white and on black; the words differ too.
_BOX = (
    '<div style="border-left: 0.5em solid {colour}; padding: 0.2em 0.8em">'
    '<b style="color: {colour}; font-size: 1.5em">{word}</b>{solved}<br>{text}</div>'
)
_CORRECT, _NOT_YET = {"colour": "#1b8a5a", "word": "✔ Correct"}, {"colour": "#d5600d", "word": "✘ Not yet"}


class NotYet(Exception):
    """The answer is not right yet. Its arguments are whole sentences: what is wrong, why, and what to do."""

    def __str__(self) -> str:
        return " ".join(self.args)


class Verdict:
    """What a check returns: true if the answer was correct, `text` as printed. Displays as nothing."""

    def __init__(self, correct: bool, text: str):
        self.correct, self.text = correct, text

    def __bool__(self) -> bool:
        return self.correct

    def _ipython_display_(self) -> None:
        """Nothing: the sentence is printed already."""


def require(condition: bool, *sentences: str) -> None:
    """End the check with "Not yet: " and the sentences unless `condition` holds."""
    if not condition:
        raise NotYet(*sentences)


def exercise(check: Callable[..., str]) -> Callable[..., Verdict]:
    """Make an exercise's check of a function that ends in NotYet where the answer is wrong.

    Every other exception ends in a "Not yet", too; only Ctrl-C passes through. The random states, the current GPU and
    PyTorch's settings are afterwards as they were before: later cells must not depend on whether a check was run.
    """

    @functools.wraps(check)
    def checked(*answers, **options) -> Verdict:
        try:
            _refuse_stubs([*answers, *options.values()])
            gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
            current = torch.cuda.device(torch.cuda.current_device()) if gpus else nullcontext()
            with torch.random.fork_rng(range(gpus)), current, settings_of_pytorch():
                correct, text = True, "Correct: " + check(*answers, **options)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - even a learner's exit() must not end the lesson
            correct, text = False, "Not yet: " + _explain(error)
        text = text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair cannot be printed
        _tell(correct, text, _solved(check, correct))
        return Verdict(correct, text)

    checked.is_exercise = True  # type: ignore[attr-defined]
    return checked


@contextmanager
def settings_of_pytorch() -> Iterator[None]:
    """PyTorch's own default device, default dtype and gradients, whatever a cell or an answer sets; then the cell's."""
    device, dtype, gradients = torch.get_default_device(), torch.get_default_dtype(), torch.is_grad_enabled()
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.set_default_device(None if device.type == "cpu" else device)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)


def _solved(check: Callable, correct: bool) -> str:
    """Such as "3 of 5 solved", after a right answer of the learner. After a stored solution nothing is counted."""
    shell = _shell()
    if not correct or shell is None or scores.is_off() or shell.user_ns["In"][-1].startswith("# Solution"):
        return ""
    lesson = sys.modules[check.__module__]
    names = {name for name, value in vars(lesson).items() if getattr(value, "is_exercise", False)}
    solved = scores.add("solved", lesson.__name__.rpartition(".")[2], check.__name__)
    return f"{len(names & solved)} of {len(names)} solved"


def _tell(correct: bool, text: str, solved: str) -> None:
    """A box that can be read from afar in a notebook, and a line elsewhere. `solved` stands beside the verdict."""
    plain = f"{text} ({solved})" if solved else text
    if _shell() is None:
        print(plain)
        return
    from IPython.display import display

    said = html.escape(text.partition(": ")[2]).replace("\n", "<br>")
    box = _BOX.format(**(_CORRECT if correct else _NOT_YET), solved=f" &nbsp; {solved}" if solved else "", text=said)
    display({"text/plain": plain, "text/html": box}, raw=True)


def _shell() -> Any:
    """The IPython of a notebook, or None: a terminal shows no boxes."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell if hasattr(shell, "kernel") else None


def show(value: object, longest: int = 80) -> str:
    """`value` as one short line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= longest else text[: longest - 4] + " ..."


def call(fn: object, *args, **kwargs) -> object:
    """`fn(*args, **kwargs)` of a learner's function; "Not yet" if it cannot be called or returns None or `...`."""
    if not callable(fn):
        raise NotYet(f"{show(fn)} cannot be called. Pass the function itself: its name without brackets.")
    before = _default_device()
    result = given(fn(*args, **kwargs), fn)
    left = _default_device()
    name = getattr(fn, "__name__", type(fn).__name__)
    later = f"`{name}` leaves PyTorch's default device at {left}, and all later cells would create their tensors there."
    require(left == before, later, "Use `device=`, or a block `with torch.device(...):`.")
    return result


def _default_device() -> torch.device:
    with torch._C.DisableTorchFunction():  # a check may watch the functions of PyTorch that an answer calls
        return torch.get_default_device()


def given(result: object, fn: object) -> object:
    """What a learner's function returned; "Not yet" if that is None or `...`."""
    name = getattr(fn, "__name__", type(fn).__name__)
    require(result is not ..., f"`{name}` still returns `...`. Replace the dots with your answer.")
    require(result is not None, f"`{name}` returned None. Does it end with `return` and a value?")
    return result


def _refuse_stubs(values) -> None:
    for value in values:
        require(value is not ..., "The cell above still contains `...`. Replace the dots with your answer.")
        require(value is not None, "The answer is None. If a function made it, does the function `return` its value?")
        if type(value) in (list, tuple, dict):
            _refuse_stubs(value.values() if type(value) is dict else value)


def _explain(error: BaseException) -> str:
    if isinstance(error, NotYet):
        return str(error)
    try:
        return f"Your code stopped{where(error)} with {words(error)}"
    except Exception:  # noqa: BLE001 - the text of a learner's error may raise, too
        return f"Your code stopped with an error of type {type(error).__name__} whose text cannot be shown."


def words(error: BaseException) -> str:
    """An error's type and text as one line that ends in a full stop, shortened."""
    text = str(error).strip()
    said = " ".join(f"{type(error).__name__}: {text}".split()) if text else type(error).__name__
    if _in_a_thread(error):
        said = text.splitlines()[-1]
    said = said if len(said) <= 300 else said[:296] + " ..."
    return said if said.endswith((".", "!", "?")) else said + "."


def where(error: BaseException) -> str:
    """Such as " at `x + y`": the learner's line, the last on the way that is neither installed nor the course's."""
    course = (str(Path(__file__).parent), str(Path(helpers.__file__).parent))
    others = (*course, ENGINE_FOLDER, sysconfig.get_path("stdlib"))
    on_the_way = [(frame.filename, frame.line) for frame in traceback.extract_tb(error.__traceback__)]
    if _in_a_thread(error):
        on_the_way += re.findall(r'  File "(.+)", line \d+, in .+\n    (.+)\n', str(error))
    for filename, line in reversed(on_the_way):
        if not filename.startswith(others) and "site-packages" not in filename and line:
            return f" at `{line}`"
    return ""


def _in_a_thread(error: BaseException) -> bool:
    """Whether it was raised in a thread of DataParallel: its text is a whole traceback, the error's own words last."""
    return str(error).startswith("Caught ") and "Original Traceback" in str(error)
