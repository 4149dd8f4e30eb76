"""Ten thousand training steps take no more than two thousand: the `outside` group, about a minute."""

import gc
import pathlib
import resource

import pytest
import torch
from torch import nn
from virtual_gpus import active_machine, virtual_gpus
from virtual_gpus.dispatch import timing

pytestmark = [pytest.mark.outside, pytest.mark.usefixtures("workspaces_given_back")]

STATM = pathlib.Path("/proc/self/statm")


def counted() -> dict[str, int]:
    """What could grow."""
    gc.collect()
    clock = active_machine().clock
    return {
        "objects": len(gc.get_objects()),
        "tensors": sum(isinstance(found, torch.Tensor) for found in gc.get_objects()),
        "bytes on cuda:0": torch.cuda.memory_allocated(0),
        "bytes on cuda:1": torch.cuda.memory_allocated(1),
        "segments": len(torch.cuda.memory_snapshot()),
        "known times": len(timing._known),
        "collectives on their way": sum(len(track.late) for track in clock.tracks),
        "streams": sum(len(track.streams) for track in clock.tracks),
        "resident": int(STATM.read_text().split()[1]) * resource.getpagesize(),
    }


@pytest.mark.skipif(not STATM.exists(), reason="the system does not say what a process holds")
def test_ten_thousand_steps():
    with virtual_gpus(2):
        first = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1)).cuda(0)
        second = nn.Linear(16, 4).cuda(1)
        optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
        side, event = torch.cuda.Stream(0), torch.cuda.Event()
        noted = []
        for step in range(10_000):
            with torch.cuda.stream(side):
                x = torch.randn(4, 8, pin_memory=True).to("cuda:0", non_blocking=True)
                hidden = first(x)
                event.record()
            event.wait()
            loss = second(hidden.to("cuda:1")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 100 == 0:
                loss.item()
            if step in (1_999, 9_999):
                del x, hidden, loss
                noted.append(counted())
        early, late = noted
    # The last modelled second's busy times are kept, and up to 4096 changes of streams for backward passes to come.
    assert abs(late.pop("objects") - early.pop("objects")) < 4096 + 1000
    assert late.pop("resident") - early.pop("resident") < 8 << 20
    assert late == early
