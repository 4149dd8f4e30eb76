"""torch.cuda's questions about the machine: how many GPUs, which one is current, what they are, their generators."""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.types import Device

from virtual_gpus.dispatch.mode import enter_thread
from virtual_gpus.machine import VirtualGPU, find_gpu, get_machine
from virtual_gpus.patches.table import Patch, in_package
from virtual_gpus.placement.random_numbers import Generator, default_generator


def gpu_at(device: Device = None, initialize: bool = True) -> VirtualGPU:
    """The GPU that an index, a name, a device or None (the current one) means. initialize: if CUDA would."""
    enter_thread()
    machine = get_machine()
    index = machine.current if device is None else device
    if not isinstance(index, int):
        index = torch.cuda._utils._get_device_index(index, optional=True)
    return find_gpu(machine, torch.device("cuda", index), initialize)


def is_available() -> bool:
    """True while at least one virtual GPU is visible."""
    return bool(get_machine().count_visible())


def device_count() -> int:
    """How many virtual GPUs are visible."""
    return get_machine().count_visible()


def is_initialized() -> bool:
    """True once this process has used a GPU. Programs that choose a GPU by the rank ask this first."""
    return get_machine().is_initialized


def _lazy_init() -> None:
    """Count CUDA as used, since virtual GPUs have nothing to start; the moment to make this thread's operators visible.

    It also stands for torch.cuda.init. C++ calls it when it parses device="cuda".
    """
    gpu_at()


def _lazy_call(callable: Callable[[], object], **kwargs: Any) -> None:
    """Run what PyTorch puts off until CUDA is initialized (seeds): virtual GPUs are ready for it at any time."""
    callable()


def current_device() -> int:
    """Index of this thread's current GPU."""
    _lazy_init()
    return get_machine().current


def set_device(device: Device) -> None:
    """Make a GPU this thread's current one."""
    enter_thread()
    index, machine = torch.cuda._utils._get_device_index(device), get_machine()
    if index >= 0:
        machine.current = find_gpu(machine, torch.device("cuda", index)).index


def _exchange_device(device: int) -> int:
    """The beginning of `with torch.cuda.device`. It is not in the block yet: Ctrl-C leaves the GPU as it was."""
    machine = get_machine()
    before = machine.current
    try:
        set_device(device)
    except KeyboardInterrupt:
        machine.current = before
        raise
    return before if device >= 0 else -1


def _maybe_exchange_device(device: int) -> int:
    """The end of `with torch.cuda.device`, where PyTorch's function in C++ cannot be interrupted."""
    try:
        return _exchange_device(device)
    except KeyboardInterrupt:
        set_device(device)
        raise


def synchronize(device: Device = None) -> None:
    """The modelled host waits for all streams of a GPU. The numbers are there already."""
    gpu = gpu_at(device)
    clock = gpu.machine.clock
    clock.notice(clock.done(gpu.slot))


class DeviceProperties:
    """What `torch.cuda.get_device_properties` returns, from the GPU's data sheet."""

    def __init__(self, gpu: VirtualGPU):
        sheet = gpu.spec
        self.name, self.total_memory = sheet.name, gpu.memory
        self.major, self.minor = sheet.capability
        self.multi_processor_count, self.L2_cache_size = sheet.multi_processor_count, sheet.l2_bytes
        self.max_threads_per_multi_processor, self.max_threads_per_block = sheet.threads, 1024
        self.regs_per_multiprocessor, self.shared_memory_per_multiprocessor = sheet.registers, sheet.shared_memory
        self.shared_memory_per_block, self.shared_memory_per_block_optin = 48 << 10, sheet.shared_memory_of_block
        self.clock_rate = round(sheet.core_clock / 1e3)  # in kHz
        self.warp_size, self.is_integrated, self.is_multi_gpu_board = 32, 0, 0
        self.uuid = uuid.UUID(gpu.uuid.removeprefix("GPU-"))
        self.pci_domain_id, self.pci_bus_id, self.pci_device_id = 0, gpu.slot + 1, 0

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, L2_cache_size={self.L2_cache_size >> 20}MB)"
        )


def get_device_properties(device: Device = None) -> DeviceProperties:
    """The data sheet of one GPU."""
    try:
        return DeviceProperties(gpu_at(device))
    except torch.AcceleratorError:
        raise AssertionError("Invalid device id") from None  # torch.cuda's own words


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """True between two different GPUs: every link that is modelled carries peer copies."""
    return gpu_at(device) is not gpu_at(peer_device)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether the GPU has bfloat16 in hardware. If not, PyTorch emulates it."""
    return including_emulation or "bf16" in gpu_at().spec.tensor_cores


def is_tf32_supported() -> bool:
    """Whether its tensor cores have TF32."""
    return "tf32" in gpu_at().spec.tensor_cores


def get_arch_list() -> list[str]:
    """The architectures that kernels were built for: the machine's own."""
    return [f"sm_{a}{b}" for a, b in sorted({gpu.spec.capability for gpu in get_machine().gpus})]


def _is_in_bad_fork() -> bool:
    """A forked process may use virtual GPUs, unless `refuse_forks` is set and its parent has used them."""
    return get_machine().is_in_bad_fork


def utilization(device: Device = None) -> int:
    """Percent of the last modelled second in which kernels ran, 0 once idle; also for torch.cuda.memory_usage."""
    gpu = gpu_at(device, initialize=False)
    return round(100 * gpu.machine.load(gpu))


def device_memory_used(device: Device = None) -> int:
    """Bytes in use as the driver sees them: reserved memory and contexts, of all processes."""
    gpu = gpu_at(device, initialize=False)
    return gpu.memory - gpu.allocator.device.free_bytes


class DefaultGenerators(Sequence[Generator]):
    """torch.cuda.default_generators: one per visible GPU. PyTorch's own torch.cuda.random stands on them."""

    def __len__(self) -> int:
        return len(get_machine().gpus)

    def __getitem__(self, index: int) -> Generator:
        return default_generator(get_machine().gpus[index])


def patches() -> list[Patch]:
    functions = (is_available, device_count, is_initialized, _lazy_init, _lazy_call, current_device, set_device,
                 synchronize, _exchange_device, _maybe_exchange_device, get_device_properties, can_device_access_peer,
                 is_bf16_supported, is_tf32_supported, get_arch_list, _is_in_bad_fork, utilization,
                 device_memory_used)  # fmt: skip
    # Memory that processes share goes back as soon as no process uses it, so `ipc_collect` has nothing to collect.
    renamed = {"init": _lazy_init, "memory_usage": utilization, "ipc_collect": lambda: None}
    return in_package("torch.cuda", *functions, **renamed) + [
        (torch._C, "_cuda_setDevice", set_device),
        (torch._C, "_accelerator_exchangeDevice", _exchange_device),  # `with device_index(1):`
        (torch._C, "_accelerator_maybeExchangeDevice", _maybe_exchange_device),
        (torch, "Generator", Generator),
        (torch.cuda, "default_generators", DefaultGenerators()),
        (torch, "_use_cudnn_rnn_flatten_weight", lambda: False),  # recurrent layers run without the feature `rnn` too
        (torch.cuda, "_initialized", False),  # checkpointing asks this before it keeps the generators' states
    ]
