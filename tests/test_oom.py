"""What filled a GPU that ran out of memory: kinds that add up to its capacity; and its segments."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import fully_shard
from virtual_gpus import virtual_gpus

from helpers.gpus import block_address
from helpers.measure import MiB, Refusal, explain_oom
from helpers.measure.oom import Block, Explanation, describe_origin
from helpers.show import describe_segments, draw_segments
from tests.pictures import alt_text

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


@pytest.fixture
def gpu():
    with virtual_gpus(1, memory="256 MiB") as devices:
        yield devices[0]


def mebibytes(count, gpu):
    return torch.zeros(count, MiB // 4, device=gpu)


def test_kinds_add_up_to_the_capacity(gpu):
    net = nn.Sequential(nn.Linear(512, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 512)).to(gpu)
    adam = torch.optim.Adam(net.parameters())
    net(torch.zeros(8, 512, device=gpu)).sum().backward()
    adam.step()
    with explain_oom() as why:
        x = torch.zeros(2048, 512, device=gpu)
        graph = net(x).sum()
        mebibytes(250, gpu)
    kinds = why.by_kind()
    size = sum(p.numel() * 4 for p in net.parameters())
    for kind, expected in {"parameters": size, "gradients": size, "optimizer state": 2 * size}.items():
        assert expected <= kinds[kind] <= expected + 2 * MiB
    assert kinds["other"] >= x.nbytes
    assert kinds["activations"] >= 2048 * (1024 + 1024) * 4  # BatchNorm's and ReLU's outputs
    assert sum(kinds.values()) == 256 * MiB and graph.is_cuda
    assert "Divide parameters, gradients and optimizer state between" in str(why)


def test_out_of_memory_is_explained_and_cleaned_up(gpu):
    def hungry():
        held = [mebibytes(20, gpu) for _ in range(5)]
        return held, mebibytes(100, gpu)

    kept = mebibytes(50, gpu)
    with explain_oom() as why:
        hungry()
    assert why and why.refused.requested == 100 * MiB
    assert why.by_kind()["other"] == 150 * MiB
    assert "(50, 262144) float32, other: made before the memory history began" in str(why) and kept.is_cuda
    row = "  100 MiB  5 x (20, 262144) float32, other: `return torch.zeros(count, MiB // 4, device=gpu)` in mebibytes"
    assert f"{row}\n             (tests/test_oom.py:" in str(why) and max(map(len, str(why).splitlines())) <= 110
    assert torch.cuda.memory_allocated(gpu) == kept.nbytes and not torch._C._cuda_isHistoryEnabled()
    cell = {"filename": "ipykernel_1/2.py", "name": "<module>", "line": 3}
    assert describe_origin([{"filename": torch.__file__, "name": "zeros", "line": 1}, cell]) == "`<module>`"


def test_a_sharded_parameter_is_one_before_it_has_an_optimizer(gpu):
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = fully_shard(nn.Linear(1024, 1024, bias=False, device=gpu))
        with explain_oom() as why:
            mebibytes(300, gpu)
        assert why.by_kind()["parameters"] == 4 * MiB and net.weight.is_cuda
    finally:
        dist.destroy_process_group()


def test_what_is_no_such_error(gpu):
    with explain_oom() as why:
        mebibytes(3, gpu)
    assert not why and str(why) == "Memory did not run out."
    with explain_oom() as why:
        raise torch.OutOfMemoryError("No figures.")
    assert not why and str(why) == "Memory ran out; PyTorch does not say where: No figures."
    with pytest.raises(ZeroDivisionError), explain_oom():
        1 / 0  # noqa: B018


def test_the_block_of_a_tensor_that_wraps_another_on_a_real_gpu(monkeypatch):
    monkeypatch.setattr("helpers.gpus.is_virtual", lambda: False)
    wrapper = AsyncCollectiveTensor(torch.ones(2))
    assert block_address(wrapper) is None
    assert block_address(nn.LazyLinear(2).weight) is None
    wrapper._local_tensor = torch.ones(2)  # as a DTensor has it
    assert block_address(wrapper) == wrapper._local_tensor.data_ptr()


def test_who_was_recording_goes_on(gpu):
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=1000)
    with explain_oom():
        kept = mebibytes(3, gpu)
    assert torch._C._cuda_isHistoryEnabled()
    (made,) = [entry for entry in torch.cuda.memory._snapshot()["device_traces"][0] if entry["action"] == "alloc"]
    torch.cuda.memory._record_memory_history(None)
    assert made["size"] == kept.nbytes and made["frames"]


def test_the_gpu_that_ran_out_is_the_one_explained():
    with virtual_gpus(2, memory="256 MiB"):
        kept = mebibytes(200, "cuda:0")
        with explain_oom() as why:
            mebibytes(250, "cuda:1")
        assert why.refused.gpu == 1 and why.by_kind().keys().isdisjoint({"other"}) and kept.is_cuda


@pytest.mark.parametrize(("held", "gone"), [(590, 90), (501, 0)])
def test_what_the_failed_operation_let_go_is_not_called_cached(held, gone):
    """The blocks are looked at after the refusal. Its text is rounded: a small difference says nothing."""
    refused = Refusal(0, 300 * MiB, 1000 * MiB, 200 * MiB, held * MiB, 700 * MiB)
    block = Block(500 * MiB, "activations", f"a tensor `{'f() ' * 23}`")
    shown = Explanation(refused, 1000 * MiB, 700 * MiB, 100 * MiB, [block])
    kinds = shown.by_kind()
    assert "f() " * 23 in str(shown)  # code is not folded
    assert kinds.get("freed since the failure", 0) == gone * MiB
    assert kinds["cached by PyTorch"] == (200 - gone) * MiB and sum(kinds.values()) == shown.capacity


def test_results_without_a_graph_and_what_a_replica_has_let_go(kept=()):
    with virtual_gpus(2, memory="256 MiB", shapes_only=True):
        net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(9))).to("cuda:0")
        with explain_oom() as why:
            nn.DataParallel(net)(torch.zeros(2**15, 512))
        assert why.by_kind()["freed since the failure"] > 99 * MiB and "Halve the batch" in why.advice()[1].text
        assert why.by_kind()["other"] == 32 * MiB and "results without a graph" not in why.by_kind()  # the inputs
        with explain_oom() as why, torch.no_grad():
            while True:
                kept = *kept, net(torch.zeros(8192, 512, device="cuda:0"))
        assert why.by_kind()["results without a graph"] >= 16 * MiB * len(kept) > 99 * MiB
        assert why.advice()[0].text.startswith("Use smaller batches") and "Halve" not in str(why)


def test_what_autograd_keeps_without_a_graph_is_an_activation(gpu):
    with explain_oom() as why:
        kept = nn.Dropout()(mebibytes(20, gpu).requires_grad_())
        mebibytes(300, gpu)
    assert why.by_kind()["activations"] == 25 * MiB and kept.is_cuda  # with the mask, of a byte for each number


@pytest.mark.parametrize(
    ("kind", "held", "requested", "reserved", "first", "size"),
    [
        ("other", 1, 2000, 1, "larger than all that PyTorch may take", 2000),
        ("parameters", 500, 300, 900, "One gap of that size", 400),
        ("parameters", 500, 450, 900, "cached in segments that are partly in use", 400),
        ("activations", 600, 500, 600, "inference_mode", 600),
        ("parameters", 900, 200, 900, "Divide parameters between two GPUs", 450),
        ("context", 900, 200, 900, None, None),
    ],
)
def test_advice(kind, held, requested, reserved, first, size):
    refused = Refusal(0, requested * MiB, 1000 * MiB, (1000 - reserved) * MiB, held * MiB, reserved * MiB)
    shown = Explanation(refused, 1000 * MiB, reserved * MiB, 0, [Block(held * MiB, kind, "here")])
    advice = shown.advice()
    assert bool(advice) == bool(first)
    for found, text, _ in advice[:1]:
        assert found == size * MiB and first in text and text[:20] in str(shown)
    assert ("One or two tensors hold 600 MiB" in str(shown)) == (kind == "activations") and "checkpoint" not in str(
        shown
    )
    shown.blocks.append(Block(MiB, "gradients", "here"))  # now it is training
    assert "inference_mode" not in str(shown)


# --- segments --------------------------------------------------------------------------------------------


def test_segments_in_words_and_drawn(gpu):
    with pytest.raises(ValueError, match="has not reserved any memory"):
        draw_segments(gpu)
    torch.empty(24 * MiB, dtype=torch.uint8, device=gpu)
    first, second = (torch.empty(12 * MiB, dtype=torch.uint8, device=gpu) for _ in range(2))
    assert describe_segments(gpu) == "1 segment, 24.0 MiB reserved: 24.0 MiB used in 2 blocks, no gaps."
    del second
    said = "1 segment, 24.0 MiB reserved: 12.0 MiB used in 1 block, 12.0 MiB free in 1 piece, the largest 12.0 MiB."
    assert describe_segments(gpu) == said and first.is_cuda
    (ax,) = draw_segments(gpu, title="holes").axes
    assert alt_text(ax) == f"holes\n{said}"
    assert ax.get_title(loc="left") == "holes"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["segment 1"]
    assert [bar.get_width() for bar in ax.patches] == [24, 12]
