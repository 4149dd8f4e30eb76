"""Memory snapshots of virtual GPUs: their structure is PyTorch's, and PyTorch's own viewer reads them."""

import gc
import os
import pickle
import pickletools
import re
import sys
import threading
import weakref

import pytest
import torch
import virtual_gpus as package
from interrupts import interrupted_at, press
from measuring import MIB, empty
from torch import nn
from torch.cuda import _memory_viz as viz
from virtual_gpus import NotModelled, virtual_gpus
from virtual_gpus.features.snapshots.calls import recorders
from virtual_gpus.machine import active

HERE = os.path.abspath(__file__)
PACKAGE = os.path.dirname(os.path.abspath(package.__file__)) + os.sep
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
memory = torch.cuda.memory
GPUS = {"count": 2, "memory": "1 GiB"}
pytestmark = pytest.mark.usefixtures("gpus")
WRONG = [({name: "cpp"}, RuntimeError, "expected enabled and context to be") for name in ("enabled", "context")]
REFUSED = [{"enabled": True}, {"skip_actions": ["oom"]}, {"global_record_annotations": True}]
REFUSED += [{"record_pinned_host_memory": True}, {"record_cuda": False}] if VERSION >= (2, 14) else []


def line():
    """The number of the caller's line."""
    return sys._getframe(1).f_lineno


def trace(device=0):
    return memory._snapshot()["device_traces"][device]


def in_use(snapshot):
    """The blocks in use."""
    blocks = (block for segment in snapshot["segments"] for block in segment["blocks"])
    return [block for block in blocks if block["state"] == "active_allocated"]


def places(frames):
    """The frames in this file, innermost first, as line numbers."""
    return [frame["line"] for frame in frames if frame["filename"] == HERE]


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.1), nn.ReLU(), nn.Linear(128, 10)).cuda()


def train(steps=2):
    net = small_net()
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(32, 64, device="cuda")).logsumexp(1).sum().backward()
        optimizer.step()


def test_a_snapshot_has_the_keys_of_pytorch():
    memory._record_memory_history()
    x = torch.ones(1000, device="cuda:1")
    snapshot = memory._snapshot()
    expected = ["segments", "device_traces", "allocator_settings", "external_annotations"]
    assert list(snapshot) == expected + (["host_segments", "host_traces"] if VERSION >= (2, 14) else [])
    (segment,) = snapshot["segments"]
    frames = segment.pop("frames")
    blocks = segment.pop("blocks")
    assert segment == {
        "device": 1, "address": blocks[0]["address"], "total_size": 2 * MIB, "allocated_size": 4096,
        "active_size": 4096, "requested_size": 4000, "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0),
        "is_expandable": False,
    }  # fmt: skip
    assert all(set(frame) == {"name", "filename", "line"} for frame in frames) and frames
    assert [set(block) for block in blocks] == [{"address", "size", "requested_size", "state", "frames"}] * 2
    assert [(b["size"], b["requested_size"], b["state"]) for b in blocks] == [
        (4096, 4000, "active_allocated"), (2 * MIB - 4096, 0, "inactive")]  # fmt: skip
    assert blocks[0]["frames"] == frames and blocks[1]["frames"] == []
    assert len(snapshot["device_traces"]) == 2 and snapshot["device_traces"][0] == []
    keys = ["action", "addr", "size", "stream", "time_us", "compile_context", "user_metadata"]
    keys += (["pool_id"] if VERSION >= (2, 12) else []) + ["frames"]
    segment_alloc, alloc = snapshot["device_traces"][1]
    assert list(segment_alloc) == list(alloc) == keys
    assert (segment_alloc["action"], segment_alloc["size"]) == ("segment_alloc", 2 * MIB)
    assert (alloc["action"], alloc["size"], alloc["addr"]) == ("alloc", 4000, blocks[0]["address"])
    assert snapshot["allocator_settings"]["expandable_segments"] is False
    (segment,) = torch.cuda.memory_snapshot(mempool_id=(0, 0))
    assert segment["allocated_size"] == 4096 and segment["blocks"][0]["frames"] == frames
    assert torch.cuda.memory_snapshot(mempool_id=(0, 1)) == []
    del x


def test_a_trace_tells_what_is_in_use_and_a_file_without_classes_feeds_text_tools(tmp_path):
    memory._record_memory_history()
    held = [torch.ones(n, device="cuda") for n in (1, 10, 1000, 300_000, 3_000_000)]
    del held[1:4:2]
    nothing = torch.zeros(0, device="cuda")
    train()
    snapshot = memory._snapshot()
    events = snapshot["device_traces"][0]
    times = [event["time_us"] for event in events]
    assert times == sorted(times) and times[0] > 1_500_000_000_000_000  # microseconds since 1970
    taken = {"segment_alloc": 1, "segment_free": -1}
    assert sum(taken.get(e["action"], 0) * e["size"] for e in events) == torch.cuda.memory_reserved()
    used = {}
    for event in events:
        if event["action"] == "alloc":
            used[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert used.pop(event["addr"]) == event["size"]
    assert used == {block["address"]: block["requested_size"] for block in in_use(snapshot)}
    assert sum(map(viz.calc_active, snapshot["segments"])) == torch.cuda.memory_allocated()
    x = empty(45 * MIB)  # more than any workspace: a segment of its own
    memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    del held, nothing, x
    stored = (tmp_path / "snapshot.pickle").read_bytes()
    # So programs without the engine can read it.
    found = {opcode.name for opcode, _, _ in pickletools.genops(stored)}
    assert not found & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "INST", "OBJ", "NEWOBJ"}
    snapshot = pickle.loads(stored)
    assert "[aaa] 46.0MiB allocated, 1.0MiB (100.0% internal) free" in viz.segsum(snapshot)
    told = viz.trace(snapshot)
    assert "cudaMalloc(" in told and "45.0MiB]" in told and "free completed for" in told
    for flamegraph in (viz.memory(snapshot, str), viz.segments(snapshot, str)):
        assert re.search(r"active_allocated;.*measuring.py:\d+:empty 47185920", flamegraph)


@pytest.mark.parametrize(("taken", "given"), [("segment_alloc", "segment_free"), ("segment_map", "segment_unmap")])
def test_every_action_has_its_event(monkeypatch, taken, given):
    settings = f"expandable_segments:{taken == 'segment_map'}"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    memory._record_memory_history()
    x = empty(30 * MIB)
    del x
    torch.cuda.empty_cache()
    with pytest.raises(torch.OutOfMemoryError):
        empty(3 * 2**30 + 1)
    assert memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] == settings
    x = empty(30 * MIB)
    (segment,) = memory._snapshot()["segments"]
    assert segment["frames"][0]["name"].startswith("empty") and segment["total_size"] >= x.nbytes
    events = trace()
    life = [taken, "alloc", "free_requested", "free_completed", given]
    assert [event["action"] for event in events] == [*life, "oom", "snapshot", *life[:2], "snapshot"]
    assert events[0]["size"] == events[4]["size"] == segment["total_size"] and events[1]["size"] == x.nbytes
    assert events[5]["size"] == 3 * 2**30 + 512
    assert events[5]["device_free"] == torch.cuda.mem_get_info()[0] + segment["total_size"]
    assert "addr" not in events[5] and places(events[5]["frames"])
    assert events[6]["addr"] == events[6]["size"] == 0 and "frames" not in events[6]


def test_frames_are_the_learners_lines_innermost_first_also_of_a_backward_pass():
    def make():
        return torch.ones(5, device="cuda"), line()

    memory._record_memory_history()
    (x, inner), outer = make(), line()
    del x
    died = line() - 1
    alloc, requested, completed = [event for event in trace() if event["action"] != "segment_alloc"]
    assert places(alloc["frames"])[:2] == [inner, outer]
    assert alloc["frames"][0]["name"].endswith("make") and alloc["frames"][0]["filename"] == HERE
    assert places(requested["frames"])[0] == places(completed["frames"])[0] == died
    x = torch.ones(1000, device="cuda", requires_grad=True)
    y, before = x.exp().sum(), len(trace())
    y.backward()
    backward = line() - 1
    events = [event for event in trace()[before + 1 :] if event["action"] == "alloc"]
    assert events and all(places(event["frames"])[0] == backward for event in events)
    del x, y


@pytest.mark.parametrize("shapes_only", [False, True])
def test_frames_show_the_program_and_not_how_virtual_gpus_work(shapes_only):
    with virtual_gpus(2, shapes_only=shapes_only):
        memory._record_memory_history()
        inner = active()
        net = nn.DataParallel(small_net(), [0, 1])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(8, 64).to("cuda:0")).sum().backward()
        optimizer.step()
        with torch.inference_mode():
            torch.addmm(torch.ones(10, device="cuda"), *[torch.ones(10, 10, device="cuda")] * 2)
        nn.LSTM(8, 8).cuda()(torch.ones(3, 2, 8, device="cuda"))[0].sum().backward()
        torch.ones(3, device="cuda:1").to("cuda:0", torch.float16)
        worker = threading.Thread(target=train, args=(1,))
        worker.start()
        worker.join()
        snapshot = memory._snapshot()
    assert not torch._C._cuda_isHistoryEnabled() and trace() == []  # recording has ended with its GPUs
    assert inner.gpus[0].allocator.observers == [] and not recorders.of(inner)[0].entries
    stacks = [event["frames"] for events in snapshot["device_traces"] for event in events]
    assert len(stacks) > 100
    for frames in stacks:
        names = [frame["filename"] for frame in frames]
        assert frames and not [name for name in names if name.startswith(PACKAGE) or name.endswith("torch/_ops.py")]
        assert places(frames) or names[0] == threading.__file__, names
        assert not names[0].endswith(("/contextlib.py", "autograd/function.py"))  # what only our own code goes through
    to = next(e for e in snapshot["device_traces"][0] if e["size"] == 8 * 64 * 4 and e["action"] == "alloc")
    assert to["frames"][0]["filename"] == HERE  # not torch/autograd/function.py, which only our copies go through
    innermost = [[frame["name"].split(".")[-1] for frame in frames] for frames in stacks]
    assert ["forward", "_call_impl", "_wrapped_call_impl"] in [names[:3] for names in innermost]


@pytest.mark.parametrize("context, events, blocks", [(None, 0, 0), ("state", 0, 1), ("alloc", 3, 1), ("all", 3, 1)])
def test_how_many_stacks_are_kept(context, events, blocks):
    memory._record_memory_history(context=context, stacks="python" if context == "all" else "all")
    x, y = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
    del y
    snapshot = memory._snapshot()
    found = {event["action"]: event.get("frames") for event in snapshot["device_traces"][0]}
    stacks = [found[name] for name in ("alloc", "free_requested", "free_completed")]
    assert sum(stack is not None for stack in stacks) == events
    assert sum(bool(block["frames"]) for block in in_use(snapshot)) == blocks
    assert (stacks[0] == stacks[1]) == (context != "all")
    del x


def test_only_the_last_entries_are_kept_and_a_longer_ring_does_not_bring_back_the_others():
    last = [("alloc", 12), ("free_requested", 12), ("free_completed", 12)]
    for context, longer in (("all", 3), (None, 100)):
        memory._record_memory_history(context=context, max_entries=3, clear_history=True)
        for n in range(1, 4):
            torch.ones(n, device="cuda")
        memory._record_memory_history(context=context, max_entries=longer)
        assert [(e["action"], e["size"]) for e in trace()] == last
    torch.ones(4, device="cuda")
    assert [e["action"] for e in trace()][3:] == ["snapshot", "alloc", "free_requested", "free_completed"]
    memory._record_memory_history("state", clear_history=True, max_entries=1)
    torch.ones(7, device="cuda")
    assert [e["action"] for e in trace()] == ["free_completed"]


@pytest.mark.parametrize("max_entries", [4, 10_000])
def test_the_same_events_without_stacks_and_without_values(max_entries):
    found = []
    for context, shapes_only in ((None, False), ("state", False), ("all", False), ("all", True)):
        with virtual_gpus(1, shapes_only=shapes_only):
            memory._record_memory_history(context=context, max_entries=max_entries)
            train(1)
            found.append([(e["action"], e["addr"], e["size"], e["stream"]) for e in trace()])
    assert found[0] == found[1] == found[2] == found[3]
    assert len(found[0]) == max_entries or 100 < len(found[0]) < max_entries


@pytest.mark.parametrize(("arguments", "error", "words"), WRONG + [(one, NotModelled, "history") for one in REFUSED])
def test_arguments_that_are_wrong_or_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        memory._record_memory_history(**arguments)
    assert not torch._C._cuda_isHistoryEnabled()


@pytest.mark.parametrize("arguments", [{"enabled": None}, {"enabled": False}])
def test_stopping_forgets_the_history_and_blocks_keep_their_stacks(arguments):
    memory._record_memory_history()
    kept, lost = torch.ones(1000, device="cuda"), torch.ones(3000, device="cuda")
    memory._record_memory_history(**arguments)
    del lost
    later = torch.ones(2900, device="cuda")  # takes the place of `lost`, unseen
    snapshot = memory._snapshot()
    assert snapshot["device_traces"] == [[], []] and active().gpus[0].allocator.observers == []
    memory._record_memory_history()
    for blocks in (in_use(snapshot), in_use(memory._snapshot())):
        assert {b["requested_size"]: b["frames"] != [] for b in blocks} == {4000: True, 11600: False}
    del kept, later


def test_recording_keeps_no_tensor_alive():
    gc.disable()
    try:
        memory._record_memory_history()
        net, x = nn.PReLU(100, device="cuda"), torch.ones(10, 100, device="cuda")
        dead = weakref.ref(net), weakref.ref(x)
        net(x).sum().backward()
        del net, x
        assert [ref() for ref in dead] == [None, None] and torch.cuda.memory_allocated() == 0
        actions = [event["action"] for event in trace()]
        assert actions.count("alloc") == actions.count("free_completed") > 3
        snapshot = memory._snapshot()
        assert not [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.is_cuda] and snapshot
    finally:
        gc.enable()


def test_ctrl_c_anywhere_while_recording_leaves_the_books_in_order():
    def work():
        torch.ones(30, device="cuda").to("cuda:1")
        torch.cuda.empty_cache()

    files = tuple(PACKAGE + name for name in ("features/snapshots/history.py", "features/snapshots/stacks.py"))
    moment, place = 0, "start"
    while place:
        memory._record_memory_history(clear_history=True)
        moment += 1
        place = interrupted_at(moment, work, press, lambda code: code.co_filename in files, "line")
        z = torch.ones(40, device="cuda")
        assert torch.cuda.memory_allocated(0) == 512 and torch.cuda.memory_allocated(1) == 0
        assert [e["size"] for e in trace() if e["action"] == "alloc"][-1] == 160
        del z
        assert torch.cuda.memory_allocated(0) == 0
        assert [e["size"] for e in trace() if e["action"] == "free_completed"][-1] == 160
        torch.cuda.empty_cache()
    assert moment > 50


def test_an_observer_dumps_a_snapshot_when_memory_runs_out_and_may_raise(tmp_path):
    seen, held = [], [empty(600 * MIB, "cuda:1")]

    def observer(*figures):
        memory._dump_snapshot(str(tmp_path / "oom.pickle"))
        held.clear()
        seen.append((*figures, torch.ones(10, device="cuda:1") * 2))
        if len(seen) == 2:
            raise LookupError("from the observer")

    memory._record_memory_history()
    torch._C._cuda_attach_out_of_memory_observer(observer)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2.00 GiB"):
        free, failed = torch.cuda.mem_get_info(1)[0], line() + 1
        torch.empty(2**31 - 1, dtype=torch.uint8, device="cuda:1")
    snapshot = pickle.loads((tmp_path / "oom.pickle").read_bytes())
    *_, event = snapshot["device_traces"][1]
    assert event["action"] == "oom" and event["device_free"] == free and places(event["frames"])[0] == failed
    assert "OutOfMemoryError" in viz.trace(snapshot)
    assert [block["size"] for block in in_use(snapshot)] == [600 * MIB]
    torch.cuda.set_per_process_memory_fraction(0.25, 1)
    with pytest.raises(LookupError, match="from the observer"):
        empty(2**30, "cuda:1")
    assert seen[0][:4] == (1, 2**31, 2**30, free)  # GPU, requested, total, free
    assert seen[1][:3] == (1, 2**30, 256 * MIB)
    assert [x.tolist() for *_, x in seen] == [[2] * 10] * 2 and torch.cuda.memory_allocated(1) == 1024
    assert empty(200 * MIB, "cuda:1").is_cuda  # now it fits
