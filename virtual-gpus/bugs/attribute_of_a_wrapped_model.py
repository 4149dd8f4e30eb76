"""Training read an attribute of the model, which a wrapper for several GPUs does not pass on.

Thread: https://github.com/ultralytics/yolov5/issues/682
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ERROR = "'DistributedDataParallel' object has no attribute 'stride'"


class Detector(nn.Module):
    stride = 32

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


def before(rank):
    model = DistributedDataParallel(Detector().cuda())
    return model(torch.ones(model.stride, 4, device="cuda")).shape[0]


def after(rank):
    model = DistributedDataParallel(Detector().cuda())
    return model(torch.ones(model.module.stride, 4, device="cuda")).shape[0]
