"""Data sheets of GPUs and links, sizes as text, and the table of `nvidia-smi topo -m`. Does not import torch.

    spec("H200").memory            # 150109880320 bytes
    parse_bytes("16 GiB")          # 17179869184
    print(draw_topology([["X", "NV6"], ["NV6", "X"]]))

Sources of the numbers:

- The data sheets and architecture white papers of NVIDIA give the number of SMs, the memory bandwidth, the peak
  operations per second (dense, at boost clock) and the link bandwidths.
- CUDA on real GPUs reported the memory. It is exact to the byte for K80, V100, T4, A100 (deviceQuery, ECC on) and H200
  (torch 2.11), and exact to the MiB for TITAN Xp (nvidia-smi), A100-80GB and H100 (torch). CUDA also reported the L2
  cache of these kinds except TITAN Xp. For Ada, Blackwell, the RTX 3090 and the GH200, the memory is what torch printed
  in public issues. It differs by some 50 MiB between drivers and on Windows. For A10 and L4 it is an estimate.
- The context of the H200 and the latency of PCIe 5 were measured (torch 2.11, CUDA 13.0, driver 580). A copy of 4 KiB
  of pinned memory took 13 microseconds. PyTorch's out-of-memory error reported 760 MiB for the context after matrix
  multiplications, and 0.75 GiB after about 80 kinds of operators of cuBLAS, cublasLt and cuDNN. Kernels that are loaded
  later add little, so one number is enough. nvidia-smi showed about 0.9 GiB. What else it counts is not known.
- All other contexts are estimates. They vary by 100 MiB or more with the driver, CUDA and the loaded libraries. They
  hold for kernels that are loaded when they are first used, as PyTorch asks CUDA 11.7 and later to do since version
  1.13. Its pull request 86509 measured 274 MiB, and 636 MiB with all kernels, on a GPU that it does not name.
  Before, NVML showed 1,343 MiB on a V100 (Hugging Face's "model memory anatomy" of 2022) and 1,687 MiB on an RTX 3090
  (PyTorch's issue 55277, torch 1.8 with CUDA 11.1). CUDA_MODULE_LOADING=EAGER still loads all of them.
- The L2 cache of TITAN Xp and the latencies of PCIe 3, PCIe 4 and NVLink are estimates, too. The latency of PCIe 3 and
  4 is assumed to be that of PCIe 5.

Every process on a GPU has its own context. NCCL needs additional buffers (a few hundred MiB per communicator), which
are not modelled.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BY_LOWER = {unit.lower(): size for unit, size in _UNITS.items()}
_MIB = 1 << 20


def parse_bytes(size: int | str) -> int:
    """Convert a size to bytes. It is an integer or text such as "16 GiB" (units of 2^30) or "16GB" (units of 10^9).

    Raises ValueError for other text and for less than one byte, and TypeError for other types.
    """
    nbytes = _bytes_of_text(size) if isinstance(size, str) else size
    if isinstance(nbytes, bool) or not isinstance(nbytes, int):
        raise TypeError(f'A size must be an integer number of bytes or text such as "16 GiB", not {size!r}.')
    if nbytes < 1:
        raise ValueError(f"A size must be at least one byte, not {size!r}.")
    return nbytes


def _bytes_of_text(text: str) -> int:
    match = re.fullmatch(r"\s*([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise ValueError(f'Cannot read {text!r} as a size. Write a number and a unit, for example "16 GiB".')
    number, unit = match.groups()
    if unit.lower() not in _BY_LOWER:
        problem = f"has the unknown unit {unit!r}" if unit else "has no unit"
        raise ValueError(f"The size {text!r} {problem}. Use one of {', '.join(_UNITS)}.")
    return int(float(number) * _BY_LOWER[unit.lower()])


def format_bytes(nbytes: int) -> str:
    """Format bytes in the largest binary unit that fits, with one decimal: "16 GiB", "139.8 GiB", "512 B"."""
    if nbytes < 0:
        return "-" + format_bytes(-nbytes)
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes >= _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes} B"


@dataclass(frozen=True)
class LinkSpec:
    """A link between two GPUs, between a GPU and the host, or between machines.

    bandwidth: peak bytes per second in one direction.
    latency: seconds of the shortest copy.
    label: what `nvidia-smi topo -m` prints for two GPUs with this link.
    """

    name: str
    label: str
    bandwidth: float
    latency: float


# PCI Express base specifications, 16 lanes: 8, 16, 32 GT/s per lane with 128b/130b coding.
PCIE3 = LinkSpec("PCIe 3.0 x16", "PHB", 15.75e9, 13e-6)
PCIE4 = LinkSpec("PCIe 4.0 x16", "PHB", 31.5e9, 13e-6)
PCIE5 = LinkSpec("PCIe 5.0 x16", "PHB", 63e9, 13e-6)
# White papers of V100, A100, H100: links per GPU (6, 12, 18) of 25 GB/s in each direction.
NVLINK2 = LinkSpec("NVLink 2 x6", "NV6", 150e9, 5e-6)
NVLINK3 = LinkSpec("NVLink 3 x12", "NV12", 300e9, 5e-6)
NVLINK4 = LinkSpec("NVLink 4 x18", "NV18", 450e9, 5e-6)
NVLINK5 = LinkSpec("NVLink 5 x18", "NV18", 900e9, 5e-6)  # B200 data sheet: 50 GB/s per link
NVLINK_C2C = LinkSpec("NVLink-C2C", "SYS", 450e9, 13e-6)  # GH200 data sheet: to the Grace CPU; latency: PCIe's


class Flops(NamedTuple):
    """Peak operations per second of matrix multiplications, by data type."""

    fp32: float
    tf32: float
    fp16: float
    bf16: float
    fp64: float


@dataclass(frozen=True)
class GPUSpec:
    """The data sheet of one kind of GPU.

    kind: the name for `spec`.
    name: the name that torch.cuda.get_device_properties reports.
    memory: bytes, as CUDA reports them.
    capability: compute capability (major, minor).
    bandwidth: bytes per second of the GPU's memory.
    flops: peak operations per second of matrix multiplications by data type, on tensor cores if the GPU has them. A
        type that the GPU does not support counts as fp32.
    context: bytes of a process's CUDA context, which come in addition to PyTorch's reserved memory.
    link: the link between two GPUs. host_link: the link to the CPU.
    source: where the numbers of this GPU come from.
    """

    kind: str
    name: str
    memory: int
    capability: tuple[int, int]
    multi_processor_count: int
    l2_bytes: int
    bandwidth: float
    flops: Flops
    context: int
    link: LinkSpec
    host_link: LinkSpec
    source: str


def _teraflops(*peaks: float) -> Flops:
    return Flops(*(peak * 1e12 for peak in peaks))


_SPECS = (
    GPUSpec(  # one of the two GPUs on the board: half of the board's 8.74 and 2.91 teraflops, 480 GB/s, 24 GB
        "K80", "Tesla K80", 11_996_954_624, (3, 7), 13, 1_572_864, 240e9,
        _teraflops(4.37, 4.37, 4.37, 4.37, 1.455),
        300 * _MIB, PCIE3, PCIE3, "K80 board specification; memory and L2: deviceQuery; context: estimated",
    ),
    GPUSpec(  # fp32: 3840 cores x 2 x 1.582 GHz; fp64: 1/32 of it
        "TITANXp", "NVIDIA TITAN Xp", 12_196 * _MIB, (6, 1), 30, 3_145_728, 547.7e9,
        _teraflops(12.15, 12.15, 12.15, 12.15, 0.38),
        350 * _MIB, PCIE3, PCIE3, "TITAN Xp data sheet; memory: nvidia-smi; L2, context: estimated",
    ),
    GPUSpec(
        "V100", "Tesla V100-SXM2-16GB", 16_945_512_448, (7, 0), 80, 6_291_456, 900e9,
        _teraflops(15.7, 15.7, 125.0, 15.7, 7.8),
        350 * _MIB, NVLINK2, PCIE3, "V100 data sheet; memory and L2: deviceQuery; context: estimated",
    ),
    GPUSpec(
        "T4", "Tesla T4", 15_843_721_216, (7, 5), 40, 4_194_304, 320e9,
        _teraflops(8.1, 8.1, 65.0, 8.1, 0.253),  # fp64: 1/32 of fp32
        300 * _MIB, PCIE3, PCIE3, "T4 data sheet; memory and L2: deviceQuery; context: estimated",
    ),
    GPUSpec(
        "A100", "NVIDIA A100-SXM4-40GB", 42_405_855_232, (8, 0), 108, 41_943_040, 1555e9,
        _teraflops(19.5, 156.0, 312.0, 312.0, 19.5),
        420 * _MIB, NVLINK3, PCIE4, "A100 white paper; memory and L2: deviceQuery; context: estimated",
    ),
    GPUSpec(
        "A100-80GB", "NVIDIA A100-SXM4-80GB", 81_037 * _MIB, (8, 0), 108, 41_943_040, 2039e9,
        _teraflops(19.5, 156.0, 312.0, 312.0, 19.5),
        420 * _MIB, NVLINK3, PCIE4, "A100 data sheet; memory: torch; L2: that of A100; context: estimated",
    ),
    GPUSpec(  # tensor cores with sums in fp32, on GeForce half of what the data sheet says for sums in fp16
        "RTX3090", "NVIDIA GeForce RTX 3090", 24_259 * _MIB, (8, 6), 82, 6 * _MIB, 936e9,
        _teraflops(35.6, 35.6, 71.0, 71.0, 0.556),
        350 * _MIB, PCIE4, PCIE4, "GA102 white paper; memory: torch; context: estimated",
    ),
    GPUSpec(
        "A10", "NVIDIA A10", 22_731 * _MIB, (8, 6), 72, 6 * _MIB, 600e9,
        _teraflops(31.2, 62.5, 125.0, 125.0, 0.488),
        350 * _MIB, PCIE4, PCIE4, "A10 data sheet; memory, context: estimated; L2: GA102 white paper",
    ),
    GPUSpec(
        "RTX4090", "NVIDIA GeForce RTX 4090", 24_207 * _MIB, (8, 9), 128, 72 * _MIB, 1008e9,
        _teraflops(82.6, 82.6, 165.2, 165.2, 1.29),
        420 * _MIB, PCIE4, PCIE4, "Ada white paper; memory: torch; context: estimated",
    ),
    GPUSpec(
        "RTX6000Ada", "NVIDIA RTX 6000 Ada Generation", 45_496 * _MIB, (8, 9), 142, 96 * _MIB, 960e9,
        _teraflops(91.1, 182.1, 364.2, 364.2, 1.42),
        420 * _MIB, PCIE4, PCIE4, "data sheet; memory: torch (ECC on); L2: Ada white paper; context: estimated",
    ),
    GPUSpec(
        "L4", "NVIDIA L4", 22_565 * _MIB, (8, 9), 58, 48 * _MIB, 300e9,
        _teraflops(30.3, 60.0, 121.0, 121.0, 0.47),
        420 * _MIB, PCIE4, PCIE4, "L4 data sheet; memory, context: estimated; L2: Ada white paper",
    ),
    GPUSpec(
        "L40S", "NVIDIA L40S", 45_589 * _MIB, (8, 9), 142, 96 * _MIB, 864e9,
        _teraflops(91.6, 183.0, 362.0, 362.0, 1.43),
        420 * _MIB, PCIE4, PCIE4, "L40S data sheet; memory: torch; L2: Ada white paper; context: estimated",
    ),
    GPUSpec(
        "H100", "NVIDIA H100 80GB HBM3", 81_090 * _MIB, (9, 0), 132, 50 * _MIB, 3.35e12,
        _teraflops(66.9, 494.7, 989.4, 989.4, 66.9),
        520 * _MIB, NVLINK4, PCIE5, "H100 white paper; memory, L2: torch; context: estimated",
    ),
    GPUSpec(
        "GH200", "NVIDIA GH200 480GB", 97_157 * _MIB, (9, 0), 132, 60 * _MIB, 4.0e12,
        _teraflops(66.9, 494.7, 989.4, 989.4, 66.9),
        520 * _MIB, NVLINK4, NVLINK_C2C, "GH200 data sheet (96 GB of HBM3); memory: torch; L2, context: estimated",
    ),
    GPUSpec(
        "H200", "NVIDIA H200", 150_109_880_320, (9, 0), 132, 60 * _MIB, 4.8e12,
        _teraflops(66.9, 494.7, 989.4, 989.4, 66.9),
        760 * _MIB, NVLINK4, PCIE5, "H200 data sheet (chip: H100's); memory, L2: torch; context: measured",
    ),
    GPUSpec(
        "B200", "NVIDIA B200", 182_642 * _MIB, (10, 0), 148, 126 * _MIB, 8.0e12,
        _teraflops(75.0, 1100.0, 2250.0, 2250.0, 37.0),
        760 * _MIB, NVLINK5, PCIE5, "HGX B200 data sheet; memory, L2: torch; context: estimated, that of the H200",
    ),
    GPUSpec(
        "RTX5090", "NVIDIA GeForce RTX 5090", 32_113 * _MIB, (12, 0), 170, 96 * _MIB, 1792e9,
        _teraflops(104.8, 104.8, 209.5, 209.5, 1.64),
        520 * _MIB, PCIE5, PCIE5, "RTX Blackwell white paper; memory: torch; context: estimated",
    ),
)  # fmt: skip
_BY_KIND = {gpu.kind.lower(): gpu for gpu in _SPECS}


def kinds() -> list[str]:
    """The names of all kinds of GPUs that `spec` knows, in the order of their architectures."""
    return [gpu.kind for gpu in _SPECS]


def spec(kind: str) -> GPUSpec:
    """The GPUSpec of a kind, for example "H200" or "titan xp". Case and spaces do not matter.

    Raises ValueError for an unknown kind and names all kinds.
    """
    found = _BY_KIND.get(re.sub(r"\s", "", str(kind)).lower())
    if found is None:
        raise ValueError(f"There is no data sheet for a GPU of kind {kind!r}. Choose one of {', '.join(kinds())}.")
    return found


# The legend of nvidia-smi topo -m, by label; "NV#" stands for any number of NVLinks.
_LEGEND = {
    "X": "Self",
    "SYS": "Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)",
    "NODE": "Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node",
    "PHB": "Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)",
    "PXB": "Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)",
    "PIX": "Connection traversing at most a single PCIe bridge",
    "NV#": "Connection traversing a bonded set of # NVLinks",
}


def draw_topology(labels: Sequence[Sequence[str]]) -> str:
    """The text of `nvidia-smi topo -m` for a square matrix of labels, without the columns about the CPU.

    Raises ValueError if the matrix is not square or if nvidia-smi does not know a label.
    """
    if any(len(row) != len(labels) for row in labels):
        columns = [len(row) for row in labels]
        raise ValueError(f"The matrix of links must be square. It has {len(labels)} rows, with lengths {columns}.")
    for label in {label for row in labels for label in row}:
        if re.sub(r"^NV\d+$", "NV#", label) not in _LEGEND:
            raise ValueError(
                f"The matrix contains the unknown link {label!r}. Use one of {', '.join(_LEGEND)}. "
                "In NV#, # is the number of NVLinks."
            )
    names = [f"GPU{index}" for index in range(len(labels))]
    rows = [["", *names], *([name, *row] for name, row in zip(names, labels, strict=True))]
    lines = ["".join((" X" if cell == "X" else cell).ljust(8) for cell in row).rstrip() for row in rows]
    legend = [f"  {label:<4} = {text}" for label, text in _LEGEND.items()]
    return "\n".join([*lines, "", "Legend:", "", *legend])
