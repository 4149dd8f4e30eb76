"""Says whether this machine can run the lessons, and what to do where it cannot.

    python -m notebooks.doctor        # in the course's folder; exit code 0 if the lessons can be run, 1 otherwise

Each check gives a line: "ok", "warning" (the lessons run, but read the advice) or "problem". The last line sums up for
the instructor and holds nothing personal. The doctor imports PyTorch only to check it, because it must be able to
report that PyTorch is missing or broken.
"""
