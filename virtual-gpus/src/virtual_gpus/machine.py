"""A virtual GPU and the machine that contains it: data sheets, allocators and the current device.

Machines form a stack, and only the newest one is *active*. A GPU has an allocator, and a machine a clock and its links.
"""

import functools
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from virtual_gpus import errors
from virtual_gpus.clock.clock import Clock
from virtual_gpus.follower import NO_FOLLOWER, Charger, Follower, LateTensors
from virtual_gpus.memory.allocator import FIRST_ADDRESS, Block, CachingAllocator, OutOfMemory
from virtual_gpus.memory.device import no_others
from virtual_gpus.memory.options import Options
from virtual_gpus.processes import environment
from virtual_gpus.processes.shared_memory import FOLDER, SharedMemoryRegistry
from virtual_gpus.settings import Settings
from virtual_gpus.threads import OfEachThread

Value = TypeVar("Value")
_stack: list["VirtualMachine"] = []
_CONTEXTS_THAT_FIT = 8  # chosen: at least, into a GPU's memory: one that a test makes small keeps room for tensors


class VirtualGPU:
    """One GPU: its number among the visible GPUs (`index`), its number in the machine (`slot`), its spec and memory."""

    def __init__(self, slot: int, settings: Settings, machine: "VirtualMachine"):
        self.slot = slot
        self.index = slot  # renumbered by the machine when CUDA_VISIBLE_DEVICES hides GPUs
        self.spec = settings.spec
        self.memory = settings.bytes_per_gpu
        self.machine = machine
        # GPUs do not share addresses: a snapshot of four GPUs must not show one block four times.
        self.allocator = CachingAllocator(self.memory, first_address=FIRST_ADDRESS + (slot << 44))
        self.allocator.clock = lambda: machine.clock  # which may be another one by then
        self.late: LateTensors[VirtualGPU] = LateTensors()  # a feature's
        self.generator: Any = None  # made on first use, with torch (see random_numbers)
        self.feature_state: dict[Kept[Any], Any] = {}  # what features keep for this GPU
        self.stream_of_thread = OfEachThread(0)  # the number of each thread's current one
        self.uuid = f"GPU-00000000-0000-4000-8000-{slot:012d}"

    @property
    def stream(self) -> int:
        """The current stream of this thread on this GPU. 0 is the default stream. Every block belongs to a stream."""
        return self.stream_of_thread.value

    def start_context(self) -> None:
        """Count the memory of the CUDA context, at the first use. Raises CUDA's error if too little is left."""
        device = self.allocator.device
        if not device.context:
            self.machine.start_cuda()
            context = min(self.spec.context, self.memory // _CONTEXTS_THAT_FIT)
            if not device.has_room(context):
                raise errors.cuda_error("out of memory", "cudaErrorMemoryAllocation")
            device.context = context

    def allocate(self, nbytes: int, owner: object) -> Block:
        """Allocate a block that lives as long as `owner`, on the current stream. Raises OutOfMemory."""
        allocator = self.allocator
        if self.machine.is_in_bad_fork:
            raise errors.cuda_error("initialization error", "cudaErrorInitializationError")
        if not allocator.device.context:
            self.start_context()
        try:
            return allocator.malloc(nbytes, self.stream_of_thread.value, owner)
        except OutOfMemory as error:
            error.gpu = self  # type: ignore  # for `entrance`; a field of this type would be of a higher layer
            raise

    def __repr__(self) -> str:
        return f"VirtualGPU(cuda:{self.index}, {self.spec.name})"


class VirtualMachine:
    """The virtual GPUs of `settings`, their clock and their links.

    `slots` are all GPUs. `gpus` are the visible ones, in the order of CUDA_VISIBLE_DEVICES, which is read when they are
    first used. All GPUs are visible if the settings ignore this variable.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.shapes_only = settings.shapes_only
        self.tensor_device = torch.device("meta" if self.shapes_only else "cpu")  # where C++ has its GPUs' tensors
        self.slots = [VirtualGPU(slot, settings, self) for slot in range(settings.count)]
        self.topology = settings.topology
        self.measured = settings.table
        self.clock = Clock(settings.count)
        self.charger: Charger[VirtualGPU] | None = None  # a feature's that charges some operators itself
        self.follower: Follower[VirtualGPU] = NO_FOLLOWER  # a feature's that follows all work
        self.around_backward: Callable[[Any, Any], AbstractContextManager[object]] = lambda *_: nullcontext()
        self._last_seen = -1, 0.0  # operators issued when the load was last asked for, and when that was new
        self.said_that_it_is_off = False  # see `errors.warn_of_gpu_that_is_off`
        self.on = False  # tensors of a machine that went off are ordinary CPU tensors
        self.registry: SharedMemoryRegistry | None = None  # while it is on: what other processes hold
        self.is_initialized = False  # whether this process has used CUDA: torch.cuda.is_initialized()
        self.is_in_bad_fork = False  # with `refuse_forks`, whether the parent of this process had used CUDA
        self.options: Options | None = None  # of all allocators; None before CUDA's start
        self.first_options: Callable[[], Options] = Options  # what they are at CUDA's start
        self.start_in_child: Callable[..., None] | None = None  # by `switch`, which lies above
        self.feature_state: dict[Kept[Any], Any] = {}  # what features keep for this machine
        self.variables: dict[str, str] = {}  # of the environment while it is on, by features before it goes on
        self.index_of_thread = OfEachThread(0)  # that of each thread's current GPU, 0 at first as in CUDA

    @functools.cached_property
    def gpus(self) -> list[VirtualGPU]:
        """The visible GPUs, cuda:0 first. They are fixed when they are first used."""
        visible = self._visible()
        for index, gpu in enumerate(visible):
            gpu.index = index
        return visible

    def _visible(self) -> list[VirtualGPU]:
        """The GPUs in CUDA_VISIBLE_DEVICES up to the first invalid entry, as CUDA reads it; all if it is not set."""
        text = os.environ.get("CUDA_VISIBLE_DEVICES")
        if text is None or not self.settings.honour_visible_devices:
            return self.slots
        visible: list[VirtualGPU] = []
        for entry in map(str.strip, text.split(",")):
            if not entry.isdigit() or int(entry) >= len(self.slots):
                break
            if self.slots[int(entry)] in visible:  # CUDA shows no GPU at all when one is named twice
                return []
            visible.append(self.slots[int(entry)])
        return visible

    def count_visible(self) -> int:
        """The number of visible GPUs. Asking for it does not count as first use, as on a real machine."""
        return len(vars(self).get("gpus", self._visible()))

    def look_again(self) -> None:
        """Forget the visible GPUs, because a program that starts now may still set CUDA_VISIBLE_DEVICES."""
        vars(self).pop("gpus", None)

    def start_cuda(self) -> None:
        """Set the allocators' options, as PyTorch does when a process first uses any GPU."""
        if self.options is None:
            self.set_options(self.first_options(), first=True)

    def set_options(self, options: Options, first: bool = False) -> None:
        """Set the options of all allocators. first: the allocators are being created (see `Options.fraction`)."""
        self.options = options
        for gpu in self.slots:
            gpu.allocator.set_options(options, first)

    @property
    def current(self) -> int:
        """Index of this thread's current GPU."""
        return self.index_of_thread.value

    @current.setter
    def current(self, index: int) -> None:
        self.index_of_thread.value = index

    def load(self, gpu: VirtualGPU) -> float:
        """The fraction of the last modelled second, 0 to 1, in which `gpu` ran kernels.

        The clock stops when there is no work, so the load is 0 after one second of real time without any work.
        """
        issued, since = self._last_seen
        if issued != self.clock.issued:
            self._last_seen = self.clock.issued, time.monotonic()
        elif time.monotonic() > since + 1:
            return 0.0
        return self.clock.tracks[gpu.slot].load(self.clock.now)

    @property
    def is_inherited(self) -> bool:
        """True in a forked process whose parent switched the machine on."""
        return self.registry is not None and self.registry.made_by != os.getpid()

    def facts(self) -> dict[str, Any]:
        """What a child needs to know to have the same GPUs, as JSON can say it."""
        gpus = [[gpu.spec.name, gpu.uuid, gpu.memory, gpu.spec.capability] for gpu in self.slots]
        return {"settings": self.settings.arguments(), "machine": self.registry_name(), "gpus": gpus}

    def registry_name(self) -> str:
        """A text that is equal only for machines with the same number, kind and memory of GPUs."""
        return f"{len(self.slots)}x{''.join(filter(str.isalnum, self.slots[0].spec.kind))}x{self.slots[0].memory}"


class Kept(Generic[Value]):
    """What a feature keeps for each GPU or machine. It goes when that goes. make: is given the GPU or machine."""

    def __init__(self, make: Callable[[Any], Value]):
        self._make = make

    def of(self, owner: VirtualGPU | VirtualMachine) -> Value:
        """That of `owner`, made when it is first asked for."""
        value = owner.feature_state.get(self)
        return owner.feature_state.setdefault(self, self._make(owner)) if value is None else value


def _forget_initialization() -> None:
    """A forked process has not used CUDA yet, whatever its parent did, and with `refuse_forks` never can."""
    for machine in _stack:
        machine.is_in_bad_fork |= machine.settings.refuse_forks and machine.is_initialized
        machine.is_initialized = False


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget_initialization)


def active() -> VirtualMachine | None:
    """The machine of the virtual GPUs that are on, or None."""
    return _stack[-1] if _stack else None


def get_machine() -> VirtualMachine:
    """The same, for what answers only while GPUs are on, as patches do."""
    return _stack[-1]


def recordable() -> VirtualMachine:
    """The active machine, for a recorder. Raises RuntimeError if no virtual GPUs are on."""
    if not _stack:
        text = "No virtual GPUs are on. Switch them on first with virtual_gpus(...). For real GPUs, use torch.profiler."
        raise RuntimeError(text)
    return _stack[-1]


def find_gpu(machine: VirtualMachine, device: torch.device, initialize: bool = True) -> VirtualGPU:
    """The GPU that a cuda device names; no index means this thread's current one. Raises as CUDA does.

    initialize: whether CUDA would initialize itself for this question. It does for all but a few statistics.
    """
    gpus, index = machine.gpus, machine.current if device.index is None else device.index
    if not 0 <= index < len(gpus):
        if not gpus:
            raise RuntimeError("No CUDA GPUs are available")
        raise errors.cuda_error("invalid device ordinal", "GPU device may be out of range, do you have enough GPUs?")
    if initialize and not machine.is_initialized:
        if machine.is_in_bad_fork:
            raise RuntimeError(  # `torch.cuda._lazy_init`
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
                "'spawn' start method"
            )
        machine.is_initialized = torch.cuda._initialized = True  # checkpoints read the latter
    return gpus[index]


def push(machine: VirtualMachine) -> None:
    """Put `machine` on top of the stack, so that `active()` returns it."""
    mine = [str(other.registry.folder) for other in _stack if other.registry and not other.is_inherited]
    machine.registry = SharedMemoryRegistry(machine.registry_name(), len(machine.slots), mine)
    for gpu in machine.slots:
        gpu.allocator.device.exchange = functools.partial(machine.registry.exchange, gpu.slot)
    environment.put_in(machine, {FOLDER: str(machine.registry.folder)} | machine.variables)
    _stack.append(machine)
    machine.on = True


def remove(machine: VirtualMachine) -> None:
    """Remove `machine` from any place in the stack, because blocks can end in any order."""
    _stack.remove(machine)
    machine.on = False
    for gpu in machine.slots:  # tensors that outlive it still give their blocks back
        gpu.allocator.device.exchange = no_others
    environment.take_out(machine)
    if machine.registry is not None:
        machine.registry.close()
