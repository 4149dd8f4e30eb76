"""What holds for the whole project: pins, settings, the commands of the README, which way imports run."""

import ast
import importlib
import json
import multiprocessing
import pkgutil
import re
import runpy
import shlex
import sys
import tomllib
from functools import cache
from pathlib import Path

import colab
import pytest
import run_all
import yaml
from packaging.specifiers import SpecifierSet
from virtual_gpus import active_machine

import helpers

ROOT = Path(__file__).resolve().parent.parent
TEST_COMMAND = "python3 -m pip install uv && python3 -m uv run pytest"
LAB_COMMAND = "python3 -m pip install uv && python3 -m uv run jupyter lab notebooks"
# From which lessons import, and which of their names are for one lesson alone, and why.
OFFERS = {"helpers", *(f"helpers.{name}" for name in "gpus data models train parallel measure show".split())}
FOR_ONE_LESSON = {
    "visualizers of memory, which the package is for": "live_memory read_memory explore describe_memory "
    "draw_segments describe_segments",
    "for training that runs out of memory": "explain_oom largest_batch",
    "a part or a kind of what several lessons use": "Attention FeedForward LLAMA_70B LlamaBlock "
    "RankError gpipe run_hosts",
    "what the panels are made of, for a panel in a lesson": "Panel control",
    "exercises of other lessons tell learners to call it": "describe_time_use",
}
NOT_EVERYBODYS = ("helpers", "torchvision", "matplotlib")
CPU_BUILD = "--torch-backend=cpu -e ./virtual-gpus -e ."
PIN = re.compile(r"([a-z0-9-]+)==[\w.]+( ; [^@/]+)?")


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def pins():
    return text_of("requirements.txt").splitlines()


def settings():
    return tomllib.loads(text_of("pyproject.toml"))


def names_of(group):
    """The packages of a dependency group."""
    return {re.match(r"[\w-]+", line)[0] for line in settings()["dependency-groups"][group]}


def test_requirements_are_exact_versions_without_addresses_and_all_roads_use_the_one_list():
    assert [line for line in pins() if not PIN.fullmatch(line)] == []
    assert names_of("lessons") <= {PIN.fullmatch(line)[1] for line in pins()}
    # PyTorch's CUDA build names the versions of NVIDIA's libraries, and its CPU build needs none of these 4 GB.
    assert not [line for line in pins() if re.match(r"nvidia-|cuda-|triton=", line)]
    assert settings()["project"]["dynamic"] == ["dependencies"]
    assert settings()["tool"]["setuptools"]["dynamic"]["dependencies"] == {"file": ["requirements.txt"]}
    assert text_of("environment.yml").rstrip().endswith("- pip:\n      - -e ./virtual-gpus\n      - -e .")


def first_try(words, printed):
    """Run `python -m` with these words, without what not everybody has. In a forked process: PyTorch is there."""
    for name in list(sys.modules):
        if name.partition(".")[0] in NOT_EVERYBODYS:
            sys.modules[name] = None
    sys.modules |= dict.fromkeys(NOT_EVERYBODYS)
    sys.argv = words
    with open(printed, "w", encoding="utf-8") as sys.stdout:
        runpy.run_path(str(ROOT / "virtual-gpus" / "src" / words[0] / "__main__.py"), run_name="__main__")


def test_the_readme_s_first_try_needs_pytorch_alone_and_prints_what_the_readme_shows(tmp_path, monkeypatch):
    first = re.search(r"```sh\n(PYTHONPATH=.*?)```.*?```text\n(.*?)```", text_of("README.md"), re.DOTALL)
    command, shown = first.groups()
    path, *words = shlex.split(command.replace("\\\n", ""))
    assert path == "PYTHONPATH=virtual-gpus/src" and words[:2] == ["python3", "-m"]
    monkeypatch.chdir(ROOT)
    ran = multiprocessing.get_context("fork").Process(target=first_try, args=(words[2:], tmp_path / "printed"))
    ran.start()
    ran.join()
    assert ran.exitcode == 0 and shown in (tmp_path / "printed").read_text(encoding="utf-8")


def test_readme_ci_binder_and_containers_use_the_same_commands():
    readme = text_of("README.md")
    assert TEST_COMMAND in readme and LAB_COMMAND in readme
    ci = text_of(".ci/run").splitlines()
    assert all(any(line.strip().endswith(command) for line in ci) for command in TEST_COMMAND.split(" && "))
    (job,) = yaml.safe_load(text_of(".github/workflows/tests.yml"))["jobs"].values()
    systems, pythons = job["strategy"]["matrix"]["os"], job["strategy"]["matrix"]["python"]
    assert {system.split("-")[0] for system in systems} == {"ubuntu", "macos", "windows"}
    assert [step["run"] for step in job["steps"] if "run" in step] == [TEST_COMMAND]
    container, docker = json.loads(text_of(".devcontainer/devcontainer.json")), text_of("Dockerfile")
    images = container["image"], re.search("^FROM (.*)$", docker, re.MULTILINE)[1]
    pythons += [image.removeprefix("python:").removesuffix("-slim") for image in images]
    known = SpecifierSet(settings()["project"]["requires-python"])
    assert all(version in known for version in [*pythons, text_of(".binder/runtime.txt").strip()[len("python-") :]])
    assert container["postCreateCommand"].endswith(CPU_BUILD) and f"{CPU_BUILD}\n" in docker
    assert text_of(".binder/postBuild").rstrip().endswith(CPU_BUILD)
    assert all(f"{name}={value}" in docker for name, value in container["containerEnv"].items())


def test_colab_gets_what_lessons_need_and_is_told_which_pytorch(monkeypatch):
    assert set(colab.NEEDS.values()) <= names_of("lessons")
    colab.check_torch()
    monkeypatch.setattr(colab, "version", lambda package: "2.10.1+cpu")
    with pytest.raises(RuntimeError, match=r"needs a PyTorch of .*>=2\.11.*has 2\.10\.1\+cpu"):
        colab.check_torch()


def test_the_main_set_up_does_without_the_frameworks():
    frameworks = names_of("frameworks")
    assert frameworks == {name for names in run_all.NEEDS.values() for name in names}
    assert not frameworks & {PIN.fullmatch(line)[1] for line in pins()}
    assert not [name for name in frameworks if users_of(name, "helpers")]


@cache
def imported(path):
    """The modules that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return names + [node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)]


def users_of(package, folder):
    """The files below `folder` that import `package`."""
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / folder).rglob("*.py")}
    assert files
    return {name for name, path in files.items() if any(f"{m}.".startswith(f"{package}.") for m in imported(path))}


@cache
def lessons_that_import():
    """By module and name, as in `from module import name`, the lessons in whose cells it stands."""
    found = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        lines = [line for cell in cells if cell["cell_type"] == "code" for line in "".join(cell["source"]).splitlines()]
        for node in ast.walk(ast.parse("\n".join("" if line.startswith(("%", "!")) else line for line in lines))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    name = (alias.name, "") if isinstance(node, ast.Import) else (node.module, alias.name)
                    found.setdefault(name, set()).add(path.name.partition("_")[0])
    return found


def test_only_one_module_knows_of_the_virtual_gpus():
    assert users_of("virtual_gpus", "helpers") == {"helpers/engine.py"}
    assert users_of("virtual_gpus", "notebooks") == set()
    assert [name for name in lessons_that_import() if name[0].startswith("virtual_gpus")] == []
    assert users_of("helpers", "virtual-gpus/src") == set()


def test_lessons_import_what_the_packages_offer_and_few_names_are_for_one_lesson():
    used = {name: found for name, found in lessons_that_import().items() if name[0].partition(".")[0] == "helpers"}
    used = {name: found for name, found in used.items() if ".".join(name) not in OFFERS}  # a package itself
    offered = {(module, name) for module in OFFERS for name in offered_by(module)}
    assert used.keys() - offered == set()
    homes = [name for _, name in used]
    assert len(homes) == len(set(homes)), "a name has one home"
    alone = " ".join(FOR_ONE_LESSON.values()).split()
    assert sorted(name for (_, name), found in used.items() if len(found) == 1) == sorted(alone)
    # The packages offer what lessons, checks or pages import, and the classes of what these names return.
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/**/*.py")]
    imports = [re.findall(r"from helpers\S* import ([\w, ]+)", page.read_text(encoding="utf-8")) for page in pages]
    known = {*homes, *re.findall(r"\w+", " ".join(line for lines in imports for line in lines))}
    for package in (helpers.measure, helpers.parallel, helpers.show):
        assert all(isinstance(getattr(package, name), type) for name in package.__all__ if name not in known)


def offered_by(module):
    module = importlib.import_module(module)
    return getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]


def test_types_of_the_helpers_are_right_and_complete():
    check = runpy.run_path(str(ROOT / "virtual-gpus/tests/test_types.py"))["check"]
    found = check("--search-path", ROOT, *(ROOT / "helpers").rglob("*.py"), preset="strict")
    # PyTorch's classes are made to be overridden. typing.override is of Python 3.12, one above the course's first.
    assert [line for line in found if "[missing-override-decorator]" not in line] == []


def test_the_map_of_the_helpers_names_each_module_below_those_that_it_imports():
    lines = re.findall(r"^ {4}(\S+) +(.*)", helpers.__doc__, re.MULTILINE)
    modules = [module.name for module in pkgutil.walk_packages(helpers.__path__, "helpers.") if not module.ispkg]
    assert sorted(f"helpers.{name}" for name, _ in lines) == sorted(modules)
    for place, (name, said) in enumerate(lines):
        module = importlib.import_module(f"helpers.{name}")
        assert [word for word in re.findall(r"`(\w+)`", said) if not hasattr(module, word)] == []
        above = [f"helpers.{each}" for each, _ in lines[:place]]
        assert {used for used in imported(Path(module.__file__)) if used.startswith("helpers")} <= set(above)


def test_importing_helpers_switches_nothing_on():
    names = [module.name for module in pkgutil.walk_packages(helpers.__path__, "helpers.")]
    assert len(names) > 15 and all(map(importlib.import_module, names)) and active_machine() is None
