"""The public names of torch.cuda: each works, or refuses by its name; classes stay types either way."""

import pickle

import pytest
import torch
from virtual_gpus import NotModelled, virtual_gpus


@pytest.fixture(scope="module", autouse=True)
def gpus():
    with virtual_gpus(2, memory="1 GiB") as devices:
        yield devices


CLASSES = ["CUDAGraph", "graph", "MemPool", "ExternalStream", "Stream", "Event"]


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_stays_a_type(name):
    kind = getattr(torch.cuda, name)

    def annotated(argument: kind | None = None):
        return argument

    class Own(kind):
        pass

    assert annotated.__annotations__["argument"] == kind | None
    assert not isinstance(1, kind) and not isinstance("", kind | None)
    assert issubclass(Own, kind) and issubclass(torch.cuda.ExternalStream, torch.cuda.Stream)
    assert pickle.loads(pickle.dumps(kind)) is kind


REFUSED = {
    "torch.cuda.GreenContext": lambda: torch.cuda.GreenContext,
    "torch.cuda.CUDAPluggableAllocator": lambda: torch.cuda.memory.CUDAPluggableAllocator,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_class_names_itself_when_one_is_made(name):
    kind = REFUSED[name]()
    with pytest.raises(NotModelled, match=name):
        kind()
    with pytest.raises(NotModelled, match=name):
        type("Own", (kind,), {})("an argument")


def test_a_stream_by_its_handle_is_that_stream():
    side = torch.cuda.Stream()
    with torch.cuda.stream(torch.cuda.ExternalStream(side.cuda_stream)):
        assert torch.cuda.current_stream() == side
    with pytest.raises(NotModelled, match=r"torch\.cuda\.ExternalStream"):
        torch.cuda.ExternalStream(0x7F00_0000_1234)
