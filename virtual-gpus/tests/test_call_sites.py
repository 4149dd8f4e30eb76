"""What hangs on the Python instruction that called PyTorch, however many of our functions lie in between.

As the code stands, and with one function of the road extracted once more: the answers must not change.
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


def requested(function) -> list[int]:
    """The sizes of all blocks that `function` takes."""
    events, observers = [], active_machine().gpus[0].allocator.observers
    observers.append(lambda *event: events.append(event))
    function()
    observers.pop()
    return [size for event, _, size in events if event == "alloc"]


@pytest.mark.parametrize("place", [None, *ROAD], ids=lambda place: place and place[1])
def test_what_hangs_on_the_calling_instruction(place, monkeypatch):
    if place is not None:  # one more frame on the road
        owner, name = place
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: function(*args, **kwargs))
    with virtual_gpus(2) as (gpu, _):
        x = torch.arange(4.0, device=gpu)
        for made in (x.quantile(0.3), torch.combinations(x), torch.vander(x), nn.functional.one_hot(x.long())):
            assert made.device == gpu, "what C++ makes on the way is adopted"
        for _ in range(2):
            with pytest.raises(RuntimeError, match="at least two devices"):  # a learner's own tensor is not
                x + torch.zeros(4)
        assert torch.zeros(4).device.type == "cpu"

        layer, x = nn.Linear(64, 512, device=gpu), torch.zeros(32, 128, 64, device=gpu).transpose(0, 1)
        with torch.no_grad():
            assert requested(lambda: layer(x)).count(32 * 128 * 512 * 4) == 1, "a layer adds its bias in place"
            assert requested(lambda: x @ layer.weight.t() + layer.bias).count(32 * 128 * 512 * 4) == 2

        weight, x = torch.zeros(512, 512, device=gpu), torch.zeros(1024, 512, device=gpu, requires_grad=True)
        hidden = x * 1
        loss = (((hidden * 1) @ weight + hidden) * 2).sum()
        gradients = requested(lambda: torch.autograd.grad(loss, x)).count(1024 * 512 * 4)
        assert gradients == 4  # of the product with 2, of both factors on the way to x, of x; the sum takes no fifth


def test_an_operator_takes_few_calls():
    """Python calls are what an operator costs here: a warm product took 63 before there was one object per operator."""
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_qualname)

    with virtual_gpus(2):
        x = torch.ones(4, 4, device="cuda")
        for _ in range(3):
            y = x @ x
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            y = x @ x  # noqa: F841 - the product before goes, which is part of the cost
        finally:
            sys.setprofile(before)
    assert "run_kernel" in calls and len(calls) <= 45, calls
