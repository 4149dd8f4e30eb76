"""A feature is one folder: the package runs without any, but for the two that a tensor on a GPU is made of."""

import ast
import os
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from measuring import rows_of
from virtual_gpus import features

FOLDER = Path(features.__file__).parent
# "cuda" says that there are GPUs, "tensors" which one a tensor is on.
BASE = {"cuda", "tensors"}
FEATURES = {module.name for module in pkgutil.iter_modules(features.__path__)} - BASE
TESTS = Path(__file__).parent
ROWS = {name: rows_of(name) for name in FEATURES | BASE}
SETTINGS = {name: rows["settings"] for name, rows in ROWS.items() if "settings" in rows}
PROGRAM = """
import importlib.abc, os, pkgutil, pytest, sys, torch

class Gone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"virtual_gpus.features.{feature}.") for feature in GONE):
            raise ModuleNotFoundError(name)

def modules(*args, **options):
    found = walk(*args, **options)
    return (module for module in found if module.name.removeprefix("virtual_gpus.features.") not in GONE)

def train():
    import virtual_gpus as package
    from virtual_gpus import virtual_gpus
    assert all(getattr(package, name) for name in package.__all__ if name != "RaceError" or "races" not in GONE)
    for feature in GONE & SETTINGS.keys():
        with pytest.raises(ValueError, match=f"needs the feature '{feature}'"):
            virtual_gpus(2, **SETTINGS[feature]).start()
    with virtual_gpus(2):
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 5)).to("cuda:1")
        net(torch.ones(2, 3, 4, 4, device="cuda:1")).softmax(1).sum().backward()
        assert net[0].weight.grad.device == torch.device("cuda:1") and torch.cuda.memory_allocated(1) > 0
        layers = torch.nn.ModuleList([torch.nn.TransformerEncoderLayer(8, 2, 16), torch.nn.LSTM(8, 5)]).to("cuda:1")
        output, _ = layers[1](layers[0](torch.ones(2, 3, 8, device="cuda:1")))
        output.sum().backward()
        (torch.optim.SGD if "streams" in GONE else torch.optim.AdamW)(layers.parameters(), 0.1).step()
        assert output.device == torch.device("cuda:1") and layers[1].weight_hh_l0.grad.any()
        with torch.accelerator.device_index(1):  # as each thread of nn.DataParallel does
            assert torch.cuda.current_device() == 1
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        torch.distributed.all_reduce(total := torch.ones(2))
        assert total.tolist() == [1, 1]
        torch.distributed.destroy_process_group()
        with pytest.raises(RuntimeError):  # devices are mixed
            net(torch.ones(2, 3, 4, 4))

walk, pkgutil.iter_modules = pkgutil.iter_modules, modules
sys.meta_path.insert(0, Gone())
for GONE in CASES:
    child = os.fork()
    if not child:
        print(GONE, flush=True)
        train()
        os._exit(0)
    assert not os.waitpid(child, 0)[1]
"""


def used_by(name):
    """The features that a feature imports."""
    files = [FOLDER / f"{name}.py"] if (FOLDER / f"{name}.py").exists() else (FOLDER / name).rglob("*.py")
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    modules = [f"{node.module}.{node.names[0].name}" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {module.split(".")[2] for module in modules if module.startswith("virtual_gpus.features.")} - {name}


def test_all_of_a_feature_has_its_name_or_lies_in_its_folder():
    names = {f"{name}{end}" for name in FEATURES | BASE for end in (".py", ".toml", ".limits.md")} | {"__init__.py"}
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} <= names
    assert {path.name for path in FOLDER.glob("*/*.*") if ".py" not in path.name} <= {"figures.toml", "limits.md"}


def test_no_name_of_a_feature_is_unknown_as_a_misspelt_one_would_be():
    sources = [path.read_text("utf-8") for path in FOLDER.parent.rglob("*.py")]
    words = Counter(word for text in sources for word in re.findall(r"\w+", text))
    names = {name for module in features.MODULES for name in vars(module) if words[name] == 1 and name[0] != "_"}
    modules = {module.__name__.rpartition(".")[2] for module in features.MODULES}
    assert names - modules <= {*re.findall(r"(?m)^    (\w+)(?:\(\w*\))?  ", features.__doc__)}


def test_features_that_go_with_another_are_few():
    for name, rows in ROWS.items():
        assert used_by(name) - BASE == {*rows.get("uses", ())}, name


def test_tests_of_a_feature_are_named_and_go_with_it():
    there, folder = [*TESTS.rglob("test_*.py")], TESTS / "features"
    alone = {path.stem.removeprefix("test_") for path in folder.glob("test_*.py")}
    together = {path.parent.name for path in folder.glob("*/test_*.py")}
    assert alone | together == FEATURES and not alone & together
    assert {path.name for path in folder.rglob("*.toml")} <= {f"{name}.toml" for name in alone | BASE | {"rows"}}
    assert len({path.name for path in there}) == len(there), "pytest imports test modules by these names"
    text = "".join(path.read_text("utf-8") for path in there)
    assert {name for rows in ROWS.values() for name in rows if f'"{name}"' not in text} == set(), "nobody reads them"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process for each feature, with PyTorch imported once")
def test_a_network_trains_without_any_of_the_others():
    users = {name: {user for user, rows in ROWS.items() if name in rows.get("uses", ())} for name in FEATURES}
    cases = [FEATURES, *({name} | users[name] for name in sorted(FEATURES))]
    program = f"CASES, SETTINGS = {cases!r}, {SETTINGS!r}\n{PROGRAM}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not run.returncode, run.stdout + run.stderr
