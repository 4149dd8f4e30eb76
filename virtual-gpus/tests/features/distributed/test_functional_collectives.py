"""Functional collectives, which DTensor calls: whoever reads a result starts when it has arrived, and no byte is taken
twice. It is so with values and without (`shapes_only`), and as with the collectives of torch.distributed."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from measuring import rows_of_features
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from virtual_gpus import record_timeline, virtual_gpus

OPS = torch.ops._c10d_functional
RANKS = 8
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning", "ignore:.*_single:UserWarning")


def measured(function):
    """(name, start, end) of all that ran on the GPU, bytes at the peak, and bytes after."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with record_timeline() as timeline:
        result = function()
        torch.cuda.synchronize()
    spans = [span for span in timeline.spans if span.kind != "wait"]
    first = spans[0].start
    times = [(span.name, round(1e9 * (span.start - first)), round(1e9 * (span.end - first))) for span in spans]
    del result
    return times, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


def attention(x):
    x = x.view(4, 4, 64, 64)
    return F.scaled_dot_product_attention(x, x, x)


CASES = dict(rows_of_features("functional_collectives"))
for case, operator in (("received", "irecv"), ("waited for together", "wait_tensors")):
    if not hasattr(OPS, operator):  # 2.11 has neither, 2.13 has the first
        del CASES[case]


def cases(shapes_only: bool) -> dict:
    """The second run of each case, as rank 3 of 8."""
    with virtual_gpus(RANKS, kind="H100", shapes_only=shapes_only, rank=3, world_size=RANKS), torch.no_grad():
        mesh = init_device_mesh("cuda", (RANKS,))
        found = {}
        names = globals() | {"DTensor": DTensor, "Shard": Shard, "mesh": mesh, "name": mesh.get_group().group_name}
        for name, code in CASES.items():
            for _ in range(2):
                names["x"] = torch.zeros(256, 256, device="cuda")
                found[name] = measured(lambda code=code: eval(code, names))
        return found


def test_what_reads_a_result_starts_when_it_has_arrived():
    found, with_values = cases(shapes_only=True), cases(shapes_only=False)
    kinds = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "recv"}
    for name, (spans, peak, left) in found.items():
        assert (spans, peak, left) == (*with_values[name][:2], 0), name
        collectives = [span for span in spans if span[0] in kinds]
        assert collectives, name
        if name != "an element":  # the copy of a number is no span
            assert spans[-1][1] >= collectives[-1][2] - 1, name
    for name, parts in {"all_reduce": 1, "all_gather": RANKS, "reduce_scatter": 1 / RANKS, "all_to_all": 1}.items():
        spans, peak, _ = found[name]  # the result of the collective, and its reader's: waiting takes no second block
        assert [span[0] for span in spans] == [name, "mul"] and spans[1][1] == spans[0][2]
        assert peak == 2 * parts * 256 * 256 * 4


def test_work_beside_the_collective_does_not_wait():
    with virtual_gpus(RANKS, kind="H100", shapes_only=True, rank=0, world_size=RANKS):
        mesh = init_device_mesh("cuda", (RANKS,))
        x, other = torch.zeros(4096, 4096, device="cuda"), torch.zeros(512, 512, device="cuda")
        (reduce, beside, reads), *_ = measured(lambda: (functional.all_reduce(x, "sum", mesh), other @ other)[0] * 2)
    assert [span[0] for span in (reduce, beside, reads)] == ["all_reduce", "mm", "mul"]
    assert beside[2] < reduce[2] == reads[1]


def test_gradients_through_functions_that_compute_below_pytorch_s_operators():
    """Attention, RMS norm and an LSTM of a result that nobody has waited for yet."""
    with virtual_gpus(1, rank=0, world_size=1):
        dist.init_process_group("nccl")
        lstm = nn.LSTM(64, 8, batch_first=True).cuda()
        for function in (attention, lambda x: F.rms_norm(x, (64,)), lambda x: lstm(x)[0]):
            gradients = []
            for later in (False, True):
                torch.manual_seed(0)
                x = torch.randn(4, 256, 64, device="cuda", requires_grad=True)
                y = functional.all_reduce(x, "sum", dist.group.WORLD) if later else x
                function(y).square().sum().backward()
                gradients.append(x.grad)
            assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5)
