"""The files that every road to the lessons shares: pins, settings, the commands of the README."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST_COMMAND = "python3 -m pip install uv && python3 -m uv run pytest"
LAB_COMMAND = "python3 -m pip install uv && python3 -m uv run jupyter lab notebooks"
PIN = re.compile(r"([a-z0-9-]+)==[\w.]+( ; [^@/]+)?")


def pins():
    return (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()


def settings():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_requirements_are_exact_versions_without_addresses():
    assert [line for line in pins() if not PIN.fullmatch(line)] == []


def test_every_package_that_is_asked_for_is_pinned():
    asked = [re.match(r"[\w-]+", line)[0] for line in settings()["dependency-groups"]["lessons"]]
    pinned = {PIN.fullmatch(line)[1] for line in pins()}
    assert asked and set(asked) <= pinned


def test_all_roads_use_the_one_list():
    assert settings()["project"]["dynamic"] == ["dependencies"]
    assert settings()["tool"]["setuptools"]["dynamic"]["dependencies"] == {"file": ["requirements.txt"]}
    assert (ROOT / "environment.yml").read_text(encoding="utf-8").rstrip().endswith("- pip:\n      - -e .")


def test_the_readme_gives_the_commands_and_ci_runs_the_same():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert TEST_COMMAND in readme and LAB_COMMAND in readme
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1] == TEST_COMMAND
