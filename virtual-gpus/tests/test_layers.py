"""Imports run one way: no module of the package imports one of a higher layer, and none itself by a detour."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import torch
from virtual_gpus import features

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "virtual_gpus"
# From the lowest to the highest. A folder is one layer; modules of a layer may import one another, without a cycle.
# "virtual_gpus" is the package's own __init__. "children" is run by other processes, see processes/children.py.
LAYERS = """
arithmetic figures versions gpus files collector memory memory_model clock settings processes driver errors follower
threads machine entrance placement dispatch patches timeline features switch testing plan measure virtual_gpus
__main__ children
""".split()


def imports(path, known):
    """The modules of this package that a file imports anywhere, also inside functions and for its types alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}: write imports of this package in full"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in known or node.module in known:
                    yield whole if whole in known else node.module


def layer(name):
    parts = name.split(".")
    return LAYERS.index(parts[1] if len(parts) > 1 else "virtual_gpus")


def feature(name):
    """ "attention" for a module of that feature. Empty for all others, and for the package of all features."""
    return (name.split(".") + [""] * 3)[2] if name.startswith("virtual_gpus.features.") else ""


def test_no_module_imports_a_higher_layer_or_itself_by_a_detour():
    known = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        known[".".join(("virtual_gpus", *parts)).removesuffix(".__init__")] = path
    graph = {name: set(imports(path, known)) - {name} for name, path in known.items()}
    assert {layer(name) for name in graph} == set(range(len(LAYERS)))
    assert {f"{a} -> {b}" for a, used in graph.items() for b in used if layer(b) > layer(a)} == set()
    TopologicalSorter(graph).prepare()
    by_feature = {}
    for name, used in graph.items():
        by_feature.setdefault(feature(name), set()).update(map(feature, used))
    TopologicalSorter({name: used - {name} for name, used in by_feature.items() if name}).prepare()


def test_no_two_modules_share_a_name():
    names = [path.name for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_versions_of_pytorch_have_names():
    """So `git grep ': Version = '` finds all rules by version, as ARCHITECTURE.md says."""
    lines = [line for path in SOURCE.rglob("*.py") for line in re.findall(r".+\(2, 1\d\)", path.read_text("utf-8"))]
    assert not [line for line in lines if not re.match(r"\w+: Version = |CUDNN_OF_WHEELS|    blas_workspaces", line)]


def test_a_name_of_pytorch_is_replaced_by_one_feature_only():
    """So it does not matter in which order the features are found."""
    of_modules = [{(id(owner), name) for owner, name, _ in rows()} for rows in features._offered("patches")]
    assert len(of_modules) > 20 and sum(map(len, of_modules)) == len(set().union(*of_modules))
    lacking = {name for owner, name, _ in features.patches() if not hasattr(owner, name)}
    assert lacking == {"_record"} or torch.version.cuda is None  # a CPU build has fewer names


def test_nothing_here_imports_the_course():
    """The package, its tests and its benchmarks stand alone: of the course's packages they import none."""
    course = re.compile(r"^\s*(from|import) (helpers|notebooks)\b", re.MULTILINE)
    files = list(ROOT.rglob("*.py"))
    assert len(files) > 100
    assert [str(path) for path in files if course.search(path.read_text(encoding="utf-8"))] == []
