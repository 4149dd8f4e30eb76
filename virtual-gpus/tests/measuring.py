"""What tests share: what a piece of work takes of the first GPU's memory and of the clock's time, tables, tensors."""

import pkgutil
import tomllib
from pathlib import Path

import torch
from virtual_gpus import features, record_timeline
from virtual_gpus.dispatch.operators import operator
from virtual_gpus.machine import active

MIB = 1 << 20
FEATURES = Path(__file__).parent / "features"


def table(name):
    """What tests/data/NAME.toml holds."""
    return tomllib.loads((Path(__file__).parent / "data" / f"{name}.toml").read_text("utf-8"))


def rows_of(feature):
    """The tables of a feature, which lie with its tests: features/FEATURE.toml or features/FEATURE/rows.toml."""
    found = [path for name in (f"{feature}.toml", f"{feature}/rows.toml") if (path := FEATURES / name).exists()]
    return tomllib.loads(found[0].read_text("utf-8")) if found else {}


def rows_of_features(name):
    """The rows of the table `name` of all features that are there: (key, value), or the members of lists."""
    found = [rows_of(module.name).get(name, ()) for module in pkgutil.iter_modules(features.__path__)]
    return [row for rows in found for row in (rows.items() if isinstance(rows, dict) else rows)]


def allocated():
    """Bytes in use on each GPU."""
    return [torch.cuda.memory_allocated(gpu.index) for gpu in active().gpus]


def waits(work):
    """Whether the host waits in `work()` until the current GPU has done what it was given."""
    clock = active().clock
    torch.cuda._sleep(10**9)
    before = clock.now
    work()
    return clock.now > before + 0.1


def bytes_of(work):
    """What `work()` returns, the bytes that it leaves in use, and their peak, above what was in use before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    return result, torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before


def peak_of(work):
    """What `work()` returns, and the peak of its bytes."""
    result, _, peak = bytes_of(work)
    return result, peak


def events_of(work):
    """What `work()` returns, and every allocation and free that it made, as (what, bytes)."""
    events, observers = [], active().gpus[0].allocator.observers
    observers.append(lambda what, _, nbytes: events.append((what, nbytes)))
    try:
        return work(), events
    finally:
        observers.pop()


def sizes_of(work) -> list[int]:
    """Every allocation that `work` made."""
    return [size for event, size in events_of(work)[1] if event == "alloc"]


def recorded(work):
    """The timeline of `work()`."""
    with record_timeline() as timeline:
        work()
    return timeline


def times_of(work) -> dict[str, float]:
    """Seconds of each operator on the GPU, to the picosecond."""
    return {span.name: round(span.end - span.start, 12) for span in recorded(work).spans}


def seconds(work):
    """Of its last span."""
    span = recorded(work).spans[-1]
    return span.end - span.start


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(one, other, **tolerances):
    """Equal bits unless there are tolerances, wherever the two are."""
    tolerances = tolerances or {"atol": 0, "rtol": 0}
    torch.testing.assert_close(one.detach().cpu(), other.detach().cpu(), equal_nan=True, **tolerances)


def empty(nbytes, device="cuda"):
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def every_overload():
    """The overloads of ATen's operators that are not composed of others."""
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        name, _, overload = full.removeprefix("aten::").partition(".")
        func = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
        if full.startswith("aten::") and func is not None and not operator(func).is_composite:
            yield func


def needed(func):
    """The arguments of an overload that have no default."""
    return [a for a in func._schema.arguments if not a.has_default_value() and not a.kwarg_only]


def function(forward, backward):
    """What applies an autograd.Function of these two, which take a context first."""
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    made = type("Function", (torch.autograd.Function,), parts)
    return lambda *arguments: made.apply(*arguments)  # `apply` is another one while GPUs are on
