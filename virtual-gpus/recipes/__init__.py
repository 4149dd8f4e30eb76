"""Questions about a training job that a run without a GPU answers: a program, the commands, and what they print.

python -m recipes                                # runs all commands, and writes docs/planning.md
"""
