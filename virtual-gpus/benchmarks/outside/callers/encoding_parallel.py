"""Train with DataParallelModel and DataParallelCriterion of PyTorch-Encoding.

The file parallel.py is read by its path. The whole package cannot be imported, because it compiles an extension.
"""

import importlib.util
import sys

import torch
from torch import nn

spec = importlib.util.spec_from_file_location("parallel", sys.argv[1])
parallel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(parallel)


class Net(nn.Module):
    """The criterion expects a tuple of outputs from every GPU."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        return (self.layers(x),)


torch.manual_seed(0)
count = torch.cuda.device_count()
net, criterion = Net(), nn.CrossEntropyLoss()
if count:
    net, criterion = parallel.DataParallelModel(net.cuda()), parallel.DataParallelCriterion(criterion)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(5):
    inputs, labels = torch.randn(32, 8), torch.randint(0, 4, (32,))
    loss = criterion(net(inputs.cuda()), labels.cuda()) if count else criterion(*net(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
