"""Virtual GPUs: the cells of a multi-GPU lesson on a machine without GPUs.

    with virtual_gpus(4, memory="16 GiB"):
        x = torch.randn(1000, 1000, device="cuda:3")
        torch.cuda.memory_allocated(3)  # 4 MB, counted by a model of PyTorch's caching allocator

Numbers, shapes, gradients and errors are real: every operator runs, on the CPU. Which GPU a tensor is on, how much
memory each GPU has left and what does not fit is modelled. `python -m virtual_gpus --gpus 4 script.py` runs a whole
program so. With `shapes_only=True` sizes are kept and values are not: a job of 100 GiB is measured on a laptop.

A modelled clock says how long it would take and who would wait for whom: `torch.cuda.Event.elapsed_time`,
`torch.cuda.utilization` and GPUtil's load answer from it, and

    with record_timeline() as t:
        step()
    t.seconds, t.utilisation(0)  # modelled
    t.plot(), t.save("step.json")

How near it is to a real H200: `python -m benchmarks.clock`. The kernels of nine training steps take 1 to 10 %
less than there (median 3 %), their wall time is within 24 % (median 17 %), each of 119 timings of single operators and
copies within 30 %. These very figures are what the constants were fitted to (`virtual_gpus.clock.calibration` says
which were, and which are estimates): another network, and any other GPU, will be farther off.

Known limits
------------
- Nothing is faster: the clock runs beside the program, whose own seconds are the CPU's.
- The clock knows what PyTorch is asked to do. Time that a program spends on its own (loading and changing data, Python
  without tensors, `time.sleep`) does not pass on it, nor does work on CPU tensors.
- Where the host is the bottleneck, a modelled wall time is that of one machine: the constants in
  `virtual_gpus.clock.calibration.HOST`. There the H200's own wall seconds differed by up to 1.6 x between two
  runs of a day.
- Kernels of several streams of one GPU take turns, also where small ones would run side by side. CUDA's launch queue
  has no end. Links that several copies share are shared per GPU, not per switch. NCCL's rings are modelled, not its
  trees.
- Numbers never depend on streams: a program that forgets to wait is right here and may be wrong on a real GPU.
- Of torch.distributed, collectives and messages of GPU tensors take modelled time; those of CPU tensors take none.
- Memory is that of CUDA's operators and libraries; `help("virtual_gpus.ops")` says where it comes from and how
  near it is. Estimated: cuDNN's workspaces, every GPU but the H200. Not counted: memory that is not PyTorch's (NCCL,
  cuSOLVER), temporaries of sorting. The context is one figure per kind of GPU.
- Processes see each other's memory where one started the other, or torchrun both, with the same number, kind and memory
  of GPUs; programs that were started apart where VIRTUAL_GPUS_FOLDER names the same folder for both. A fork's copies of
  its parent's tensors count once. On Windows two processes may both take the last free memory.
- Random numbers drawn on a GPU differ from a real GPU's, and from the CPU's for the same seed, as on a real GPU.
- Tensors made under FakeTensorMode say that they are on the CPU. They are nobody's memory and take no time.
- `shapes_only` keeps no values: `.item()` of a floating-point tensor is nan, of anything else an error.
  Memory is that of a run with numbers, but for sparse gradients, which then have no entries. Collectives then send
  the time and nothing else, so that a rank does not notice other sizes on another rank.
- Refused with an error that names them: CUDA graphs, torch.compile, memory pools, sharing GPU tensors between
  processes, nested tensors, DLPack, NCCL by hand, temperature and power sensors, the allocator settings
  backend:cudaMallocAsync, throw_on_cudamalloc_oom and expandable_segments_reserve. The backend "nccl" means gloo.
- PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF) is read at the first touch of a GPU. Without options the allocator was
  measured against a real H200; what the options do is read from PyTorch's source.
- A tensor that `record_stream` named comes back at the first allocation after the stream's work, by the modelled clock.
- `torch.distributed.fsdp.fully_shard` works, with or without a mesh, mixed precision and `shapes_only`; so does
  `torch.distributed.tensor.parallel`. Not compared with a real GPU: their memory beside the shares (buffers of the
  collectives) and time. The collectives of DTensor itself (`full_tensor`, tensor parallel) take no modelled time.
  `set_gradient_divide_factor` with a factor other than the number of ranks needs NCCL; gloo says so.
  Gloo's thread may hold a collective's buffer for a moment: a peak may be one gathered layer too high, run by run.
- `torch.autocast("cpu")` casts tensors on virtual GPUs as well, which it leaves alone on real ones.
- Programs started with `subprocess` have no virtual GPUs of their own; put `python -m virtual_gpus` before them.
- A thread that was running before the GPUs went on joins when it first names a GPU (those of a ThreadPoolExecutor or
  of an event loop join for each call). Stopped by another thread than started them, they leave an idle dispatch mode on
  the starting one, until it starts others and stops them.
- Tensors that outlive the GPUs they were on are ordinary CPU tensors afterwards (meta tensors with `shapes_only`).
  While other virtual GPUs are on, the first computation with them warns. An error names them where they meet a tensor
  of these GPUs.
- `torch.load(..., map_location=None)` and `torch.save` work; a file saved from a virtual GPU loads on a real one.
"""

from __future__ import annotations

from virtual_gpus.errors import NotModelled
from virtual_gpus.placement.storages import block_address
from virtual_gpus.switch import active_machine, renew_inherited, virtual_gpus
from virtual_gpus.timeline.record import record_timeline

__all__ = ["NotModelled", "active_machine", "block_address", "record_timeline", "renew_inherited", "virtual_gpus"]
__version__ = "0.2.0"
