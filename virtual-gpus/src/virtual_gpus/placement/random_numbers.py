"""Random generators of the virtual GPUs: each GPU has its own, and numbers drawn on it leave the CPU's alone."""

import contextlib
import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Self

import torch

from virtual_gpus.arithmetic import ceil_div
from virtual_gpus.errors import refusing
from virtual_gpus.machine import VirtualGPU, active
from virtual_gpus.placement.storages import gpu_of

# C++ hands a generator on as a new Python object; the address of what it wraps says which one it was.
_generators: weakref.WeakValueDictionary[int, "Generator"] = weakref.WeakValueDictionary()
_STATE_BYTES = 16  # what a CUDA generator's state has: its seed and its offset (CUDAGeneratorImpl.cpp)
_REMEMBERED = 64  # states that were read, per generator
_MASK = (1 << 64) - 1
_THREADS_PER_BLOCK, _PER_CALL = 256, 4
_lending = threading.RLock()  # there is one CPU generator for all threads


def device_of_generator(generator: torch.Generator) -> torch.device:
    """The device that a generator draws for, also when C++ has wrapped it anew."""
    original = _generators.get(generator._cdata)  # type: ignore  # not in PyTorch's stubs
    return generator.device if original is None else original.device


class _AnyGenerator(type(torch._C.Generator)):
    """isinstance(g, torch.Generator) stays true for generators that C++ made."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_AnyGenerator):
    """`torch.Generator(device="cuda:1")` while virtual GPUs are on: a CPU generator that says it belongs to a GPU.

    Its state has the 16 bytes of a CUDA generator's: the seed, and an offset that counts as in DistributionTemplates.h.
    The numbers come from the CPU's algorithm, whose larger state lies behind the 16 bytes in the same storage, so that
    it survives `torch.save`. A state that was put together from a seed and an offset gets numbers of its own, which are
    the same in every process; that is what DTensor asks for.
    """

    _device: Any  # a torch.device, which a checker takes for a descriptor
    _seen: OrderedDict[tuple[int, int], torch.Tensor]  # (seed, offset) -> the CPU's state

    def __new__(cls, device: torch.device | str | int = "cpu") -> Self:
        generator: Any = super().__new__(cls, "cpu")  # type: ignore  # PyTorch's stubs have `__init__` in its place
        generator._device = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
        machine, index = active(), generator._device.index
        if generator._device.type == "cuda" and index is None:
            generator._device = torch.device("cuda", machine.current if machine else 0)
        elif generator._device.type == "cuda" and machine and not 0 <= index < len(machine.gpus):
            raise RuntimeError("The device_index is invalid.")  # aten/src/ATen/cuda/CUDAGeneratorImpl.cpp
        generator._seed, generator._offset = torch._C.Generator.initial_seed(generator), 0
        generator._seen = OrderedDict()
        _generators[generator._cdata] = generator
        return generator

    @property
    def device(self) -> torch.device:
        """The device that this generator draws for."""
        return self._device

    def manual_seed(self, seed: int) -> Self:
        """Start from `seed`, at offset 0."""
        torch._C.Generator.manual_seed(self, seed)
        self._seed, self._offset = seed & _MASK, 0
        return self

    def seed(self) -> int:
        """Start from a random seed, and return it."""
        self._seed, self._offset = torch._C.Generator.seed(self), 0
        return self._seed

    def initial_seed(self) -> int:
        """The seed that was last set."""
        return self._seed

    def clone_state(self) -> Self:
        """A generator of the same device in the same state."""
        twin = type(self)(self._device)
        twin.set_state(self.get_state())
        return twin

    def get_state(self) -> torch.Tensor:
        """A GPU's: (16,) bytes on the CPU, the seed and the offset. The CPU's: what PyTorch has."""
        raw = self.raw_state()
        if self._device.type != "cuda":
            return raw
        head = struct.pack("=Qq", self._seed, self._offset)
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            whole = torch.cat([torch.frombuffer(bytearray(2 * head), dtype=torch.uint8), raw])
            self._seen[self._seed, self._offset] = raw
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
            return whole[:_STATE_BYTES]

    def set_state(self, new_state: torch.Tensor) -> torch._C.Generator:
        """Go on from a state of `get_state`, or from a seed and an offset. Raises RuntimeError for another size."""
        if self._device.type != "cuda":
            return torch._C.Generator.set_state(self, new_state)
        if new_state.dtype != torch.uint8 or gpu_of(new_state) is not None:
            raise TypeError("RNG state must be a torch.ByteTensor")
        if new_state.numel() not in (_STATE_BYTES, _STATE_BYTES // 2):  # without an offset, it is 0
            raise RuntimeError("RNG state is wrong size")
        with torch._C._DisableTorchDispatch():
            seed, offset = struct.unpack("=Qq", bytes(new_state.tolist()).ljust(_STATE_BYTES, b"\0"))
            raw = _carried(new_state)
        raw = self._seen.get((seed, offset)) if raw is None else raw
        if raw is None:
            torch._C.Generator.manual_seed(self, _mixed(seed, offset))
        else:
            torch._C.Generator.set_state(self, raw)
        self._seed, self._offset = seed, offset
        return self

    def get_offset(self) -> int:
        """A GPU's offset: four for each call of its random number engine, per thread."""
        return self._offset if self._device.type == "cuda" else torch._C.Generator.get_offset(self)

    def set_offset(self, offset: int) -> torch._C.Generator:
        """Go on from another offset of the same seed."""
        if self._device.type != "cuda":
            return torch._C.Generator.set_offset(self, offset)
        if offset % _PER_CALL:
            raise RuntimeError("offset must be a multiple of 4")
        return self.set_state(torch.frombuffer(bytearray(struct.pack("=Qq", self._seed, offset)), dtype=torch.uint8))

    graphsafe_get_state = refusing("torch.Generator.graphsafe_get_state")
    graphsafe_set_state = refusing("torch.Generator.graphsafe_set_state")

    def raw_state(self) -> torch.Tensor:
        """The state of the CPU's algorithm."""
        return torch._C.Generator.get_state(self)


def is_state(tensor: torch.Tensor) -> bool:
    """True for what `get_state` of a GPU's generator returned, unchanged."""
    return tensor.dtype == torch.uint8 and tensor.shape == (_STATE_BYTES,) and _carried(tensor) is not None


def _carried(state: torch.Tensor) -> torch.Tensor | None:
    """The CPU's state behind the 16 bytes of `state`; None if there is none, or if those bytes were changed."""
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(state.untyped_storage())
    if state.storage_offset() or whole.numel() <= 2 * _STATE_BYTES:
        return None
    head, copy = whole[:_STATE_BYTES], whole[_STATE_BYTES : 2 * _STATE_BYTES]
    return whole[2 * _STATE_BYTES :].clone() if torch.equal(head, copy) else None


def _mixed(seed: int, offset: int) -> int:
    """A seed for the CPU's algorithm, far from those of near offsets (the finalizer of SplitMix64)."""
    if not offset:
        return seed
    value = (seed + offset * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def count_draws(generator: torch.Generator, elements: int, threads: int = 0) -> None:
    """Move a generator's offset by `elements` numbers, which so many threads draw at once (DistributionTemplates.h)."""
    original = _generators.get(generator._cdata)  # type: ignore  # not in PyTorch's stubs
    if original is not None:
        blocks = min(threads // _THREADS_PER_BLOCK, ceil_div(elements, _THREADS_PER_BLOCK)) or 1
        original._offset += _PER_CALL * max(1, ceil_div(elements, blocks * _THREADS_PER_BLOCK * _PER_CALL))


def default_generator(gpu: VirtualGPU) -> Generator:
    """The GPU's own generator, started from the seed that `torch.manual_seed` last set, as CUDA does."""
    if gpu.generator is None:
        gpu.generator = Generator(torch.device("cuda", gpu.index))
        gpu.generator.manual_seed(torch.initial_seed())
    return gpu.generator


@contextlib.contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Lend the generator's state to the CPU's default one, for operators that take no generator argument."""
    with _lending:
        state_before = torch.default_generator.get_state()
        torch.default_generator.set_state(torch._C.Generator.get_state(generator))
        try:
            yield
        finally:
            torch._C.Generator.set_state(generator, torch.default_generator.get_state())
            count_draws(generator, 1)
            torch.default_generator.set_state(state_before)
