"""Random generators of the virtual GPUs: each GPU has its own, and numbers drawn on it leave the CPU's alone."""

from __future__ import annotations

import contextlib
import threading
import weakref

import torch

from virtual_gpus.machine import VirtualGPU, active

# C++ hands a generator on as a new Python object; the address of what it wraps says which one it was.
_known: weakref.WeakValueDictionary[int, Generator] = weakref.WeakValueDictionary()


def device_of_generator(generator: torch.Generator) -> torch.device:
    """The device that a generator draws for, also when C++ has wrapped it anew."""
    made = _known.get(generator._cdata)
    return generator.device if made is None else made.device


class Generator(torch._C.Generator):
    """`torch.Generator(device="cuda:1")`: a CPU generator that says it belongs to a GPU."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls, "cpu")
        made._device = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
        if made._device.type == "cuda" and made._device.index is None:
            machine = active()
            made._device = torch.device("cuda", machine.current if machine else 0)
        _known[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:
        """The device that this generator draws for."""
        return self._device

    def clone_state(self) -> Generator:
        """A generator of the same device in the same state."""
        twin = type(self)(self._device)
        twin.set_state(self.get_state())
        return twin


def default_generator(gpu: VirtualGPU) -> Generator:
    """The GPU's own generator, started from the seed that `torch.manual_seed` last set, as CUDA does."""
    if gpu.generator is None:
        gpu.generator = Generator(torch.device("cuda", gpu.index))
        gpu.generator.manual_seed(torch.initial_seed())
    return gpu.generator


_lending = threading.RLock()  # there is one CPU generator for all threads


@contextlib.contextmanager
def drawing_from(generator: torch.Generator):
    """Lend the generator's state to the CPU's default one, for operators that take no generator argument."""
    with _lending:
        kept = torch.default_generator.get_state()
        torch.default_generator.set_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(kept)
