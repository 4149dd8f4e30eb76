"""`python -m notebooks.doctor`: run all checks, print what they found, and a line to send in."""

from __future__ import annotations

import platform
import sys
import textwrap

from notebooks.doctor import checks
from notebooks.doctor.checks import Finding

SYMBOLS = {"ok": "✓", "warning": "!", "problem": "✗"}
INDENT = 11 * " "
PLAIN = str.maketrans({"✓": "+", "✗": "x"})  # for terminals that cannot print the symbols


def main() -> int:
    """Print a line for each check, with advice where there is some. Returns the exit code."""
    findings = []
    for check in checks.ALL:
        finding = check()
        known = finding.advice and any(finding.advice == before.advice for before in findings)
        advice = "Do the same as above." if known else finding.advice
        findings.append(finding)
        for text, begin in ((finding.found, f"{SYMBOLS[finding.mark]} {finding.mark:8} "), (advice, INDENT)):
            say(textwrap.fill(text, 100, initial_indent=begin, subsequent_indent=INDENT, break_on_hyphens=False))
    bad = any(finding.mark == "problem" for finding in findings)
    say(
        "\n" + ("Something is missing. Do what the problems above say." if bad else "This machine can run the lessons.")
    )
    say("Before a course, send this line to the instructor:\n")
    say(summary(findings, bad))
    return int(bad)


def summary(findings: list[Finding], bad: bool) -> str:
    """One line with versions and results, without names, folders and addresses."""
    result = "multi-GPU lessons: " + ("PROBLEM" if bad else "ready")
    return " | ".join([result, f"{platform.system()} {platform.machine()}", *(finding.short for finding in findings)])


def say(text: str) -> None:
    encoding = sys.stdout.encoding or "ascii"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(PLAIN).encode(encoding, "replace").decode(encoding)
    if text:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
