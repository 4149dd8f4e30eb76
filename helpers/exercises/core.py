"""`@exercise` makes a check of a function: whatever is passed, it prints a sentence and does not raise."""

import functools
import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch

from helpers.gpus import ENGINE_FOLDER


class NotYet(Exception):
    """The answer is not right yet: `what` was found, and `because` explains it."""

    def __init__(self, what: str, because: str):
        super().__init__(f"{what}, because {because}")


class Verdict:
    """What a check returns: true if the answer was correct, `text` as printed. Displays as nothing."""

    def __init__(self, correct: bool, text: str):
        self.correct, self.text = correct, text

    def __bool__(self) -> bool:
        return self.correct

    def _ipython_display_(self) -> None:
        """Nothing: the sentence is printed already."""


def not_yet(what: str, because: str) -> NoReturn:
    """End a check: prints "not yet: `what`, because `because`"."""
    raise NotYet(what, because)


def require(condition: bool, what: str, because: str) -> None:
    """`not_yet(what, because)` unless `condition` holds."""
    if not condition:
        not_yet(what, because)


def exercise(check: Callable[..., str | None]) -> Callable[..., Verdict]:
    """Make an exercise's check of a function that calls `not_yet` (or `compare.*`) where the answer is wrong.

    The check returns a sentence for a right answer, or None. Every exception ends in a "not yet"; only Ctrl-C
    passes through. The random state and the current GPU are afterwards as they were before.
    """

    @functools.wraps(check)
    def checked(*answers, **options) -> Verdict:
        try:
            _look_for_stubs(check, answers, options)
            with _undisturbed():
                found = check(*answers, **options)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - even a learner's exit() must not end the lesson
            return _say(False, _sentence(error))
        return _say(True, found or "well done")

    return checked


def show(value: object, longest: int = 80) -> str:
    """`value` as one short line, also when its own repr fails."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # noqa: BLE001 - a learner's repr may raise anything
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= longest else text[: longest - 4] + " ..."


def call(fn: object, *args, **kwargs) -> object:
    """`fn(*args, **kwargs)` of a learner's function; "not yet" if it cannot be called or returns nothing or `...`."""
    if not callable(fn):
        not_yet(f"{show(fn)} cannot be called", "the check needs the function itself: its name without brackets")
    return given(fn(*args, **kwargs), fn)


def given(result: object, fn: object) -> object:
    """What a learner's function returned; "not yet" if that is nothing or `...`."""
    name = getattr(fn, "__name__", type(fn).__name__)
    if result is ...:
        not_yet(f"{name} still returns ...", "your answer is missing: put it in the place of the dots")
    if result is None:
        not_yet(f"{name} returned None", "it has no `return` with a value yet")
    return result


def _say(correct: bool, text: str) -> Verdict:
    text = ("correct: " if correct else "not yet: ") + text
    text = text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair cannot be printed
    print(text)
    return Verdict(correct, text)


def _look_for_stubs(check: Callable, answers: tuple, options: dict) -> None:
    try:
        bound = inspect.signature(check).bind(*answers, **options)
    except TypeError as error:
        not_yet(f"the check was called with other answers than it takes ({error})", f"it is {_usage(check)}")
    for value in _flat(bound.arguments.values()):
        if value is ...:
            not_yet("there is nothing to check", "the cell above still holds ...: put your answer in its place")
        if value is None:
            not_yet("there is nothing to check", "the answer is None: does your function `return` its value?")


def _flat(values) -> Iterator[object]:
    for value in values:
        if type(value) in (list, tuple):
            yield from _flat(value)
        elif type(value) is dict:
            yield from _flat(value.values())
        else:
            yield value


def _usage(check: Callable) -> str:
    return f"check.{check.__name__}{inspect.signature(check)}"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Random states and current GPU as before: later cells must not depend on whether a check was run."""
    gpus = torch.cuda.is_available() and torch.cuda.is_initialized()
    current = torch.cuda.current_device() if gpus else None
    with torch.random.fork_rng(range(torch.cuda.device_count()) if gpus else []):
        try:
            yield
        finally:
            if gpus:
                torch.cuda.set_device(current)


def _sentence(error: BaseException) -> str:
    if isinstance(error, NotYet):
        return str(error)
    return f"your code stopped{where(error)}, because of {words(error)}"


# An error in a thread of nn.DataParallel: its text is a whole traceback, with the error's own words at the end.
_IN_A_THREAD = re.compile(
    r"Caught (?P<kind>\w+) in replica .*\nOriginal Traceback(?P<lines>[\s\S]*)\n[\w.]*(?P=kind): (?P<message>[\s\S]*)"
)
_LINES = re.compile(r'  File "(.+)", line \d+, in .+\n    (.+)\n')


def words(error: BaseException) -> str:
    """An error's kind and text as one line, shortened."""
    message = " ".join(_text(error, "message").split())
    message = message if len(message) <= 300 else message[:296] + " ..."
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def where(error: BaseException) -> str:
    """Such as " at `x + y`": the learner's line, the last on the way that is neither installed nor of this package."""
    others = (str(Path(__file__).parents[1]), ENGINE_FOLDER, sysconfig.get_path("stdlib"))
    on_the_way = [(frame.filename, frame.line) for frame in traceback.extract_tb(error.__traceback__)]
    for filename, line in reversed(on_the_way + _LINES.findall(_text(error, "lines"))):
        if not filename.startswith(others) and "site-packages" not in filename and line:
            return f" at `{line}`"
    return ""


def _text(error: BaseException, part: str) -> str:
    """The `message` of an error, or the `lines` of the traceback that is in its text: none for most."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the text of an error may raise, too
        text = "an error whose text cannot be shown"
    in_a_thread = _IN_A_THREAD.match(text)
    return in_a_thread[part] if in_a_thread else {"message": text, "lines": ""}[part]
