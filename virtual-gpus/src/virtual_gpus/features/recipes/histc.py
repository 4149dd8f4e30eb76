"""`histc` of integers, for which PyTorch has a kernel on CUDA alone (aten/src/ATen/native/cuda/SummaryOps.cu)."""

from __future__ import annotations

import torch

from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.threads import below


def histc(call: OpCall):
    """CUDA counts integers too."""
    x = call["self"]
    if x.is_floating_point():
        return call.run()
    with below():
        return call.place(torch.histc(x.double(), call["bins"], call["min"], call["max"]).to(x.dtype))


RECIPES = {"histc": histc}
