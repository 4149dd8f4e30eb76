"""The public names of torch.cuda: each works, or refuses by its name; classes stay types either way."""

import ast
import importlib
import pickle
import pkgutil
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import virtual_gpus as virtual_gpus_package
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


@pytest.mark.parametrize("name", ["GreenContext", "CUDAPluggableAllocator", "CUDAGraph", "graph", "MemPool"])
def test_a_refused_class_names_itself_when_one_is_made(name):
    kind = getattr(torch.cuda, name, None) or getattr(torch.cuda.memory, name)
    for made in (kind, type("Own", (kind,), {})):
        with pytest.raises(NotModelled, match=f"torch.cuda.{name}"):
            made("an argument")
    assert torch.cuda.is_current_stream_capturing() is False  # optimizers ask


def test_streams_by_handle_sleep_by_cycles_the_runtime_library_and_the_plans_of_cufft():
    side = torch.cuda.Stream()
    for refused in (torch.cuda.ExternalStream, torch.cuda.get_stream_from_external):
        with pytest.raises(NotModelled, match=refused.__name__):
            refused(side.cuda_stream)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    start.record()
    torch.cuda._sleep(1_980_000)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(1.0, rel=0.02)  # milliseconds: an H200 has 1.98 GHz
    with torch.cuda.profiler.profile():
        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    assert torch.cuda.cudart().cudaMemGetInfo(0)[1] == 1 << 30
    with pytest.raises(NotModelled, match=r"torch\.cuda\.cudart\(\)\.cudaHostRegister"):
        torch.cuda.cudart().cudaHostRegister(0, 1, 0)
    plans = torch.backends.cuda.cufft_plan_cache
    for use in (lambda: plans.size, lambda: plans[1], lambda: setattr(plans, "max_size", 3), lambda: plans.clear()):
        with pytest.raises(NotModelled, match=r"torch\.backends\.cuda\.cufft_plan_cache"):
            use()


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


# What a name is called with that no other test calls, by its last part or its last two. All others are called with
# nothing. If Python itself refuses that, the name must be in another test.
ARGUMENTS = {
    "set_rng_state_all": lambda: [torch.cuda.get_rng_state_all()], "custom_bwd": lambda: [abs],
    "get_global_rank": lambda: [dist.group.WORLD, 0], "supports_complex": lambda: [dist.ReduceOp.SUM],
    "set_timeout": lambda: [dist.constants.default_pg_timeout], "new_subgroups_by_enumeration": lambda: [[[0]]],
    "CudaError": lambda: [0], "ExternalStream": lambda: [0], "StreamContext": lambda: [None],
    "mark": lambda: ["m"],
    "check_error": lambda: [0], "device": lambda: [1], "get_stream_from_external": lambda: [0],
    "range": lambda: ["r"], "range_end": lambda: [0], "set_cublaslt_requested_algo_count": lambda: [1],
    "range_push": lambda: ["r"], "range_start": lambda: ["r"], "set_stream": lambda: [None],
    "stream": lambda: [None], "set_filename": lambda: ["results.csv"],
    "set_max_tuning_duration": lambda: [30], "set_max_tuning_iterations": lambda: [100],
    "set_numerical_check_tolerances": lambda: [False], "nccl.reduce": lambda: [[x(), x(1)]],
    "all_gather_coalesced": lambda: [[[x()]], [x()]],
    "all_gather_single": lambda: [x(), x()], "all_reduce_coalesced": lambda: [[x()]],
    "gather_into_tensor": lambda: [x(), x()], "gather_object": lambda: [1, [None]], "gather_single": lambda: [x(), x()],
    "get_default_backend_for_device": lambda: ["cuda"], "is_backend_available": lambda: ["nccl"],
    "get_node_local_rank": lambda: [0], "new_subgroups": lambda: [1], "record_comm": lambda: ["m"],
    "reduce_scatter_single": lambda: [x(), x()], "split_group": lambda: [None, [[0]]],
}  # fmt: skip
# Types of which no program makes one here, and what has no effect on a GPU, as the hooks of CUDA graphs.
UNCALLED = """Backend BackendConfig BuiltinCommHookType Callable DeviceMesh FileStore GradBucket GroupName Logger
PrefixStore TCPStore register_rendezvous_handler rendezvous dump_kernel_py_stacks mark_kernels"""
# Messages need a second rank and breakpoint a person, the others would end what the walk stands on.
LEFT_OUT = ("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "batch_isend_irecv", "breakpoint",
            "init_process_group", "destroy_process_group", "monitored_barrier", "shrink_group")  # fmt: skip


def public_names(module):
    """(path, what it is) of the public callables of a module and its submodules."""
    listed = getattr(module, "__all__", None) or [name for name in vars(module) if name[0] != "_"]
    for name in sorted(set(listed)):
        if callable(getattr(module, name, None)) and name not in LEFT_OUT:
            yield f"{module.__name__}.{name}", getattr(module, name)
    for entry in pkgutil.iter_modules(getattr(module, "__path__", ())) if module is not dist else ():
        if entry.name[0] != "_":
            yield from public_names(importlib.import_module(f"{module.__name__}.{entry.name}"))


def call(path: str, function) -> str:
    """What the call of a public name raised, "" if nothing."""
    name = path.rpartition(".")[2]
    arguments = ARGUMENTS.get(".".join(path.split(".")[-2:])) or ARGUMENTS.get(name) or list
    arguments = arguments()
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
    obscure = {path: text for path, text in raised.items() if any(words in text for words in NEVER)}
    assert obscure == {}
    unnamed = {path: text for path, text in raised.items() if text and not text.startswith("TypeError: ")}
    assert unnamed == {}
    tested = set(re.findall(r"\w+", "".join(file.read_text("utf-8") for file in Path(__file__).parent.glob("*.py"))))
    assert {p for p, text in raised.items() if text and p.split(".")[-1] not in tested and "_hook" not in p} == set()


def test_every_refusal_is_in_the_list():
    """Every text in a call of `not_modelled`, up to its explanation in parentheses."""
    words, listed = [], REFUSALS.replace("`", "")
    for file in SOURCE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "not_modelled(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("not_modelled") and node.args:
                parts = node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else node.args
                words += [part.value for part in parts if isinstance(part, ast.Constant)]
    assert len(words) > 15  # most refusals are rows of `refused`
    assert {word for word in words if word.partition(" (")[0].strip(' ,"().') not in listed} == set()
