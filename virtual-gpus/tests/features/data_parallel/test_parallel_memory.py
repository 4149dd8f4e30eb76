"""Memory of DataParallel and DistributedDataParallel, allocation by allocation. Expected sequences are derived by hand
from torch/csrc/cuda/comm.cpp, torch/nn/parallel/comm.py and torch/csrc/distributed/c10d/{comm,reducer}.cpp. Sizes are
in float32 of 4 bytes, rounded up to 512 bytes."""

import gc

import pytest
import torch
import torch.distributed as dist
from measuring import allocated, bytes_of
from ranks import in_ranks
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel, comm, replicate
from virtual_gpus import virtual_gpus
from virtual_gpus.machine import active

KIB, MIB = 2**10, 2**20
pytestmark = pytest.mark.usefixtures("rules_of_2_11")


def rounded(*numbers):
    """Bytes of float32 tensors with so many numbers."""
    return sum(-(-4 * n // 512) * 512 for n in numbers)


def watch():
    """One list of events per GPU that grows from now on: bytes, positive for alloc and negative for free."""
    allocated()  # what is free by now is not seen any more
    lists = [[] for _ in active().gpus]
    for gpu, events in zip(active().gpus, lists, strict=True):
        gpu.allocator.observers.append(lambda what, _, size, events=events: note(events, what, size))
    return lists


def note(events, what, size):
    if what in ("alloc", "free"):
        events.append(size if what == "alloc" else -size)


def zeros(*sizes, gpu=0, **options):
    return [torch.zeros(size, device=gpu, **options) for size in sizes]


def test_broadcast_coalesced_sends_chunks_that_the_last_tensor_fills():
    with virtual_gpus(3):
        tensors = zeros(300, 100, 500, 200)
        first, *others = watch()
        copies = comm.broadcast_coalesced(tensors, [0, 1, 2], buffer_size=1600)
        # 300 + 100 numbers are 1,600 bytes: full. 500 are 2,000: full by themselves, sent without a flat copy.
        # 200 remain, and are sent as they are as well.
        assert first == [2048]
        assert others == [[2048, 2048, 1024]] * 2
        assert all(one is other for one, other in zip(copies[0], tensors, strict=True))
        shared = [t.untyped_storage().data_ptr() for t in copies[1]]
        assert shared[0] == shared[1] and len(set(shared)) == 3
        del copies, tensors
        assert allocated() == [0, 0, 0]
        assert first[:2] == [2048, -2048]  # the flat copy at the source was gone at once


def test_broadcasts_go_type_by_type_sums_close_a_chunk_before_it_overflows_and_gather_makes_one_tensor():
    with virtual_gpus(2):
        counters, numbers = zeros(1, 1, dtype=torch.int64), zeros(300, 300)
        source, target = watch()
        comm.broadcast_coalesced([numbers[0], counters[0], numbers[1], counters[1]], [0, 1])
        assert target[:2] == [512, 2560]  # int64 comes before float32 in c10::ScalarType, whatever came first
        assert source[0] == 512 and 2560 in source
        weight = torch.arange(24.0, device="cuda").view(2, 3, 2, 2).to(memory_format=torch.channels_last)
        source, target = watch()
        (copy,) = comm.broadcast_coalesced([weight], [0, 1])[1]
        assert source == [512] and target == [512]
        assert copy.is_contiguous() and torch.equal(copy.cpu(), weight.cpu())
        inputs = [zeros(300, 200, 100, gpu=gpu) for gpu in (0, 1)]
        first, second = watch()
        sums = comm.reduce_add_coalesced(inputs, 0, buffer_size=1600)
        # 300 and 200 numbers do not fit into 1,600 bytes: [300], [200, 100]
        assert second[:1] == [1536] and [e for e in first if e > 0] == [1536, 1536, 1536]
        shared = [t.untyped_storage().data_ptr() for t in sums]
        assert shared[0] != shared[1] == shared[2]
        images = [torch.zeros(2, 3, 4, 4, device=gpu).to(memory_format=torch.channels_last) for gpu in (0, 1)]
        first, second = watch()
        assert comm.gather(images, 0, 0).is_contiguous(memory_format=torch.channels_last)
        assert first[0] == rounded(2 * 96) and second == []
        assert comm.gather([image.contiguous() for image in images], 0, 0).is_contiguous()


def test_inputs_from_the_cpu_are_copied_on_a_stream_of_their_own():
    with virtual_gpus(2):
        weight, out = zeros(10), DataParallel(nn.Identity())(torch.zeros(8, 100_000))
        # 1.6 MB per GPU: a segment of 20 MiB of the copy's stream, and one for the gathered output
        assert [torch.cuda.memory_reserved(i) for i in (0, 1)] == [(2 + 20 + 20) * MIB, 20 * MIB]
        del out, weight
        y = torch.zeros(400_000, device="cuda:1")  # not from that segment, which belongs to the other stream
        assert torch.cuda.memory_reserved(1) == 40 * MIB
        del y


class Scale(nn.Module):
    """Parameters and buffers of known sizes, and no matrix product."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(500))
        self.register_buffer("mean", torch.zeros(200))
        self.register_buffer("variance", torch.zeros(200))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return x * self.one * self.two[:300] + self.mean.sum()


@pytest.mark.parametrize("shapes_only", [False, True])
def test_a_step_of_data_parallel(shapes_only):
    with virtual_gpus(2, shapes_only=shapes_only):
        model, module = rounded(300, 500, 200, 200) + 512, Scale().cuda()
        source, target = watch()
        replicas = replicate(module, [0, 1])
        # They live in flat buffers. The parameters, then the buffers: int64 first, as it is; then the two of float32.
        assert source[:2] == [rounded(800), -rounded(800)] and source[-1] in (rounded(400), -rounded(400))
        assert target == [rounded(800), 512, rounded(400)]
        views = [replicas[1].one, replicas[1].two]
        del replicas
        gc.collect()
        while views:  # each holds the whole buffer
            assert allocated() == [model, rounded(800)]
            views.pop()
        net = DataParallel(module)
        assert allocated() == [model, 0]
        out = net(torch.zeros(6, 300))
        # kept for backward: x, x * one, and a view of `two`, which on GPU 1 holds the buffer of all parameters
        kept = 2 * rounded(900)
        assert allocated() == [model + kept + rounded(1800), rounded(800) + kept]
        out.sum().backward()
        del out
        # both gradients are parts of one flat tensor
        assert allocated() == [model + rounded(800), 0]
        net.zero_grad()
        assert allocated() == [model, 0]


def test_replicas_use_cublas_in_threads_of_their_own():
    """The first step's threads leave their handles to autograd's, so the second needs new ones."""
    with virtual_gpus(2):
        net = DataParallel(nn.Linear(4, 4, bias=False).cuda())
        x, workspaces = torch.zeros(4, 4), []
        for _ in range(3):
            out = net(x)
            workspaces.append([size // MIB for size in allocated()])
            out.sum().backward()
            del out
            workspaces.append([size // MIB for size in allocated()])
        assert workspaces == [[32, 32]] * 2 + [[64, 64]] * 4
    with virtual_gpus(2):  # the main thread keeps its handle
        net = DataParallel(nn.Linear(4, 4, bias=False).cuda())
        net.module(torch.zeros(4, 4, device="cuda"))
        net(torch.zeros(4, 4))
        assert [size // MIB for size in allocated()] == [64, 32]


LAYERS = (300_000, 1000, 500)  # numbers: 1.2 MB, more than the first bucket's 1 MiB
MODEL = rounded(*LAYERS)


class Layers(nn.Module):
    def __init__(self, sizes=LAYERS):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(size) for size in sizes)

    def forward(self, x):
        for weight in self.weights:
            x = x + weight.sum()
        return x


# Until the first step all in one bucket; then buckets in the order of the gradients: 500, 1,000 and 300,000 numbers,
# of which the last closes the first one at 1 MiB. With unused parameters so from the start.
BUCKETS = rounded(sum(LAYERS))
GRADIENTS = MODEL
COPIES = [BUCKETS] + [BUCKETS + GRADIENTS, BUCKETS] * 3
MAP = 512  # of used parameters, three numbers of int32
VIEWS = {"gradient_as_bucket_view": True}
CASES = {
    "copies": ({}, True, COPIES),
    "zeroed in place": ({}, False, [BUCKETS] + [BUCKETS + GRADIENTS] * 6),
    "views": (VIEWS, True, [BUCKETS] * 7),
    "views zeroed in place": (VIEWS, False, [BUCKETS] * 7),
    "unused": ({"find_unused_parameters": True}, True, [size + MAP for size in COPIES]),
    "static graph": ({"static_graph": True}, True, [size + MAP for size in COPIES]),
}


def stages(rank):
    """Bytes beside the model for each case: built, then after backward and after zero_grad of three steps."""
    stages = {}
    for name, (options, set_to_none, _) in CASES.items():
        net = DistributedDataParallel(Layers().to(rank), device_ids=[rank], **options)
        x, found = torch.zeros(1, device=rank), [allocated()[rank]]
        for _ in range(3):
            net(x).sum().backward()
            found.append(allocated()[rank])
            net.zero_grad(set_to_none=set_to_none)
            found.append(allocated()[rank])
        stages[name] = [size - MODEL - rounded(1) for size in found]
        del net, x
        gc.collect()
        assert allocated() == [0] * 4
    return stages


def several_buckets(rank):
    """Three tensors of 700 KiB with a cap of 1 MiB: one bucket, then one of two and one of one."""
    size = 700 * KIB // 4
    net = Layers([size] * 3).to(rank)
    mine, net = watch()[rank], DistributedDataParallel(net, device_ids=[rank], bucket_cap_mb=1)
    built, x = [e for e in mine if e > 0], torch.zeros(1, device=rank)
    net(x).sum().backward()
    del mine[:]
    net.zero_grad()
    net(x)
    rebuilt = [e // KIB for e in mine if abs(e) > 600 * KIB]
    return [e // KIB for e in built], rebuilt


class TwoGPUs(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.last = first + 1
        self.first, self.second = Layers([1000, 500]).to(first), Layers([2000]).to(self.last)

    def forward(self, x):
        return self.second(self.first(x).to(self.last))


def model_parallel(rank):
    torch.cuda.set_device(2 * rank)
    net = DistributedDataParallel(TwoGPUs(2 * rank))
    built, x = allocated(), torch.zeros(1, device="cuda")
    for _ in range(3):
        net.zero_grad()
        net(x).sum().backward()
    return built, allocated(), [str(parameter.grad.device) for parameter in net.parameters()]


def lists(rank):
    """What collectives on lists leave, and their peaks, above what is there."""
    x, parts = torch.zeros(1000, device=rank), [torch.zeros(1000, device=rank) for _ in range(2)]
    return [bytes_of(call)[1:] for call in (lambda: dist.all_gather(parts, x), lambda: dist.reduce_scatter(x, parts))]


def all_of_it(rank):
    found = []
    for function in (stages, several_buckets, lists, model_parallel):
        found.append(function(rank))
        gc.collect()
        assert allocated() == [0] * 4
    return found


def test_memory_of_distributed_data_parallel():
    with virtual_gpus(4):
        answers = in_ranks(all_of_it, count=2)
    for rank, (at_stages, rebuilt, of_lists, (built, trained, places)) in enumerate(answers):
        assert at_stages == {name: expected for name, (_, _, expected) in CASES.items()}
        # Buckets are made anew before the second forward pass: all parameters in one flat tensor to send them, then the
        # bucket. Later three gradients go, and the old bucket before the new ones come.
        assert rebuilt == ([2100, 2100], [-700, -700, -700, -2100, 1400, 700])
        assert of_lists == [(0, rounded(2000))] * 2  # lists go through a flat tensor
        # A model on two GPUs has buckets on both.
        models, buckets = (rounded(1000, 500), rounded(2000)), (rounded(1500), rounded(2000))
        mine, others = slice(2 * rank, 2 * rank + 2), slice(2 - 2 * rank, 4 - 2 * rank)
        assert built[mine] == [sum(pair) for pair in zip(models, buckets, strict=True)]
        assert trained[mine] == [2 * models[0] + buckets[0] + 512, 2 * models[1] + buckets[1]]
        assert built[others] == trained[others] == [0, 0]
        assert places == [f"cuda:{2 * rank}"] * 2 + [f"cuda:{2 * rank + 1}"]
