"""Run an unmodified program on virtual GPUs.

python -m virtual_gpus --gpus 4 --memory 16GiB train.py --epochs 1
python -m virtual_gpus --gpus 2 -m package.module arguments
torchrun --nproc-per-node 2 -m virtual_gpus --gpus 2 train.py
python -m virtual_gpus --gpus 8 --kind H100 --shapes-only --as-rank 0 --of 1024 train.py
python -m virtual_gpus plan --gpus 8 --kind H100 --of 64 train.py    # does it fit?
python -m virtual_gpus measure --out mine.json train.py    # how long its operators take on a real GPU
"""

import argparse
import builtins
import importlib.util
import io
import os
import runpy
import sys
import types
from collections.abc import Callable

from virtual_gpus.collector import passing_over_torch

with passing_over_torch():
    from virtual_gpus import measure, plan
    from virtual_gpus.settings import Settings, add_options
    from virtual_gpus.switch import active_machine, virtual_gpus
    from virtual_gpus.timeline.training import record_training


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Separate our options from the program and its arguments. Invalid options print an error and exit with 2."""
    plans, measures = arguments[:1] == ["plan"], arguments[:1] == ["measure"]
    words = "Say whether a training job fits: the last line is FITS, DOES NOT FIT, ERROR or INCOMPLETE."
    parser = argparse.ArgumentParser(
        prog=" ".join(["python -m virtual_gpus", *arguments[: plans or measures]]),
        description=words if plans else "Run a program on virtual GPUs.",
        epilog="Exit codes: 0 fits, 1 error, 2 wrong options, 3 does not fit, 4 incomplete." if plans else None,
        allow_abbrev=False,
    )
    if plans:
        plan.add_options(parser)
    if measures:
        measure.add_options(parser)
    add_options(parser, plan.number_or_place)
    parser.add_argument("--tokens", type=int, help="tokens of one step of that job, for its report")
    parser.add_argument("--samples", type=int, help="samples of one step of that job, for its report")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("program", help="a script, or a module name after -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments for the program")
    options = parser.parse_args(arguments[plans or measures :])
    options.plans, options.measures = plans, measures
    if options.module and not _is_module(options.program):
        parser.error(f"There is no module named {options.program!r}.")
    if not options.module and not os.path.isfile(options.program):
        parser.error(f"There is no file {options.program!r}. To run a module, write -m {options.program}.")
    if options.tokens is not None and options.samples is not None:
        parser.error("Give --tokens or --samples, not both.")
    try:
        if plans:
            plan.prepare(options)
        asked = {name: value for name, value in vars(options).items() if name in Settings.__dataclass_fields__}
        options.made = virtual_gpus(**asked)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return options, options.arguments


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


def main(arguments: list[str] | None = None) -> None:
    """Switch the GPUs on and run the program as __main__, as Python itself would.

    The GPUs stay on until the process ends, because threads and exit handlers of the program need them too. As one rank
    of many, a report of the job is printed after the program, also after one that fails.
    """
    given = sys.argv[1:] if arguments is None else arguments
    options, rest = parse(given)
    if options.plans and options.search:
        plan.search(given[1:], options)
    if options.measures and not options.only_list:
        return measure.command(given[1:], options.out)
    _stay_on_this_machine()
    options.made.start()
    machine = active_machine()
    assert machine is not None
    machine.look_again()  # the program may set CUDA_VISIBLE_DEVICES in its first lines
    sys.argv = [options.program, *rest]
    if options.plans:
        plan.run(lambda: _run(options), options)
    if options.measures:
        return measure.write_list(lambda: _run(options), machine, options.out)
    if options.rank is None:
        return _run(options)
    try:
        with record_training() as recorded:
            _run(options)
    finally:
        print(recorded.report(tokens=options.tokens, samples=options.samples), flush=True)


def _stay_on_this_machine() -> None:
    """Let gloo use the loopback interface if torchrun has started all ranks here."""
    if os.environ.get("WORLD_SIZE") and os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE"):
        from virtual_gpus.testing.child import interface  # here, because only ranks need it

        os.environ.update(interface())


def _run(options: argparse.Namespace) -> None:
    try:
        if options.module:
            if options.program == "pytest":  # else it warns that it could not rewrite this package, a plugin of its own
                package = sys.modules["virtual_gpus"]
                package.__doc__ = f"{package.__doc__}\nPYTEST_DONT_REWRITE"
            runpy.run_module(options.program, run_name="__main__", alter_sys=True)
        else:
            _run_script(options.program)
    except BaseException:
        sys.excepthook = _without_our_frames(sys.excepthook)
        raise


def _run_script(program: str) -> None:
    """Run `program` as Python does. runpy would remove the module while threads may still need it."""
    path = os.path.abspath(program)
    sys.path.insert(0, os.path.dirname(path))
    script = types.ModuleType("__main__")
    vars(script).update(__file__=path, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = script
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(script))


def _without_our_frames(hook: Callable[..., object]) -> Callable[..., None]:
    """Wrap `hook`, which handles uncaught exceptions, so that it receives a traceback that starts in the program."""

    def show(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    return show


if __name__ == "__main__":
    main()
