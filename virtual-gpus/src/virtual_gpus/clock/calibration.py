"""The constants of the clock: how much of its data sheet each kind of GPU reaches, and the costs on the host.

There is one set of constants per kind of GPU and class of operator, but none per network. They come from these sources:

- H200: fitted to measurements on a real H200 (torch 2.11, CUDA 13.0), which are the kernels of nine training steps by
  operator, and single operators. `python -m benchmarks.clock` prints how close the result is.
- H100: the constants of the H200, which has the same chip, except `tensor`. The H200 was measured for some 40 ms at a
  time, and it reached 777 teraflops in bf16. A GPU that trains for hours lowers its clock to stay within its limit of
  power (700 W). How far depends on the numbers, the cooling and the card. For products of 8,192 x 8,192, 716
  teraflops are published (README of github.com/pranjalssh/fast.cu), and 519 for another H100 (issue 13 there). So
  `tensor` was fitted to training: MPT 1B, 3B and 7B on 8 and 16 H100 (scripts/train/benchmarking/README.md in
  github.com/mosaicml/llm-foundry). At 0.58, which is 574 teraflops, the model is as much too fast for these as it is
  for the same programs on 8 A100. Another team's figures bear it out: with the same program, an H100 is 2.1 to 2.3
  times as fast as an A100 (7B to 70B, README of github.com/foundation-model-stack/fms-fsdp), where the data sheets
  say 3.2.
- K80: the speed of convolutions was chosen to match two published times. PyramidNet at batch 240 takes 6 to 7 s a step
  (6.1 s here). PyTorch's tutorial on model parallelism, which does not name its GPU, takes 3.75 s (3.4 s here). As a
  check, PyramidNet on four K80s at batch 768 takes 4.9 s here and 5 s in the article.
- GH200 and B200: `tensor` is what large matrix multiplications were measured to reach (0.84 and 0.78, the table of
  maximum achievable matmul FLOPS in compute/accelerator/README.md of github.com/stas00/ml-engineering), lowered as
  much as the H100's training is below its figure there (0.80). Other constants: those of the H200.
- RTX 4090: `memory` and `tensor` were fitted to timm's inference (see `clock/cost_conv.py`), 20 networks.
- `conv_in_two_bytes`: on GeForce cards, V100 and T4 it is `tensor`, as timm's figures and those of ResNet-50 in
  NVIDIA's DeepLearningExamples bear out. A100: fitted to ResNet-50 there (2,470 images/s in training, batch 256,
  channels last), with ResNeXt-101 as a check. H200: between what its convolutions of ResNet-50 in bf16 took
  (tests/data/h200/third), which are too small to tell, and the A100's share of `tensor`. H100, GH200, B200: the H200's
  share of `tensor`. All others: `tensor`.
- `tensor_conv` of GeForce cards: an estimate from their convolutions in fp16, a little below those.
- All other kinds, and all other constants of the K80: estimates from the fraction of the peak that large matrix
  multiplications, convolutions and copies are known to reach on these GPUs. On GeForce cards, sums in fp32 halve the
  tensor cores' peak, so they come close to the rest; cards of 72 to 300 W lower their clock rate. Values that follow
  from the data sheet (peak, bandwidth, multiprocessors) need no constants. `python -m benchmarks.kinds` compares ten
  kinds with published figures.
- The host: fitted to the wall time of the same nine steps. On the real machine, these times differed by a factor of 1.6
  between two runs on the same day, so the constants cannot be more accurate than that.
"""

from __future__ import annotations

from typing import NamedTuple


class Calibration(NamedTuple):
    """The constants of one kind of GPU. All except `kernel` are fractions of a peak of the data sheet, from 0 to 1.

    kernel: seconds of the shortest kernel.
    memory: fraction of the bandwidth for kernels that read and write in order.
    simt: fraction of the fp32 and fp64 peak for matrix multiplications.
    tensor: fraction of the tensor cores' peak for matrix multiplications.
    conv: fraction of the fp32 and fp64 peak for convolutions.
    tensor_conv: fraction of the tensor cores' peak for convolutions in TF32, whose kernels need another image layout.
    conv_in_two_bytes: fraction of the tensor cores' peak for large convolutions in fp16 and bf16, channels last.
    """

    kernel: float
    memory: float
    simt: float
    tensor: float
    conv: float
    tensor_conv: float
    conv_in_two_bytes: float


_CALIBRATIONS = {
    "K80": Calibration(4e-6, 0.70, 0.62, 0.62, 0.27, 0.27, 0.62),
    "TITANXp": Calibration(2.5e-6, 0.75, 0.80, 0.80, 0.75, 0.75, 0.80),
    "V100": Calibration(2e-6, 0.84, 0.90, 0.70, 0.90, 0.40, 0.70),
    "T4": Calibration(2.2e-6, 0.80, 0.55, 0.40, 0.55, 0.25, 0.40),
    "A100": Calibration(1.5e-6, 0.86, 0.90, 0.80, 0.65, 0.36, 0.44),
    "A100-80GB": Calibration(1.5e-6, 0.86, 0.90, 0.80, 0.65, 0.36, 0.44),
    "RTX3090": Calibration(1.8e-6, 0.87, 0.75, 0.88, 0.65, 0.75, 0.88),
    "A10": Calibration(2e-6, 0.82, 0.60, 0.50, 0.55, 0.30, 0.50),
    "RTX4090": Calibration(1.5e-6, 0.94, 0.80, 0.95, 0.65, 0.75, 0.95),
    "RTX6000Ada": Calibration(1.5e-6, 0.86, 0.75, 0.62, 0.60, 0.36, 0.62),
    "L4": Calibration(2e-6, 0.82, 0.55, 0.45, 0.50, 0.25, 0.45),
    "L40S": Calibration(1.5e-6, 0.84, 0.75, 0.62, 0.60, 0.36, 0.62),
    "H100": Calibration(1e-6, 0.88, 0.77, 0.58, 0.60, 0.36, 0.44),
    "H200": Calibration(1e-6, 0.88, 0.77, 0.80, 0.60, 0.36, 0.60),
    "GH200": Calibration(1e-6, 0.88, 0.77, 0.62, 0.60, 0.36, 0.46),
    "B200": Calibration(1e-6, 0.88, 0.77, 0.56, 0.60, 0.30, 0.42),
    "RTX5090": Calibration(1.5e-6, 0.88, 0.80, 0.95, 0.65, 0.75, 0.95),
}


def calibration(kind: str) -> Calibration:
    """The constants of a kind of GPU, given its `GPUSpec.kind`."""
    return _CALIBRATIONS[kind]


class HostCosts(NamedTuple):
    """Seconds that one host thread needs to issue work, in Python and C++ together.

    view: an operator that starts no kernel.
    operator: an operator that starts a kernel and creates a tensor.
    in_place: an operator that starts a kernel and creates no tensor.
    product, convolution: the additional time of a library that chooses the kernel.
    kernel: each additional kernel of an operator.
    training: the additional time per operator for modules, nodes and gradients, while autograd records or runs.
    tensor: each tensor in a list of tensors, as in an optimizer.
    copy: a copy between devices. pageable_copy: a copy through the driver's buffer.
    wait: the time until the host notices that a GPU is done.
    pageable: bytes per second of the host's copies between pageable and pinned memory, the only rate here.
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
