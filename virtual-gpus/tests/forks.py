"""`python -m virtual_gpus` in a fork of this process: starting Python and importing PyTorch anew takes seconds."""

import os
import signal
import subprocess
import sys
import tempfile

from ranks import HANGS_S
from virtual_gpus.__main__ import main


def command(arguments, folder, **environment) -> subprocess.CompletedProcess:
    """What the command returns and prints in `folder`. It ends without its handlers of atexit."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            _run_and_end(list(arguments), folder, environment, out, err)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


def run(asked, **_) -> subprocess.CompletedProcess:
    """`subprocess.run` of a `python -m virtual_gpus`, in the current folder."""
    assert asked[:3] == [sys.executable, "-m", "virtual_gpus"]
    return command(asked[3:], os.getcwd())


def _run_and_end(arguments, folder, environment, out, err):
    code = 1
    try:
        signal.alarm(HANGS_S)
        os.chdir(folder)
        os.environ.update(environment)
        sys.path.insert(0, str(folder))  # as `python -m` does
        sys.excepthook = sys.__excepthook__  # PyTorch puts in one of its own for a process group
        for file, descriptor in ((out, 1), (err, 2)):
            os.dup2(file.fileno(), descriptor)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")
        main(arguments)
        code = 0
    except SystemExit as left:
        code = left.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__.tb_next)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
