"""What hangs on the Python instruction that called PyTorch, however many of our functions lie in between.

Each test runs as the code stands, and with one function of the road extracted once more: the answers must not change.
"""

import pathlib
import sys

import pytest
import torch
from torch import nn
from virtual_gpus import active_machine, entrance, virtual_gpus
from virtual_gpus.dispatch import call, creation, mode
from virtual_gpus.ops import accumulation
from virtual_gpus.placement import creation_sites

PACKAGE = str(pathlib.Path(entrance.__file__).parent)
ROAD = [(mode, "run"), (mode, "create"), (mode, "_run_on_host"), (mode, "resolve_common_device"),
        (mode, "adopt_destination"), (creation, "_create_on_host"), (call, "calling_site"),
        (creation_sites, "calling_frame"), (accumulation, "calling_frame"), (call, "run_kernel")]  # fmt: skip


@pytest.fixture(autouse=True, params=[None, *ROAD], ids=lambda place: place and place[1])
def extracted(request, monkeypatch):
    """One more frame on the road."""
    if request.param is not None:
        owner, name = request.param
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: function(*args, **kwargs))


@pytest.fixture
def gpu():
    with virtual_gpus(2) as (first, _):
        yield first


def requested(function) -> list[int]:
    """The sizes of all blocks that `function` takes."""
    events, observers = [], active_machine().gpus[0].allocator.observers
    observers.append(lambda *event: events.append(event))
    function()
    observers.pop()
    return [size for event, _, size in events if event == "alloc"]


def test_what_cpp_makes_on_the_way_is_adopted(gpu):
    x = torch.arange(4.0, device=gpu)
    for made in (x.quantile(0.3), torch.combinations(x), torch.vander(x), nn.functional.one_hot(x.long())):
        assert made.device == gpu


def test_a_learners_own_tensor_is_not(gpu):
    x = torch.zeros(4, device=gpu)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="at least two devices"):
            x + torch.zeros(4)
    assert torch.zeros(4).device.type == "cpu"


def test_linear_adds_its_bias_in_place(gpu):
    layer, x = nn.Linear(64, 512, device=gpu), torch.zeros(32, 128, 64, device=gpu).transpose(0, 1)
    with torch.no_grad():
        assert requested(lambda: layer(x)).count(32 * 128 * 512 * 4) == 1
        assert requested(lambda: x @ layer.weight.t() + layer.bias).count(32 * 128 * 512 * 4) == 2


def test_the_engine_adds_gradients_in_place(gpu):
    weight, x = torch.zeros(512, 512, device=gpu), torch.zeros(1024, 512, device=gpu, requires_grad=True)
    hidden = x * 1
    loss = (((hidden * 1) @ weight + hidden) * 2).sum()
    whole = [size for size in requested(lambda: torch.autograd.grad(loss, x)) if size == 1024 * 512 * 4]
    assert len(whole) == 4  # of the product with 2, of both factors on the way to x, of x; the sum takes no fifth


@pytest.mark.parametrize("extracted", [None], indirect=True)
def test_an_operator_takes_few_calls(gpu):
    """Python calls are what an operator costs here: a warm product took 63 before there was one object per operator."""
    x = torch.ones(4, 4, device=gpu)
    for _ in range(3):
        y = x @ x
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        y = x @ x  # noqa: F841 - the product before goes, which is part of the cost
    finally:
        sys.setprofile(before)
    assert "run_kernel" in calls and len(calls) <= 45, calls
