"""What holds for the whole project: pins, settings, the commands of the README, which way imports run."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEST_COMMAND = "python3 -m pip install uv && python3 -m uv run pytest"
LAB_COMMAND = "python3 -m pip install uv && python3 -m uv run jupyter lab notebooks"
DOORS = {"helpers/devices.py", "helpers/hardware.py"}  # through which the lessons' modules reach the virtual GPUs
NEUTRAL = ["helpers.intervals"]  # both sides use them; they import nothing of ours
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


# ---- imports run one way: lessons -> helpers -> the doors -> helpers.virtual


def imported(code, package):
    """Modules and names that `code`, of a module in `package`, imports; also those given to import_module as a text."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


def is_virtual(name):
    return f"{name}.".startswith("helpers.virtual.")


def imports_of(path):
    return imported(path.read_text(encoding="utf-8"), ".".join(path.relative_to(ROOT).parent.parts))


def modules():
    return {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "helpers").rglob("*.py")}


def test_only_the_doors_know_of_the_virtual_gpus():
    lesson_facing = {name: path for name, path in modules().items() if not name.startswith("helpers/virtual/")}
    scripts = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "notebooks").rglob("*.py")}
    know = {name for name, path in (lesson_facing | scripts).items() if any(map(is_virtual, imports_of(path)))}
    assert know == DOORS


def test_the_virtual_gpus_know_of_nothing_else_here():
    own = {name: path for name, path in modules().items() if name.startswith("helpers/virtual/")}
    assert len(own) > 50
    others = {
        name: [each for each in imports_of(path) if each.startswith("helpers.") and not is_virtual(each)]
        for name, path in own.items()
    }
    found = {each.rpartition(".")[0] for imports in others.values() for each in imports}
    assert found == set(NEUTRAL)


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_both_sides_use_imports_nothing_of_ours(name):
    path = ROOT / (name.replace(".", "/") + ".py")
    assert [each for each in imports_of(path) if each.startswith("helpers")] == []


@pytest.mark.parametrize(
    ("code", "known"),
    [
        ("import helpers.virtual.links as links", True),
        ("from helpers.virtual import virtual_gpus", True),
        ("from helpers import virtual", True),
        ("def f():\n    from ..virtual.specs import spec", True),
        ("from ... import virtual", False),
        ("from .. import virtual", True),
        ("import importlib\nimportlib.import_module('helpers.virtual.clock')", True),
        ("from helpers.virtually import x", False),
        ("from . import virtual", False),
        ("import helpers", False),
    ],
)
def test_an_import_of_the_virtual_gpus_is_seen(code, known):
    assert any(map(is_virtual, imported(code, "helpers.widgets"))) == known
