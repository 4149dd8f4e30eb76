"""`fully_shard` (FSDP2) on virtual GPUs: one GPU's numbers, each rank's share of memory."""

import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from benchmarks.reference.networks import GPT
from ranks import in_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.functional import cross_entropy, mse_loss
from virtual_gpus import record_timeline, virtual_gpus

WIDTH, BLOCKS = 256, 4
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of one linear layer
SGD, ADAM = (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}), (torch.optim.Adam, {"lr": 1e-3})


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


def numbers():
    make = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=make), torch.randn(8, WIDTH, generator=make)


def gpt():
    torch.manual_seed(0)
    return GPT(words=30, hidden=128, layers=2, heads=4, length=8)


def words():
    make = torch.Generator().manual_seed(1)
    return torch.randint(0, 30, (8, 8), generator=make), torch.randint(0, 30, (8, 8), generator=make)


JOBS = {"mlp": (mlp, list, numbers, lambda y, wanted: mse_loss(y.float(), wanted)),
        "gpt": (gpt, lambda net: list(net.blocks), words,
                 lambda scores, y: cross_entropy(scores.flatten(0, 1), y.flatten()))}  # fmt: skip


def allocated():
    """Bytes in use once gloo's thread, which may hold the tensors of the last collective for a moment, lets them go."""
    time.sleep(0.5)  # microseconds, if the thread has a core
    return torch.cuda.memory_allocated()


def steps(net, x, y, loss_of, optimizer):
    """Three steps; the losses, and of the last one the bytes before it, at its peak, and after it, gradients kept."""
    kind, options = optimizer
    optimizer, losses = kind(net.parameters(), **options), []
    for number in range(3):
        optimizer.zero_grad()
        if number == 2:
            before = allocated()
            torch.cuda.reset_peak_memory_stats()
        loss = loss_of(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del loss
    return losses, (before, torch.cuda.max_memory_allocated(), allocated())


def sharded(rank, job, optimizer, ranks, with_mesh, options):
    build, blocks, data, loss_of = JOBS[job]
    if with_mesh:
        options = {**options, "mesh": init_device_mesh("cuda", (ranks,))}
    net = build().cuda()
    for part in (*blocks(net), net):
        fully_shard(part, **options)
    x, y = (part.chunk(ranks)[rank].cuda() for part in data())
    found = steps(net, x, y, loss_of, optimizer)
    one = next(net.parameters())
    where = {str(tensor.device) for tensor in (one, one.grad, one.to_local(), one.full_tensor())}
    full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    host = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    where_host = {str(tensor.device) for tensor in host.values()}
    return *found, {name: tensor.cpu() for name, tensor in full.items()}, where, where_host


def on_one(job, optimizer):
    build, _, data, loss_of = JOBS[job]
    net = build().cuda()
    return *steps(net, *(part.cuda() for part in data()), loss_of, optimizer), net.cpu().state_dict()


@pytest.mark.parametrize("job, optimizer, ranks, with_mesh", [("mlp", SGD, 4, True), ("gpt", SGD, 2, False)])
def test_numbers_are_those_of_one_gpu(job, optimizer, ranks, with_mesh):
    with virtual_gpus(ranks):
        losses, _, weights = on_one(job, optimizer)
        found = in_ranks(sharded, job, optimizer, ranks, with_mesh, {}, count=ranks)
    mean = torch.tensor([rank[0] for rank in found]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=1e-6)
    for rank, (_, _, full, where, host) in enumerate(found):
        torch.testing.assert_close(full, dict(weights), rtol=1e-4, atol=1e-5)
        assert where == {f"cuda:{rank}"} and host == ({"cpu"} if rank == 0 else set())


def test_each_rank_holds_its_share():
    """Parameters, gradients and Adam's two states of 4 layers, of which each rank has one part in `ranks`."""
    ranks = 4
    with virtual_gpus(ranks, torch_version="2.15"):  # cuBLAS keeps no workspace from then on
        found = in_ranks(sharded, "mlp", ADAM, ranks, False, {}, count=ranks)
    share = BLOCKS * LAYER // ranks
    for _, (before, peak, after), *_ in found:
        room = 128 * 2**10  # the batch, Adam's step counters, and blocks of 512 bytes
        assert 3 * share <= before < 3 * share + room
        assert 4 * share <= after < 4 * share + room
        assert peak > after + LAYER  # at least one gathered layer


def after_forward(rank, reshard):
    net = mlp().cuda()
    for block in net:
        fully_shard(block, reshard_after_forward=reshard)
    scores = net(numbers()[0].cuda())
    assert scores.requires_grad
    return allocated()


def test_layers_that_stay_gathered_cost_memory():
    with virtual_gpus(2):
        freed, kept = (in_ranks(after_forward, reshard, count=2)[0] for reshard in (True, False))
    assert kept - freed == BLOCKS * LAYER


def clocked(rank):
    net = mlp().cuda()
    for part in (*net, net):
        fully_shard(part)
    x = numbers()[0].cuda()
    net(x).sum().backward()
    with record_timeline() as timeline:
        net(x).sum().backward()
    return [(span.kind, span.name) for span in timeline.spans if span.kind in ("collective", "copy")]


def test_each_layer_is_gathered_twice_and_its_gradients_are_scattered():
    """Nothing else is sent: what gloo copies on its own account is no copy of a GPU."""
    with virtual_gpus(2):
        found = in_ranks(clocked, count=2)[0]
    assert sorted(found) == [("collective", "all_gather")] * 2 * BLOCKS + [("collective", "reduce_scatter")] * BLOCKS


def sizes(rank):
    net = mlp().cuda()
    for part in (*net, net):
        fully_shard(part)
    return steps(net, *(torch.randn(8, WIDTH, device="cuda") for _ in "xy"), mse_loss, ADAM)[1]


def test_shapes_only_needs_the_same_memory():
    found = []
    for shapes_only in (False, True):
        with virtual_gpus(4, shapes_only=shapes_only):
            found.append(in_ranks(sizes, count=4))
    for (before, peak, after), (start, highest, end) in zip(*found, strict=True):
        assert (before, after) == (start, end)
        assert highest <= peak <= highest + LAYER  # gloo's thread may hold a gathered layer a moment too long


def tensor_parallel(rank):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).cuda()
    if rank is not None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(net, init_device_mesh("cuda", (2,)), plan)
    x = torch.linspace(-1, 1, 8 * 16, device="cuda").reshape(8, 16)
    losses, (before, *_) = steps(net, x, torch.ones(8, 4, device="cuda"), mse_loss, SGD)
    with record_timeline() as timeline:
        device = str(net(x).device)
    sent = [span for span in timeline.spans if span.kind == "collective"]
    return losses, before, device, [(span.name, round(1e9 * (span.end - span.start))) for span in sent]


def test_tensor_parallel_layers_of_pytorch():
    """A column and a row layer: the numbers of one GPU, each rank with half of the first and of the second matrix."""
    with virtual_gpus(2):
        losses, whole, _, sent = tensor_parallel(None)
    assert not sent
    with virtual_gpus(2):
        found = in_ranks(tensor_parallel, count=2)
    for rank, (ours, before, device, sent) in enumerate(found):
        nanoseconds = round(1e9 * (15e-6 + 8 * 4 * 4 / (0.78 * 450e9) + 2 * 2.5e-6))  # the sum over the halves of a row
        assert sent == [("all_reduce", nanoseconds)]
        assert ours == pytest.approx(losses, rel=1e-5) and device == f"cuda:{rank}"
        assert before < whole


def test_in_bfloat16_the_shares_stay_fp32():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with virtual_gpus(2):
        losses, _, _ = on_one("mlp", SGD)
        found = in_ranks(sharded, "mlp", SGD, 2, False, {"mp_policy": policy}, count=2)
    mean = torch.tensor([rank[0] for rank in found]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=2e-2, atol=1e-3)
    assert {tensor.dtype for tensor in found[0][2].values()} == {torch.float32}


def too_large(rank):
    net = mlp().cuda()
    fully_shard(net)  # 1 MiB in shares of 0.5 MiB; the whole is gathered at once
    ballast = torch.empty(torch.cuda.mem_get_info()[0] - 2**20, dtype=torch.uint8, device="cuda")
    net(torch.randn(8, WIDTH, device="cuda"))
    return ballast


def test_gathering_what_does_not_fit_runs_out_of_memory():
    with virtual_gpus(2, memory="700 MiB"), pytest.raises(mp.ProcessRaisedException, match="CUDA out of memory"):
        in_ranks(too_large, count=2)


def from_meta(rank):
    """The recipe for models that no GPU holds whole: sizes first, then shards, then their numbers."""
    mesh = init_device_mesh("cuda", (2,))
    torch.manual_seed(0)
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    for part in (*net, net):
        fully_shard(part, mesh=mesh)
    net.to_empty(device="cuda")
    for part in net:
        part.reset_parameters()
    net(torch.ones(2, 8, device="cuda")).sum().backward()
    weights = {name: tensor.full_tensor().cpu() for name, tensor in net.state_dict().items()}
    rows = torch.linspace(-1, 1, 2 * 6 * 8, device="cuda").reshape(2, 6, 8)
    plain = nn.RMSNorm(8, device="cuda")
    norm = parallelize_module(nn.Sequential(nn.RMSNorm(8, device="cuda")), mesh, {"0": SequenceParallel()})
    found = []
    for places in ([Shard(1)], [Replicate()]):  # of the normalized rows
        plain.weight.grad = norm[0].weight.grad = None
        part, whole = distribute_tensor(rows, mesh, places).requires_grad_(), rows.clone().requires_grad_()
        made, wanted = norm(part), plain(whole)
        made.square().sum().backward()
        wanted.square().sum().backward()
        assert norm[0].weight.grad.to_local().device == rows.device
        pairs = ((made, wanted), (part.grad, whole.grad), (norm[0].weight.grad, plain.weight.grad))
        found += [(ours.full_tensor() - theirs).abs().max().item() for ours, theirs in pairs]

    query, mask = (torch.randn(2, 4, 6, 8, device="cuda"), torch.rand(2, 1, 6, 6, device="cuda") > 0.3)
    options = [{}, {"is_causal": True}, {"attn_mask": mask}]
    for places in ([Shard(0)], [Shard(1)], [Replicate()], [Shard(2)]):
        for option in options:
            plain, sharded = query.clone().requires_grad_(), distribute_tensor(query, mesh, places).requires_grad_()
            given = dict(option)
            if "attn_mask" in option:
                given["attn_mask"] = distribute_tensor(mask, mesh, [Replicate()])
            wanted = torch.nn.functional.scaled_dot_product_attention(plain, plain, plain, **option)
            made = torch.nn.functional.scaled_dot_product_attention(sharded, sharded, sharded, **given)
            wanted.square().sum().backward()
            made.square().sum().backward()
            found.append((made.full_tensor() - wanted).abs().max().item())
            found.append((sharded.grad.full_tensor() - plain.grad).abs().max().item())
    return weights, torch.cuda.get_rng_state().tolist(), max(found)


def test_a_model_from_meta_and_attention_of_dtensors():
    with virtual_gpus(2):
        (first, state, far), (second, other_state, _) = in_ranks(from_meta, count=2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert first["0.weight"].std() > 0.1 and not torch.equal(first["0.weight"][:4], first["0.weight"][4:])
    assert state == other_state and len(state) == 16 and far < 1e-5


def saved_meanwhile(rank, folder):
    """Saves a checkpoint in a thread of DCP while a step of training goes on; whether it holds what was to be saved."""
    net = mlp().cuda()
    fully_shard(net)
    group = torch.distributed.new_group(backend="cpu:gloo,cuda:nccl")
    before = {name: weight.clone() for name, weight in get_model_state_dict(net).items()}
    saving = dcp.async_save(get_model_state_dict(net), checkpoint_id=folder, process_group=group)
    for _ in range(5):
        torch.distributed.all_reduce(torch.ones(1000, device="cuda"), group=group)
    steps(net, *(part.cuda() for part in numbers()), mse_loss, SGD)
    saving.result()
    found = get_model_state_dict(net)
    changed = not torch.equal(found["0.0.weight"].to_local(), before["0.0.weight"].to_local())
    dcp.load(found, checkpoint_id=folder)
    return changed, all(torch.equal(found[name].to_local(), before[name].to_local()) for name in before)


def test_a_checkpoint_is_saved_while_training_goes_on(tmp_path):
    with virtual_gpus(2):
        assert in_ranks(saved_meanwhile, tmp_path / "checkpoint", count=2) == [(True, True)] * 2
