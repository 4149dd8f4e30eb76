"""Virtual GPUs: run multi-GPU programs of PyTorch on a machine without GPUs.

    with virtual_gpus(4, memory="16 GiB"):
        x = torch.randn(1000, 1000, device="cuda:3")
        torch.cuda.memory_allocated(3)  # 4 MB, counted by a model of PyTorch's caching allocator

Numbers, shapes, gradients and errors are real, because every operator runs on the CPU. The package models which GPU
holds a tensor, how much memory each GPU has left, and which allocations fail. To run a whole program on virtual GPUs,
use `python -m virtual_gpus --gpus 4 script.py`. With `shapes_only=True`, tensors keep their sizes but no values, so you
can measure a job of 100 GiB on a laptop.

A modelled clock predicts how long the program would take and where it would wait. `torch.cuda.Event.elapsed_time`,
`torch.cuda.utilization`, torch.profiler and the load in GPUtil use this clock. You can also record a
timeline:

    with record_timeline() as t:
        step()
    t.seconds, t.utilisation(0)  # modelled
    t.plot(), t.save("step.json")

A job of a thousand GPUs can be asked whether it fits, and how long a step would be, by running one of its ranks: see
`help("virtual_gpus.features.distributed.one_rank")` and `record_training`.

`python -m benchmarks.clock` compares the clock with a real H200. The modelled kernels of nine training steps take 1 to
10 % less time than the real ones (median 2 %). The wall times are within 24 % (median 17 %). Each of 119 timings of
single operators and copies is within 30 %. The constants of the clock were fitted to these same measurements, so expect
larger errors for other networks and other GPUs. The files in `virtual_gpus/figures` say which constants were fitted
and which are estimates.

Known limits
------------
Time:

- Programs do not run faster. The clock only counts modelled time, while the program runs at the speed of the CPU.
- The clock counts only the work that PyTorch is asked to do on GPUs. It does not count work on CPU tensors, nor the
  program's own time, for example for loading data, for Python code without tensors, or for `time.sleep`.
- Where the host is the bottleneck, the modelled wall time is that of one particular machine. Its constants are in
  `virtual_gpus.clock.clock.HOST`. On that machine, the wall time with a real H200 differed by a factor of up to
  1.6 between two runs on the same day.
- Kernels on different streams of one GPU run one after the other, even if small kernels would overlap on a real GPU.
  CUDA's launch queue has no limit. Copies that use the same link share its bandwidth per GPU, not per switch. Of NCCL's
  algorithms, rings are modelled, and trees for all-reduces over several hosts.
- Numbers never depend on streams. A program that forgets to wait gives correct results here, but may give wrong ones on
  a real GPU. `check_races=True` raises an error there. It compares the spans of bytes that tensors take, so two streams
  that use different columns of one matrix count as a race. It does not look into CPU threads, nor at what a NumPy
  array of pinned memory is used for later.
- In torch.distributed, collectives and messages take modelled time for GPU tensors, but none for CPU tensors. With the
  backend "fake", each collective begins without waiting for the other ranks, which are not there. Groups of one host
  share its network adapters as if all ranks ran such collectives at the same time. On NVLink, groups do not slow each
  other down.
- In torch.profiler, the times of the CPU are real and those of the GPUs are modelled. In its Chrome trace, the GPUs
  start together with the CPU, but the rows do not line up afterwards. `profile_memory` counts GPU tensors as memory of
  the CPU.

Memory:

- Memory is that of CUDA's operators and libraries. `help("virtual_gpus.features.recipes")` explains where the numbers
  come from and how accurate they are. The workspaces of cuDNN and all GPUs except the H200 are estimates. Two things
  are not counted: memory outside PyTorch (NCCL, cuSOLVER) and the temporary buffers of sorting. The size of the CUDA
  context is one number per kind of GPU.
- Processes see each other's memory if one started the other, or if torchrun started both. They must have the same
  number, kind and memory of GPUs. Programs that were started separately see each other's memory if
  VIRTUAL_GPUS_FOLDER names the same folder for both. A forked process has copies of its parent's tensors, which count
  only once. No real GPU allows that; with `refuse_forks=True`, it raises CUDA's errors. On Windows, two processes can
  both take the last free memory.
- PYTORCH_CUDA_ALLOC_CONF (or PYTORCH_ALLOC_CONF) is read when a GPU is first used. The default allocator was compared
  with a real H200. The effects of the options follow PyTorch's source code.
- A block that is marked with `record_stream` becomes free at the first allocation after the stream's work has finished
  on the modelled clock.
- Tensors that are made under FakeTensorMode report the CPU as their device. They take no memory and no time.

Values:

- Random numbers that are drawn on a virtual GPU differ from those of a real GPU. They are the numbers that the CPU
  gives for the same seed, where a real GPU gives others. The state of a GPU's generator is a seed and an offset of 16
  bytes, as on a real GPU, and goes on exactly where it was read. A state with another offset has numbers of its own.
- `shapes_only` keeps no values. `.item()` returns nan for floating-point tensors and raises an error for all others.
  Memory is the same as in a run with values, except that sparse gradients have no entries. Collectives exchange only
  the modelled time, so a rank does not notice if the sizes on another rank differ.
- `torch.autocast("cpu")` also casts tensors on virtual GPUs. With real GPUs it leaves GPU tensors unchanged.

What is not modelled, and what differs:

- What is not modelled raises an error that names it, for example nested tensors, DLPack, calling NCCL directly, and
  temperature and power sensors. The file docs/refused.md of the source lists every call, with its reason.
- torch.compile returns PyTorch's own objects, which run the program operator by operator. While virtual GPUs are on,
  `torch.compiler.set_stance` is at "force_eager", for CPU tensors too. Numbers, memory and modelled time are therefore
  those of the program without torch.compile. On a real GPU, the compiler fuses operators and keeps fewer tensors.
  `compile="modelled"` models the time of fused operators, but not their memory.
  Backends are not called, and `fullgraph=True` does not find graph breaks. `flex_attention` computes the whole matrix
  of scores, as it does on a real GPU without torch.compile.
- An index out of range, of a label, an embedding or a `gather`, raises the CPU's error, in the line that has it. On a
  real GPU the kernel asserts: a later line raises "device-side assert triggered", and the process has lost its GPU.
- Gloo carries the messages of the backend "nccl", which has NCCL's rules and errors. Numbers are added in gloo's order,
  timeouts and errors of a connection are gloo's, and `batch_isend_irecv` returns one Work per message.
- `torch.distributed.fsdp.fully_shard` and `torch.distributed.tensor.parallel` work. Their memory follows PyTorch's
  sources and their time a model of the links. Neither was compared with a real GPU, but with figures that others have
  published (docs/accuracy.md): memory was within 1 %, and speed off by 5 % in the median, and by 15 % at most.
- One rank of many (`rank=` and `world_size=`): the other ranks do not exist, so numbers are not those of the job.
  Objects that another rank would send are refused, and so is torch.distributed.checkpoint.
- With torch.distributed.autograd, a process whose part of a backward pass another process started runs it in threads of
  C++. The operators take no modelled time, and gradients take memory from `get_gradients` on.
- Programs that are started with `subprocess` have virtual GPUs only if the parent asked for it, with
  `virtual_gpus(4, children=True)` or by running under `python -m virtual_gpus`. The children must be Python programs of
  the same installation. `help("virtual_gpus.processes.children")` says how it works and how to switch it off. The
  program `nvidia-smi` that they find does not know the load of the GPUs.
- A thread that was running before the GPUs were switched on sees them from the first time it names a GPU. Threads of a
  ThreadPoolExecutor or an event loop see them for each call. If the GPUs are stopped in a different thread from the one
  that started them, an idle dispatch mode stays active in the starting thread until it starts and stops GPUs again.
- `torch.use_deterministic_algorithms(True)` refuses the operators that CUDA refuses, as far as the
  modules in `virtual_gpus.features.recipes` name them in `CHECKS`. Their results here are the same in every run, with
  and without it.
- The inference fast path of `nn.MultiheadAttention` and `nn.TransformerEncoder` is off: layers run operator by operator
  in evaluation too, and padded samples stay padded.
- When virtual GPUs are switched off, their tensors become ordinary CPU tensors, or meta tensors with `shapes_only`. If
  other virtual GPUs are on, the first computation with such a tensor warns. It raises an error in an operator with a
  tensor on the current GPUs.
- TorchScript programs (`torch.jit.script`) run the CPU's operators for attention, dropout and recurrent layers, so
  their memory and time differ there. Inside a scripted program, `.cpu()` and `.to("cpu")` leave a GPU tensor where it
  is, and `is_cuda` is False. `torch.jit.load` without `map_location` loads to the CPU.
- `torch.save` and `torch.load(..., map_location=None)` work. A file saved on a virtual GPU loads on a real one.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from virtual_gpus.errors import NotModelled, RaceError
    from virtual_gpus.placement.storages import block_address
    from virtual_gpus.switch import active_machine, renew_inherited, virtual_gpus
    from virtual_gpus.timeline.record import record_timeline
    from virtual_gpus.timeline.training import record_training, transformer_flops

__all__ = ["NotModelled", "RaceError", "active_machine", "block_address", "record_timeline", "record_training",
           "renew_inherited", "transformer_flops", "virtual_gpus"]  # fmt: skip
__version__ = "0.2.0"

_MODULES = {
    "NotModelled": "virtual_gpus.errors",
    "RaceError": "virtual_gpus.errors",
    "active_machine": "virtual_gpus.switch",
    "block_address": "virtual_gpus.placement.storages",
    "record_timeline": "virtual_gpus.timeline.record",
    "record_training": "virtual_gpus.timeline.training",
    "transformer_flops": "virtual_gpus.timeline.training",
    "renew_inherited": "virtual_gpus.switch",
    "virtual_gpus": "virtual_gpus.switch",
}


def __getattr__(name: str) -> Any:
    """Import a public name or a module when it is first used: programs such as nvidia-smi need no torch."""
    if name in _MODULES:
        if _MODULES[name] != "virtual_gpus.switch":
            importlib.import_module("torch")  # inherited GPUs go on with it, see processes.children
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value
    whole = f"{__name__}.{name}"
    if name.startswith("_") or importlib.util.find_spec(whole) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(whole)
