"""Run public programs unmodified on virtual GPUs and write docs/programs.md. Nothing is downloaded.

python -m benchmarks.outside --had                      # what FOLDER has to hold, and which packages
python -m benchmarks.outside --from FOLDER              # run all programs
python -m benchmarks.outside --from FOLDER --only mnist
python -m benchmarks.outside --from FOLDER --check-races    # for the column "races"; no reference is run
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.outside import table
from benchmarks.outside.programs import SOURCES
from benchmarks.outside.runner import check_races, hold, hold_on_fakegpu


def main() -> None:
    """Run what is asked for, and write the table with the results of these runs and of earlier ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outside", description=__doc__.splitlines()[0])
    parser.add_argument("--had", action="store_true", help="say where the programs are had")
    parser.add_argument("--from", dest="folder", type=Path, help="the folder that holds the repositories")
    parser.add_argument("--only", nargs="*", default=[""], help="only the programs of these names or parts of names")
    parser.add_argument("--fakegpu", action="store_true", help="run on FakeGPU, for the column beside ours")
    parser.add_argument("--check-races", action="store_true", help="look for races, for the column of that name")
    parser.add_argument("--work", type=Path, help="keep copies, logs and losses here")
    options = parser.parse_args()
    if options.had:
        for source in SOURCES.values():
            print(f"{source.folder or '(installed)'}: {source.had}")
    if options.folder is None:
        table.write()
        return
    work = options.work or Path(tempfile.mkdtemp(prefix="outside-"))
    names = {program.name: program for program in table.PROGRAMS}
    chosen = [names[name] for word in options.only for name in ([word] if word in names else names) if word in name]
    for program in dict.fromkeys(chosen):
        source = options.folder / SOURCES[program.source].folder
        if not source.is_dir():
            print(f"{program.name}: there is no folder {source}")
            continue
        column = "races" if options.check_races else "FakeGPU" if options.fakegpu else "ours"
        if column == "races":
            row = check_races(program, source, work)
        elif column == "FakeGPU":
            row = hold_on_fakegpu(program, source, options.folder / SOURCES["fakegpu"].folder, work).row()
        else:
            row = hold(program, source, work).row()
        print(program.name, row, flush=True)
        table.keep(program, row, column)
    table.write()


if __name__ == "__main__":
    main()
