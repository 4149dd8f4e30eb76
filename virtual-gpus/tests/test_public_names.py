"""The public names of torch.cuda: each works, or refuses by its name; classes stay types either way."""

import importlib
import pickle
import pkgutil
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import virtual_gpus as virtual_gpus_package
from measuring import table
from virtual_gpus import NotModelled

pytestmark = pytest.mark.usefixtures("gpus_of_the_module")
GPUS = {"count": 2, "memory": "1 GiB"}
SOURCE = Path(virtual_gpus_package.__file__).parent
REFUSALS = (SOURCE.parents[1] / "docs" / "refused.md").read_text(encoding="utf-8")
NEVER = ("Found no NVIDIA", "compiled with CUDA", "driver version is insufficient", "libcuda", "no GPUs found")


@pytest.mark.parametrize("name", ["CUDAGraph", "graph", "MemPool", "ExternalStream", "Stream", "Event"])
def test_a_class_stays_a_type(name):
    kind = getattr(torch.cuda, name)
    Own = type("Own", (kind,), {})
    assert not isinstance(1, kind) and not isinstance("", kind | None)
    assert issubclass(Own, kind) and issubclass(torch.cuda.ExternalStream, torch.cuda.Stream)
    assert pickle.loads(pickle.dumps(kind)) is kind


@pytest.mark.parametrize(("owner", "name"), [(torch.autograd.Function, "apply"), (torch.Tensor, "type")])
def test_a_method_keeps_its_name(owner, name):
    assert getattr(owner, name).__name__ == name


def test_legacy_types_make_tensors_on_the_gpu():
    x = torch.cuda.FloatTensor(2, 3)
    assert (x.shape, x.type(), x.device) == (torch.Size([2, 3]), "torch.cuda.FloatTensor", torch.device("cuda", 0))
    assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2] and torch.cuda.HalfTensor().shape == (0,)
    assert torch.cuda.ByteTensor(torch.Size([2]), device="cuda:1").device.index == 1
    assert torch.cuda.FloatTensor(x).data_ptr() == x.data_ptr()
    assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x, torch.cuda.HalfTensor)
    for name in ("torch.cuda.HalfTensor", "torch.HalfTensor"):
        for start, kind in (("cpu", name), ("cuda:1", name), ("cuda:1", eval(name))):
            moved = torch.ones(2, device=start).type(kind)
            assert moved.type() == name and moved.tolist() == [1, 1]
            assert moved.get_device() == (-1 if "cuda" not in name else 0 if start == "cpu" else 1)
    with pytest.raises(ValueError, match="invalid type"):
        x.type("torch.NoTensor")
    with pytest.raises(NotModelled, match=r"torch\.cuda\.sparse\.FloatTensor\. Use torch\.sparse"):
        torch.cuda.sparse.FloatTensor()
    for kind in ("torch.cuda.FloatTensor", torch.cuda.FloatTensor):
        with pytest.raises(NotModelled, match="set_default_tensor_type of a CUDA type. Use torch.set_default_dtype"):
            torch.set_default_tensor_type(kind)
    torch.set_default_tensor_type(torch.FloatTensor)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_are_made_on_the_gpu():
    before = torch.cuda.memory_allocated(1)
    made = torch.UntypedStorage([1, 2, 3], device="cuda:1")
    assert made.device == torch.device("cuda", 1) and made.tolist() == [1, 2, 3]
    assert torch.cuda.memory_allocated(1) == before + 512
    assert made.new().device == made[1:].device == made.device and made[1:].data_ptr() == made.data_ptr() + 1
    assert torch.UntypedStorage(4, device="cuda").nbytes() == 4 and torch.UntypedStorage(device="cuda").is_cuda
    typed = torch.cuda.FloatStorage([1, 2])
    assert typed.device.type == "cuda" and typed.tolist() == [1, 2]
    assert torch.TypedStorage(3, dtype=torch.half, device="cuda").nbytes() == 6
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.UntypedStorage(1 << 40, device="cuda")


def x(index: int = 0):
    return torch.ones(2, device=f"cuda:{index}")


NAMES = table("public_names")


def public_names(module):
    """(path, what it is) of the public callables of a module and its submodules."""
    listed = getattr(module, "__all__", None) or [name for name in vars(module) if name[0] != "_"]
    for name in sorted(set(listed)):
        if callable(getattr(module, name, None)) and name not in NAMES["left_out"].split():
            yield f"{module.__name__}.{name}", getattr(module, name)
    for entry in pkgutil.iter_modules(getattr(module, "__path__", ())) if module is not dist else ():
        if entry.name[0] != "_":
            yield from public_names(importlib.import_module(f"{module.__name__}.{entry.name}"))


def call(path: str, function) -> str:
    """What the call of a public name raised, "" if nothing."""
    name = path.rpartition(".")[2]
    known = NAMES["arguments"]
    arguments = eval(known.get(".".join(path.split(".")[-2:])) or known.get(name) or "[]")
    try:
        function(*arguments)
    except NotModelled as error:
        assert name in str(error), f"{path} is refused as something else: {error}"
        assert name in REFUSALS, f"{path} is refused and not in docs/refused.md"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.filterwarnings("ignore")
def test_every_public_name_works_or_refuses_by_name(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        found = [pair for root in (torch.cuda, dist) for pair in public_names(root)]
        raised = {path: call(path, function) for path, function in found}
    finally:
        dist.destroy_process_group()
    assert len(raised) > 300
    assert {path: text for path, text in raised.items() if any(words in text for words in NEVER)} == {}
    assert {path: text for path, text in raised.items() if text and not text.startswith("TypeError: ")} == {}
    tested = set(NAMES["uncalled"].split())
    tested |= set(re.findall(r"\w+", "".join(file.read_text("utf-8") for file in Path(__file__).parent.rglob("*.py"))))
    assert {p for p, text in raised.items() if text and p.split(".")[-1] not in tested and "_hook" not in p} == set()
