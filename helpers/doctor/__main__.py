"""`python -m helpers.doctor`: run all checks, print what they found, and a line to send in."""

import platform
import sys

from helpers.doctor import checks
from helpers.doctor.checks import Finding

SYMBOLS = {"ok": "✓", "warning": "!", "problem": "✗"}
PLAIN = str.maketrans({"✓": "+", "✗": "x"})  # for terminals that cannot print the symbols


def main() -> int:
    """Print a line for each check, with advice where there is some. Returns the exit code."""
    findings = []
    for check in checks.ALL:
        findings.append(check())
        say(f"{SYMBOLS[findings[-1].mark]} {findings[-1].mark:8} {findings[-1].found}")
        if findings[-1].advice:
            say(f"{'':11}{findings[-1].advice}")
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
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
