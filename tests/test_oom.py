"""What is on a GPU, who keeps it, how it lies there; on virtual GPUs, whose snapshots are as PyTorch's."""

import gc
import sys
from types import ModuleType, SimpleNamespace

import matplotlib
import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.measure import MiB, Refusal
from helpers.measure.oom import (
    explain_memory,
    explain_oom,
    find_leaks,
    forget_error,
    remember_origins,
)
from helpers.measure.oom.blocks import UNKNOWN, Block, origin
from helpers.measure.oom.explain import Explanation
from helpers.measure.oom.leaks import holders
from helpers.show import describe_segments, draw_segments
from tests.pictures import alt_text

matplotlib.use("Agg")
pytestmark = pytest.mark.usefixtures("workspaces_given_back")


@pytest.fixture
def gpu():
    with virtual_gpus(1, memory="256 MiB") as devices:
        yield devices[0]


def mebibytes(count, gpu):
    return torch.zeros(count, MiB // 4, device=gpu)


def trained(gpu):
    net = nn.Sequential(nn.Linear(512, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 512)).to(gpu)
    adam = torch.optim.Adam(net.parameters())
    net(torch.zeros(8, 512, device=gpu)).sum().backward()
    adam.step()
    return net, adam


# --- what is there ---------------------------------------------------------------------------------------


def test_kinds_add_up_to_what_is_allocated(gpu):
    net, adam = trained(gpu)
    named = mebibytes(3, gpu)
    graph = net(torch.zeros(2048, 512, device=gpu)).sum()
    picture = explain_memory(gpu)
    kinds = picture.by_kind()
    size = sum(p.numel() * 4 for p in net.parameters())
    for kind, expected in {"parameters": size, "gradients": size, "optimizer state": 2 * size}.items():
        assert expected <= kinds[kind] <= expected + 2 * MiB
    assert kinds["tensors in variables"] >= named.nbytes
    assert kinds["held by autograd"] >= 2048 * (512 + 1024 + 1024) * 4  # the input, BatchNorm's and ReLU's outputs
    assert 0 < kinds["buffers"] < MiB
    assert picture.allocated == torch.cuda.memory_allocated(gpu)
    assert sum(kinds.values()) == picture.capacity == 256 * MiB
    del graph
    assert "held by autograd" not in explain_memory(gpu).by_kind()


def test_looking_keeps_nothing_alive(gpu):
    tensor = mebibytes(5, gpu)
    assert "5.00 MiB" in str(explain_memory(gpu))
    holders(tensor)
    del tensor
    assert torch.cuda.memory_allocated(gpu) == 0


def test_modules_are_not_asked_what_they_hold(gpu, monkeypatch):
    """On Python 3.12 asking `_asyncio` spoils the interpreter: see `helpers.measure.oom.blocks`."""
    asked, ask = [], gc.get_referents
    monkeypatch.setattr(gc, "get_referents", lambda *objects: asked.extend(map(type, objects)) or ask(*objects))
    explain_memory(gpu)
    assert dict in asked and ModuleType not in asked


def test_the_line_that_made_a_tensor_is_named(gpu):
    early = mebibytes(2, gpu)
    remember_origins()
    late = mebibytes(4, gpu)
    text = str(explain_memory(gpu))
    assert "`return torch.zeros(count, MiB // 4, device=gpu)` in mebibytes (tests/test_oom.py:" in text
    assert UNKNOWN in text and early.nbytes < late.nbytes
    torch.cuda.memory._record_memory_history(None)
    assert not torch._C._cuda_isHistoryEnabled()


def test_pytorch_s_own_frames_are_no_origin():
    inside = {"filename": torch.__file__, "name": "zeros", "line": 1}
    cell = {"filename": "ipykernel_1/2.py", "name": "<module>", "line": 3}
    assert origin([inside, cell]) == "`<module>`"
    assert origin([inside]) == origin([]) == UNKNOWN


def test_equal_blocks_are_one_row(gpu):
    tensors = [mebibytes(2, gpu) for _ in range(7)]
    (group,) = explain_memory(gpu).groups()
    assert (group.count, group.size, group.shape) == (7, 14 * MiB, tuple(tensors[0].shape))


# --- out of memory ---------------------------------------------------------------------------------------


def hungry(gpu):
    big = mebibytes(150, gpu)
    return big + mebibytes(100, gpu)


def test_out_of_memory_is_explained_and_cleaned_up(gpu):
    with explain_oom() as why:
        hungry(gpu)
    assert why and why.refused.requested == 100 * MiB
    assert why.by_kind()["tensors in variables"] == 150 * MiB
    assert "(150, 262144) float32, tensors in variables" in str(why) and "in mebibytes" in str(why)
    assert torch.cuda.memory_allocated(gpu) == 0


def test_without_an_error_it_says_so(gpu):
    with explain_oom() as why:
        mebibytes(3, gpu)
    assert not why and str(why) == "Memory did not run out. The most that was allocated: GPU 0 3.00 MiB."


def test_other_errors_pass_through(gpu):
    with pytest.raises(ZeroDivisionError), explain_oom():
        1 / 0  # noqa: B018


def test_the_gpu_that_ran_out_is_the_one_explained():
    with virtual_gpus(2, memory="256 MiB"):
        kept = mebibytes(200, "cuda:0")
        with explain_oom() as why:
            mebibytes(250, "cuda:1")
        assert why.gpu == 1 and kept.is_cuda


def picture(blocks=(), reserved=None, free=0, requested=0, capacity=1000):
    held = sum(block.size for block in blocks) * 1
    reserved = held if reserved is None else reserved
    refused = Refusal(0, requested * MiB, capacity * MiB, free * MiB, held, reserved) if requested else None
    return Explanation(0, capacity * MiB, reserved, 0, blocks, refused)


def block(kind, mib, number=0):
    return Block(number, mib * MiB, mib * MiB, kind, (mib,), "float32", "here")


@pytest.mark.parametrize(("held", "gone"), [(590, 90), (501, 0)])
def test_what_the_failed_operation_let_go_is_not_called_cached(held, gone):
    """The blocks are looked at after the refusal. Its text is rounded: a small difference says nothing."""
    refused = Refusal(0, 300 * MiB, 1000 * MiB, 200 * MiB, held * MiB, 700 * MiB)
    shown = Explanation(0, 1000 * MiB, 700 * MiB, 100 * MiB, [block("held by autograd", 500)], refused)
    kinds = shown.by_kind()
    assert kinds.get("inside the failed operation", 0) == gone * MiB
    assert kinds["cached by PyTorch"] == shown.cached == (200 - gone) * MiB and sum(kinds.values()) == shown.capacity


@pytest.mark.parametrize(
    ("shown", "first", "size"),
    [
        (picture(requested=2000), "larger than the whole GPU", 2000),
        (picture([block("parameters", 500)], reserved=900 * MiB, free=100, requested=300), "expandable_segments", 400),
        (picture([block("held by autograd", 600)]), "inference_mode", 600),
    ],
)
def test_advice(shown, first, size):
    (found, text), *_ = shown.advice()
    assert found == size * MiB and first in text


def test_a_full_card_of_parameters_has_no_cheap_cure():
    assert picture([block("parameters", 900)]).advice() == []


# --- leaks -----------------------------------------------------------------------------------------------


def test_a_list_is_found_by_name(gpu, monkeypatch):
    lesson = ModuleType("lesson")
    monkeypatch.setitem(sys.modules, "lesson", lesson)
    lesson.history = {"losses": []}
    with find_leaks(gpu) as leaks:
        for _ in range(3):
            lesson.history["losses"].append(mebibytes(2, gpu))
    ((group, names),) = leaks.grown
    assert leaks and (group.count, group.size, leaks.change) == (3, 6 * MiB, 6 * MiB)
    assert any(name.startswith("`history['losses'][") and "of the module lesson" in name for name in names)
    assert "one of them kept by" in str(leaks)


def test_nothing_left_is_said(gpu):
    kept = mebibytes(2, gpu)
    with find_leaks(gpu) as leaks:
        mebibytes(9, gpu)
    assert not leaks and str(leaks) == "GPU 0: nothing was left behind." and kept.is_cuda


def test_a_tensor_that_is_replaced_by_its_like_is_no_leak(gpu):
    remember_origins()
    kept = [mebibytes(2, gpu)]
    kept.append(mebibytes(1, gpu))
    with find_leaks(gpu) as leaks:
        kept[0] = None
        kept[0] = mebibytes(2, gpu)
    assert not leaks


def test_a_graph_is_found_by_the_tensor_that_carries_it(gpu):
    net, _ = trained(gpu)
    kept = SimpleNamespace(total=0)
    with find_leaks(gpu) as leaks:
        for _ in range(4):
            kept.total = kept.total + net(torch.zeros(512, 512, device=gpu)).sum()
    text = str(leaks)
    assert "held by autograd" in text and "a graph of" in text and "`kept.total`" in text


def test_a_cycle_is_told_apart(gpu):
    class Circle:
        def __init__(self):
            self.me, self.tensor = self, mebibytes(4, gpu)

    with find_leaks(gpu) as leaks:
        Circle()
    assert leaks.cycles == 4 * MiB and leaks.grown == [] and leaks.change == 0


def test_an_error_that_is_kept_is_named(gpu):
    with find_leaks(gpu) as leaks:
        try:
            hungry(gpu)
        except torch.OutOfMemoryError as error:
            kept = error
    assert "`big` of hungry(), which ended in an error that is kept" in str(leaks)
    assert kept is not None


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (lambda x: SimpleNamespace(inner=SimpleNamespace(x=x)), "`box.inner.x`"),
        (lambda x: [0, {"k": (x,)}], "`box[1]['k'][0]`"),
        (lambda x: lambda: x, "`box`"),
    ],
)
def test_ways_to_a_tensor(gpu, keep, said):
    box = keep(mebibytes(1, gpu))
    tensor = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.is_cuda][0]
    assert any(name.startswith(said) for name in holders(tensor)), holders(tensor)
    assert box is not None


def test_forget_error_gives_back_what_the_last_error_keeps(gpu):
    try:
        hungry(gpu)
    except torch.OutOfMemoryError as error:
        sys.last_value, sys.last_traceback = error, error.__traceback__
        error.__traceback__.tb_next.tb_frame.f_locals  # noqa: B018 - as IPython does, which shows the error
    assert torch.cuda.memory_allocated(gpu) == 150 * MiB
    assert forget_error() == 150 * MiB
    assert forget_error() == 0 and not hasattr(sys, "last_value")


# --- segments --------------------------------------------------------------------------------------------


def test_segments_in_words_and_drawn(gpu):
    pair = torch.empty(24 * MiB, dtype=torch.uint8, device=gpu)
    del pair
    first, second = (torch.empty(12 * MiB, dtype=torch.uint8, device=gpu) for _ in range(2))
    assert describe_segments(gpu) == "1 segment, 24.0 MiB reserved: 24.0 MiB used in 2 blocks, no gaps."
    del second
    said = "1 segment, 24.0 MiB reserved: 12.0 MiB used in 1 block, 12.0 MiB free in 1 piece, the largest 12.0 MiB."
    assert describe_segments(gpu) == said and first.is_cuda
    ax = draw_segments(gpu, title="holes")
    assert alt_text(ax) == f"holes\n{describe_segments(gpu)}"
    assert ax.get_title(loc="left") == "holes"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["segment 1"]
    assert [bar.get_width() for bar in ax.patches] == [24, 12]


def test_an_empty_gpu_has_nothing_to_draw(gpu):
    with pytest.raises(ValueError, match="has not reserved any memory"):
        draw_segments(gpu)
