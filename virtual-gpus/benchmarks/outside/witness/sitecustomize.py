"""Note every loss of a program. This folder is on PYTHONPATH, and Python imports this file when it starts.

The value of each tensor on which `backward` is called goes into a file of the process in the folder OUTSIDE_LOSSES, if
that is not "".
Most programs print a few losses and round them, and some print none.
"""

import contextlib
import importlib.abc
import importlib.util
import os
import random
import sys


def _note(tensors) -> None:
    import torch

    roots = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if capturing or not os.environ["OUTSIDE_LOSSES"]:
        return
    with torch.no_grad():
        roots = [getattr(root, "unscaled", root) for root in roots if hasattr(root, "detach")]  # not a GradientEdge
        locally = [root.to_local() if hasattr(root, "to_local") else root for root in roots]
        value = sum(float(root.detach().double().sum()) for root in locally)
    rank = os.environ.get("RANK", "")
    with open(os.path.join(os.environ["OUTSIDE_LOSSES"], f"rank{rank}.{os.getpid()}"), "a") as file:
        file.write(f"{value!r}\n")


def _note_losses(autograd) -> None:
    backward = autograd.backward

    def noting(tensors, *args, **kwargs):
        _note(tensors)
        return backward(tensors, *args, **kwargs)

    autograd.backward = noting


def _note_distributed_losses(autograd) -> None:
    backward = autograd.backward

    def noting(context, roots, *args, **kwargs):
        _note(roots)
        return backward(context, roots, *args, **kwargs)

    autograd.backward = noting


def _draw_as_the_cpu(numbers) -> None:
    """A GPU's own generator stands where the CPU's stands: before each draw, and after it."""
    import torch

    own, count, lend, owned = numbers.default_generator, numbers.count_draws, numbers.drawing_from, set()

    def default_generator(gpu):
        generator = own(gpu)
        owned.add(id(generator))
        torch._C.Generator.set_state(generator, torch.default_generator.get_state())
        return generator

    def give_back(generator):
        generator = numbers._generators.get(generator._cdata, generator)  # also when C++ has wrapped it anew
        if id(generator) in owned:
            torch.default_generator.set_state(generator.raw_state())

    def count_draws(generator, *args):
        count(generator, *args)
        give_back(generator)

    @contextlib.contextmanager
    def drawing_from(generator):
        with lend(generator):
            yield
        give_back(generator)

    numbers.default_generator, numbers.count_draws, numbers.drawing_from = default_generator, count_draws, drawing_from


def _keep_unscaled(amp) -> None:
    """A GradScaler multiplies losses on a GPU only; the witness notes them as they were."""
    scale = amp.GradScaler.scale

    def keeping(self, outputs):
        scaled = scale(self, outputs)
        if scaled is not outputs and hasattr(scaled, "backward"):
            scaled.unscaled = outputs.detach()
        return scaled

    amp.GradScaler.scale = keeping


def _prepare(torch) -> None:
    # Two runs of a program that sets no seed would differ. Generators of GPUs start from this seed as well.
    torch.default_generator.manual_seed(0)


def _let_small_data_pass(cifar) -> None:
    """torchvision's CIFAR10 checks the sums of its files. Without sums it reads the small files that are there."""
    for sort in (cifar.CIFAR10, cifar.CIFAR100):
        sort.train_list = [[name, None] for name, _ in sort.train_list]
        sort.test_list = [[name, None] for name, _ in sort.test_list]
        sort.meta = {**sort.meta, "md5": None}


_AFTER = {
    "torch": _prepare,
    "numpy": lambda numpy: numpy.random.seed(0),
    "torch.autograd": _note_losses,
    "torch.amp.grad_scaler": _keep_unscaled,
    "torch.distributed.autograd": _note_distributed_losses,
    "torchvision.datasets.cifar": _let_small_data_pass,
}
if "OUTSIDE_DRAWS" in os.environ:
    _AFTER["virtual_gpus.placement.random_numbers"] = _draw_as_the_cpu


class _After(importlib.abc.MetaPathFinder):
    """Calls the functions of _AFTER with their modules as soon as these are imported."""

    searching = False

    def find_spec(self, name, path=None, target=None):
        if self.searching or name not in _AFTER:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        load = spec.loader.exec_module

        def exec_module(module):  # a spec may be asked for without an import
            after = _AFTER.pop(name, None)
            load(module)
            if after is not None:
                after(module)

        spec.loader.exec_module = exec_module
        return spec


if "OUTSIDE_LOSSES" in os.environ:
    sys.meta_path.insert(0, _After())
    random.seed(0)

if "OUTSIDE_FAKEGPU" in os.environ:
    import fakegpu

    fakegpu.init(runtime="fakecuda", profile="h100", device_count=int(os.environ["OUTSIDE_FAKEGPU"]))
