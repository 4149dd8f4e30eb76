"""One rank of many: a program for torchrun runs as rank 3 of a job whose other ranks do not exist."""

import copy
import functools
import gc
import os
from multiprocessing.pool import ThreadPool

import pytest
import torch
import torch.distributed as dist
from forks import command
from measuring import recorded
from ranks import fully_sharded, in_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from virtual_gpus import NotModelled, record_timeline, record_training, virtual_gpus
from virtual_gpus.features.distributed import one_rank
from virtual_gpus.settings import INSTALLED

WIDTH = 512
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def test_the_environment_is_that_of_torchrun_and_is_restored(monkeypatch):
    monkeypatch.setenv("RANK", "before")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with virtual_gpus(8, shapes_only=True, rank=11, world_size=1024):
        wanted = {"RANK": "11", "WORLD_SIZE": "1024", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1"}
        assert {name: os.environ[name] for name in wanted} == wanted
        with virtual_gpus(4, shapes_only=True, rank=0, world_size=4):
            assert os.environ["RANK"] == "0"
        assert os.environ["RANK"] == "11"
    assert os.environ["RANK"] == "before" and "LOCAL_RANK" not in os.environ


def test_every_collective_answers_at_once():
    with virtual_gpus(8, shapes_only=True, rank=3, world_size=1024):
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method="tcp://localhost:1", rank=3, world_size=1024)
        assert (dist.get_rank(), dist.get_world_size()) == (3, 1024)
        mesh = init_device_mesh("cuda", (128, 8), mesh_dim_names=("data", "model"))
        assert torch.cuda.current_device() == 3 and list(mesh.get_coordinate()) == [0, 3]
        x, every = torch.ones(4, device="cuda"), torch.empty(4096, device="cuda")
        dist.all_gather_into_tensor(every, x)
        dist.reduce_scatter_tensor(x, every)
        dist.all_to_all_single(every, every.clone())
        dist.all_reduce(x, async_op=True).wait()
        dist.barrier()
        for message in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 2), dist.P2POp(dist.irecv, x, 4)]):
            message.wait()
        some = dist.new_group(range(3, 1024, 8))
        assert dist.get_group_rank(some, 11) == 1 and dist.get_backend(some) == "cpu:gloo,cuda:nccl"
        objects = [None] * 1024
        dist.all_gather_object(objects, {"rank": 3})
        assert objects == [{"rank": 3}] * 1024
        mine = ["mine"]
        dist.broadcast_object_list(mine, src=3)
        assert mine == ["mine"]
        nobody = (dist.broadcast_object_list, [0]), (dist.scatter_object_list, [None, 0]), (dist.recv_object_list, [])
        for function, arguments in nobody:
            with pytest.raises(NotModelled, match="only rank 3 of 1024 exists"):
                function([None], *arguments)
        dist.destroy_process_group()
        with pytest.raises(ValueError, match="as rank 2 of 1024, but it runs as rank 3"):
            dist.init_process_group("nccl", rank=2, world_size=1024)


def test_the_other_ranks_hold_what_this_one_holds(capfd):
    """DistributedDataParallel has the gradients of one GPU. fully_shard repeats this rank's part for the others."""
    with virtual_gpus(2, rank=1, world_size=2):
        assert "rank 1 of 2 runs alone" in capfd.readouterr().out
        dist.init_process_group("nccl")
        torch.cuda.set_device(1)
        x = torch.randn(8, 16, device="cuda")
        net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).cuda()
        copied, shards = DistributedDataParallel(copy.deepcopy(net), device_ids=[1]), fully_shard(copy.deepcopy(net))
        for each in (net, copied, shards):
            each(x).square().sum().backward()
        torch.testing.assert_close([p.grad for p in copied.parameters()], [p.grad for p in net.parameters()])
        own = shards[0].weight.to_local()
        torch.testing.assert_close(own, net[0].weight[16:])
        torch.testing.assert_close(shards[0].weight.full_tensor(), torch.cat([own, own]))
        assert shards[0].weight.grad.to_local().isfinite().all()

        ones = torch.ones(4, device="cuda")
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            dist.all_reduce(ones, op=op)
            assert ones.tolist() == [2] * 4
        parts = [torch.zeros(2, device="cuda") for _ in range(2)]
        dist.all_to_all(parts, [torch.full((2,), float(n), device="cuda") for n in (5, 6)])
        assert torch.stack(parts).tolist() == [[6, 6], [6, 6]]
        dist.all_to_all_single(ones, torch.arange(4.0, device="cuda"))
        assert ones.tolist() == [2, 3, 2, 3]
        for x, total in ((torch.tensor([1, 2]), [2, 4]), (torch.tensor([True, False], device="cuda"), [True, False])):
            dist.all_reduce(x, group=dist.new_group(backend="cpu:gloo,cuda:nccl"))
            assert x.tolist() == total


def test_a_reduction_has_the_operation_of_its_own_thread(monkeypatch):
    """Before PyTorch 2.14, C++ does not tell which operation it carries out, as it does for DDP."""
    monkeypatch.delattr(dist.ReduceOp, "unbox", raising=False)
    with virtual_gpus(1, rank=0, world_size=2), ThreadPool(1) as other:
        dist.init_process_group("nccl")
        maximum = one_rank.reducing(dist.ReduceOp.MAX)
        other.apply(maximum.__enter__)
        net = nn.Linear(4, 4).cuda()
        copied = DistributedDataParallel(copy.deepcopy(net))
        for each in (net, copied):
            each(torch.ones(2, 4, device="cuda")).sum().backward()
        torch.testing.assert_close(copied.module.weight.grad, net.weight.grad)
        other.apply(maximum.__exit__, (None, None, None))


def test_the_report_says_what_fills_the_gpu_and_where_the_time_goes():
    """Bytes by kind against figures derived by hand: 8 layers of 1,024 by 1,024 in two groups, over 8 ranks."""
    layer, ranks = 1024 * 1024, 8
    with virtual_gpus(8, kind="H100", shapes_only=True, rank=3, world_size=ranks, torch_version="2.15"):
        mesh = init_device_mesh("cuda", (ranks,))
        with record_training() as recorded:
            net = nn.Sequential(*(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in "1234")) for _ in "ab"))
            for block in net:
                fully_shard(block.cuda(), mesh=mesh)
            optimizer = torch.optim.AdamW(net.parameters(), fused=True)
            for _ in range(3):
                x = torch.randn(16, 1024, device="cuda")
                net(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            with pytest.raises(RuntimeError, match="still recording"):
                recorded.report()
        report = recorded.report(tokens=16 * ranks)
        assert report.peak_bytes == sum(report.by_kind.values()) == torch.cuda.max_memory_allocated()
    assert report.by_kind["parameters"] == 8 * layer * 4 // ranks
    assert report.by_kind["optimizer state"] == 2 * 8 * layer * 4 // ranks + 8 * 512  # and a step counter each
    assert report.by_kind["gathered layers"] >= 4 * layer * 4
    assert (report.rank, report.world_size, report.parameters) == (3, ranks, 8 * layer)
    assert 0 < report.exposed_seconds <= report.communication_seconds <= report.step_seconds
    assert report.units_per_second == pytest.approx(16 * ranks / report.step_seconds)
    assert report.mfu == pytest.approx(6 * 8 * layer * 16 / report.step_seconds / 989.4e12, rel=0.01)
    assert "gathered layers" in str(report)
    with virtual_gpus(1, shapes_only=True), record_training() as recorded:
        pass
    assert recorded.report().step_seconds is None


def mlp():
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 99))
    return nn.Sequential(first, nn.Linear(99, WIDTH))


def replicated():
    mesh, net = init_device_mesh("cuda", (2, 2), mesh_dim_names=("copy", "shard")), mlp().cuda()
    net[0] = checkpoint_wrapper(net[0])
    return fully_sharded(net, mesh=mesh, mp_policy=HALF, reshard_after_forward=False)


def from_meta():
    """Sharded, and parallel in its tensors too."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "model"))
    with torch.device("meta"):
        net = mlp()
    parallelize_module(net, mesh["model"], {"0.0": ColwiseParallel(), "0.2": RowwiseParallel(), "1": ColwiseParallel()})
    fully_sharded(net, mesh=mesh["data"]).to_empty(device="cuda")
    for layer in (net[0][0], net[0][2], net[1]):
        layer.reset_parameters()
    return net


def figures(rank):
    """For each case: bytes at the peak of the second step, after it, and reserved; and entries of its state."""
    builds = {
        "from meta": from_meta,
        "replicated and sharded, gathered until the backward pass, checkpointed, in bfloat16": replicated,
        "on the host": lambda: fully_sharded(mlp(), offload_policy=CPUOffloadPolicy()),
    }
    found = {}
    for name, build in builds.items():
        net = optimizer = None
        gc.collect()
        torch.cuda.empty_cache()
        net = build()
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            net(torch.randn(64, WIDTH, device="cuda")).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found[name] = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved()
    state = get_model_state_dict(net)
    set_model_state_dict(net, state)
    return found, len(state), len(get_model_state_dict(net, options=StateDictOptions(full_state_dict=True)))


def lists():
    """What collectives of lists put on the clock: names and seconds."""
    x, parts = torch.empty(1 << 20, device="cuda"), [torch.empty(1 << 20, device="cuda") for _ in range(4)]
    others = [torch.empty_like(part) for part in parts]
    calls = (dist.all_to_all, others, parts), (dist.all_gather, parts, x), (dist.reduce_scatter, x, parts)
    torch.cuda.synchronize()
    dist.barrier()
    found = [recorded(functools.partial(*call)).spans for call in calls]
    return [[(span.name, round(span.end - span.start, 9)) for span in spans if span.gpu is not None] for spans in found]


def figures_with_gloo(rank):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:nccl")  # gradients' norm on the host is all-reduced there: NCCL cannot
    torch.cuda.set_device(rank)
    return figures(rank), lists()


def test_one_rank_needs_what_real_ranks_need_to_the_byte():
    with virtual_gpus(4, shapes_only=True, rank=3, world_size=4):
        alone = figures_with_gloo(3)  # first: the forked ranks then have DTensor's answers from here
    with virtual_gpus(4, shapes_only=True):
        real = in_ranks(figures_with_gloo, count=4)
    assert alone == real[3] != real[0]  # the last rank has fewer of the 99 rows
    copies, names = ["copy_"] * 4, [[name for name, _ in spans] for spans in alone[1]]
    assert names == [["all_to_all"], ["all_gather", *copies], [*copies, "reduce_scatter"]]
    assert not dist.is_initialized()  # the ranks are gone, and so are their groups


@pytest.mark.skipif(INSTALLED in ((2, 12), (2, 13)), reason="this PyTorch reads a vote of the other ranks")
def test_a_stage_of_a_pipeline_receives_shapes():
    with virtual_gpus(4, shapes_only=True, rank=3, world_size=4):
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pipeline", "data"))
        gpu, net = torch.device("cuda", torch.cuda.current_device()), nn.Linear(64, 64).cuda()
        fully_shard(net, mesh=mesh["data"])
        shapes = (torch.empty(4, 64, device="meta", requires_grad=True) for _ in range(2))
        names = dict(zip(("input_args", "output_args"), shapes, strict=True))
        stage = PipelineStage(net, 1, 2, gpu, group=mesh.get_group("pipeline"), **names)
        schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, wanted: (y - wanted).square().mean())
        with record_timeline() as timeline:
            schedule.step(target=torch.randn(16, 64, device="cuda"))
        sent = [span.name for span in timeline.spans if span.kind == "collective"]
        assert sent.count("recv") >= 4 and sent.count("send") >= 4  # PyTorch 2.11 begins with one more of each
        assert net.weight.grad is not None and net.weight.grad.to_local().shape == (32, 64)
        with pytest.raises(NotModelled, match="only rank 3 of 4 exists"):
            torch.distributed.checkpoint.save(get_model_state_dict(net), checkpoint_id="nowhere")


def test_the_next_rank_of_the_same_mesh_has_answers_of_its_own():
    """DTensor keeps answers by the mesh, and meshes of the same shape are equal."""
    shapes = []
    for rank in (0, 3):
        with virtual_gpus(4, shapes_only=True, rank=rank, world_size=4):
            mesh = init_device_mesh("cuda", (4,))
            x = distribute_tensor(torch.ones(5, 2, device="cuda"), mesh, [Shard(0)])
            shapes.append((tuple((x + 1).to_local().shape), (x + 1).device_mesh.get_local_rank()))
    assert shapes == [((2, 2), 0), ((0, 2), 3)]


def test_the_command_line(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "print(dist.get_rank(), dist.get_world_size(), torch.cuda.current_device())\n"
        "x = torch.ones(1 << 20, device='cuda')\n"
    )
    done = command("--gpus 8 --shapes-only --no-children --as-rank 21 --of 1024 train.py".split(), tmp_path)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["21 1024 5", "Rank 21 of 1024, NVIDIA H200"] and "4 MiB of 139.8 GiB" in "".join(lines)
