"""`python -m helpers.doctor`: run all checks, print what they found, and a line to send in."""

from __future__ import annotations

import platform
import sys
import textwrap

from helpers.doctor import checks
from helpers.doctor.checks import Finding

SYMBOLS = {"ok": "✓", "warning": "!", "problem": "✗"}
INDENT = 11 * " "


def main() -> int:
    """Print a line for each check, with advice where there is some. Returns the exit code."""
    sys.stdout.reconfigure(errors="replace", line_buffering=True)  # not every terminal can print the symbols
    findings = []
    for check in checks.ALL:
        finding = check()
        known = finding.advice and any(finding.advice == before.advice for before in findings)
        advice = "Do the same as above." if known else finding.advice
        findings.append(finding)
        for text, begin in ((finding.found, f"{SYMBOLS[finding.mark]} {finding.mark:8} "), (advice, INDENT)):
            if text:
                print(textwrap.fill(text, 100, initial_indent=begin, subsequent_indent=INDENT, break_on_hyphens=False))
    bad = any(finding.mark == "problem" for finding in findings)
    print("\nSomething is missing. Do what the problems above say." if bad else "\nThis machine can run the lessons.")
    print("Before a course, send this line to the instructor:\n")
    print(summary(findings, bad))
    return int(bad)


def summary(findings: list[Finding], bad: bool) -> str:
    """One line with versions and results, without names, folders and addresses."""
    result = "multi-GPU lessons: " + ("PROBLEM" if bad else "ready")
    return " | ".join([result, f"{platform.system()} {platform.machine()}", *(finding.short for finding in findings)])


if __name__ == "__main__":
    sys.exit(main())
