"""Groups of the backend "nccl": what NCCL takes and refuses (see ProcessGroupNCCL.cpp), while gloo carries it."""

import pytest
import torch
import torch.distributed as dist
from measuring import rows_of
from ranks import in_ranks, ones
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from virtual_gpus import active_machine, virtual_gpus
from virtual_gpus.dispatch.operators import operator

REFUSED = rows_of("nccl")["refused_collectives"]


def shapes(rank):
    """Name -> tensors that a collective wrote, most of them in shapes that gloo does not take."""
    mine = rank + 1.0
    dist.barrier(device_ids=[rank])
    pair = dist.new_group([0, 1], None, "nccl")
    factor = dist._make_nccl_premul_sum(0.5)

    def written(collective, into, *args, **options):
        """The tensors that a collective writes."""
        collective(into, *args, **options)
        return into if isinstance(into, list) else [into]

    made = {
        "mean": written(dist.all_reduce, ones(2) * mine, op=dist.ReduceOp.AVG),
        "mean of integers": written(dist.all_reduce, ones(1, dtype=torch.long) * -3 * rank, op=dist.ReduceOp.AVG),
        "broadcast": written(dist.broadcast, ones(2) * mine, src=1, group=pair),
        "gathered into a flat tensor": written(dist.all_gather_into_tensor, ones(8), ones(2, 2) * mine),
        "gathered into a list of another shape": written(dist.all_gather, [ones(4), ones(4)], ones(2, 2) * mine),
        "gathered unevenly": written(dist.all_gather, [ones(1), ones(3)], ones(1 + 2 * rank) * mine),
        "scattered from a flat tensor": written(dist.reduce_scatter_tensor, ones(2, 2), torch.arange(8.0).cuda()),
        "scattered unevenly": written(dist.reduce_scatter, ones(1 + 2 * rank), [ones(1) * mine, ones(3) * mine]),
        "gathered scalars": written(dist.all_gather_into_tensor, ones(2), torch.tensor(mine).cuda()),
        "all to all": [ones(1 + rank), ones(2 - rank)],
        "coalesced": [ones(2) * mine, ones(3) * mine],
        "coalesced into tensors": [ones(4), ones(2, 2)],
        "batch of messages": [ones(2)],
        "multiplied first": written(dist.all_reduce, ones(2) * mine, op=factor),
    }
    parts = made["all to all"]
    work = dist.all_to_all(parts, [part * mine for part in parts], async_op=True)
    assert work.wait() and work.result() is not None and len(work.get_future().wait()) == 2
    small = [ones(2, dtype=torch.float8_e4m3fn) for _ in range(2)]
    dist.all_gather(small, (ones(2) * mine).to(torch.float8_e4m3fn))
    made["float8"] = [part.float() for part in small]
    with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as work:
        for one in made["coalesced"]:
            dist.all_reduce(one)
    work.wait()
    with dist._coalescing_manager():
        for one in made["coalesced into tensors"]:
            dist.all_gather_into_tensor(one, ones(2) * mine)
    options = dist.AllreduceOptions()
    options.reduceOp = factor
    for _ in range(2):  # a program may use its options again
        dist.group.WORLD.allreduce([halved := ones(1)], options).wait()
        assert halved.item() == 1
    given = ones(4) * mine
    made["multiplied first"] += written(dist.reduce_scatter_tensor, ones(2), given, op=factor)
    assert given.tolist() == [mine] * 4
    received, peer = made["batch of messages"][0], 1 - rank
    ways = [dist.P2POp(dist.irecv, received, peer), dist.P2POp(dist.isend, ones(2) * mine, peer)]
    for work in dist.batch_isend_irecv(ways):
        work.wait()
    objects = [None, None]
    dist.all_gather_object(objects, rank)
    work = dist.all_reduce(ones(2, 2), async_op=True)
    work.wait()
    assert work.is_completed() and work.is_success() and work.result()[0].tolist() == [[2.0, 2.0]] * 2
    assert objects == [0, 1]
    assert dist.group.WORLD._device_types == [torch.device("cuda")]
    assert dist.group.WORLD._get_backend_name() == "nccl"  # SyncBatchNorm gathers lists in gloo's groups
    assert {str(tensor.device) for tensors in made.values() for tensor in tensors} == {f"cuda:{rank}"}
    return {name: [tensor.tolist() for tensor in tensors] for name, tensors in made.items()}


def both_on_the_first(rank):
    torch.cuda.set_device(0)
    dist.barrier()  # goes to the GPU that the group has used
    try:
        dist.all_reduce(ones(2))
    except dist.DistBackendError as error:
        return str(error)


def mixed(rank):
    """The two backends of a group have nothing to do with each other: the ranks need not use them in one order."""
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    found = torch.ones(2), ones(3)
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in (found if rank == 0 else found[::-1])]
    for work in works:
        work.wait()
    summed = all_reduce(ones(1), "sum", group).tolist()
    dist.barrier(group)
    name = dist.get_backend(group)
    dist.destroy_process_group(group)
    return [tensor.tolist() for tensor in found], summed, name


def affine():
    return torch.nn.Sequential(torch.nn.Linear(40, 40, bias=False), torch.nn.Linear(40, 40), torch.nn.Linear(40, 1))


def mean_gradients(net, value, device):
    for parameter in net.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    net.zero_grad()
    net(torch.full((4, 40), value, device=device)).sum().backward()
    return [parameter.grad.mean().item() for parameter in net.parameters()]


def compressed(rank):
    """A hook whose callbacks do collectives: of the three buckets' parameters PowerSGD compresses all, some or none."""
    net = DistributedDataParallel(affine().cuda(), bucket_cap_mb=0.001)
    net.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    return [mean_gradients(net, rank + 1.0, "cuda") for _ in range(6)]


def free_results():
    """Bytes that are left after collectives whose tensors were let go at once."""
    left, before = 0, torch.cuda.memory_allocated()
    for _ in range(100):
        tensor = torch.zeros(1000, device="cuda")
        all_reduce(tensor, "sum", dist.group.WORLD).wait()
        dist.all_gather_into_tensor(torch.empty(2000, device="cuda"), tensor, async_op=True).wait()
        del tensor
        left = max(left, torch.cuda.memory_allocated() - before)
    return left


def all_of_it(rank):
    assert free_results() == 0
    return shapes(rank), compressed(rank), mixed(rank), both_on_the_first(rank)


def test_collectives_of_nccl():
    with virtual_gpus(2):
        (first, gradients, mixture, refused), (second, *_) = in_ranks(all_of_it, count=2)
    assert first == rows_of("nccl")["collectives"]
    assert second["scattered from a flat tensor"] == [[[8.0, 10.0], [12.0, 14.0]]]
    assert second["scattered unevenly"] == [[3.0] * 3] and second["all to all"] == [[1.0, 1.0], [2.0]]
    expected = mean_gradients(affine(), 1.5, "cpu")
    assert all(found == pytest.approx(expected, rel=1e-4) for found in gradients)
    assert mixture == ([[2.0, 2.0], [2.0, 2.0, 2.0]], [2.0], "cpu:gloo,cuda:nccl")
    assert "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000" in refused


ALONE = {"rank": 1, "world_size": 2}


@pytest.mark.parametrize("options", [{}, {"shapes_only": True}, ALONE | {"shapes_only": True}])
def test_a_mesh_makes_the_group_and_takes_the_gpu_of_local_rank(options, monkeypatch):
    """As torchrun starts a program: nobody else names a GPU or makes a group."""
    here = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    for name, value in here.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with virtual_gpus(2, **options):
        mesh = init_device_mesh("cuda", (options.get("world_size", 1),))
        try:
            assert torch.cuda.current_device() == 1 and dist.is_nccl_available() and len(torch.cuda.nccl.version()) > 2
            dist.all_reduce(ones(2), group=mesh.get_group())
        finally:
            dist.destroy_process_group()


def root(far=0):
    """Options of a gather whose root is this rank, or the one after it."""
    options = dist.GatherOptions()
    options.rootRank = (dist.get_rank() + far) % 2
    return options


def told(rank):
    """What one rank is told by each call that is refused, before the ranks meet: the other one is elsewhere."""
    found, sparse = {}, not active_machine().settings.shapes_only  # there are no sparse tensors without values
    for program in (program for program in REFUSED if sparse or "sparse" not in program):
        if rank == 0 or ALONE["rank"] == active_machine().settings.rank:
            found[program] = repr(pytest.raises((RuntimeError, ValueError, TypeError), eval, program, globals()).value)
    dist.barrier()
    return found


@pytest.mark.parametrize("options", [{}, {"shapes_only": True}, ALONE, ALONE | {"shapes_only": True}])
def test_what_nccl_refuses(options):
    """In a group of processes, and by one rank alone."""
    with virtual_gpus(2, **options):
        if options.get("rank"):
            dist.init_process_group("nccl")
        found = told(1) if options.get("rank") else in_ranks(told, count=2)[0]
    assert {program: told for program, told in found.items() if REFUSED[program] not in told} == {}
    assert len(found) > 30


class Own(dist.ProcessGroup):
    """A group in Python, of one rank, as PyTorch's tests have them for ranks that are threads."""

    def allreduce(self, tensors, options=None):
        done = torch.futures.Future()
        done.set_result([tensor.mul_(3) for tensor in tensors])
        return torch._C._distributed_c10d._create_work_from_future(done)


def test_a_group_of_a_python_class_works_and_what_it_inherits_has_no_backend():
    group, ops = Own(0, 1), torch.ops._c10d_functional
    torch._C._distributed_c10d._register_process_group("own", group)
    try:
        with virtual_gpus(1):
            assert ops.wait_tensor(ops.all_reduce(ones(2), "sum", "own")).tolist() == [3.0, 3.0]
            for tensor in (ones(2), torch.ones(2)):
                with pytest.raises(RuntimeError, match="No backend type associated"):
                    ops.all_gather_into_tensor(tensor, 1, "own")
                with pytest.raises(RuntimeError, match="No backend type associated"):
                    group.broadcast([tensor], dist.BroadcastOptions())
    finally:
        torch._C._distributed_c10d._unregister_process_group("own")


def test_collectives_are_known_by_their_namespace_and_not_by_an_underscore():
    ops = [torch.ops.c10d.allgather_, torch.ops.c10d._allgather_base_, torch.ops._c10d_functional.all_reduce]
    found = [operator(op.default) for op in ops]
    assert [(op.kind, op.row.crosses) for op in found] == [("collective", False)] * 3
    assert operator(torch.ops.aten._foreach_add.List).kind == "list"
