"""What of a `MemoryMonitor` travels from a rank to its parent: the results, without hooks, locks and models."""

from types import SimpleNamespace

_RESULTS = ("indices", "_runs", "_before", "_driver_before", "_started", "_ended")


def results(monitor) -> dict:
    """The state of a monitor that is pickled: its pictures and figures are the same afterwards.

    Raises RuntimeError where the run is not over.
    """
    if not monitor._runs:
        raise RuntimeError("The run is not over: send the monitor after its `with` block.")
    sampler = monitor._sampler and SimpleNamespace(most=monitor._sampler.most)
    return {name: getattr(monitor, name) for name in _RESULTS} | {"_watches": monitor.watched, "_sampler": sampler}
