"""Make the module of a new feature, which runs, and its test, which fails until you have filled both.

    python docs/new_feature.py airy "Airy functions" special_airy_ai

The feature begins as a recipe for the memory of one operator, which has none yet, with its figures and limits beside
it. ARCHITECTURE.md ("How to add a feature") says what else the module may have, and "How to add an operator" how to
fill the recipe.
"""

import argparse
from pathlib import Path

import torch
from virtual_gpus import features
from virtual_gpus.dispatch import operators

ROOT = Path(__file__).resolve().parents[1]
MODULE = '''"""{what}: how CUDA uses memory. Name the file of PyTorch, or the measurement, that this rests on."""

import torch

from virtual_gpus import figures
from virtual_gpus.clock.cost import moves
from virtual_gpus.dispatch.operators import OpCall, Row

_FITTED = figures.beside(__file__)


def {operator}(call: OpCall) -> torch.Tensor:
    """Say what CUDA takes on the way, in its order."""
    with call.scratch(512):  # bytes
        return call.run()


OPERATORS = {{"{operator}": Row(moves(**_FITTED["{operator}"]), {operator})}}
'''
FIGURES = """# What {what} take besides the plain reading and writing of their bytes.

source = "estimate" # name the measurement, if there is one
units.floor = "of the shortest kernel"
{operator} = {{ floor = 1 }}
"""
LIMITS = "- {what}: say what differs from a real GPU, or delete this file, and the row in tests/features/{name}.toml.\n"
ROWS = '[limits]\n"{what}" = "test_{name}.py::test_peak_of_{operator}"\n'
TEST = '''"""{what}: the memory of its operators."""

import torch
from virtual_gpus import virtual_gpus

PEAK = 0  # bytes: measured on a real GPU, or added up from PyTorch's source


def test_peak_of_{operator}():
    with virtual_gpus(1):
        x = torch.ones(1000, device="cuda")
        torch.ops.aten.{operator}({arguments})
        assert torch.cuda.max_memory_allocated() == PEAK
'''


def main(arguments=None, root=ROOT):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the module")
    parser.add_argument("what", help="the feature in a few words, for its docstrings")
    parser.add_argument("operator", help="base name of an ATen operator: torch.ops.aten.NAME")
    options = parser.parse_args(arguments)
    if not options.name.isidentifier() or hasattr(features, options.name):
        parser.error(f"{options.name!r} is the name of a feature, or no name for a module.")
    if options.operator in operators.ROWS:
        parser.error(f"{options.operator!r} has a row: {operators.ROWS[options.operator]}.")
    packet = getattr(torch.ops.aten, options.operator, None)
    if packet is None:
        parser.error(f"There is no operator {options.operator!r}. Write add, not add.Tensor: overloads share a recipe.")
    overload = getattr(packet, packet.overloads()[0])
    if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd"):
        parser.error(
            f"{options.operator!r} is made of other operators. Write recipes for those, or a row of patches()."
        )
    needed = [argument for argument in overload._schema.arguments if not argument.has_default_value()]
    options.arguments = ", ".join({"Tensor": "x", "List[Tensor]": "[x]"}.get(str(a.type), "...") for a in needed)
    module = root / "src" / "virtual_gpus" / "features" / f"{options.name}.py"
    tests = root / "tests" / "features"
    module.parent.mkdir(parents=True, exist_ok=True)
    texts = {module: MODULE, module.with_suffix(".toml"): FIGURES, module.with_suffix(".limits.md"): LIMITS,
             tests / f"test_{options.name}.py": TEST, tests / f"{options.name}.toml": ROWS}  # fmt: skip
    for path, text in texts.items():
        path.write_text(text.format(**vars(options)), encoding="utf-8", newline="\n")
        print(path.relative_to(root))
    print(f"Its arguments, of which call[NAME] gives one: {overload._schema}")
    print("Fill the recipe and the test. Then run: "
          f"pytest tests/features/test_{options.name}.py tests/test_layers.py tests/test_features.py")  # fmt: skip


if __name__ == "__main__":
    main()
