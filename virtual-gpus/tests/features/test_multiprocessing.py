"""Forked and spawned processes, torch.distributed and DistributedDataParallel."""

import faulthandler
import json
import os
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import HANGS_S, in_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from virtual_gpus import NotModelled, active_machine, virtual_gpus
from virtual_gpus.features.distributed import process_groups
from virtual_gpus.features.distributed.groups import gloo_group
from virtual_gpus.features.multiprocessing import started as processes

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

FORK = mp.get_context("fork")
# Shape, samples per rank (unequal), and whether the norm has parameters.
NORMALIZED = [((7, 5, 3, 3), [3, 4], True), ((7, 5), [3, 4], False), ((7, 5, 1, 1), [1, 6], True)]


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    process_groups._say_once.cache_clear()


def join(process):
    """The exit code of a process that must end by itself."""
    process.join(HANGS_S)
    if process.is_alive():
        process.kill()
        pytest.fail("the process hangs")
    return process.exitcode


def in_fork(function):
    """What `function` returns in a forked process, by way of JSON."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: sender.send(json.dumps(function())))
    process.start()
    sender.close()
    answer = json.loads(receiver.recv())
    assert join(process) == 0
    return answer


def test_a_forked_process_inherits_gpus_and_tensors_or_switches_its_own_on():
    def inherits():
        y = x * 2
        return str(y.device), y[0].item(), torch.cuda.memory_allocated(1), torch.cuda.memory_allocated(0)

    def switches_on():
        with virtual_gpus(3):
            return torch.cuda.device_count(), str(torch.ones(2, device="cuda:2").device)

    with virtual_gpus(2):
        x = torch.full((1000,), 3.0, device="cuda:1")
        assert in_fork(inherits) == ["cuda:1", 6.0, 8192, 0]
        assert torch.cuda.memory_allocated(1) == 4096  # the parent's books are its own
    assert in_fork(switches_on) == [3, "cuda:2"]
    with virtual_gpus(1, refuse_forks=True):
        assert in_fork(lambda: torch.ones(2, device="cuda").tolist()) == [1, 1]  # the parent has not used CUDA
        x = torch.ones(2, device="cuda")
        for use, words in ((lambda: x * 2, "CUDA error: initialization error"), (x.cpu().cuda, "Cannot re-initialize")):
            assert words in in_fork(lambda use=use: str(pytest.raises(RuntimeError, use).value))
    assert not torch.cuda.is_available() or torch.cuda.device_count() != 3


def test_a_spawned_process_may_choose_its_gpu_before_it_touches_any():
    def chooses():  # what it unpickles first of all, in a forked one, which starts faster
        start(*arguments)
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        return torch.cuda.device_count(), torch.cuda.get_device_properties(0).pci_bus_id - 1

    with virtual_gpus(2):
        start, arguments = processes._FirstOfAll(active_machine(), {}).__reduce__()
    assert in_fork(chooses) == [1, 1]


def doubled(queue, answers):
    """Double what comes, in place, and send something of this process's own back."""
    for _ in range(2):
        x = queue.get()
        x.mul_(2)
        answers.put((str(x.device), torch.cuda.memory_allocated(1)))
    answers.put({"mine": torch.full((3,), 5.0, device="cuda:1"), "theirs": x})
    queue.get()  # as with CUDA, a process must stay until its tensors have been received


def test_ways_to_share():
    with virtual_gpus(2):
        queue, answers, net = FORK.Queue(), FORK.SimpleQueue(), nn.Linear(4, 3).cuda().share_memory()
        process = FORK.Process(target=doubled, args=(queue, answers))
        process.start()
        x = torch.ones(1000, device="cuda:1")
        for _ in range(2):
            queue.put(x)
            assert answers.get() == ("cuda:1", 0)  # the memory counts here alone
        assert x.tolist() == [4.0] * 1000 and torch.cuda.memory_allocated(1) == 4096
        found = answers.get()
        queue.put(None)
        assert str(found["mine"].device) == "cuda:1" and found["mine"].tolist() == [5.0] * 3
        assert found["theirs"].data_ptr() == x.data_ptr()  # it has come back to where it was made
        assert torch.cuda.memory_allocated(1) == 4096
        assert join(process) == 0
        assert x.is_shared()  # as all tensors on GPUs are
        process = FORK.Process(target=torch.nn.init.constant_, args=(net.weight, 7.0))
        process.start()
        assert join(process) == 0
        assert net.weight.unique().tolist() == [7.0]  # a fork shares what was put into shared memory
        with pytest.raises(NotModelled, match=r"Event\.ipc_handle"):
            torch.cuda.Event(interprocess=True).ipc_handle()
        with pytest.raises(RuntimeError, match="only available on CUDA"):
            torch.ones(3).untyped_storage()._share_cuda_()
        with pytest.raises(RuntimeError, match="non-leaf tensor"):
            FORK.SimpleQueue().put(net.weight * 2)
    with virtual_gpus(2, shapes_only=True):
        queue = FORK.SimpleQueue()
        queue.put(torch.ones(3, 4, device="cuda:1"))
        x = queue.get()
        assert (str(x.device), x.shape, x.share_memory_().is_shared()) == ("cuda:1", (3, 4), True)


def grow(x):
    faulthandler.disable()  # pytest's would print where it ends
    x.resize_(5, 5)


def test_memory_that_processes_share_cannot_grow():
    with virtual_gpus(1):
        process = FORK.Process(target=grow, args=(torch.ones(3, device="cuda").share_memory_(),))
        process.start()
        assert join(process) < 0, "a signal ends it, as on the CPU"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 3))


def training(net, inputs, targets):
    """Three steps, as DDP's buckets are made anew after the first; the losses."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(8, 6, generator=generator), torch.rand(8, 3, generator=generator)


def ddp(rank):
    """Losses, weights and bytes of a training without a default device and with one."""
    found, there = [], torch.device("cuda", rank)
    for default in (None, there):
        torch.cuda.reset_peak_memory_stats()
        net, parts = network(), [part.chunk(2)[rank] for part in data()]
        with default or nullcontext():
            batch = [part.to(rank) for part in parts]
            net = DistributedDataParallel(net.to(rank), device_ids=[rank], bucket_cap_mb=0.001)
            losses = training(net, *batch)
        memory = [(torch.cuda.memory_allocated(i), torch.cuda.max_memory_allocated(i)) for i in range(2)]
        assert {p.get_device() for p in net.parameters()} == {p.grad.get_device() for p in net.parameters()} == {rank}
        found.append((losses, memory, [p.detach().cpu() for p in net.parameters()]))
        del net, batch
    return found


def normalized(shape, affine):
    """A network and its samples."""
    torch.manual_seed(1)
    images = len(shape) == 4
    norm = (nn.BatchNorm2d if images else nn.BatchNorm1d)(5, affine=affine)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    net = nn.Sequential(nn.Conv2d(5, 5, 1) if images else nn.Linear(5, 5), norm, nn.Tanh())
    return net, torch.randn(shape), torch.randn(shape)


def two_steps(net, x, y, share=1):
    """Gradients of the second, and the running statistics."""
    for _ in range(2):
        net.zero_grad()
        (((net(x) - y) ** 2).sum() * share).backward()
    return [t.cpu() for t in (*(p.grad for p in net.parameters()), *net.buffers()) if t.is_floating_point()]


def synchronized(rank):
    found, memory = [], []
    for shape, sizes, affine in NORMALIZED:
        net, *samples = normalized(shape, affine)
        torch.cuda.reset_peak_memory_stats()
        net = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(net).to("cuda"), device_ids=[rank])
        x, y = (part.split(sizes)[rank].to("cuda") for part in samples)
        found.append(two_steps(net, x, y, share=2))  # DDP takes the mean of two ranks
        memory.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
    return found, memory


def in_two_ranks(rank):
    found = ddp(rank), *synchronized(rank)
    torch.set_default_device(rank)  # the other way to have a default device
    one = torch.ones(2)
    dist.all_gather([torch.empty(2) for _ in range(2)], one)
    dist.recv(one, 0) if rank else dist.send(one, 1)
    dist.barrier()
    torch.set_default_device(None)
    return found


def test_ddp_trains_as_one_process_does(capfd):
    """SyncBatchNorm has the statistics of all samples. Without values, and by a rank alone, memory is the same."""
    net = network()
    expected = training(net, *data())
    parameters = sum(p.nbytes for p in net.parameters())
    with virtual_gpus(2, memory="1 GiB"):
        trained, norms, taken = zip(*in_ranks(in_two_ranks, count=2), strict=True)
    with virtual_gpus(2, memory="1 GiB", shapes_only=True):
        assert tuple(memory for _, memory in in_ranks(synchronized, count=2)) == taken
    losses = [sum(pair) / 2 for pair in zip(*(found[0][0] for found in trained), strict=True)]
    assert losses == pytest.approx(expected, rel=1e-5) and losses[-1] < losses[0]
    for rank, (first, again) in enumerate(trained):
        losses, memory, weights = first
        with virtual_gpus(2, memory="1 GiB", shapes_only=True, rank=rank, world_size=2):
            dist.init_process_group("nccl")
            torch.cuda.set_device(rank)
            without_values = [found[1] for found in ddp(rank)]
            assert synchronized(rank)[1] == taken[rank]
        assert again[:2] == (losses, memory) and without_values == [memory] * 2
        torch.testing.assert_close(weights, [p.detach() for p in net.parameters()])
        # weights, gradients and buckets: three times the parameters, and little more
        assert 3 * parameters <= memory[rank][0] <= 3 * parameters + 64 * 512 and memory[1 - rank] == (0, 0)
    torch.testing.assert_close(*norms)
    expected = [two_steps(*normalized(shape, affine)) for shape, _, affine in NORMALIZED]
    torch.testing.assert_close(norms[0], expected, rtol=1e-4, atol=1e-4)
    assert "Warning" not in capfd.readouterr().err


def test_every_way_to_ask_for_a_backend(monkeypatch, capfd):
    process_groups._rest_at_exit.cache_clear()
    for backend in ("cpu:gloo,cuda:nccl", "NCCL", "gloo", None):
        process_groups._say_once.cache_clear()
        with virtual_gpus(1) as (gpu,):
            limit = timedelta(seconds=HANGS_S)
            where = {"store": dist.HashStore(), "rank": 0, "world_size": 1, "device_id": gpu}
            dist.init_process_group(backend, timeout=limit, **where)
            try:
                x = torch.ones(2, device="cuda")
                for group in (dist.group.WORLD, dist.new_group([0], timeout=limit)):
                    dist.all_reduce(x, group=group)
                    # Two threads of gloo's crash the process once in some 30,000 collectives (`_with_one_thread`).
                    options = gloo_group(group)._get_backend(gpu).options
                    assert (options._threads, options._timeout) == (1, limit)
                assert x.tolist() == [1.0, 1.0] and dist.get_backend() == str(backend or "nccl").lower()
                coll_device = dist.distributed_c10d._get_object_coll_device()
                assert coll_device == ("cpu" if "gloo" in str(backend) else "cuda")
                with pytest.raises(NotModelled, match="torch.cuda.nccl.all_reduce"):
                    torch.cuda.nccl.all_reduce([x])
            finally:
                dist.destroy_process_group()
        assert ("needs real GPUs" in capfd.readouterr().out) == (backend != "gloo")
        assert not dist.is_initialized()
    assert process_groups._rest_at_exit.cache_info().currsize == 1
