"""`fully_shard` (FSDP2) on virtual GPUs: one GPU's numbers, each rank's share of memory."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measuring import recorded
from ranks import fully_sharded, in_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from virtual_gpus import virtual_gpus
from virtual_gpus.settings import INSTALLED

WIDTH, BLOCKS = 256, 4
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of one linear layer


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


def numbers():
    make = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=make), torch.randn(8, WIDTH, generator=make)


def steps(net, x, y):
    """Three steps; the losses, and of the last one the bytes before it, at its peak, and after it, gradients kept."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9), []
    for number in range(3):
        optimizer.zero_grad()
        if number == 2:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        loss = nn.functional.mse_loss(net(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del loss
    return losses, (before, torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())


def sharded_mlp(**options):
    return fully_sharded(mlp().cuda(), **options)


def sharded(rank, options):
    net = sharded_mlp(mesh=init_device_mesh("cuda", (2,)), **options)
    found, one = steps(net, *(part.chunk(2)[rank].cuda() for part in numbers())), next(net.parameters())
    assert {str(tensor.device) for tensor in (one, one.grad, one.to_local(), one.full_tensor())} == {f"cuda:{rank}"}
    full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    host = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert {str(tensor.device) for tensor in host.values()} == ({"cpu"} if rank == 0 else set())
    return *found, {name: tensor.cpu() for name, tensor in full.items()}


def check_numbers(found, **tolerances):
    """The losses of ranks are those of one GPU, and so are the weights that each of them has gathered."""
    net = mlp().cuda()
    losses, _ = steps(net, *(part.cuda() for part in numbers()))
    mean = torch.tensor([rank[0] for rank in found]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), **(tolerances or {"rtol": 1e-5, "atol": 1e-6}))
    for *_, full in found:
        assert {tensor.dtype for tensor in full.values()} == {torch.float32}
        if not tolerances:
            torch.testing.assert_close(full, dict(net.cpu().state_dict()), rtol=1e-4, atol=1e-5)


def test_each_rank_holds_its_share():
    """Parameters, gradients and momentum of 4 layers, of which each rank has a half."""
    with virtual_gpus(2, torch_version="2.15"):  # cuBLAS keeps no workspace from then on
        found = in_ranks(sharded, {}, count=2)
        check_numbers(found)
    for _, (before, peak, after), _ in found:
        room = 128 * 2**10  # the batch, and blocks of 512 bytes
        assert 2 * BLOCKS * LAYER // 2 <= before < 2 * BLOCKS * LAYER // 2 + room
        assert 3 * BLOCKS * LAYER // 2 <= after < 3 * BLOCKS * LAYER // 2 + room
        assert after + LAYER < peak < after + 3 * LAYER + room + 2**25  # gathered layers, and cuBLAS's workspace


def sent(function):
    """(kind, name, nanoseconds) of what went over links meanwhile."""
    spans = [span for span in recorded(function).spans if span.kind in ("collective", "copy")]
    return [(span.kind, span.name, round(1e9 * (span.end - span.start))) for span in spans]


def step_on_the_clock():
    net, x = sharded_mlp(), numbers()[0].cuda()
    net(x).sum().backward()
    return sent(lambda: net(x).sum().backward())


def tensor_parallel(rank):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).cuda()
    if rank is not None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(net, init_device_mesh("cuda", (2,)), plan)
    before, x = torch.cuda.memory_allocated(), torch.linspace(-1, 1, 8 * 16, device="cuda").reshape(8, 16)
    losses, _ = steps(net, x, torch.ones(8, 4, device="cuda"))
    assert net(x).get_device() == (rank or 0)
    return losses, before, sent(lambda: net(x))


def from_meta(rank):
    """The recipe for models that no GPU holds whole: sizes first, then shards, then their numbers."""
    torch.manual_seed(0)
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    fully_sharded(net).to_empty(device="cuda")
    for part in net:
        part.reset_parameters()
    net(torch.ones(2, 8, device="cuda")).sum().backward()
    return {name: tensor.full_tensor().cpu() for name, tensor in net.state_dict().items()}, torch.cuda.get_rng_state()


def normalized_and_attended(rank):
    """How far RMS norm and attention of DTensors are from those of whole tensors, and their gradients."""
    mesh = init_device_mesh("cuda", (2,))
    torch.manual_seed(0)
    mask = torch.rand(2, 1, 6, 6, device="cuda") > 0.3
    masks = {"attn_mask": distribute_tensor(mask, mesh, [Replicate()])}, {"attn_mask": mask}
    plain, norm = nn.RMSNorm(8, device="cuda"), nn.Sequential(nn.RMSNorm(8, device="cuda"))
    parallelize_module(norm, mesh, {"0": SequenceParallel()})

    def attend(x, **options):
        return nn.functional.scaled_dot_product_attention(x, x, x, **options)

    causal = partial(attend, is_causal=True)
    cases = [(norm, plain, Shard(1)), (norm, plain, Replicate()), (attend, attend, Shard(2))]
    cases += [(causal, causal, place) for place in (Shard(0), Replicate())]
    if INSTALLED > (2, 11):  # whose DTensor fails where a mask has no gradient
        cases.append((partial(attend, **masks[0]), partial(attend, **masks[1]), Shard(1)))
    for ours, theirs, place in cases:
        plain.weight.grad = norm[0].weight.grad = None
        whole = torch.randn(2, 4, 6, 8, device="cuda").requires_grad_()
        part = distribute_tensor(whole.detach(), mesh, [place]).requires_grad_()
        pairs = [(ours(part), theirs(whole))]
        for each in pairs[0]:
            each.square().sum().backward()
        pairs += [(part.grad, whole.grad)] + [(norm[0].weight.grad, plain.weight.grad)] * (ours is norm)
        for one, other in pairs:
            assert one.to_local().device == other.device
            torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-5)


def saved_meanwhile(rank, folder):
    """Saves a checkpoint in a thread of DCP while a step of training goes on; whether it holds what was to be saved."""
    net = mlp().cuda()
    fully_shard(net)
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    before = {name: weight.clone() for name, weight in get_model_state_dict(net).items()}
    saving = dcp.async_save(get_model_state_dict(net), checkpoint_id=folder, process_group=group)
    for _ in range(5):
        dist.all_reduce(torch.ones(1000, device="cuda"), group=group)
    steps(net, *(part.cuda() for part in numbers()))
    saving.result()
    found = get_model_state_dict(net)
    changed = not torch.equal(found["0.0.weight"].to_local(), before["0.0.weight"].to_local())
    dcp.load(found, checkpoint_id=folder)
    return changed, all(torch.equal(found[name].to_local(), before[name].to_local()) for name in before)


def all_of_it(rank, folder):
    half = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    return {
        "tensor parallel": tensor_parallel(rank),
        "half": sharded(rank, half),
        "sent": step_on_the_clock(),
        "from meta": from_meta(rank),
        "as whole": normalized_and_attended(rank),
        "saved": saved_meanwhile(rank, folder),
    }


def test_two_ranks(tmp_path):
    with virtual_gpus(2):
        losses, whole, nothing = tensor_parallel(None)
    with virtual_gpus(2):
        found = in_ranks(all_of_it, tmp_path / "checkpoint", count=2)
        check_numbers([rank["half"] for rank in found], rtol=2e-2, atol=1e-3)  # in bfloat16; the shares are fp32
    for rank in found:
        # Layers of PyTorch's, a column and a row: the numbers of one GPU, with half of the matrices on each rank, and
        # a sum over the halves of a row.
        ours, before, over_links = rank["tensor parallel"]
        assert ours == pytest.approx(losses, rel=1e-5) and before < whole and nothing == []
        wire = 8 * 4 * 4 / (0.78 * 450e9)
        assert over_links == [("collective", "all_reduce", round(1e9 * (15e-6 + wire + 2 * 2.5e-6)))]
        # Each layer is gathered twice and its gradients are scattered. What gloo copies on its own account is no copy.
        names = sorted((kind, name) for kind, name, _ in rank["sent"])
        assert names == [("collective", "all_gather")] * 2 * BLOCKS + [("collective", "reduce_scatter")] * BLOCKS
        assert rank["saved"] == (True, True)  # a checkpoint is saved while training goes on
    (first, state), (second, other_state) = (rank["from meta"] for rank in found)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert first["0.weight"].std() > 0.1 and not torch.equal(first["0.weight"][:4], first["0.weight"][4:])
    assert torch.equal(state, other_state) and len(state) == 16
