"""How much of its data sheet each kind of GPU reaches, and what its host pays: the constants of the clock. No torch.

One set per kind of GPU and per class of operator, none per network. Where they come from:

- H200: fitted to what a real one measured (torch 2.11, CUDA 13.0): the kernels of nine training steps, by operator, and
  single operators. `python -m benchmarks.clock` prints how near the whole comes.
- H100: the H200's, whose chip it has.
- K80: the speed of its convolutions was chosen with two published figures in view: PyramidNet at batch 240, 6 to 7 s
  a step (6.1 s here), and PyTorch's tutorial on model parallelism, whose GPU is not named, 3.75 s (3.4 s here).
  PyramidNet on four K80s at batch 768 follows: 4.9 s, where the same article has 5 s.
- Every other kind, and the rest of the K80: estimated, from the share of peak that large matrix products, convolutions
  and copies are known to reach on these GPUs. What follows from the data sheet (peak, bandwidth, multiprocessors)
  scales by itself.
- The host: fitted to the wall seconds of the same nine steps. The real machine's own figures moved by 1.6 x between
  two runs of one day, so nothing that hangs on them is better than that.
"""

from __future__ import annotations

from typing import NamedTuple


class Calibration(NamedTuple):
    """Shares of a data sheet's peaks, as numbers between 0 and 1, and seconds.

    kernel: seconds of the shortest kernel. memory: of the bandwidth, by kernels that read and write in order. simt: of
    the fp32 and fp64 peak, by matrix products; tensor: of the tensor cores' peak. conv: of the same peaks, by
    convolutions in fp32 and fp64; tensor_conv: on tensor cores, whose kernels want another layout of images.
    """

    kernel: float
    memory: float
    simt: float
    tensor: float
    conv: float
    tensor_conv: float


_CALIBRATIONS = {
    "K80": Calibration(4e-6, 0.70, 0.62, 0.62, 0.27, 0.27),
    "TITANXp": Calibration(2.5e-6, 0.75, 0.80, 0.80, 0.75, 0.75),
    "V100": Calibration(2e-6, 0.84, 0.90, 0.70, 0.90, 0.40),
    "T4": Calibration(2.2e-6, 0.80, 0.55, 0.40, 0.55, 0.25),
    "A100": Calibration(1.5e-6, 0.86, 0.90, 0.80, 0.65, 0.36),
    "H100": Calibration(1e-6, 0.88, 0.77, 0.80, 0.60, 0.36),
    "H200": Calibration(1e-6, 0.88, 0.77, 0.80, 0.60, 0.36),
}


def calibration(kind: str) -> Calibration:
    """The constants of a kind of GPU, by the name in its `GPUSpec.kind`."""
    return _CALIBRATIONS[kind]


class HostCosts(NamedTuple):
    """Seconds that one host thread pays to issue work, Python and C++ together.

    view: an operator that starts no kernel. operator: one that starts a kernel and makes a tensor; in_place: one that
    makes none. product, convolution: more, since a library is asked which kernel to take. kernel: each further kernel
    of an operator. training: more per operator while a graph is built or gone through: modules, nodes, gradients.
    tensor: each tensor in a list of tensors (the optimizers'). copy: a copy between devices; pageable_copy: through the
    driver's buffer. wait: to notice that a GPU is done. pageable: bytes per second of the computer's own copies between
    pageable and pinned memory.
    """

    view: float = 3e-6
    operator: float = 14.2e-6
    in_place: float = 10.8e-6
    product: float = 8e-6
    convolution: float = 10e-6
    kernel: float = 6e-6
    training: float = 15e-6
    tensor: float = 1.4e-6
    copy: float = 12e-6
    pageable_copy: float = 14e-6
    wait: float = 11e-6
    pageable: float = 14.5e9


HOST = HostCosts()
