"""torch.distributed.rpc, and what it stands on: collectives of a backend that no process group holds."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import HANGS_S
from torch.distributed import rpc
from virtual_gpus import virtual_gpus


def test_a_collective_in_a_thread_of_gloo():
    """Its operators have no Python instruction that called them."""
    with virtual_gpus(2):
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=HANGS_S))
        whole = torch.zeros(1, dtype=torch.long)
        assert group.allgather([[whole]], [torch.ones(1, dtype=torch.long)]).wait() and whole.item() == 1


class Net:
    """A model that lives on a GPU of another process."""

    def __init__(self):
        self.layer = torch.nn.Linear(3, 3, bias=False).cuda(1)

    def doubled(self):
        return str((self.layer.weight * 2).device)  # names no GPU, in whatever thread it runs

    def weight(self):
        return self.layer.weight

    def forward(self, x):
        return self.layer(x.cuda(1)).cpu()

    def step(self, context):
        """One step of SGD with the gradients of the backward pass that another process started."""
        weight, before = self.layer.weight, self.layer.weight.tolist()
        gradient = torch.distributed.autograd.get_gradients(context)[weight]
        with torch.no_grad():
            weight.sub_(gradient)
        return str(gradient.device), before, weight.tolist()


def join(rank, folder):
    os.environ.update(MASTER_ADDR="localhost")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/meet", rpc_timeout=HANGS_S)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)


def worker(rank, folder):
    join(rank, folder)
    if rank == 0:
        ones, there = torch.ones(2), "worker1"
        assert rpc.rpc_sync(there, torch.add, args=(ones, 1)).tolist() == [2.0, 2.0]
        assert rpc.rpc_async(there, max, args=([3, 4],)).wait() == 4
        net = rpc.remote(there, Net)
        assert {net.rpc_sync().doubled(), net.remote().doubled().to_here()} == {"cuda:1"}
        later = rpc.rpc_async(there, abs, args=(ones,)).then(lambda future: (future.wait().cuda() * 2).is_cuda)
        assert later.wait()
        for refused in (torch.add, max):
            with pytest.raises(NotImplementedError, match=r"GPU tensor by torch.distributed.rpc \(send x.cpu"):
                rpc.rpc_sync(there, refused, args=(ones.cuda(), 1))
        with pytest.raises(RuntimeError, match="GPU tensor by torch.distributed.rpc"):
            net.rpc_sync().weight()
    rpc.shutdown()


def backward_worker(rank, folder):
    join(rank, folder)
    if rank == 0:
        net = rpc.remote("worker1", Net)
        with torch.distributed.autograd.context() as context:
            torch.distributed.autograd.backward(context, [net.rpc_sync().forward(torch.ones(2, 3)).sum()])
            device, before, after = net.rpc_sync().step(context)
        assert device == "cuda:1" and torch.allclose(torch.tensor(before) - 2, torch.tensor(after))
    rpc.shutdown()


@pytest.mark.outside  # Once, in a run of all tests, a process aborted in C++. The cause is not found.
def test_a_backward_pass_over_two_processes(tmp_path):
    with virtual_gpus(2):
        mp.start_processes(backward_worker, args=(str(tmp_path),), nprocs=2, start_method="fork")


def test_remote_calls(tmp_path):
    with virtual_gpus(2):
        options = rpc.TensorPipeRpcBackendOptions()
        for refused in (
            lambda: rpc.TensorPipeRpcBackendOptions(device_maps={"worker1": {0: 1}}),
            lambda: rpc.TensorPipeRpcBackendOptions(devices=["cuda:0"]),
            lambda: options.set_device_map("worker1", {0: 1}),
            lambda: options.set_devices([0]),
        ):
            with pytest.raises(NotImplementedError, match=r"device maps of torch.distributed.rpc \(send x.cpu"):
                refused()
        mp.start_processes(worker, args=(str(tmp_path),), nprocs=2, start_method="fork")
