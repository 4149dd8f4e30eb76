"""Count the graphs that torch.compile makes of a net inside DDP or fully_shard. See lesson 12.

    python count_graphs.py     # one process, on the CPU; no GPU and no C++ compiler are needed

Gradients of one graph are ready at the same time, when its backward pass ends. So the number of graphs says whether
communication can begin earlier. The backend counts the graphs and runs them as they are.
"""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

# With another size, the compiler's first piece still has 1 MiB, unlike DDP's first bucket, and the cuts do not agree.
BUCKET = 1
WIDTH = 368  # a layer has a little more than half a MiB


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x).relu()


class Net(nn.Module):
    """Eight layers; two fill a bucket of 1 MiB. It is a class of its own, since a bare nn.Sequential is not split."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def ddp_then_compile(backend):
    return torch.compile(DistributedDataParallel(Net(), bucket_cap_mb=BUCKET), backend=backend)


def compile_then_ddp(backend):
    return DistributedDataParallel(torch.compile(Net(), backend=backend), bucket_cap_mb=BUCKET)


def shard(model, mesh):
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)
    return model


def shard_then_compile(backend):
    return torch.compile(shard(Net(), dist.init_device_mesh("cpu", (1,))), backend=backend)


def compile_blocks_then_shard(backend):
    model = Net()
    for layer in model.layers:
        layer.compile(backend=backend)
    return shard(model, dist.init_device_mesh("cpu", (1,)))


def count(build):
    """The operators in each graph that was compiled, and how many graphs a forward pass runs."""
    operators, runs = [], []

    def backend(graph, inputs):
        operators.append(sum(node.op in ("call_function", "call_module", "call_method") for node in graph.graph.nodes))

        def run(*arguments):
            runs.append(graph)
            return graph.forward(*arguments)

        return run

    torch.compiler.reset()
    model = build(backend)
    # An input that needs a gradient, as those of inner layers do. Else the first layer would get a graph of its own.
    model(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()
    return operators, len(runs)


def main():
    torch._logging.set_logs(dynamo=logging.ERROR)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = [
        ("DDP, then compile", ddp_then_compile, True),
        ("compile, then DDP", compile_then_ddp, True),
        ("DDP without its optimization", ddp_then_compile, False),
        ("fully_shard, then compile", shard_then_compile, True),
        ("compile blocks, then fully_shard", compile_blocks_then_shard, True),
    ]
    for name, build, optimize in rows:
        torch._dynamo.config.optimize_ddp = optimize
        operators, runs = count(build)
        print(f"{name:34} graphs run: {runs}, compiled: {len(operators)}, operators in each: {operators}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
